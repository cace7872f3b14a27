"""The report as people see it: on a screen, a phone, in the dark and on paper; and its drawings."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from eval.reporting.commands import commands
from eval.reporting.plots import (
    QUALITY_PLOTS,
    kinds,
    plot,
    plot_apart,
    plot_quality,
    plot_quality_apart,
    plot_training_apart,
)
from eval.reporting.quality_charts import LINES
from eval.reporting.training import HeadTraining
from matplotlib.colors import same_color, to_hex

from eval.analysis.choice import DevChoice
from eval.measuring.results import Results
from eval.reporting.charts import LOOKS, RULES, look_of
from eval.reporting.report import Context, write_report
from eval.reporting.verdict import judge
from tests.browser import CHROMIUM, Browser
from tests.synthetic_quality import CHOICE, synthetic_quality
from tests.synthetic_results import synthetic_results
from tests.test_training_report import history

PAPER = 703
"""CSS pixels between the margins of A4: 186 mm."""
needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine")


@pytest.fixture(scope="module")
def results() -> Results:
    return synthetic_results()


@pytest.fixture(scope="module")
def page(results: Results, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A report with every section, and with names that cannot be broken."""
    folder = tmp_path_factory.mktemp("layout")
    choice = DevChoice(*CHOICE, dict.fromkeys(sorted({run.method for run in results.runs}), 1.0))
    line = ["recipes/pipeline.py", "--config", "recipes/configs/" + 40 * "long-" + ".yaml"]
    context = Context(
        title="acme/" + 30 * "target",
        stages={"draft": 12.5},
        draft={"acceptance on held-out rollouts": (0.41, 0.62)},
        head={"auroc": 0.83},
        verdict=judge(results, choice),
        quality=synthetic_quality(),
        trainings={"distillation": history("maths", "code")},
        head_training=HeadTraining(tuple(1 / (1 + n) for n in range(300)), 3, 800, 8, 2e-3),
        commands=commands(line, results.environment, "models: {target: " + 200 * "x" + "}"),
    )
    return write_report(results, folder, context)


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with Browser(tmp_path_factory.mktemp("chromium")) as opened:
        yield opened


# What is wider than the window, or than the box that it can be scrolled in.
WIDE = """[...document.querySelectorAll("body *")]
  .filter(e => e.getClientRects().length && (!e.closest("svg") || e.tagName === "svg"))
  .filter(e => !e.parentElement.closest(BOXES))
  .filter(e => e.getBoundingClientRect().right > innerWidth + 1)
  .map(e => e.tagName + " " + e.className + " " + e.textContent.trim().slice(0, 30))"""


@pytest.mark.slow
@needs_chromium
@pytest.mark.parametrize("width", [1280, 390])
def test_nothing_is_wider_than_the_window_but_inside_its_own_scrolling_box(
    width: int, browser: Browser, page: Path
) -> None:
    browser.open(page, width=width)
    assert browser.ask("innerWidth") == width
    assert browser.ask("document.documentElement.scrollWidth") <= width
    assert browser.ask(WIDE.replace("BOXES", '".scroll, pre"')) == []
    assert browser.ask('document.querySelectorAll("table").length') >= 8
    small = '[...document.querySelectorAll("svg[role=img]")].filter(e => e.clientWidth < 250)'
    assert browser.ask(f"{small}.length") == 0


@pytest.mark.slow
@needs_chromium
def test_on_paper_no_column_is_cut_and_no_table_needs_scrolling(
    browser: Browser, page: Path
) -> None:
    browser.open(page, width=PAPER, media="print")
    assert browser.ask(WIDE.replace("BOXES", '".nowhere"')) == []
    boxes = '[...document.querySelectorAll(".scroll, pre, td, th")]'
    assert browser.ask(f"{boxes}.filter(e => e.scrollWidth > e.clientWidth + 1).length") == 0
    assert browser.ask('getComputedStyle(document.querySelector("tr")).breakInside') == "avoid"
    assert browser.ask('getComputedStyle(document.querySelector("h2")).breakAfter') == "avoid"
    printed = browser.pdf()
    assert printed.startswith(b"%PDF")
    assert printed.count(b"/Type /Page\n") > 5


