"""The certificate of a served engine: planted faults are found, and sound engines get it."""

import json
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from scipy.stats import combine_pvalues

from distill.drafts.states import silence
from distill.toy import save_tokenizer
from distill.training import save_model
from eval.analysis.certificate import certify_server
from recipes.command import run_tool
from specdata.models import load_tokenizer
from specdata.probability import SamplingConfig, probabilities
from specdata.rollouts.backend import Request
from tests.support.served_by_vllm import Handler, serving
from tests.support.tiny import END, tiny_llama

VOCABULARY, DRAFTED, TEXTS, NEW = 16, 3, 128, 96
PROMPTS = [[3, 5, number] for number in range(4, 12)]
Table = NDArray[np.float64]


@cache
def bigrams(seed: int, vocabulary: int = VOCABULARY) -> Any:
    """A model whose layers are silent, so that a token depends on the one before alone."""
    model = tiny_llama(seed, vocab=vocabulary)
    silence(model)
    return model


@cache
def table(role: int, sampling: SamplingConfig, vocabulary: int) -> Table:
    """(V, V) the distribution after each token, of target (0) or draft (1)."""
    with torch.no_grad():
        logits = bigrams(role, vocabulary)(input_ids=torch.arange(vocabulary)[:, None]).logits
    found: Table = probabilities(logits[:, -1].double(), sampling).numpy()
    return found


def residual(law: Table, other: Table) -> Table:
    rest = np.clip(law - other, 0, None)
    return rest if rest.sum() > 1e-12 else law


class Fault(NamedTuple):
    """What a stand-in does wrong; nothing by default."""

    kept: float = 0.0  # share of rejected tokens that stay all the same
    kept_first: bool = False  # the first drafted token is never verified
    raw: SamplingConfig | None = None  # the target's sampler, whatever was asked
    stale: float = 0.0  # share of rejections after which the rejected token's row stays
    bonus: str = "target"  # what the token after an accepted draft is drawn from
    length: int = DRAFTED


def speculate(
    last: int,
    sampling: SamplingConfig,
    fault: Fault,
    seed: int,
    vocabulary: int = VOCABULARY,
    most: int = NEW,
) -> list[int]:
    """The new tokens of an engine that drafts and verifies."""
    rng = np.random.default_rng(seed)
    p = table(0, fault.raw or sampling, vocabulary)
    q = table(1, sampling, vocabulary)

    def draw(law: Table) -> int:
        return int(rng.choice(vocabulary, p=law / law.sum()))

    out: list[int] = []
    read = last  # what the target has in its cache for the last token
    while len(out) < most and END not in out:
        drafted, before = [], last
        for _ in range(fault.length):
            drafted.append(draw(q[before]))
            before = drafted[-1]
        contexts = [read, *drafted]
        for place, token in enumerate(drafted):
            law, other = p[contexts[place]], q[[last, *drafted][place]]
            passed = (fault.kept_first and place == 0) or rng.random() < law[token] / other[token]
            if passed or rng.random() < fault.kept:
                out.append(token)
                continue
            out.append(draw(residual(law, other)))
            read = token if rng.random() < fault.stale else out[-1]
            break
        else:
            law, other = p[contexts[-1]], q[drafted[-1]]
            laws = {"target": law, "residual": residual(law, other), "draft": other}
            out.append(draw(laws[fault.bonus]))
            read = out[-1]
        last = out[-1]
    ends = [place for place, token in enumerate(out) if token == END]
    return out[: min(most, ends[0] + 1 if ends else most)]


def found(fault: Fault, sampling: SamplingConfig, seed: int, *, knows_draft: bool) -> Any:
    """The certificate of an engine with a fault."""

    def answers(requests: Sequence[Request], asked: SamplingConfig) -> list[list[int]]:
        return [
            speculate(each.ids[-1], asked, fault, 1000 * seed + number)
            for number, each in enumerate(requests)
        ]

    return certify_server(
        answers,
        bigrams(0),
        bigrams(1) if knows_draft else None,
        [torch.tensor(each) for each in PROMPTS],
        sampling,
        texts=TEXTS,
        max_new_tokens=NEW,
        seed=0,
    )


