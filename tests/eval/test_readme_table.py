"""The README's table and picture of a finished evaluation, and the command that makes them."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from PIL import Image

from benchmarks.table import beside_table, main, together
from eval.decode_config import Method
from eval.measuring.intervals import Interval
from eval.measuring.methods import PLAIN
from eval.measuring.pooled import ALL_SETS, medians, pool
from eval.measuring.results import (
    Results,
    Run,
    build_results,
    check_metrics,
    read_results,
    write_results,
)
from eval.reporting.rendering import NOT_MEASURED
from eval.reporting.table import MOST_ROWS, readme_table, shown_methods
from specdata.errors import ConfigError
from specdata.storage.files import write_json
from tests.support.synthetic_results import only, rebuilt, slower

ROOT = Path(__file__).parents[2]
REAL, AT_ONE = "docs/real/results.json", "docs/real/temperature-1/results.json"
PUBLIC = "docs/real/public/results.json"
GEMMA = "docs/real/gemma-3-270m"
SERVED = ("f16-t0", "f16-t0.2", "q8_0-t0", "q8_0-t0.2")
OPENVINO = " ".join(f"docs/engines/openvino-{name}/results.json" for name in ("fp32", "int8"))
LLAMA_CPP = " ".join(f"docs/engines/{name}/results.json" for name in SERVED)


def cells(table: str) -> dict[str, list[str]]:
    rows = [line.strip("|").split("|") for line in table.splitlines() if line.startswith("|")]
    return {row[0].strip(): [cell.strip() for cell in row[1:]] for row in rows}


def test_a_row_has_the_speed_up_of_each_set_and_the_counts_of_all(results: Results) -> None:
    rows = cells(readme_table(results))
    assert rows["method"] == ["alpaca", "gsm8k", "tokens per target call", "acceptance", "discard"]
    first = next(run for run in results.of("alpaca") if run.name == "block-6")
    low, high = first.intervals["speedup"]
    (row,) = (row for row in pool(results) if row.name == "block-6")
    assert rows["block-6"][0] == f"{first.speedup:.2f}x [{low:.2f}, {high:.2f}]"
    assert rows["block-6"][2:] == [
        f"{row.value('block_efficiency'):.2f}",
        f"{row.value('acceptance_rate'):.3f}",
        f"{row.value('discard_rate'):.2f}",
    ]
    assert rows[PLAIN][2:] == ["1.00", NOT_MEASURED, "0.00"]
    assert "biased-0.05 †" in rows


def test_figures_of_uncommitted_code_are_not_said_to_be_of_the_commit_alone(
    results: Results,
) -> None:
    dirty = results.environment.model_copy(update={"git_dirty": True})
    table = readme_table(results.model_copy(update={"environment": dirty}))
    assert "commit 0123456 with uncommitted changes." in table
    assert "commit 0123456." in readme_table(results)


def test_by_default_the_fastest_setting_of_each_kind_stands_for_it(results: Results) -> None:
    """Which a note says where a setting was left out, and only there."""
    names = shown_methods(results)
    said = "fastest on these prompts"
    assert said in readme_table(results)
    assert said not in readme_table(results, names)
    assert said not in readme_table(only(results, *names))
    assert names[0] == PLAIN
    assert len(names) == len(set(names)) <= MOST_ROWS
    assert {"block-6", "tree-4x2x1", "transformers"} <= set(names)
    speed = {row.name: row.speed() for row in pool(results)}
    for kind in ("fixed", "head"):
        (shown,) = [name for name in names if name.startswith(kind)]
        assert speed[shown] == max(speed[name] for name in speed if name.startswith(kind))
    assert names[1:] == sorted(names[1:], key=speed.__getitem__, reverse=True)


def test_the_command_prints_the_table_and_writes_what_to_commit(
    results: Results, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, out = tmp_path / "run", tmp_path / "docs"
    write_results(run / "results.json", results)
    draft, head = {"epochs": 7}, {"folder": "head-2"}
    write_json(tmp_path / "draft" / "run.json", {"config": {"draft": draft, "head": None}})
    write_json(run / "run.json", {"config": {"head": head}})
    for name, kept in (("head", {"folder": None}), ("head-2", head)):
        write_json(tmp_path / name / "run.json", {"config": {"head": kept}})
    assert main([str(run), "--method", "plain", "--method", "fixed-4", "--out", str(out)]) == 0
    assert capsys.readouterr().out == readme_table(results, ["plain", "fixed-4"])
    assert json.loads((out / "recipe.json").read_text()) == {"draft": draft, "head": head}
    written = out / "results.json"
    assert read_results(written) == results
    check_metrics(read_results(written))
    assert written.stat().st_size < 0.6 * (run / "results.json").stat().st_size
    with Image.open(out / "speedup.png") as picture:
        assert picture.width == 8 * 150
        assert picture.height < 300, "a bar for each set takes little room"


def test_of_several_evaluations_each_figure_is_the_median_run_and_has_the_spread_of_all(
    results: Results, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The median is each figure's own: of fixed-4 the first run, of block-6 the last."""
    later = results.environment.model_copy(update={"date": "later"})
    evaluations = [results]
    for factors in ({"fixed-4": 0.5, "block-6": 2.0}, {"fixed-4": 1.25, "block-6": 1.25}):

        def timed(run: Run, factors: dict[str, float] = factors) -> Run:
            return slower(run, factors.get(run.name, 1.0)) if run.dataset == "alpaca" else run

        again = rebuilt(results, timed)
        evaluations.append(again.model_copy(update={"environment": later}))
    for number, each in enumerate(evaluations):
        write_results(tmp_path / f"{number}" / "results.json", each)
    folders, out = [str(tmp_path / f"{number}") for number in range(3)], tmp_path / "out"
    shown = ["--method", "fixed-4", "--method", "block-6", "--method", PLAIN]
    assert main([*folders, *shown, "--out", str(out)]) == 0
    rows = cells(printed := capsys.readouterr().out)
    for name, of_run in (("fixed-4", 0), ("block-6", 2)):
        speeds = []
        for each in evaluations:
            (row,) = (row for row in pool(each, ["alpaca"]) if row.name == name)
            speeds.append(row.rate("speedup"))
        found, all_of_them = speeds[of_run], [speed.value for speed in speeds if speed]
        assert found is not None
        assert sorted(all_of_them)[1] == found.value
        assert rows[name][0] == (
            f"{found.value:.2f}x [{found.low:.2f}, {found.high:.2f}]"
            f" ({min(all_of_them):.2f} to {max(all_of_them):.2f})"
        )
    assert rows["method"][2] == ALL_SETS
    assert rows[PLAIN][:3] == ["1.00x [1.00, 1.00] (1.00 to 1.00)"] * 3
    assert "median of 3 runs" in printed
    # What is committed holds all runs, in little more than the first one's room.
    kept = read_results(out / "results.json")
    check_metrics(kept)
    assert [each.runs for each in kept.repetitions()] == [each.runs for each in evaluations]
    assert readme_table(kept, ["fixed-4", "block-6", PLAIN]) == printed
    brief = cells(readme_table(kept, ["fixed-4", PLAIN], is_brief=True))
    assert brief["method"] == [ALL_SETS, "tokens per target call"]
    assert brief[PLAIN] == ["1.00x [1.00, 1.00]", "1.00"]
    assert brief["fixed-4"] == [rows["fixed-4"][2].partition(" (")[0], rows["fixed-4"][3]]
    assert together([kept]) == kept
    slow, found = (  # of two the slower one, which for fixed-4 is the first
        [row.value("speedup") for row in each if row.name == "fixed-4"]
        for each in (pool(results), medians(together(evaluations[:2])))
    )
    assert found == slow
    assert (out / "results.json").stat().st_size < (tmp_path / "0/results.json").stat().st_size


