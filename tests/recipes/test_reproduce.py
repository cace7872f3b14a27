"""A paper's protocol as data, run on a pair: `make papers`."""

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.papers.__main__ import main
from benchmarks.papers.examples import batches, rejections
from benchmarks.papers.measurements import (
    MEASURES,
    ModelPair,
    evaluated,
    evaluation,
    formula,
    replay,
)
from benchmarks.papers.reproduce import PAPERS, protocol_of
from benchmarks.papers.tables import paper_figures, pivot, selected
from recipes.config import parse
from specdata.storage.dataset import load_stored, read_manifest
from tests.support.random_pair import measured_only

SEEDS = ("seed-0", "seed-1")


@pytest.mark.parametrize("paper", PAPERS)
def test_formulas_reach_the_printed_digits(paper: str) -> None:
    protocol = protocol_of(paper, quick=True)
    for table in protocol["tables"]:
        if not table.get("exact"):
            continue
        names = [table["of"]] if isinstance(table["of"], str) else table["of"]
        specs = {name: protocol["measurements"][name] for name in names}
        made = {name: formula(None, spec, Path(name)) for name, spec in specs.items()}  # type: ignore[arg-type]
        ours, compared = pivot(table, selected(table, made)), 0
        for row, cells in paper_figures(table).items():
            for column, printed in cells.items():
                digits = len(str(printed).partition(".")[2])
                assert ours[row][column] == pytest.approx(float(printed), abs=0.51 * 10**-digits)
                compared += 1
        assert compared, table["title"]


@pytest.mark.parametrize("quick", [False, True])
@pytest.mark.parametrize("paper", PAPERS)
def test_a_protocol_fits_the_demos_pair_and_names_what_it_measures(paper: str, quick: bool) -> None:
    protocol, command = protocol_of(paper, quick=quick), parse([], paper)
    for spec in protocol["measurements"].values():
        assert spec["kind"] in MEASURES
        if spec["kind"] == "evaluation":
            _, _, methods = evaluated(ModelPair(command.config, command.given, Path()), spec)
            names = {method["name"] for method in methods}
            assert {method["over"] for method in methods if "over" in method} <= names
    for shown in protocol["tables"]:
        of = [shown["of"]] if isinstance(shown["of"], str) else shown["of"]
        assert {*of} <= {*protocol["measurements"]}, shown["title"]


@pytest.mark.parametrize("responses", [1, 4])
def test_simulated_rejections_are_those_of_theorems_1_and_3(responses: int) -> None:
    simulated, exact = rejections(4, 12, 1.0, runs=[200], seed=1, responses=responses)
    low, high = (simulated["rejections"][side] for side in ("low", "high"))
    assert low < exact["rejections"] < high < 1.2 * low
    batch, limit = (row["rejections"] for row in batches(4, 12, 1.0, [responses], seed=1))
    assert limit < batch == pytest.approx(exact["rejections"], abs=1e-12)


def test_gains_are_of_the_same_prompts_and_scores_of_texts_that_have_references(
    trained_pair: Path, tmp_path: Path
) -> None:
    sets = f"[{{name: instruct, count: 2}}, {{name: {tmp_path / 'none.jsonl'}}}]"
    (tmp_path / "none.jsonl").write_text('{"prompt": "What is a map for?"}\n')
    given = measured_only(trained_pair, tmp_path)
    given += ["--eval.sets", sets, "--eval.max_new_tokens", "12"]
    command = parse(given, "canonical")
    methods = [{"name": "K=1", "length": 1}, {"name": "K=3", "length": 3, "over": "K=1"}]
    spec = {"timed": True, "scores": ["rougeL"], "methods": methods}
    made = evaluation(ModelPair(command.config, command.given, tmp_path), spec, tmp_path / "m")
    of = {(each["set"], each.get("method")): each for each in made}
    one, three = of["instruct", "K=1"], of["instruct", "K=3"]
    for gain, rate in (("over", "block_efficiency"), ("faster", "tokens_per_second")):
        ratio = three[rate]["value"] / one[rate]["value"]
        assert three[gain]["value"] == pytest.approx(100 * (ratio - 1))
    assert 0 < one["rougeL"]["value"] < 1
    assert {name for name, method in of if "rougeL" in of[name, method]} == {"instruct"}


def said(page: Path) -> list[str]:
    """A page without its day."""
    return [line for line in page.read_text().splitlines() if "Measured on" not in line]


