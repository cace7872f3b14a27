from __future__ import annotations

import dataclasses
import io
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
from eval.reporting.plots import QUALITY_PLOTS, kinds, plot, plot_quality, to_svg
from eval.reporting.quality_charts import MIN_TOKENS
from matplotlib.figure import Figure
from matplotlib.text import Annotation
from PIL import Image
from rich.console import Console

from eval.analysis.choice import DevChoice
from eval.analysis.rivals import ALL
from eval.measuring.methods import PLAIN
from eval.measuring.results import Results, build_results, check_metrics, fastest
from eval.reporting.charts import LOOKS, PARTS, POINT, data_boxes, extent, family, series
from eval.reporting.findings import findings
from eval.reporting.quality import QUALITY_COLUMNS, basis, quality_rows
from eval.reporting.report import COLUMNS, Context, render_page, sections_of, terminal, write_report
from eval.reporting.verdict import HeadVerdict, judge
from tests.synthetic_quality import CHOICE, synthetic_quality
from tests.synthetic_results import ENVIRONMENT, method, synthetic_results

EVIL = "<script>alert('x')</script> $\\frac{1}{2}$ [bold]&amp;"
SHOWN_FAMILIES = {"plain", "fixed", "head", "rule", "tree", "transformers"}
VOID = {"meta", "link", "img", "br", "hr", "input"}


