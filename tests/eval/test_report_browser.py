"""The report as people see it: on a screen, a phone, in the dark and on paper.

In a real browser, if this machine has one (Debian: apt-get install chromium).
"""

from collections.abc import Iterator
from pathlib import Path

import pytest

from eval.analysis.forms import FORMS
from eval.measuring.intervals import Interval
from eval.reporting.report import write_report
from tests.support.browser import CHROMIUM, Browser
from tests.support.synthetic_results import synthetic_results, verifier_row

PAPER = 703
"""CSS pixels between the margins of A4: 186 mm."""
pytestmark = [
    pytest.mark.exhaustive,
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine"),
]


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A report with names that cannot be broken."""
    command = "recipes/pipeline.py --config recipes/configs/" + 40 * "long-" + ".yaml"
    more = {"ceiling": 4.2, "share_of_ceiling": 0.93, "speedup": 2.1}
    verifiers = [
        verifier_row(
            kind.name,
            name,
            parameters=parameters,
            gain=Interval(0.03, 0.01, 0.05) if number else None,
            **more,
        )
        for kind in FORMS.values()
        for number, (name, parameters) in enumerate(kind.rows())
    ]
    every = synthetic_results("alpaca", "gsm8k", "code")
    results = every.model_copy(update={"verifiers": verifiers})
    return write_report(results, tmp_path_factory.mktemp("layout"), command)


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with Browser(tmp_path_factory.mktemp("chromium")) as opened:
        yield opened


OPEN = 'document.querySelectorAll("details").forEach(each => each.open = true)'
# What is wider than the window, or than the box that it can be scrolled in.
WIDE = """[...document.querySelectorAll("body *")]
  .filter(e => e.getClientRects().length && (!e.closest("svg") || e.tagName === "svg"))
  .filter(e => !e.parentElement.closest(BOXES))
  .filter(e => e.getBoundingClientRect().right > innerWidth + 1)
  .map(e => e.tagName + " " + e.className + " " + e.textContent.trim().slice(0, 30))"""


@pytest.mark.parametrize("width", [1280, 390])
def test_nothing_is_wider_than_the_window_but_inside_its_own_scrolling_box(
    width: int, browser: Browser, page: Path
) -> None:
    browser.open(page, width=width)
    assert browser.ask("innerWidth") == width
    for opened in ("", OPEN):
        browser.ask(opened)
        assert browser.ask("document.documentElement.scrollWidth") <= width
        assert browser.ask(WIDE.replace("BOXES", '".scroll"')) == []
    assert browser.ask('document.querySelectorAll("table").length') >= 5
    deciding = '[...document.querySelectorAll("tbody th + td")]'
    right = f"{deciding}.map(e => e.getBoundingClientRect().right)"
    assert browser.ask(f"Math.max(...{right})") <= width, "the deciding column is on the screen"


def test_on_paper_no_column_is_cut_and_no_table_needs_scrolling(
    browser: Browser, page: Path
) -> None:
    browser.open(page, width=PAPER, media="print")
    assert browser.ask(WIDE.replace("BOXES", '".nowhere"')) == []
    boxes = '[...document.querySelectorAll(".scroll, td, th")]'
    assert browser.ask(f"{boxes}.filter(e => e.scrollWidth > e.clientWidth + 1).length") == 0
    assert browser.ask('getComputedStyle(document.querySelector("tr")).breakInside') == "avoid"
    assert browser.ask('getComputedStyle(document.querySelector("h2")).breakAfter') == "avoid"
    printed = browser.pdf()
    assert printed.startswith(b"%PDF")
    assert printed.count(b"/Type /Page\n") > 3, "folds are open on paper"
