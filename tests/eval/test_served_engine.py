"""A served engine as a method of an evaluation: measured, counted, answered for, and refused."""

import json
import time
from collections import Counter
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch

from eval.decode_config import DecodeConfig
from eval.decoder import SpeculativeDecoder
from eval.measuring.experiment import WARMUP_TOKENS
from eval.measuring.methods import SERVED
from eval.measuring.records import record_prompt
from eval.measuring.results import read_results
from eval.measuring.schedule import best_length, schedule
from eval.measuring.served import COUNTED, PROBED, ServedEngine, rounds_of
from eval.rounds import Round
from recipes.command import run_tool
from recipes.config import TOY
from specdata.errors import ConfigError
from specdata.models import load_model
from tests.support.random_pair import measured_only
from tests.support.served_by_vllm import Handler, client, no_pauses, serving

__all__ = ["no_pauses"]  # a fixture

COUNTS = ("n_draft", "n_discarded", "accepted", "accepted_by_position")


def engine(target: Any, draft: Any | None, length: int, seconds: float = 0.0) -> Any:
    """A server that decodes with our decoder and counts as vLLM does; without a draft, alone.

    The prompt's forward gives the first token, before anything is drafted. Each answer takes so
    many seconds more.
    """
    config = DecodeConfig(length=length, temperature=0.0)
    decoder = SpeculativeDecoder.from_config(target, draft, config)
    counts: Counter[str] = Counter()

    class Engine(Handler):
        rounds: ClassVar[list[tuple[Round, ...]]] = []
        """Those that drafted, of each request."""

        def do_GET(self) -> None:  # noqa: N802 - the name that http.server calls
            if self.path != "/metrics":
                super().do_GET()
                return
            labels = 'engine="0",model_name="served"'
            lines = [
                f"vllm:spec_decode_num_{name}_total{{{labels}}} {float(counts[name])}"
                for name in ("drafts", "draft_tokens")
            ]
            name = "vllm:spec_decode_num_accepted_tokens_per_pos_total"
            lines += [
                f'{name}{{{labels},position="{place}"}} {float(counts[str(place)])}'
                for place in range(length)
            ]
            self.server.raw = ("\n".join(lines) if draft else "").encode()
            self.answer(200, {})
            self.server.raw = None

        def do_POST(self) -> None:  # noqa: N802
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            self.server.bodies.append(body)
            prompt = torch.tensor(body["prompt"])
            with self.server.lock:
                time.sleep(seconds)
                first = target(prompt[None]).logits[0, -1:].argmax(-1)
                out = decoder.generate(
                    torch.cat([prompt, first]),
                    max_new_tokens=body["max_tokens"] - 1,
                    generator=torch.Generator(),
                )
            self.rounds.append(tuple(each for each in out.rounds if each.drafted))
            for each in out.rounds:
                counts["drafts"] += each.drafted > 0
                counts["draft_tokens"] += each.drafted
                counts.update(map(str, range(each.accepted)))
            ids = {
                "token_ids": [*first.tolist(), *out.tokens.tolist()],
                "prompt_token_ids": body["prompt"],
            }
            self.answer(200, {"choices": [self.server.edit(ids)]})

    return Engine


def test_a_generation_that_waited_for_a_busy_server_is_measured_again() -> None:
    with serving(troubles=(503,)) as server, client(server) as backend:
        ServedEngine(backend).generate([2, 3], "a", 20)
        assert len(server.bodies) == 3  # refused, answered late, and answered at once


