"""The report in a real browser, if this machine has one (Debian: apt-get install chromium)."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from eval.reporting.report import Context, write_report
from eval.reporting.verdict import judge
from tests.browser import CHROMIUM, FLAGS
from tests.synthetic_quality import synthetic_quality
from tests.synthetic_results import synthetic_results

# Asks the page itself, after layout, and leaves the answer where --dump-dom shows it.
PROBE = """<script>addEventListener("load", () => { document.title = JSON.stringify({
  width: innerWidth, needed: document.documentElement.scrollWidth,
  broken: [...document.images].filter(image => !image.naturalWidth).length,
  small: [...document.querySelectorAll("svg[role=img]")].filter(
    drawing => drawing.getBoundingClientRect().width < 200).length,
  head: document.getElementById("verdict").getBoundingClientRect().top < innerHeight ? 1 : 0,
  tables: document.querySelectorAll("table caption").length }) })</script>"""


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine")
@pytest.mark.parametrize("width", [1280, 500])
def test_the_page_fits_the_screen_and_every_drawing_is_shown(width: int, tmp_path: Path) -> None:
    results, quality = synthetic_results(), synthetic_quality()
    context = Context(verdict=judge(results, quality.choice), quality=quality)
    page = write_report(results, tmp_path, context)
    probed = tmp_path / "probed.html"
    probed.write_text(page.read_text(encoding="utf-8") + PROBE, encoding="utf-8")
    assert CHROMIUM is not None
    done = subprocess.run(
        [CHROMIUM, *FLAGS, "--force-device-scale-factor=1", f"--user-data-dir={tmp_path}/profile",
         f"--window-size={width},900",
         "--dump-dom", probed.as_uri()],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )  # fmt: skip
    (title,) = re.findall(r"<title>(\{.*?\})</title>", done.stdout)
    measured = {key: int(value) for key, value in re.findall(r'"(\w+)":(\d+)', title)}
    assert measured["width"] == width
    assert measured["needed"] <= width, "the page scrolls sideways"
    assert measured["broken"] == 0
    assert measured["small"] == 0
    assert measured["tables"] >= 2
    assert measured["head"] == 1, "whether the head pays is not seen without scrolling"
