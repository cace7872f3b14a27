"""Logits from a loopback server, which reads texts with a real model as vLLM does."""

import json
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from datasets import Dataset
from transformers import PreTrainedModel

from recipes import make_logits, make_rollouts, train_draft, train_head
from specdata.config import LogitsConfig, ServerConfig
from specdata.errors import ConfigError
from specdata.labels.make import load_labels
from specdata.lm_head import find_lm_head
from specdata.logits.make import ModelLogits
from specdata.logits.make import make_logits as make_dataset
from specdata.logits.served import ServedLogits, check_lengths
from specdata.models import load_model
from specdata.sampling import SamplingConfig
from specdata.server.client import ServerClient
from specdata.storage.dataset import load_stored, read_manifest
from specdata.storage.resume import Settings
from specdata.storage.schema import TOP_LOGITS, LogitRow, Rollout
from specdata.top_logits import TopLogits
from tests.support import served_by_vllm
from tests.support.acceptance import labeller, rollouts
from tests.support.served_by_vllm import Edit, Server, no_pauses
from tests.support.tiny import tiny_llama
from tests.support.word_pair import with_train_and_dev

__all__ = ["no_pauses"]  # a fixture

V, N = 40, 6


class Handler(served_by_vllm.Handler):
    """Speaks /v1/models and /v1/completions, with and without log probabilities of the prompt."""

    def do_GET(self) -> None:  # noqa: N802 - the name that http.server calls
        self.answer(200, {"data": [{"id": "served", "max_model_len": 256}]})

    def do_POST(self) -> None:  # noqa: N802
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with self.server.lock:
            trouble = self.server.troubles.pop(0) if self.server.troubles else 0
            self.server.bodies.append(body)
            if trouble == -1:  # it dies in the middle of an answer
                self.close_connection = True
                self.connection.close()
                return
            if body.get("prompt_logprobs", 0) > V:
                trouble = 400
            if trouble:
                self.answer(trouble, {"error": {"message": "greater than max allowed"}})
                return
            if "prompt_logprobs" in body:
                answer = by_vllm(self.server.model, body)
            else:
                answer = served_by_vllm.complete(self.server.model, body)
        self.answer(200, self.server.edit(answer))


@torch.inference_mode()
def by_vllm(model: PreTrainedModel, body: dict[str, Any]) -> dict[str, Any]:
    """Token t under what was read before it: the best ones, and it; null for the first."""
    ids, count = body["prompt"], body["prompt_logprobs"]
    # (T, V) in float32, as servers compute them; row t is after token t.
    rows = model(torch.tensor([ids])).logits[0].float().log_softmax(-1)
    found: list[dict[str, Any] | None] = [None]
    for token, row in zip(ids[1:], rows, strict=False):
        ranked = row.argsort(descending=True).tolist()
        wanted = dict.fromkeys([token, *ranked[:count]])
        found.append(
            {
                str(each): {
                    "logprob": max(float(row[each]), -9999.0),
                    "rank": ranked.index(each) + 1,
                    "decoded_token": f"w{each}",
                }
                for each in wanted
            }
        )
    choice = {"index": 0, "text": "w3", "finish_reason": "length", "prompt_logprobs": found}
    choice |= {"token_ids": [3], "prompt_token_ids": ids}
    return {"id": "cmpl-1", "object": "text_completion", "model": "served", "choices": [choice]}


def serving(model: PreTrainedModel, **behaviour: Any) -> AbstractContextManager[Server]:
    return served_by_vllm.serving(model=model, handler=Handler, **behaviour)


@contextmanager
def source(server: Server, count: int = N, **changes: Any) -> Iterator[ServedLogits]:
    config = ServerConfig(**{"url": server.url, "concurrency": 3, **changes})
    client = ServerClient(config, "logits.server")
    try:
        yield ServedLogits(client, "served", count, V)
    finally:
        client.close()


def target() -> PreTrainedModel:
    return tiny_llama(4, vocab=V, layers=2)


def own(rows: list[Rollout], count: int) -> list[LogitRow]:
    """The model's own logits, on the scale of log probabilities."""
    found = ModelLogits(find_lm_head(target()), count)(rows)
    for row in found:
        per = torch.tensor(row["top_logits"]).view(-1, count).double()
        rest = torch.tensor(row["rest_logit"]).double()
        total = torch.logaddexp(per.logsumexp(-1), rest)
        row["top_logits"] = (per - total[:, None]).flatten().tolist()
        for name in ("rest_logit", "next_logit", "text_logit"):
            row[name] = (torch.tensor(row[name]) - total).tolist()  # type: ignore[literal-required]
    return found