def test_an_engine_is_a_method_beside_ours_whose_counts_are_its_own(
    tiny_pair: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target, draft = (load_model(str(tiny_pair / role)) for role in ("target", "draft"))
    given = ["--config", str(TOY), *measured_only(tiny_pair, tmp_path)]
    given += ["--sampling.temperature", "0"]
    given += ["--eval.sets", "[{name: maths, count: 3}]", "--eval.max_new_tokens", "24"]
    given += ["--eval.methods", "[{name: plain, decoder: plain}, {name: K=3, length: 3}]"]
    given += ["--model", "served", "--method", "K=3"]
    given += ["--eval.engine", "eager", "--eval.verifier_seconds", "0"]
    drafts = engine(target, draft, 3)
    with serving(handler=drafts) as drafting, serving(handler=engine(target, None, 3)) as alone:
        asked = [drafting.url, "--alone", alone.url, "--name", "engine", *given]
        asked += ["--concurrency", "1"]
        assert run_tool("engine", asked) == 0, capsys.readouterr().err
        assert "the server alone; it accepted" in capsys.readouterr().out
        budgets = [body["max_tokens"] for body in drafting.bodies]
        assert budgets == [PROBED, WARMUP_TOKENS, 24, 24, 24]
        path = tmp_path / "eval-server/results.json"
        runs = {run.name: run for run in read_results(path).runs}
        assert runs.keys() == {"plain", "K=3", "engine", SERVED}
        alike = zip(runs["engine"].generations, runs["K=3"].generations, strict=True)
        for (each, ours), drafted in zip(alike, drafts.rounds[-3:], strict=True):
            assert each.tokens == ours.tokens
            alone_too = each.tokens - sum(one.emitted for one in drafted)
            assert (each.rounds, alone_too > 0) == (len(drafted) + alone_too, True)
            made = record_prompt("made", drafted, seconds=None, finish="eos")
            assert [getattr(made, name) for name in COUNTS] == [
                getattr(each, name) for name in COUNTS
            ]
        assert runs[SERVED].speedup == 1.0
        assert runs["engine"].speedup == pytest.approx(
            runs["engine"].tokens_per_second / runs[SERVED].tokens_per_second
        )
        record = next((tmp_path / "eval-server/prompts").glob("*.json"))
        before = record.stat().st_mtime_ns
        assert run_tool("engine", asked) == 0, "a finished one is read"
        assert record.stat().st_mtime_ns == before
        elsewhere = ["--alone", str(path.parent), "--eval.folder", "eval-again"]
        assert run_tool("engine", [drafting.url, *asked[3:], *elsewhere]) == 0
        assert "x the server alone; " in capsys.readouterr().out
        elsewhere = ["--alone", str(path.parent), "--eval.folder", "eval-short"]
        elsewhere += ["--eval.max_new_tokens", "12"]
        assert run_tool("engine", [drafting.url, *asked[3:], *elsewhere]) == 2
        assert "same prompts, sampling and budget" in capsys.readouterr().err
        # Another model by the same name is found before anything is measured.
        drafting.edit = lambda ids: {**ids, "token_ids": [7] * len(ids["token_ids"])}
        assert run_tool("engine", [*asked, "--eval.folder", "eval-other"]) == 2
        assert "must serve models.target" in capsys.readouterr().err
    assert run_tool("engine", asked) == 0, "a finished one is read without its servers"
    assert run_tool("engine", [*asked, "--eval.folder", "eval-gone"]) == 1
    assert "did not answer /v1/models" in capsys.readouterr().err
    assert not (tmp_path / "eval-gone").exists(), "nothing is bound to a server that is not there"


@pytest.mark.parametrize("slow", ["alone", "drafting"])
def test_the_schedule_drafts_where_a_length_was_surely_faster_and_nowhere_else(
    slow: str, tiny_pair: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target, draft = (load_model(str(tiny_pair / role)) for role in ("target", "draft"))
    given = ["--config", str(TOY), *measured_only(tiny_pair, tmp_path), "--model", "served"]
    given += ["--sampling.temperature", "0", "--eval.max_new_tokens", "6"]
    given += ["--eval.sets", "[{name: maths, count: 10}]", "--concurrency", "4", "--eval.engine"]
    given += ["eager", "--eval.verifier_seconds", "0", "--method", "plain"]
    lengths = {"alone": (None, 3), "drafting": (draft, 3)}
    handlers = {
        name: engine(target, *settings, 0.25 * (name == slow)) for name, settings in lengths.items()
    }
    with serving(handler=handlers["drafting"]) as one, serving(handler=handlers["alone"]) as other:
        assert run_tool("engine", [one.url, "--alone", other.url, *given]) == 0
    said = capsys.readouterr().out
    answers = json.loads((tmp_path / "eval-server/at-4-requests.json").read_text())
    assert {len(answers[name]["maths"]) for name in ("server", SERVED)} == {10}
    drafts = {"num_speculative_tokens": 3, "num_speculative_tokens_per_batch_size": [[1, 4, 3]]}
    assert (json.dumps(drafts) in said) == (slow == "alone")
    assert ("at 1 to 4 requests nothing is surely faster" in said) == (slow == "drafting")


def test_a_longer_draft_is_chosen_where_it_is_surely_faster_and_up_to_the_batch_measured() -> None:
    noise = np.random.default_rng(0).normal(0, 0.01, (2, 1001))
    slow, fast, tied = 100 + noise[0], 120 + noise[1], 100.01 + 10 * noise[1]
    assert best_length({0: slow, 1: fast, 2: fast - 1, 4: fast}) == 1
    assert best_length({0: slow, 1: tied, 3: fast}) == 3
    assert best_length({0: slow, 1: tied, 2: slow - 1}) == 0
    assert schedule({1: 3, 4: 3, 16: 1, 64: 0}) == [[1, 4, 3], [5, 16, 1], [17, 64, 0]]


def test_counts_of_llama_server_are_read_as_those_of_vllm() -> None:
    """As its /metrics has them, without labels."""
    lines = ["drafts_total 3", "draft_tokens_total 9", "accepted_tokens_total 4"]
    lines += ['accepted_tokens_per_pos_total{position="0"} 2']
    page = "\n".join(f"llamacpp:spec_decode_num_{line}" for line in lines)
    assert COUNTED.findall(page) == [
        ("drafts", "", "3"),
        ("draft_tokens", "", "9"),
        ("accepted_tokens_per_pos", 'position="0"', "2"),
    ]


def test_rounds_are_told_from_counts() -> None:
    """Ten tokens: one of the prompt's forward, and rounds of 3 that accept 3, 1 and 0."""
    rounds = rounds_of(Counter({"drafts": 3, "draft_tokens": 9, "0": 2, "1": 1, "2": 1}), 8)
    assert [(each.drafted, each.accepted, each.emitted) for each in rounds] == [
        (3, 0, 1),
        (3, 1, 2),
        (3, 3, 4),
        (0, 0, 1),
    ]
    cut = rounds_of(Counter({"drafts": 2, "draft_tokens": 6, "0": 2, "1": 2, "2": 1}), 5)
    assert [(each.accepted, each.emitted) for each in cut] == [(2, 3), (1, 1), (0, 1)]
    assert len(rounds_of(Counter(), 4)) == 4
    with pytest.raises(ConfigError, match="answer nobody else"):
        rounds_of(Counter({"drafts": 9, "draft_tokens": 9}), 4)
