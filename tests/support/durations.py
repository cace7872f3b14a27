"""Write docs/durations.md and its figures from what pytest measured of a tier, on a quiet machine.

make test PYTEST=--junitxml=runs/test.xml
python -m tests.support.durations "make test" runs/test.xml
"""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

ROOT = Path(__file__).parents[2]
FIGURES, PAGE = ROOT / "docs" / "evidence" / "durations.json", ROOT / "docs" / "durations.md"
# What runs, and at most how many minutes it may take.
TIERS = {
    "make check": ("tests that start no process", 4.0),
    "make test": ("and one process test a mechanism", 7.0),
    "make test-all": ("everything", None),
}
NAMED = 10


def measured(report: Path) -> dict[str, Any]:
    """The figures of one tier, its longest tests first; a fixture counts for its first test."""
    (suite,) = ElementTree.parse(report).getroot().iter("testsuite")
    assert not int(suite.attrib["failures"]) + int(suite.attrib["errors"]), "not a green run"
    cases = [
        {
            "test": f"{case.attrib['classname'].rpartition('.')[2]}.py::{case.attrib['name']}",
            "seconds": round(float(case.attrib["time"]), 1),
        }
        for case in suite.iter("testcase")
    ]
    commit = ["git", "rev-parse", "--short", "HEAD"]
    return {
        "tests": len(cases) - int(suite.attrib["skipped"]),
        "seconds": round(float(suite.attrib["time"])),
        "commit": subprocess.check_output(commit, cwd=ROOT, text=True).strip(),
        "longest": sorted(cases, key=lambda case: -case["seconds"])[:NAMED],
    }


def page(figures: dict[str, Any]) -> str:
    """docs/durations.md, with the sources of its figures (tests/documents/test_claims.py)."""
    lines = ["# How long the tests take", ""]
    lines += ["| tier | what runs | tests passed | minutes | commit | goal |"]
    lines += ["|---|---|---:|---:|---|---:|"]
    sources = []
    for tier, (runs, goal) in TIERS.items():
        of = figures.get(tier)
        now = (
            (of["tests"], f"{of['seconds'] / 60:.1f} min", of["commit"])
            if of
            else ("", "not measured", "")
        )
        missed = ", missed" if of and goal and of["seconds"] > 60 * goal else ""
        runs += f"; {of['note']}" if of and "note" in of else ""  # until it is measured again
        cells = [f"`{tier}`", runs, *now, f"{goal} min{missed}" if goal else ""]
        lines.append("| " + " | ".join(map(str, cells)) + " |")
        sources += [f"{tier}/seconds"] * bool(of) + ["=goal"] * bool(goal)
    lines += ["", f"<!-- from docs/evidence/durations.json: {'; '.join(sources)} -->", ""]
    lines += [f"Measured on {figures['machine']}; installation and lint are not included."]
    lines += [
        "`python -m tests.support.durations` writes this page and "
        "[its figures](evidence/durations.json)."
    ]
    for tier in TIERS:
        if longest := figures.get(tier, {}).get("longest"):
            lines += [
                "",
                f"## The longest tests of `{tier}`",
                "",
                "| test | seconds |",
                "|---|---:|",
            ]
            lines += [f"| `{case['test']}` | {case['seconds']:.1f} |" for case in longest]
            places = "|".join(map(str, range(len(longest))))
            lines += [
                "",
                f"<!-- from docs/evidence/durations.json: {tier}/longest/{{{places}}}/seconds -->",
            ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    figures = json.loads(FIGURES.read_text())
    for tier, report in zip(sys.argv[1::2], sys.argv[2::2], strict=True):
        figures[tier] = measured(Path(report))
    FIGURES.write_text(json.dumps(figures, indent=1, ensure_ascii=False) + "\n")
    PAGE.write_text(page(figures))