@pytest.mark.parametrize("count", [N, V])
def test_a_server_gives_the_logits_of_the_model_that_it_runs(count: int) -> None:
    rows = rollouts(9, vocab=V)
    with serving(target()) as server, source(server, count) as served:
        found = served(rows)
        body = server.bodies[0]
    assert (body["prompt_logprobs"], body["max_tokens"]) == (min(count + 1, V), 1)
    assert (body["temperature"], body["top_k"], body["top_p"]) == (1.0, 0, 1.0)
    assert not body["add_special_tokens"]
    for ours, theirs in zip(found, own(rows, count), strict=True):
        assert ours["top_ids"] == theirs["top_ids"]
        for name in TOP_LOGITS.names:
            # What is left of 1 is known to float32's rounding of 1.
            close = 1e-2 if name == "rest_logit" else 1e-4
            assert ours[name] == pytest.approx(theirs[name], abs=close), name  # type: ignore[literal-required]
        assert ours["example_id"] == theirs["example_id"]


def of_positions(change: Callable[[Any], Any]) -> Edit:
    """Change what is said of each position that has something."""

    def edit(answer: dict[str, Any]) -> dict[str, Any]:
        for part in answer["choices"]:
            found = part["prompt_logprobs"]
            part["prompt_logprobs"] = [entry and change(entry) for entry in found]
        return answer

    return edit


def of_all(logprob: float | None) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """The same said of every token."""
    return lambda entry: {token: {"logprob": logprob} for token in entry}


def shifted(answer: dict[str, Any]) -> dict[str, Any]:
    """A start token was put before the text."""
    for choice in answer["choices"]:
        choice["prompt_token_ids"] = [0, *choice["prompt_token_ids"]]
    return answer


def no_logits(answer: dict[str, Any]) -> dict[str, Any]:
    del answer["choices"][0]["prompt_logprobs"]
    return answer


REFUSED: list[tuple[Edit, str]] = [
    (lambda answer: {}, "does not speak the API of this server"),
    (no_logits, "returned no prompt_logprobs"),
    (
        of_positions(lambda entry: dict(list(entry.items())[:3])),
        r"returned 3 log probabilities at a position where 7 were asked",
    ),
    (
        of_positions(lambda entry: {**entry, "99": {"logprob": -1.0, "rank": 1}}),
        "returned token 99, and the vocabulary .* has 40",
    ),
    # Processed log probabilities, of a temperature below 1: the best one has nearly all.
    (of_positions(of_all(-0.5)), "must be the model's own at temperature 1"),
    # More mass is missing than all other tokens could have.
    (of_positions(of_all(-9.0)), "must be the model's own at temperature 1"),
    (shifted, r"read another text \(\d+ tokens\) than it was sent"),
    (of_positions(of_all(None)), "logprobs.*: Input should be a valid number"),
    (of_positions(of_all(float("nan"))), "logprobs.*: Input should be a finite number"),
    (
        of_positions(lambda entry: {f"{name}.5": entry[name] for name in entry}),
        r"logprobs.*: String should match",
    ),
]


@pytest.mark.parametrize(("edit", "message"), REFUSED)
def test_an_answer_that_is_not_the_targets_logits_is_refused(edit: Edit, message: str) -> None:
    with (
        serving(target(), edit=edit) as server,
        source(server) as served,
        pytest.raises(ConfigError, match=message),
    ):
        served(rollouts(3, vocab=V))


def test_a_text_must_leave_the_server_room_for_a_token() -> None:
    rows = {"prompt_ids": [[1, 2, 3]], "completion_ids": [[4, 5]]}
    check_lengths(rows, None)
    check_lengths(rows, 6)
    with pytest.raises(ConfigError, match=r"has 5 tokens.* takes 5.*--max-model-len 6"):
        check_lengths(rows, 5)


def make(folder: Path, logits: ModelLogits | ServedLogits) -> int:
    rows = Dataset.from_list(rollouts(10, vocab=V))
    config = LogitsConfig(shard_size=3, top_logits=N)
    return make_dataset(
        logits, rows, folder, config, settings=Settings({}), report=lambda rows: None
    )


def test_a_dataset_goes_on_after_the_server_died_and_came_back(tmp_path: Path) -> None:
    with (
        serving(target(), troubles=(0, 0, 0, 0, 0, -1, -1, -1)) as server,
        source(server, concurrency=1) as served,
        pytest.raises(ConnectionError, match="did not answer"),
    ):
        make(tmp_path / "a", served)
    assert len(list((tmp_path / "a").glob("*.parquet"))) == 2
    for name in ("a", "b"):
        with serving(target()) as server, source(server) as served:
            assert make(tmp_path / name, served) == 10
            asked = len(server.bodies)
            assert asked == (6 if name == "a" else 10), "what is stored is not asked for again"
    assert load_stored(tmp_path / "a").to_list() == load_stored(tmp_path / "b").to_list()
    assert read_manifest(tmp_path / "a") == read_manifest(tmp_path / "b")
    assert TopLogits.of(tmp_path / "a") == TopLogits(N, V)


