"""The replay command: rules against the oracle on stored labels."""

from __future__ import annotations

import dataclasses
import json
import math
import shutil
from pathlib import Path

import pytest
import torch

from eval.analysis.replay import best_settings, main, replay_rules, result_rows
from eval.analysis.traces import AcceptanceTrace, acceptance_traces, head_probabilities
from eval.drafting.stopping.calibration import Calibration
from heads import AcceptanceHead
from heads.inputs import HeadInputs
from specdata.probability import SamplingConfig
from specdata.storage.dataset import fill_dataset, load_stored
from specdata.storage.files import fingerprint
from specdata.storage.resume import Settings
from specdata.storage.schema import LABELS
from tests.test_acceptance import labeller
from tests.tiny import tiny_llama

SAMPLING = SamplingConfig(temperature=0.8)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target and a draft, saved, and labels of twelve rollouts."""
    root = tmp_path_factory.mktemp("replay")
    target, draft = tiny_llama(0, vocab=12).float(), tiny_llama(1, vocab=12).float()
    draft.save_pretrained(root / "draft")
    tiny_llama(2, vocab=12).save_pretrained(root / "other")
    AcceptanceHead(hidden_size=16, depth=1).save_pretrained(root / "head")
    generator = torch.Generator().manual_seed(0)

    def row(number: int) -> object:
        ids = torch.randint(2, 12, (14,), generator=generator).tolist()
        made = {"example_id": f"e{number}", "dataset": "d", "sample": 0, "finish": "length"}
        made["split"] = "dev" if number % 2 else "test"
        return made | {"turn": 0, "prompt_ids": ids[:3], "completion_ids": ids[3:]}

    settings: dict[str, object] = {"sampling": {"temperature": 0.8, "top_k": 0, "top_p": 1.0}}
    settings["draft"] = {"name": "elsewhere/draft", "revision": fingerprint(str(root / "draft"))}
    rows = labeller(target, draft, SAMPLING)([row(number) for number in range(12)])  # type: ignore[misc]
    fill_dataset(root / "labels", LABELS, Settings(settings), [lambda: rows], lambda done: None)
    return root


def test_the_head_predicts_after_the_draft_consumed_the_drafted_token(folder: Path) -> None:
    draft, row = tiny_llama(1, vocab=12).float(), load_stored(folder / "labels")[0]
    torch.manual_seed(1)
    head = AcceptanceHead(hidden_size=16, depth=1, rejection_weight=6.0).eval()
    predicted = head_probabilities(draft, head, row)
    for position, token in enumerate(row["draft_ids"]):
        ids = [*row["prompt_ids"], *row["completion_ids"][:position], token]
        with torch.no_grad():
            state = draft.base_model(input_ids=torch.tensor([ids])).last_hidden_state[0, -1]
            expected = float(head.probability(HeadInputs({"hidden": state})))
        assert predicted[position] == pytest.approx(expected, abs=1e-5)


def test_outcomes_depend_on_the_seed_and_the_rollout_only(folder: Path) -> None:
    rows = load_stored(folder / "labels")
    first, again = (acceptance_traces(rows, seed=3) for _ in range(2))
    assert first == again
    for trace, row in zip(first, rows, strict=True):
        assert trace.accept_prob == row["accept_prob"]
        assert trace.q == pytest.approx([math.exp(log_q) for log_q in row["log_q"]])
        assert trace.q_max == pytest.approx([math.exp(log_q) for log_q in row["log_q_max"]])
    assert acceptance_traces(rows.select([4]), seed=3) == first[4:5]
    assert acceptance_traces(rows, seed=4) != first


def simulated_traces(generator: torch.Generator) -> list[AcceptanceTrace]:
    """60 sequences of 80 positions whose acceptance probability is .97 or .3."""
    traces = []
    for _ in range(60):
        accept = torch.where(torch.rand(80, generator=generator) < 0.8, 0.97, 0.3)
        accepted = torch.rand(80, generator=generator) < accept
        traces.append(
            AcceptanceTrace(accepted.tolist(), accept.tolist(), accept.tolist(), accept.tolist())
        )
    return traces


def test_no_rule_is_faster_than_the_oracle_and_a_perfect_head_beats_every_fixed_length() -> None:
    traces = simulated_traces(torch.Generator().manual_seed(0))
    results = replay_rules(traces, Calibration(), draft_seconds=0.1, target_seconds=1.0)
    rows = result_rows(results, 0.1, 1.0)
    assert max(rows, key=lambda row: row["of_the_oracles_speed"])["rule"] == "oracle"
    best = {row["rule"]: row for row in best_settings(rows) if row["setting"] != "cost rule"}
    cost = {r["rule"]: r["seconds_per_token"] for r in rows if r["setting"] == "cost rule"}
    assert cost["perfect head"] < best["fixed"]["seconds_per_token"]
    # Here max q is the acceptance itself, and the logistic model trusts it.
    assert cost["logit"] == cost["perfect head"]


def test_each_rule_reads_its_own_values_and_a_head_decides_one_token_late() -> None:
    traces = simulated_traces(torch.Generator().manual_seed(0))
    for trace in traces:
        trace.head = trace.accept_prob
        trace.q = [1.0] * len(trace.accepted)
        trace.q_max = [0.01] * len(trace.accepted)
    results = {
        (result.family, result.setting): result.counts
        for result in replay_rules(traces, Calibration(), draft_seconds=0.1, target_seconds=1.0)
    }
    assert results["head", "h=0.5"].n_draft > results["perfect head", "h=0.5"].n_draft
    assert results["confidence", "0.9"] == results["fixed", "K=20"]
    assert results["logit", "h=0.5"] == results["fixed", "K=1"]


def test_the_command_prints_a_table_and_writes_json_and_a_picture(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = [str(folder / "labels"), "--out", str(tmp_path)]
    flags += ["--draft", str(folder / "draft"), "--head", str(folder / "head")]
    assert main(flags) == 0
    printed = capsys.readouterr().out
    for rule in ("oracle", "plain", "fixed", "confidence", "logit", "head", "perfect"):
        assert rule in printed
    stored = json.loads((tmp_path / "replay.json").read_text())
    assert stored["calibration"] != dataclasses.asdict(Calibration())
    for row in stored["rows"]:
        assert row["n_draft"] + row["n_target"] == row["tokens"] + row["n_discarded"]
    assert (tmp_path / "replay.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--split", "train"], "no rows of split 'train', only dev, test"),
        (["--head", "x"], "give --draft too"),
        (["--draft-seconds", "0"], "must be positive"),
    ],
)
def test_unusable_arguments_end_with_status_2(
    flags: list[str], message: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(folder / "labels"), *flags]) == 2
    assert message in capsys.readouterr().err


def test_labels_of_an_earlier_version_which_name_their_draft_only_are_replayed(
    folder: Path, tmp_path: Path
) -> None:
    labels = shutil.copytree(folder / "labels", tmp_path / "labels")
    manifest = json.loads((labels / "manifest.json").read_text())
    manifest["settings"]["draft"] = "elsewhere/draft"
    (labels / "manifest.json").write_text(json.dumps(manifest))
    assert main([str(labels), "--out", str(tmp_path), "--draft", str(folder / "draft")]) == 0


def test_another_draft_than_that_of_the_labels_is_refused(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = [str(folder / "labels"), "--out", str(tmp_path), "--head", str(folder / "head")]
    assert main([*flags, "--draft", str(folder / "other")]) == 2
    assert "made with, elsewhere/draft; the one in" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
    moved = shutil.copytree(folder / "draft", tmp_path / "moved")
    assert main([*flags, "--draft", str(moved)]) == 0


def test_a_folder_without_labels_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(tmp_path)]) == 2
    assert "holds no dataset" in capsys.readouterr().err
