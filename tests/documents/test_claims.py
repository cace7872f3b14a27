"""Every measured figure of the documents is a value of a committed file.

After its figures a page says where they are from, in their order, in a comment:

    The head saves 3.9 % [3.6, 4.2] of the time.
    <!-- from docs/heads.json: domains/instruct/saving_over_best_k/{value|low|high} -->

Sources are separated by ";". `a=x&b=y` finds the row of a list, `{a|b}` are two paths, `all/METHOD`
and `SET/METHOD` are an evaluation's rates (value, low, high) and the spread of its runs,
`saved/RUN/METHOD/RIVAL` the share of a rival's time that a method saves, paired, "A over B" is
computed, "=REASON" is of a figure that was not measured (a goal, what a paper prints), and
"2,414=PATH" is of a count that stands anywhere before the comment. A file is named once.
`<!-- not measured: REASON -->` stands after figures that are settings or formulas. What stands
between `<!-- table of FILE -->` and `<!-- end of table -->` is made from the file: of papers' pages
here, of the others in tests/eval/test_readme_table.py.

    pytest -s tests/documents/test_claims.py      # prints the table: page, figure, source
"""

import json
import re
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from functools import cache
from itertools import zip_longest
from pathlib import Path
from typing import Any

import pytest

from benchmarks.papers.reproduce import protocol_of
from benchmarks.papers.tables import page as page_of_paper
from eval.measuring.intervals import Interval
from eval.measuring.pooled import PooledRow, medians, pool
from eval.measuring.results import read_results