def test_a_protocol_goes_on_after_a_kill_with_the_same_counts(
    trained_pair: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = ["block", "--quick", "--prompts", "2", "--out", str(tmp_path / "page")]
    given += measured_only(trained_pair, tmp_path)
    given += ["--eval.sets", "[{name: instruct, count: 2}, {name: maths, count: 2}]"]
    given += ["--eval.max_new_tokens", "12"]
    assert main(given) == 0, capsys.readouterr().err
    page, stored = tmp_path / "page/README.md", tmp_path / "page/results.json"
    first, measured = said(page), tmp_path / "papers/block-quick/measured/decoding"
    assert str(tmp_path) not in stored.read_text() + page.read_text()
    result = json.loads(stored.read_text())
    counts, records = result["measured"], measured / "records.json"
    of_all = [each["counts"] for each in counts["decoding"] if each["set"] == "all prompt sets"]
    assert [each["prompts"] for each in of_all] == [4] * len(of_all)
    assert of_all[0]["rounds"] == of_all[0]["tokens"] > of_all[1]["rounds"]  # plain, then token
    where, digest = result["environments"]["decoding"], result["pair"]["draft"]["digest"]
    assert all(part in page.read_text() for part in (where["hardware"]["cpu"], digest))
    kept, lost = (next((measured / seed / "prompts").rglob("*.json")) for seed in SEEDS)
    before = kept.stat().st_mtime_ns
    records.unlink()  # as after a kill in the second seed, whose prompts are one batch
    lost.unlink()
    assert main(given) == 0, capsys.readouterr().err
    assert (kept.stat().st_mtime_ns, said(page)) == (before, first)
    assert json.loads(stored.read_text())["measured"] == counts
    assert main([*given, "--seed", "1"]) == 2
    assert "remove" in capsys.readouterr().err


SWEEP: dict[str, Any] = {"sampling": {"temperature": 1.0, "top_k": 50, "top_p": 1.0}}
SWEEP |= {"depths": [0, 1], "weights": [1.0, 6.0], "training": {"epochs": 2}, "rows": 8}
SWEEP |= {"judged_rows": 6, "lengths": [2, 6], "thresholds": [0.3, 0.7], "rules": ["entropy"]}
SWEEP |= {"draft_seconds": 0.0234, "target_seconds": 0.112, "alone_seconds": 0.108}


@pytest.mark.slow
def test_each_head_learns_once_of_one_set_under_its_sampling_and_is_judged_on_all(
    trained_pair: Path, tmp_path: Path
) -> None:
    sets = [{"name": n, "split": s} for s in ("train", "dev") for n in ("instruct", "maths")]
    given = [f"--output={tmp_path}", "--toy", "null", "--draft", "null"]
    given += ["--rollouts.sets", json.dumps(sets), "--rollouts.max_new_tokens", "12"]
    given += [f"--models.{role}={trained_pair / role}" for role in ("target", "draft")]
    command = parse(given)
    pair, folder = ModelPair(command.config, command.given, tmp_path), tmp_path / "grid"
    records = replay(pair, SWEEP, folder)
    heads = [row for row in records if row.get("rule") == "head"]
    assert len(heads) == 4 * 3 * 2, "heads, sets with that of all, thresholds"
    labels = load_stored(folder / "run/labels")
    assert read_manifest(folder / "run/labels")["settings"]["sampling"]["top_k"] == 50
    rows = list(zip(labels["split"], labels["dataset"], strict=True))
    counted = {each: rows.count(each) for each in rows}
    dev = {("dev", "maths"): 6, ("dev", "instruct"): 6}
    assert counted == {("train", "instruct"): 8, **dev}
    for row in (row for row in records if "set" in row):  # by the paper's times, over its target
        counts, seconds = row["counts"], 1 / row["tokens_per_second"]["value"]
        spent = 0.0234 * counts["n_draft"] + 0.112 * counts["n_target"]
        assert spent / counts["tokens"] == pytest.approx(seconds)
        assert row["speedup"]["value"] == pytest.approx(0.108 / seconds)
    # Asked for again, it trains nothing.
    before = {path: path.stat().st_mtime_ns for path in folder.glob("depth*/model.safetensors")}
    assert len(before) == 4
    assert replay(pair, SWEEP, folder) == records
    assert {path: path.stat().st_mtime_ns for path in before} == before


def test_a_paper_that_is_not_there_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["blok"]) == 2
    assert "did you mean 'block'?" in capsys.readouterr().err
