"""What the report says of the head and of trainings: one decision, its numbers, how to repeat."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from eval.analysis.quality import Quality
from eval.analysis.rivals import ALL, Replayed, Rival
from eval.measuring.intervals import Interval
from eval.measuring.results import Results
from eval.reporting.commands import commands
from eval.reporting.findings import decide
from eval.reporting.quality import bin_table, main_prediction
from eval.reporting.report import Context, render_page
from eval.reporting.training import HeadTraining, training_summary
from eval.reporting.training_charts import BLOCKS, loss_blocks
from eval.reporting.verdict import HeadCost, HeadVerdict, Ratio, _draft_step
from eval.reporting.verdict import Rival as TimedRival
from recipes.config import build
from recipes.run_eval import _configuration
from tests.synthetic_quality import synthetic_quality
from tests.synthetic_results import ENVIRONMENT, T_DRAFT, synthetic_results
from tests.test_training_report import history

ROOT = Path(__file__).parent.parent
SAVES = Interval(0.06, 0.05, 0.07)
LOSES = Interval(-0.03, -0.04, -0.02)
FASTER, SLOWER = Ratio(1.25, 1.1, 1.4), Ratio(0.8, 0.7, 0.9)
MAYBE_FASTER, MAYBE_SLOWER = Ratio(1.05, 0.9, 1.2), Ratio(0.95, 0.9, 1.1)


def rival(rule: str, setting: str, saved: Interval) -> Rival:
    return Rival(rule=rule, setting=setting, candidates=3, saved={ALL: saved})


def replayed(*rivals: Rival) -> Quality:
    replay = Replayed(
        draft_seconds=0.002,
        target_seconds=0.011,
        setting="h=.5",
        candidates=4,
        rivals=list(rivals),
        to_oracle=None,
        cost_rule=None,
    )
    return synthetic_quality().model_copy(update={"replay": replay})


def clocked(fixed: Ratio, margin: Ratio, cost: HeadCost | None = None) -> HeadVerdict:
    rivals = (
        TimedRival("fixed", "K=4", 3, {ALL: fixed}),
        TimedRival("margin", "margin .5", 2, {ALL: margin}),
    )
    return HeadVerdict("not shown to pay", method="head .5", rivals=rivals, cost=cost)


IN_REPLAY = replayed(
    rival("fixed", "K=6", SAVES), rival("margin", "h=.7", Interval(0.01, 0.0, 0.02))
)
PAYS = replayed(rival("fixed", "K=6", SAVES), rival("margin", "h=.7", SAVES))


@pytest.mark.parametrize(
    ("quality", "verdict", "begins"),
    [
        (PAYS, clocked(FASTER, FASTER), "The head pays: in replay it saves 6.0 % [5.0, 7.0] over"),
        (PAYS, clocked(MAYBE_FASTER, MAYBE_FASTER), "The head pays: "),
        (
            PAYS,
            clocked(FASTER, SLOWER),
            "The head does not pay, because by the clock margin .5 takes less time without it: in",
        ),
        (
            PAYS,
            clocked(MAYBE_SLOWER, FASTER),
            "The head does not pay, because the clock does not confirm it: K=4 takes less time: in",
        ),
        (
            IN_REPLAY,
            clocked(FASTER, FASTER),
            "The head does not pay, because it is not told apart from margin h=.7 in replay: in",
        ),
        (
            replayed(rival("fixed", "K=6", SAVES), rival("margin", "h=.7", LOSES)),
            clocked(FASTER, FASTER),
            "The head does not pay, because margin h=.7 takes less time without it in replay: in",
        ),
        (
            None,
            clocked(FASTER, MAYBE_FASTER),
            "The head does not pay, because by the clock it is not told apart from margin .5: by",
        ),
        (None, clocked(FASTER, FASTER), "The head pays: by the clock it saves 20.0 % ["),
        (
            None,
            HeadVerdict("not measured", "speeds were not measured"),
            "Whether the head pays was not measured: speeds were not measured.",
        ),
    ],
)
def test_one_sentence_says_whether_the_head_pays_or_why_not(
    quality: Quality | None, verdict: HeadVerdict, begins: str
) -> None:
    assert decide(verdict, quality).sentence.startswith(begins)


def test_the_decision_has_the_numbers_of_both_judgements_for_every_rule() -> None:
    decision = decide(clocked(FASTER, SLOWER), PAYS)
    assert decision.sentence.endswith(
        "in replay it saves 6.0 % [5.0, 7.0] over K=6, 6.0 % [5.0, 7.0] over margin h=.7; by the"
        " clock it saves 20.0 % [9.1, 28.6] over K=4; loses 25.0 % [11.1, 42.9] against margin .5."
    )
    assert decision.columns == ("saved in replay", "saved by the clock")
    assert [row.rule for row in decision.rows] == ["fixed length", "margin"]
    assert decision.rows[1].cells[0] == "6.0 % [5.0, 7.0] (margin h=.7)"
    assert decision.rows[1].cells[1] == "-25.0 % [-42.9, -11.1] (margin .5)"
    assert all(row.decides for row in decision.rows)
    untimed = decide(HeadVerdict("not measured", "no held-out labels"), PAYS)
    assert untimed.sentence.endswith("(by the clock: not measured, no held-out labels).")


def test_the_cost_of_the_head_is_the_difference_of_two_draft_steps() -> None:
    cost = HeadCost(with_head=0.0025, without=0.002, target=0.011, method="K=4")
    words = decide(clocked(FASTER, FASTER, cost), PAYS).cost
    assert "2.50 ms with the head and 2.00 ms at K=4: 0.50 ms, 25 % of a draft step, go to" in words
    assert "11.00 ms" in words
    free = replace(cost, with_head=0.0019)
    assert "no time that shows" in decide(clocked(FASTER, FASTER, free), PAYS).cost
    results = synthetic_results(datasets=("alpaca",))
    fixed = [run for run in results.runs if run.method == "fixed-4"]
    assert _draft_step(fixed) == pytest.approx(T_DRAFT, rel=0.03)
    assert _draft_step([run for run in results.runs if run.draft is None]) is None


def test_the_bins_of_the_head_hold_all_its_tokens_and_say_what_was_observed() -> None:
    quality = synthetic_quality()
    table, judged = bin_table(quality), main_prediction(quality, ALL)
    assert table is not None
    assert judged is not None
    assert judged.moment == "drawn"
    assert sum(int(row[2].replace(",", "")) for row in table.rows) == judged.scores.tokens
    first = judged.reliability[0]
    assert table.rows[0][0] == f"{first.predicted:.3f}"
    assert table.rows[0][1].startswith(f"{first.accepted.value:.3f} [{first.accepted.low:.3f}")
    assert f"{judged.scores.ece.value:.3f}" in table.caption
    headless = quality.model_copy(
        update={"predictions": [p for p in quality.predictions if p.predictor != "head"]}
    )
    assert bin_table(headless) is None


def test_a_long_loss_is_drawn_as_means_of_blocks_that_leave_no_step_out() -> None:
    losses = [float(n % 7) for n in range(1000)]
    blocks = loss_blocks(range(1, 1001), losses)
    assert len(blocks) <= BLOCKS
    size = -(-1000 // BLOCKS)
    assert blocks[0].mean == sum(losses[:size]) / size
    assert blocks[0].middle == (1 + size) / 2
    sizes = [size] * (len(blocks) - 1) + [1000 - size * (len(blocks) - 1)]
    total = sum(block.mean * n for block, n in zip(blocks, sizes, strict=True))
    assert total == pytest.approx(sum(losses)), "the mean of all blocks is the mean of all steps"
    assert all(block.low <= block.mean <= block.high for block in blocks)


@pytest.fixture(scope="module")
def results() -> Results:
    return synthetic_results(datasets=("alpaca",))


def test_the_page_shows_both_losses_and_what_they_are(results: Results) -> None:
    trained = HeadTraining(tuple(1 / (1 + n) for n in range(300)), 3, 800, 8, 2e-3, 6.0)
    html = render_page(
        results,
        Context(
            trainings={"distillation": history("maths")},
            objectives={"distillation": "Loss: lk_hybrid between target and draft."},
            head_training=trained,
        ),
    )
    assert "Loss: lk_hybrid between target and draft. 100 optimizer steps on 100,000" in html
    assert "Learning rate: 0.0001 at most, logged at step 100" in html
    assert "Median speed: 512 tokens/s." in html
    assert "Training of the acceptance head" in html
    assert "rejections x 6" in html
    assert "300 optimizer steps of 8 labelled rollouts, 3 passes over 800" in html
    assert "learning rate up to 0.002" in html
    assert "Values: step 3 " in html  # the first block, for those who cannot see it
    assert "Learning rate" not in training_summary(replace(history(), steps=()))


def test_the_commands_have_the_commit_the_versions_and_the_command_line() -> None:
    line = ["/home/me/src/recipes/pipeline.py", "--config", "my pair.yaml", "--seed", "3"]
    made = commands(line, ENVIRONMENT, "seed: 3\n")
    assert made.lines == (
        "git checkout 0123456789abcdef0123456789abcdef01234567",
        "make .venv/installed",
        ".venv/bin/pip install torch==2.13.0 transformers==5.23.0",
        ".venv/bin/python recipes/pipeline.py --config 'my pair.yaml' --seed 3",
    )
    assert "Python 3.11.9" in made.basis
    dirty = ENVIRONMENT.model_copy(update={"git_dirty": True})
    assert "not committed" in commands(line, dirty, "").basis
    installed = ENVIRONMENT.model_copy(update={"git_commit": None})
    made = commands(["/venv/bin/draftsmith", "pipeline"], installed, "")
    assert made.lines[-1] == ".venv/bin/draftsmith pipeline"
    assert "installed copy" in made.basis


def test_the_configuration_of_the_report_is_the_one_that_was_run() -> None:
    config = build(yaml.safe_load((ROOT / "recipes/configs/toy.yaml").read_text()))
    written = _configuration(config)
    assert build(yaml.safe_load(written)) == config
    assert len(written) < 8000, "defaults are left out"