CONTRAST = """(() => {
  const numbers = c => c.match(/[\\d.]+/g).map(Number);
  const light = c => numbers(c).slice(0, 3).map(v => v / 255)
    .map(v => v <= .04045 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4)
    .reduce((sum, v, i) => sum + v * [.2126, .7152, .0722][i], 0);
  const below = e => { const c = getComputedStyle(e).backgroundColor;
    return !e.parentElement || (numbers(c)[3] ?? 1) === 1 ? c : below(e.parentElement); };
  const words = [...document.querySelectorAll("body *")].filter(e => !e.closest("svg")
    && [...e.childNodes].some(n => n.nodeType === 3 && n.data.trim()));
  return words.map(e => { const [a, b] = [light(getComputedStyle(e).color), light(below(e))];
    return [(Math.max(a, b) + .05) / (Math.min(a, b) + .05), e.tagName + " " + e.textContent]; })
})()"""


@pytest.mark.slow
@needs_chromium
@pytest.mark.parametrize("dark", [False, True])
def test_words_stand_out_from_what_is_behind_them(dark: bool, browser: Browser, page: Path) -> None:
    browser.open(page, width=1280, dark=dark)
    paper = browser.ask("getComputedStyle(document.body).backgroundColor")
    assert paper == ("rgb(13, 17, 23)" if dark else "rgb(255, 255, 255)")
    found = browser.ask(CONTRAST)
    assert len(found) > 300
    assert [words[:40] for contrast, words in found if contrast < 4.5] == []
    inks = 'new Set([...document.querySelectorAll("svg")].map(e => getComputedStyle(e).color))'
    assert browser.ask(f"[...{inks}]") == [browser.ask("getComputedStyle(document.body).color")]


def limits(drawn: Any, axis: str) -> list[tuple[float, float]]:
    return [getattr(figure.axes[0], f"get_{axis}lim")() for figure in drawn]


def test_drawings_of_one_section_share_their_axes_and_have_one_legend(results: Results) -> None:
    for kind in kinds(results):
        drawn, legend = plot_apart(kind, results)
        assert len(drawn) == 3
        assert legend
        axes = "x" if kind in ("speedup", "cost") else "xy"
        for axis in axes:
            assert all(one == pytest.approx(other) for one, other in pairwise(limits(drawn, axis)))
        assert all(figure.legends == [] and figure.axes[0].get_legend() is None for figure in drawn)
        together = plot(kind, results, results.datasets())
        (only,) = together.legends
        assert [text.get_text() for text in only.get_texts()] == list(legend)
        ends = [each.get_xlim() for each in together.axes]
        assert all(one == pytest.approx(other) for one, other in pairwise(ends))


def test_drawings_of_predictions_and_trainings_have_one_legend_each() -> None:
    quality = synthetic_quality()
    for kind in QUALITY_PLOTS:
        drawn, legend = plot_quality_apart(kind, quality)
        assert {"head, drawn", "margin", "logit"} <= set(legend)
        assert len(set(limits(drawn, "y"))) == 1
        assert len(plot_quality(kind, quality, quality.domains()).legends) == 1
    drawn, legend = plot_training_apart(history("maths", "code"))
    assert {"loss", "kept", "all", "maths", "code", "before", "after"} <= set(legend)
    assert all(figure.legends == [] for figure in drawn)


def test_a_method_has_one_colour_and_mark_in_every_drawing(results: Results) -> None:
    looks = [*LOOKS.values(), *RULES.values()]
    assert len({(look.colour, look.marker) for look in looks}) == len(looks) - 1, (
        "the rules' own look and that of the first of them"
    )
    for (predictor, _), line in LINES.items():
        assert line.look == (LOOKS["head"] if predictor == "head" else RULES[predictor])
    drawn, _ = plot_apart("acceptance", results)
    pareto, _ = plot_apart("pareto", results)
    known = {run.method: look_of(run) for run in results.runs}
    colours = {to_hex(look.colour) for look in known.values()}
    for figure in [*drawn, *pareto]:
        for line in figure.axes[0].get_lines():
            if line.get_marker() in ("None", "", None):
                continue  # a line of equal speed
            (match,) = [
                look
                for look in {*known.values()}
                if same_color(look.colour, line.get_color()) and look.marker == line.get_marker()
            ]
            assert to_hex(match.colour) in colours
