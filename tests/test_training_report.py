"""How a draft was trained, in the report and in its card."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
from PIL import Image

from eval.measuring.results import Results
from eval.reporting.plots import TRAINING_PLOTS, plot_training, training_kinds
from eval.reporting.report import Context, render_page, write_report
from eval.reporting.training import training_measures, training_rows, training_summary
from specdata.history import Figures, History, LoggedStep, Measurement, PositionFigures
from tests.synthetic_results import synthetic_results
from tests.test_report import EVIL, Page


def figures(acceptance: float) -> Figures:
    tokens = {"token_4": 3.0, "token_8": 4.0, "block_4": 3.1, "block_8": 4.3}
    more = {name: value + acceptance for name, value in tokens.items()}
    return Figures(1234, acceptance, 0.3, more)


def measured(step: int, *sets: str) -> Measurement:
    acceptance = 0.6 + step / 1000
    places = (PositionFigures(1, 8, 900, acceptance), PositionFigures(9, 16, 334, acceptance - 0.1))
    by_set = {name: figures(acceptance + 0.01 * n) for n, name in enumerate(sets, 1)}
    return Measurement(step, 64, figures(acceptance), by_set, places)


def history(*sets: str) -> History:
    return History(
        steps=tuple(LoggedStep(s, 1 / s, 0.5, 1e-4, 1000 * s, 512.5) for s in range(10, 110, 10)),
        measurements=tuple(measured(step, *sets) for step in (0, 50, 100)),
        before=measured(0, *sets),
        after=measured(50, *sets),
        kept_step=50,
        kept_by="tokens of a round",
    )


@pytest.fixture(scope="module")
def results() -> Results:
    return synthetic_results(datasets=("alpaca",))


def test_the_table_has_every_prompt_set_and_all_of_them_if_there_are_several() -> None:
    rows = training_rows(history("maths", "code"))
    assert [row.name for row in rows] == ["all", "maths", "code"]
    assert rows[0].positions == 1234
    assert rows[1].cells[:2] == ("0.610 → 0.660", "3.610 → 3.660")
    assert [row.name for row in training_rows(history("maths"))] == ["maths"]
    assert [row.name for row in training_rows(history())] == ["all"]
    assert training_rows(History((LoggedStep(1, 0.5),))) == []


@pytest.mark.parametrize(
    ("told", "words"),
    [
        (
            history("maths"),
            "100 optimizer steps on 100,000 tokens, prompts included. Kept: the weights of step 50,"
            " which were best by tokens of a round, on 64 watched dev rollouts.",
        ),
        (replace(history(), kept_step=0), "Kept: the weights it started from, which were best"),
        (replace(history(), kept_by=None), "prompts included; the last weights were kept."),
        (History((LoggedStep(7, 0.5),)), "7 optimizer steps."),
        (History(kept_step=0), "Not trained: the draft is kept as it started."),
    ],
)
def test_a_sentence_says_how_long_it_was_trained_and_what_was_kept(
    told: History, words: str
) -> None:
    assert words in training_summary(told)


def test_the_page_shows_a_training_as_table_and_drawings(results: Results, tmp_path: Path) -> None:
    context = Context(trainings={"distillation": history("maths", "code")})
    page = Page(write_report(results, tmp_path, context).read_text(encoding="utf-8"))
    text = " ".join("".join(page.text).split())
    assert "Training of the draft: distillation" in text
    assert "0.600 → 0.650" in text
    assert "step 50 acceptance 0.650" in text  # in words, for those who cannot see it
    assert "before 1-8 0.600, 9-16 0.500; after 1-8 0.650" in text
    with Image.open(tmp_path / "training-distillation.png") as image:
        assert image.width > 3 * 5 * 150
        assert len(set(image.convert("L").get_flattened_data())) > 50


def test_a_training_without_measurements_shows_its_loss_alone(results: Results) -> None:
    alone = History(tuple(LoggedStep(step, 1 / step) for step in (1, 2, 3)))
    assert training_kinds(alone) == ["loss"]
    html = render_page(results, Context(trainings={"fine-tuning": alone}))
    assert "step 2 0.5000" in html
    assert "Before and after" not in html
    assert training_kinds(History(kept_step=0)) == []
    assert training_kinds(history()) == list(TRAINING_PLOTS)


def test_names_of_prompt_sets_are_text(results: Results) -> None:
    trainings = {"fine-tuning": history(), EVIL: history(EVIL, "maths")}
    html = render_page(results, Context(trainings=trainings))
    assert "<script>alert" not in html
    ids = re.findall(r'\bid="([^"]*)"', html)
    assert len(ids) == len(set(ids))


def test_the_words_of_a_training_drawing_stay_inside_the_picture() -> None:
    figure = plot_training(history("a very long name of a prompt set", "maths"), ["acceptance"])
    figure.draw_without_rendering()
    box = figure.get_tightbbox()
    width, height = figure.get_size_inches()
    assert box.x0 >= -0.02
    assert box.y0 >= -0.02
    assert box.x1 <= width + 0.02
    assert box.y1 <= height + 0.02


def test_a_card_has_the_figures_of_every_prompt_set() -> None:
    measures = training_measures(history("maths", "code"))
    assert measures["acceptance before distillation"] == pytest.approx(0.6)
    assert measures["acceptance after distillation, maths"] == pytest.approx(0.66)
    name = "expected tokens a round (block verification, K = 8) after distillation, code"
    assert measures[name] == pytest.approx(4.3 + 0.67)
    assert len(measures) == 18
    assert len(training_measures(history("maths"))) == 6
    assert training_measures(History((LoggedStep(1, 0.5),))) == {}