def test_evaluations_of_other_settings_stand_beside_one_another(
    results: Results, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def changed(run: Run) -> Run:
        run = slower(run, 2.0) if run.name == "fixed-4" else run
        return run.model_copy(update={"sampling": {**run.sampling, "temperature": 0.5}})

    evaluations = {"T=1": results, "T=.5": rebuilt(results, changed)}
    for name, each in evaluations.items():
        write_results(tmp_path / name / "eval" / "results.json", each)
    folders = [str(tmp_path / name / "eval") for name in evaluations]
    assert main([*folders, "--beside"]) == 0
    rows = cells(printed := capsys.readouterr().out)
    assert rows["method"] == [name.replace("_", "\\_") for name in folders]
    assert PLAIN not in rows
    for each, cell in zip(evaluations.values(), rows["fixed-4"], strict=True):
        (row,) = (row for row in pool(each) if row.name == "fixed-4")
        speed, tokens = row.rate("speedup"), row.value("block_efficiency")
        assert speed is not None
        assert cell == f"{speed.value:.2f}x [{speed.low:.2f}, {speed.high:.2f}]; {tokens:.2f}"
    assert rows["fixed-4"][0] != rows["fixed-4"][1]
    assert "top\\_k" in printed, "a setting of both"
    assert "temperature" not in printed


def test_evaluations_of_other_tokens_are_not_put_together_but_rules_that_follow_the_clock_are(
    results: Results,
) -> None:
    plain, fixed = (run for run in results.of("alpaca") if run.name in (PLAIN, "fixed-4"))

    def measured(method: Method, tokens: int) -> Results:
        setup = fixed.model_copy(update={"method": method})
        first, *others = fixed.generations
        changed = replace(first, tokens=first.tokens + tokens, rounds=first.rounds + tokens)
        return build_results(
            results.environment, [(plain, plain.generations), (setup, [changed, *others])]
        )

    token = Method(name="K=4", length=4)
    with pytest.raises(ConfigError, match="counts, and differs in alpaca, K=4"):
        together([measured(token, 0), measured(token, 1)])
    with pytest.raises(ConfigError, match="differs in alpaca, K=4"):
        together([measured(token, 0), measured(Method(name="K=4", length=5), 0)])
    cost = Method(name="cost", stop="cost")
    one, two = (measured(cost, tokens) for tokens in (0, 1))
    assert [each.runs for each in together([one, two]).repetitions()] == [one.runs, two.runs]
    dev = [run.model_copy(update={"dataset": "dev", "split": "dev"}) for run in one.runs]
    chosen = [one.model_copy(update={"runs": [*one.runs, *dev[:number]]}) for number in (1, 2)]
    assert together(chosen).runs == chosen[0].runs  # what dev timed again in both
    elsewhere = one.environment.model_copy(update={"git_commit": "another"})
    with pytest.raises(ConfigError, match="differs in machine, packages or commit"):
        together([one, one.model_copy(update={"environment": elsewhere})])


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["nowhere.json"], "or run the evaluation"),
        (["RUN", "--method", "fixed-44"], "did you mean 'fixed-4'?"),
        (["RUN", "--out", "RUN"], "another folder"),
    ],
)
def test_unusable_input_is_said_on_the_error_stream(
    arguments: list[str],
    said: str,
    results: Results,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    write_results(tmp_path / "results.json", results)
    before = (tmp_path / "results.json").read_bytes()
    assert main([str(tmp_path) if word == "RUN" else word for word in arguments]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert said in printed.err
    assert (tmp_path / "results.json").read_bytes() == before


def test_tables_in_the_documents_are_what_the_command_prints() -> None:
    pages = [
        (ROOT / name).read_text()
        for name in (
            *("README.md", "docs/real/README.md", f"{GEMMA}/README.md"),
            *("docs/engines/llama-cpp.md", "docs/engines/vllm.md", "docs/engines/openvino.md"),
            "docs/evidence/lookups.md",
        )
    ]
    table = r"<!-- (brief )?table of (.+?) -->\n(.*?)<!-- end of table -->"
    found = [each for page in pages for each in re.findall(table, page, re.DOTALL)]
    assert [path for _, path, _ in found] == [
        *(REAL, REAL, AT_ONE, "docs/real/plain/results.json", PUBLIC),
        *(f"{GEMMA}/results.json", f"{GEMMA}/temperature-1/results.json"),
        *(LLAMA_CPP, "docs/engines/results.json", OPENVINO, "docs/evidence/lookups/results.json"),
    ]
    for brief, paths, stands in found:
        evaluations = {Path(each).parent.name: read_results(ROOT / each) for each in paths.split()}
        shown = [name.removesuffix(" †").replace("\\", "") for name in list(cells(stands))[2:]]
        results = [*evaluations.values()]
        assert stands in [
            readme_table(results[0], methods, is_brief=bool(brief))
            if len(results) == 1
            else beside_table(evaluations, methods)
            for methods in ((), shown)
        ]
        assert all((ROOT / each).stat().st_size < 5_000_000 for each in paths.split())


def test_sentences_about_all_prompt_sets_are_what_the_results_give() -> None:
    for path in (REAL, AT_ONE):
        rows = medians(read_results(ROOT / path))
        best = max((Interval.of(row.rates["speedup"]) for row in rows), key=lambda each: each.value)
        for name in ("README.md", "docs/real/README.md"):
            page = " ".join((ROOT / name).read_text().split())
            assert f"{best.value:.2f}x [{best.low:.2f}, {best.high:.2f}]" in page