# --- the recipes: a target that is a tokenizer and a configuration here, and a server elsewhere


@pytest.fixture(scope="module")
def bare(word_pair: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A pair whose target folder has no weights, its configuration, and prompts."""
    folder = tmp_path_factory.mktemp("bare")
    weights = shutil.ignore_patterns("*.safetensors")
    shutil.copytree(word_pair / "target", folder / "target", ignore=weights)
    tree = with_train_and_dev(word_pair, folder)
    out = folder / "out"
    tree |= {
        "output": str(out),
        "models": {"target": str(folder / "target"), "draft": str(word_pair / "draft")},
        "sampling": {"top_k": 8},
        "logits": {"top_logits": 12, "shard_size": 4},
        "draft": {"epochs": 1, "batch_size": 4, "logits": str(out / "logits"), "report_to": []},
        "labels": {"shard_size": 4, "draws": 3, "logits": str(out / "logits")},
        "head": {"depth": 1, "epochs": 1},
    }
    (folder / "pair.yaml").write_text(yaml.safe_dump(tree))
    return folder


@pytest.mark.slow
def test_a_target_behind_a_server_needs_no_weights_from_rollouts_to_head(
    bare: Path, word_pair: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ["--config", str(bare / "pair.yaml")]
    model = load_model(str(word_pair / "target"))
    with serving(model, troubles=()) as server:
        vllm = json.dumps({"url": server.url, "model": "served", "concurrency": 4})
        given = [*asked, "--rollouts.backend=vllm", "--rollouts.vllm", vllm]
        given += ["--logits.backend=vllm", "--logits.server", vllm]
        for recipe in (make_logits, train_draft):
            assert recipe.RECIPE.run([*given, "--plan"]) == 0
        plan = capsys.readouterr().out
        assert "logits (would be made)" in plan
        # Completions of at most 12 tokens: an id, twelve logits with ids, three numbers.
        assert re.search(r"out/logits: 40 completions.* at most 480 tokens, about 53.8 KB", plan)
        assert f"reads logits: {bare / 'out' / 'logits'} (not made yet)" in plan
        assert make_rollouts.RECIPE.run(given) == 0
        server.troubles = [0] * 9 + [503] * 12
        assert make_logits.RECIPE.run(given) == 1
        assert "did not answer /v1/completions" in capsys.readouterr().err
        server.troubles = []
        assert make_logits.RECIPE.run(given) == 0
        assert "12 of 40 logits stored at each of" in capsys.readouterr().out
        assert train_draft.RECIPE.run(given) == 0
        assert "upper bounds" not in capsys.readouterr().out, "top_k 8 is decided by 12 logits"
        assert train_head.RECIPE.run(given) == 0
        assert make_rollouts.RECIPE.run([*given, "--output", str(bare / "new"), "--seed", "1"]) == 0
    labels, sampling = bare / "out" / "labels", SamplingConfig(top_k=8)
    draft = load_model(str(bare / "out" / "draft" / "model"))
    expected = labeller(model, draft, sampling, draws=3)
    rows: Any = load_stored(bare / "out" / "rollouts").to_list()
    for ours, theirs in zip(load_labels(labels, sampling), expected(rows), strict=True):
        for name in ("draft_ids", "more_draft_ids", "overlap", "accept_prob", "more_accept_prob"):
            assert ours[name] == pytest.approx(theirs[name], abs=1e-4), name  # type: ignore[literal-required]
        assert not {*TOP_LOGITS.names} & ours.keys()
    # What does not decide these labels, or is of another run, is refused before anything is made.
    new, logits = [*asked, "--output", str(bare / "new"), "--labels.logits"], bare / "out/logits"
    early = [
        ([str(logits), "--sampling.top_k", "20"], "12 top logits of 40 do not give"),
        ([str(bare / "none")], "make it with draftsmith make-logits"),
        ([str(bare / "new" / "rollouts")], "keeps no target logits: name a dataset"),
    ]
    for more, message in (
        *early,
        *(([*more, "--plan"], message) for more, message in early),
        ([str(logits), "--models.target", str(word_pair / "draft")], "target.revision"),
        ([str(logits), "--models.dtype", "bfloat16"], "dtype: 'float32' -> 'bfloat16'"),
        ([str(logits)], "rollouts: its contents have changed"),
    ):
        assert train_head.RECIPE.run([*new, *more, "--draft", "null"]) == 2
        assert message in capsys.readouterr().err
    assert not list((bare / "new" / "labels").glob("[!.]*"))
    assert train_draft.RECIPE.run([*new[:-1], "--draft.logits", "x"]) == 2
    assert "draft.logits must be a folder with top target logits" in capsys.readouterr().err