FULL, WARPED = SamplingConfig(), SamplingConfig(0.7, 0, 0.8)
FAULTS = {
    "a quarter of the rejected kept, warped": (Fault(kept=0.25), WARPED),
    "first token not verified": (Fault(kept_first=True), FULL),
    "top-p on the draft alone": (Fault(raw=SamplingConfig(0.7)), WARPED),
    "row of a rejected token, half the time": (Fault(stale=0.5), WARPED),
    "min-p dropped": (Fault(raw=SamplingConfig()), SamplingConfig(min_p=0.3)),
    "temperature dropped": (Fault(raw=SamplingConfig(1.0, 0, 0.8)), WARPED),
    "temperature dropped, greedy": (Fault(raw=SamplingConfig(0.0)), FULL),
    "bonus of the residual": (Fault(bonus="residual", length=1), FULL),
    "bonus of the draft": (Fault(bonus="draft", length=1), FULL),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_found(name: str) -> None:
    fault, sampling = FAULTS[name]
    certificate = found(fault, sampling, 1, knows_draft=True)
    assert not certificate.is_exact, certificate


@pytest.mark.exhaustive
def test_sound_engines_raise_no_alarm() -> None:
    """By all p-values of 16 runs at once (Fisher), which sees more than 16 verdicts.

    Of cells so biased, or so much further apart than draws are, that 3 runs in 100 raised an alarm
    it sees 99.7 or 95 in 100, as many as a hundred verdicts; of sound ones it fails one in 10,000.
    """
    p_values = []
    for seed in range(16):
        certificate = found(Fault(), (FULL, WARPED)[seed % 2], seed, knows_draft=seed % 4 < 2)
        assert certificate.is_exact, certificate
        p_values.append(certificate.p_value)
    assert combine_pvalues(p_values).pvalue > 1e-3, p_values


def test_the_command_asks_a_server_and_says_what_it_found(
    tiny_pair: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tokenizer = load_tokenizer(str(tiny_pair / "target"))
    model, fault = bigrams(0, len(tokenizer)), Fault()
    share = 1

    class Engine(Handler):
        def do_GET(self) -> None:  # noqa: N802
            if self.path != "/metrics":
                super().do_GET()
                return
            asked, name = len(self.server.bodies), "vllm:spec_decode_num"
            kept = [f'{name}_accepted_tokens_per_pos{{position="0"}} {asked * share}']
            self.server.raw = "\n".join([f"{name}_draft_tokens {2 * asked}", *kept]).encode()
            self.answer(200, {})
            self.server.raw = None

        def do_POST(self) -> None:  # noqa: N802 - the name that http.server calls
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            self.server.bodies.append(body)
            sampling = SamplingConfig(**{key: body[key] for key in FULL.__slots__})
            seed, last = body["seed"] % 2**32, body["prompt"][-1]
            ids = speculate(last, sampling, fault, seed, len(tokenizer), body["max_tokens"])
            choice = {"token_ids": ids, "prompt_token_ids": body["prompt"]}
            self.answer(200, {"choices": [choice]})

    save_model(model, tmp_path / "target")
    save_tokenizer(tokenizer, tmp_path / "target")
    given = ["--target", str(tmp_path / "target"), "--model", "served"]
    given += ["--max-new-tokens", "32", "--texts", "96", "--count", "4", "--prompts", "maths"]
    kept = ["--out", str(tmp_path / "out")]
    with serving(handler=Engine) as server:
        given += ["--server", server.url]
        assert run_tool("certify", [*given, *kept]) == 0
        assert "Lossless" in capsys.readouterr().out
        alike = [*given, "--draft", str(tmp_path / "target"), "--out", str(tmp_path / "alike")]
        assert run_tool("certify", alike) == 0
        assert "196 tokens drafted by the target itself, 98 lost" in capsys.readouterr().out
        share = 0
        assert run_tool("certify", alike) == 1, "more than the last draft of each text"
        assert "by the target itself, 196 lost" in capsys.readouterr().out
        fault = Fault(kept=0.5)
        assert run_tool("certify", [*given, *kept]) == 1
        assert "NOT LOSSLESS" in capsys.readouterr().out
        given[3] = "another"
        assert run_tool("certify", [*given, "--out", str(tmp_path / "other")]) == 2
        assert "serves 'served', not 'another'" in capsys.readouterr().err
    for wrong, said in [
        (["--server", "127.0.0.1:8"], "must begin with http"),
        (["--top-p", "0"], "top_p must lie in"),
    ]:
        assert run_tool("certify", [*given, *wrong]) == 2
        assert said in capsys.readouterr().err
    assert run_tool("certify", ["--server", server.url]) == 2
    assert "--server needs --target" in capsys.readouterr().err