class Page(HTMLParser):
    """Collects tags, attributes and text, and asserts that every tag is closed."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text: list[str] = []
        self.open: list[str] = []
        self.feed(html)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append(data)


def renamed(results: Results, name: str) -> Results:
    """The first dataset alone, it and one of its methods called `name`."""
    runs = [run.model_copy(update={"dataset": name}) for run in results.of(results.datasets()[0])]
    runs[2] = runs[2].model_copy(update={"method": name, "draft": name})
    latency = {name: results.latency[results.datasets()[0]]}
    return results.model_copy(update={"runs": runs, "latency": latency})


@pytest.fixture(scope="module")
def results() -> Results:
    return synthetic_results(datasets=("alpaca", "gsm8k"))


def verdict(results: Results) -> HeadVerdict:
    """By the clock, where every method cost the same on held-out rollouts."""
    names = {run.method for run in results.runs}
    return judge(results, DevChoice(*CHOICE, dict.fromkeys(sorted(names), 1.0)))


@pytest.fixture(scope="module")
def folder(results: Results, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("report")
    measures = {"acceptance": (0.41, 0.62)}, {"AUROC": 0.83}
    context = Context("A pair", {"draft": 12.5}, *measures, verdict(results), synthetic_quality())
    assert write_report(results, folder, context) == folder / "report.html"
    return folder


@pytest.fixture(scope="module")
def page(folder: Path) -> Page:
    return Page((folder / "report.html").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def evil_html(results: Results) -> str:
    quality, evil = synthetic_quality(), renamed(results, EVIL)
    assert quality.replay is not None
    named = [each.model_copy(update={"domain": EVIL}) for each in quality.of("alpaca")]
    rivals = [r.model_copy(update={"saved": {EVIL: r.overall}}) for r in quality.replay.rivals]
    replay = quality.replay.model_copy(update={"rivals": rivals})
    quality = quality.model_copy(update={"predictions": named, "replay": replay})
    return render_page(evil, Context(EVIL, {EVIL: 1.0}, {}, {}, verdict(evil), quality))


def test_the_page_refers_to_nothing_outside_itself(folder: Path, page: Page) -> None:
    html = (folder / "report.html").read_text(encoding="utf-8")
    assert "http:" not in html
    assert "https:" not in html
    assert "@import" not in html
    assert {tag for tag, _ in page.tags}.isdisjoint({"script", "link", "img", "iframe", "object"})
    for _, attributes in page.tags:
        for name in ("href", "src", "srcset", "xlink:href"):
            assert (attributes.get(name) or "#").startswith("#")
    assert all(target.startswith("#") for target in re.findall(r"url\(([^)]*)\)", html))


def test_every_id_is_unique_and_every_reference_has_one(page: Page) -> None:
    ids = [attributes["id"] for _, attributes in page.tags if "id" in attributes]
    assert len(ids) == len(set(ids))
    for _, attributes in page.tags:
        wanted = (attributes.get("aria-labelledby") or "").split()
        wanted += [(attributes.get("href") or "")[1:]] if attributes.get("href") else []
        assert set(wanted) <= set(ids)


def test_datasets_have_captions_and_drawings_have_words(page: Page, results: Results) -> None:
    tags = [tag for tag, _ in page.tags]
    assert tags.count("table") == tags.count("caption") >= len(results.datasets())
    drawings = [a for tag, a in page.tags if tag == "svg" and "aria-hidden" not in a]
    of_predictions = len(QUALITY_PLOTS) * len(synthetic_quality().domains())
    assert len(drawings) == len(kinds(results)) * len(results.datasets()) + of_predictions
    assert all(a["role"] == "img" and a["aria-labelledby"] for a in drawings)
    assert page.open == []
    assert "lang" in dict(page.tags[0][1])


def test_the_page_shows_every_method_with_its_figures(page: Page, results: Results) -> None:
    text = " ".join(page.text)
    for run in results.runs:
        assert run.method in text
        assert f"{run.verification_rate:.3f}" in text
        assert f"{run.speedup:.2f}x" in text
    for name, meaning in COLUMNS:
        assert name in text
        assert meaning in text
    assert ENVIRONMENT.git_commit in text
    assert "Simulated CPU" in text
    assert "AUROC" in text


def test_names_are_text_and_never_markup(evil_html: str) -> None:
    page = Page(evil_html)
    assert "script" not in {tag for tag, _ in page.tags}
    assert EVIL in "".join(page.text)


def test_the_page_says_first_whether_the_head_pays_in_replay_and_by_the_clock(
    folder: Path, page: Page, results: Results
) -> None:
    quality = synthetic_quality()
    found = findings(verdict(results), quality)
    assert len(found) == 2
    html, text = (folder / "report.html").read_text(encoding="utf-8"), " ".join(page.text)
    assert html.index("Does the head pay?") < html.index("Fastest lossless method")
    for finding in found:
        assert finding.headline in text
        assert finding.basis in text
        assert all(sentence in text for sentence in finding.sets.values())
    for domain in quality.domains():
        for row in quality_rows(quality, domain):
            assert row.predictor in text
            assert all(cell in text for cell in row.cells)
    for name, meaning in QUALITY_COLUMNS:
        assert name in text
        assert meaning in text
    assert basis(quality) in text


def test_drawings_of_predictions_show_the_head_at_each_of_its_moments_and_its_rivals(
    folder: Path,
) -> None:
    quality = synthetic_quality()
    for kind in QUALITY_PLOTS:
        with Image.open(folder / f"{kind}.png") as image:
            assert image.width == 3 * 5.2 * 150
        figure = plot_quality(kind, quality, [ALL])
        lines = {line.get_label() for line in figure.axes[0].get_lines()}
        assert lines >= {
            "head, drawn",
            "head, one token later",
            "head, before the draw",
            "margin",
            "logit",
            "cumulative",
        }
        figure.draw_without_rendering()
        bounds, (width, height) = figure.get_tightbbox(), figure.get_size_inches()
        assert min(bounds.x0, bounds.y0) >= -0.02
        assert bounds.x1 <= width + 0.02
        assert bounds.y1 <= height + 0.02
    (figure,) = [plot_quality("reliability", quality, [ALL])]
    (drawn,) = [line for line in figure.axes[0].get_lines() if line.get_label() == "head, drawn"]
    (head,) = [p for p in quality.of(ALL, "drawn") if p.predictor == "head"]
    shown = [each for each in head.reliability if each.tokens >= MIN_TOKENS]
    assert list(drawn.get_xdata()) == [each.predicted for each in shown]  # type: ignore[arg-type]
    assert list(drawn.get_ydata()) == [each.accepted.value for each in shown]  # type: ignore[arg-type]


def test_equal_results_make_equal_drawings(results: Results) -> None:
    once, again = (
        to_svg(plot("pareto", results, ["alpaca"]), prefix="a", title="t", description="d")
        for _ in range(2)
    )
    assert once == again


def test_drawings_use_the_colour_of_the_page(results: Results) -> None:
    svg = to_svg(plot("cost", results, ["alpaca"]), prefix="a", title="<t>", description="a & b")
    assert "currentColor" in svg
    assert "&lt;t&gt;" in svg
    assert "#24292f" not in svg


DRAWN_COLOURS = {
    "speedup": {LOOKS[key].colour for key in SHOWN_FAMILIES},
    "pareto": {LOOKS[key].colour for key in SHOWN_FAMILIES - {"plain", "tree"}},
    "acceptance": {LOOKS[key].colour for key in ("fixed", "tree")},
    "acceptance-adaptive": {LOOKS[key].colour for key in ("head", "rule", "transformers")},
    "cost": {colour for _, colour in PARTS},
}


@pytest.mark.parametrize("kind", DRAWN_COLOURS)
def test_png_files_show_every_family_in_one_panel_a_dataset_at_150_dots_an_inch(
    folder: Path, kind: str
) -> None:
    with Image.open(folder / f"{kind}.png") as image:
        assert image.format == "PNG"
        assert image.width == 2 * 5.2 * 150
        assert image.height >= 600
        kept = 0.87 if kind == "speedup" else 0.75  # the rest holds the legend
        box = (0, 0, image.width, int(kept * image.height))
        above_the_legend = image.convert("RGB").crop(box)
        colours = above_the_legend.getcolors(1 << 24)
    assert colours is not None
    drawn = {"#{:02X}{:02X}{:02X}".format(*colour) for _, colour in colours}  # type: ignore[misc]
    assert drawn >= {colour.upper() for colour in DRAWN_COLOURS[kind]}


def test_labels_of_the_pareto_plot_hide_no_label_line_or_marker(results: Results) -> None:
    figure = plot("pareto", results, results.datasets())
    renderer = figure.canvas.get_renderer()  # type: ignore[attr-defined]
    for axes in figure.axes:
        labels = [t for t in axes.texts if isinstance(t, Annotation) and t.get_gid() == POINT]
        boxes = [extent(label, renderer) for label in labels]
        assert len(boxes) == sum(
            run.drafter in ("chain", "transformers") for run in results.of("alpaca")
        )
        data = data_boxes(axes, figure.dpi / 72)
        assert len(data) > len(boxes)
        for index, box in enumerate(boxes):
            assert box.count_overlaps(boxes[:index]) == 0
            assert box.count_overlaps(data) == 0


def test_text_of_a_plot_stays_inside_the_picture(results: Results) -> None:
    for kind in kinds(results):
        figure = plot(kind, results, ["alpaca"])
        figure.draw_without_rendering()
        bounds = figure.get_tightbbox()
        width, height = figure.get_size_inches()
        assert bounds.x0 >= -0.02
        assert bounds.y0 >= -0.02
        assert bounds.x1 <= width + 0.02
        assert bounds.y1 <= height + 0.02


def test_a_sweep_is_one_series_in_the_order_of_its_parameter(results: Results) -> None:
    groups = series([run for run in results.of("alpaca") if run.drafter == "chain"])
    names = [[run.method for run in group] for group in groups]
    assert ["fixed-2", "fixed-4", "fixed-6", "fixed-8", "fixed-12"] in names
    assert ["head-0.3", "head-0.5", "head-0.7", "head-0.9"] in names
    assert ["block-6"] in names


def test_every_run_has_a_family_and_colours_differ(results: Results) -> None:
    seen = {family(run) for run in results.runs}
    assert seen == SHOWN_FAMILIES
    assert len({f.colour for f in LOOKS.values()}) == len(LOOKS)
    assert len({f.marker for f in LOOKS.values()}) == len(LOOKS)


def test_the_fastest_method_is_lossless_and_ties_are_named(results: Results) -> None:
    for dataset in results.datasets():
        runs = results.of(dataset)
        winner = fastest(runs)
        assert winner is not None
        best, ties = winner
        assert best.lossless
        assert best.tokens_per_second == max(r.tokens_per_second for r in runs if r.lossless)
        assert all(run.lossless and run is not best for run in ties)
    section = sections_of(results)[0]
    assert [row.mark for row in section.rows].count("★") == 1


def test_a_measured_bias_is_shown_with_its_interval(results: Results) -> None:
    def with_bias(value: float | None, interval: tuple[float, float] | None) -> Results:
        runs = []
        for run in results.runs:
            if not run.lossless:
                intervals = {k: v for k, v in run.intervals.items() if k != "total_variation"}
                if interval is not None:
                    intervals["total_variation"] = interval
                run = run.model_copy(update={"total_variation": value, "intervals": intervals})
            runs.append(run)
        return results.model_copy(update={"runs": runs})

    def note(shown: Results) -> str:
        (row,) = [row for row in sections_of(shown)[0].rows if row.method.startswith("biased")]
        return row.note

    measured = with_bias(0.041, (0.03, 0.052))
    assert note(measured) == "† TV 0.041 [0.030, 0.052]"
    assert "TV: total variation" in sections_of(measured)[0].footnote
    assert "† TV 0.041 [0.030, 0.052]" in "".join(Page(render_page(measured, Context())).text)
    assert note(with_bias(0.041, None)) == "† TV 0.041"
    assert note(with_bias(None, None)) == "†"
    assert "TV: total variation" not in sections_of(with_bias(None, None))[0].footnote


def test_a_method_measured_twice_ties_with_itself(results: Results) -> None:
    run = results.of("alpaca")[3]
    again = run.model_copy(update={"method": "again"})
    assert fastest([run, again]) == (run, [again])


def test_terminal_tables_fit_into_100_columns_and_cut_nothing(results: Results) -> None:
    console = Console(width=100, record=True, file=io.StringIO())
    console.print(terminal(results))
    text = console.export_text()
    assert max(map(len, text.splitlines())) <= 100
    assert "…" not in text
    for run in results.runs:
        low, high = run.intervals["speedup"]
        assert f"{run.speedup:.2f}x [{low:.2f}, {high:.2f}]" in text
        assert run.method in text


def test_the_terminal_ends_with_whether_the_head_pays(results: Results) -> None:
    context = Context(verdict=verdict(results), quality=synthetic_quality())
    console = Console(width=100, record=True, file=io.StringIO())
    console.print(terminal(results, context))
    text = " ".join(console.export_text().split())
    tail = text[text.rindex("Fitted times") :]
    for finding in context.findings:
        assert finding.headline in tail
        assert all(f"{name}: {words}" in tail for name, words in finding.brief.items())


def test_terminal_names_are_not_markup(results: Results) -> None:
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(terminal(renamed(results, "[bold red]x[/]")))
    assert "[bold red]x[/]" in console.export_text()


def test_a_draft_that_makes_decoding_slower_is_reported_as_no_gain(results: Results) -> None:
    plain = results.plain("alpaca")
    assert plain is not None
    slow = [dataclasses.replace(g, seconds=g.seconds * 3) for g in results.runs[2].generations]
    nothing = {"draft": None, "drafter": None, "verifier": None, "stop": None, "length": None}
    measured = [
        (method(PLAIN, "alpaca", **nothing), plain.generations),
        (method("slow", "alpaca"), slow),
    ]
    assert "No method was faster" in sections_of(build_results(ENVIRONMENT, measured))[0].summary


def test_without_plain_decoding_the_report_shows_tokens_per_second(results: Results) -> None:
    measured = [(method("only", "alpaca"), results.runs[2].generations)]
    alone = build_results(ENVIRONMENT, measured)
    assert sections_of(alone)[0].rows[0].cells[0] == "\N{EN DASH}"
    figure = plot("speedup", alone, ["alpaca"])
    assert isinstance(figure, Figure)
    assert figure.axes[0].get_xlabel() == "tokens per second"
    assert "Fastest" in Console(width=100).render_str(sections_of(alone)[0].summary).plain
    assert render_page(alone, Context())


def test_plain_decoding_alone_makes_a_report(results: Results, tmp_path: Path) -> None:
    only = [results.runs[0]]
    alone = results.model_copy(update={"runs": only, "latency": {"alpaca": None}})
    page = Page(write_report(alone, tmp_path).read_text(encoding="utf-8"))
    assert "No method was faster than the target alone." in " ".join(page.text)


def test_without_times_tables_say_so_and_drawings_need_none(tmp_path: Path) -> None:
    untimed = synthetic_results(datasets=("alpaca",), timed=False)
    check_metrics(untimed)
    assert kinds(untimed) == ["efficiency", "pareto", "acceptance", "acceptance-adaptive"]
    assert fastest(untimed.runs) is None
    (section,) = sections_of(untimed)
    assert all(row.cells[:2] == ("not measured", "not measured") for row in section.rows)
    assert not any(row.mark for row in section.rows)
    assert section.summary.startswith("Speeds were not measured: 4 prompts were decoded together.")
    lossless = [run for run in untimed.runs if run.lossless]
    best = max(lossless, key=lambda run: run.block_efficiency)
    assert f"{best.method}, {best.block_efficiency:.2f}" in section.summary
    assert "★" not in section.footnote
    page = Page(write_report(untimed, tmp_path).read_text(encoding="utf-8"))
    assert sum(a.get("role") == "img" for tag, a in page.tags if tag == "svg") == 4
    assert {path.stem for path in tmp_path.glob("*.png")} == set(kinds(untimed))
    console = Console(width=100, record=True, file=io.StringIO())
    console.print(terminal(untimed))
    text = console.export_text()
    assert max(map(len, text.splitlines())) <= 100
    assert text.count("not measured") == 2 * len(section.rows) + 2
    for run in untimed.runs:
        assert f"{run.block_efficiency:.2f}" in text