ROOT = Path(__file__).parents[2]
PAGES = sorted(
    str(page.relative_to(ROOT)) for page in (*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"))
)
PAPERS = sorted(path.parent.name for path in (ROOT / "docs/papers").glob("*/README.md"))
FIGURE = re.compile(
    r"(?<![\w.-])(-?(?:\d*\.\d+|\d+(?= ?%|x\b| (?:hours?|minutes?|seconds?|min|ms|s)\b)))(?!\.?\d)"
    r"( ?%| min)?"
)
NO_FIGURES = re.compile(
    r"```.*?```|`[^`]*`|(?<=\])\([^)]*\)"  # code, in which settings stand; links
    r"|<!-- (?:brief )?table of .*?<!-- end of table -->"  # tests/eval/test_readme_table.py
    r"|<!-- (?!from |not measured).*?-->"
    r"|\b(?:torch|transformers|Python|vLLM|speculators|temperature|top-p) \.?\d[\d.]*"
    r"|(?<![={|])\b(?:Theorem|Eq\.|[Ss]ection|sec\.|[Aa]ppendix) [A-Z]?[\d.]+\b"
    r"|\b\d{4}\.\d{5}\b|95 %",  # arXiv's numbers; the level of every interval
    re.DOTALL,
)


@cache
def stored(path: str) -> Any:
    """A committed JSON; of an evaluation also each method's rates, by set and over all sets."""
    values = json.loads((ROOT / path).read_text())
    if "runs" in values and "environment" in values:
        results = read_results(ROOT / path)
        values["all"] = {row.name: rates(row) for row in medians(results)}
        for name in results.datasets():
            values[name] = {row.name: rates(row) for row in medians(results, [name])}
        values["saved"] = [saved(pool(each)) for each in results.repetitions()]
    return values


def saved(rows: Sequence[PooledRow]) -> dict[str, dict[str, dict[str, float]]]:
    """Method -> rival -> the share of the rival's time for a token that the method saves."""
    speed = {row.name: row.rates["tokens_per_second"] for row in rows}
    return {
        name: {rival: asdict(Interval.of(1 - other / own)) for rival, other in speed.items()}
        for name, own in speed.items()
    }


def rates(row: PooledRow) -> dict[str, Any]:
    of_row = {name: asdict(Interval.of(values)) for name, values in row.rates.items()}
    return {**of_row, "spread": row.spread}


def value_of(path: str, source: str) -> float:
    """What a source says."""
    if " over " in source:
        above, below = source.split(" over ")
        return value_of(path, above) / value_of(path, below)
    here = stored(path)
    for step in source.split("/"):
        if isinstance(here, dict):
            here = here[step]
        elif step.isdigit():  # of a list
            here = here[int(step)]
        else:
            wanted = dict(part.split("=", 1) for part in step.split("&"))
            (here,) = (row for row in here if all(str(row.get(k)) == v for k, v in wanted.items()))
    return float(here)


def expanded(source: str) -> Iterator[str]:
    """`a/{b|c}` is a/b and a/c; the last braces vary fastest."""
    if braces := re.search(r"\{(.*?)\}", source):
        for part in braces[1].split("|"):
            yield from expanded(source[: braces.start()] + part + source[braces.end() :])
    else:
        yield source


def figures(text: str) -> Iterator[tuple[str, float]]:
    """Measured figures, and what a value is multiplied by; brackets have the unit before them."""
    scale = 1.0
    for found in FIGURE.finditer(text):
        if text.rfind("[", 0, found.start()) <= text.rfind("]", 0, found.start()):
            scale = {"%": 100.0, "min": 1 / 60}.get((found[2] or "").strip(), 1.0)
        yield found[1], scale


def claims(page: str) -> Iterator[tuple[str, float, str, str]]:
    """Figure, scale, file and source of every measured figure of a page; "" for what is missing."""
    text = NO_FIGURES.sub("", (ROOT / page).read_text())
    parts = [*re.split(r"<!-- (from|not measured)(.*?)-->", text, flags=re.DOTALL), "from", ""]
    path = ""
    for written, kind, body in zip(parts[::3], parts[1::3], parts[2::3], strict=True):
        if kind != "from":
            continue
        sources = []
        for each in filter(None, map(str.strip, body.split(";"))):
            if named := re.match(r"(\S+\.json): *(.*)", each, re.DOTALL):
                path, each = named.groups()
            if counted := re.match(r"([\d,]+)=(.*)", each, re.DOTALL):
                count, source = counted[1], " ".join(counted[2].split())
                stands = re.search(rf"(?<![\w.,]){count}(?![\w,]*\d)(?!\.\d)", written)
                yield count.replace(",", "") if stands else "", 1.0, path, source
                continue
            sources += [(path, one) for one in expanded(" ".join(each.split()))]
        for figure, source in zip_longest(figures(written), sources):
            yield *(figure or ("", 1.0)), *(source or ("", ""))


def agrees(figure: str, value: float) -> bool:
    """Whether a figure is a value, rounded to the printed digits."""
    return abs(float(figure) - value) <= 0.5 * 10.0 ** -len(figure.partition(".")[2]) + 1e-9


@pytest.mark.parametrize("page", PAGES)
def test_every_figure_of_a_document_is_a_value_of_a_committed_file(page: str) -> None:
    for figure, scale, path, source in claims(page):
        assert figure, f"{page}: no figure for {source}"
        assert source, f"{page}: no source for {figure}"
        print(f"{page} | {figure} | {path} {source}")  # noqa: T201
        if not source.startswith("="):
            value = scale * value_of(path, source)
            assert agrees(figure, value), f"{page}: {figure}, but {source} of {path} is {value}"
            # Not by luck: with another last digit it is none.
            assert not agrees(figure[:-1] + str((int(figure[-1]) + 5) % 10), value)


@pytest.mark.parametrize("paper", PAPERS)
def test_a_papers_page_is_its_verdict_and_what_the_command_makes_of_its_results(paper: str) -> None:
    """Title, verdict, tables: of the tables every cell, of the verdict the figures (above)."""
    path = f"docs/papers/{paper}"
    parts = re.fullmatch(
        rf"(.*?\n\n)(.*?)<!-- table of {path}/results.json -->\n(.*)<!-- end of table -->\n",
        (ROOT / path / "README.md").read_text(),
        re.DOTALL,
    )
    assert parts, "a new page from `make papers` goes between the verdict's comments"
    title, verdict, made = parts.groups()
    of = made.partition("\n")[0]  # where it was measured; no test measures again
    assert title + made == page_of_paper(
        protocol_of(paper, quick=False), stored(f"{path}/results.json")["measured"], of
    )
    assert verdict.startswith("**Like the paper:** ")
    assert "**Not like the paper:** " in verdict or "**Not comparable:** " in verdict


def test_every_commit_that_a_document_names_is_in_the_history() -> None:
    def git(*words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True)

    if git("rev-parse", "--is-shallow-repository").stdout.strip() != "false":
        pytest.skip("the history is not here")
    named = {
        (page, commit)
        for page in PAGES
        # A digest of contents, in brackets after a model, is none.
        for commit in re.findall(
            r"(?<!\()\b(?=\d*[a-f])[0-9a-f]{7,40}\b", (ROOT / page).read_text()
        )
        if re.search(r"\d", commit)
    }
    assert len(named) > 3
    absent = [each for each in named if git("cat-file", "-e", f"{each[1]}^{{commit}}").returncode]
    assert absent == []


def test_a_guide_has_at_most_900_words() -> None:
    for page in (ROOT / "docs").glob("*.md"):
        text = re.sub(r"<!--.*?-->", "", page.read_text(), flags=re.DOTALL)
        assert len(text.split()) <= 900, page.name
