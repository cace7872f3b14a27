"""The report of an evaluation: one page, the table in a terminal, and the pictures."""

import io
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
from rich.console import Console

from distill.toy import train_tokenizer
from eval.decode_config import Method
from eval.measuring.experiment import Artefacts, Experiment
from eval.measuring.methods import PLAIN, EvalConfig
from eval.measuring.pooled import PooledRow, fastest, pool
from eval.measuring.records import Text
from eval.measuring.results import Results, check_metrics
from eval.reporting.report import (
    RATES_SHOWN,
    methods_table,
    picture,
    positions_of,
    render_page,
    terminal,
    write_report,
)
from eval.reporting.texts import sampled_texts
from eval.reporting.verdict import verdict
from specdata.config import PromptSet
from specdata.prompts.prompt import Prompt
from specdata.sampling import SamplingConfig, unapplied_words
from tests.support.synthetic_results import ENVIRONMENT, only, rebuilt, slower, synthetic_results
from tests.support.tiny import tiny_llama

EVIL = "<script>alert('x')</script> $\\frac{1}{2}$ [bold]&amp; {{ 7 * 7 }}"
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
    method = runs[2].method.replace(name=name)
    runs[2] = runs[2].model_copy(update={"method": method, "draft": name})
    return results.model_copy(update={"runs": runs})


def fastest_of(results: Results, dataset: str) -> tuple[PooledRow, list[PooledRow]]:
    found = fastest(pool(results, [dataset]))
    assert found is not None
    return found


@pytest.fixture(scope="module")
def html(results: Results, tmp_path_factory: pytest.TempPathFactory) -> str:
    path = write_report(
        results,
        tmp_path_factory.mktemp("r"),
        command="run_eval.py --config 'my pair.yaml'",
        unapplied=unapplied_words({"repetition_penalty": 1.1}),
    )
    return path.read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def page(html: str) -> Page:
    return Page(html)


def printed(results: Results, width: int = 80) -> str:
    console = Console(width=width, record=True, file=io.StringIO())
    console.print(terminal(results))
    return console.export_text()


# --- the page ---


def test_the_page_is_whole_refers_to_nothing_outside_itself_and_names_its_tables_and_pictures(
    html: str, page: Page
) -> None:
    assert not re.search("https?:|@import", html)
    tags = [tag for tag, _ in page.tags]
    assert {*tags}.isdisjoint({"script", "link", "img", "iframe", "object"})
    ids = [attributes["id"] for _, attributes in page.tags if "id" in attributes]
    assert len(ids) == len(set(ids))
    for _, attributes in page.tags:
        for name in ("href", "src", "srcset", "xlink:href"):
            assert not (link := attributes.get(name)) or (link[0] == "#" and link[1:] in ids)
    assert all(target.startswith("#") for target in re.findall(r"url\(([^)]*)\)", html))
    assert tags.count("table") == tags.count("caption") >= 4
    assert all(a.get("aria-hidden") == "true" for tag, a in page.tags if tag == "svg")
    groups = [a for _, a in page.tags if a.get("class") == "bars"]
    assert groups
    assert all(a["role"] == "group" and a["aria-label"] for a in groups)
    assert page.open == []


def test_the_page_shows_every_method_with_its_figures(
    html: str, page: Page, results: Results
) -> None:
    assert html.count("asks for repetition_penalty 1.1, which nothing here applies") == 1
    text = " ".join(" ".join(page.text).split())
    for run in results.runs:
        assert run.name in text
        assert f"{run.speedup:.2f}x" in text
    assert "decoder=" not in text, "a method is called by its name"
    for row in pool(results):
        assert f"{row.value('verification_rate'):.3f}" in text
        assert f"{row.value('block_efficiency'):.2f}" in text
    for name, _, _, meaning in RATES_SHOWN.values():
        assert name in text
        assert meaning in text
    assert ENVIRONMENT.git_commit in text
    assert "Simulated CPU" in text
    assert "run_eval.py --config 'my pair.yaml'" in text


def test_green_is_only_what_is_lossless_and_surely_faster(results: Results) -> None:
    assert methods_table(results).wins == ["tree-4x2x1 ★"]
    for factor, wins in ((1.0, True), (3.0, False)):
        few = only(only(results, "alpaca"), PLAIN, "fixed-4")
        again = rebuilt(few, lambda run, by=factor: run if run.name == PLAIN else slower(run, by))  # type: ignore[misc]
        assert bool(methods_table(again).wins) == wins
        assert [bar.look for bar in picture(again)] == ["best" if wins else "first"]


def test_names_are_text_and_never_markup(results: Results) -> None:
    page = Page(render_page(renamed(results, EVIL)))
    assert "script" not in {tag for tag, _ in page.tags}
    assert EVIL in "".join(page.text)


# --- the sections ---


def test_the_fastest_method_is_lossless_and_ties_are_named(results: Results) -> None:
    for dataset in results.datasets():
        best, ties = fastest_of(results, dataset)
        lossless = [row for row in pool(results, [dataset]) if row.method.lossless]
        assert best.name == max(lossless, key=PooledRow.speed).name
        assert all(row.method.lossless and row is not best for row in ties)
    marked = [name for name, _ in methods_table(results, ["alpaca"]).rows]
    assert sum(name.endswith(" ★") for name in marked) == 1


def test_a_biased_method_is_marked_and_its_measured_bias_said_once(results: Results) -> None:
    table = methods_table(results, ["alpaca"])
    assert [name for name, _ in table.rows if "†" in name] == ["biased-0.05 †"]
    assert "† biased" in table.note
    assert render_page(results).count("(total variation 0.041 [0.041, 0.041] a token)") == 1


def test_without_times_tables_say_so_and_pictures_need_none(tmp_path: Path) -> None:
    untimed = synthetic_results("alpaca", timed=False)
    check_metrics(untimed)
    assert fastest(pool(untimed)) is None
    table, said = methods_table(untimed), verdict(untimed)
    assert all(figures[:2] == ["\N{EN DASH}"] * 2 for _, figures in table.rows)
    assert not table.wins
    assert said.startswith("Speeds were not measured (4 prompts were decoded together)")
    lossless = [run for run in untimed.runs if run.method.lossless]
    best = max(lossless, key=lambda run: run.block_efficiency)
    assert f"{best.name}, {best.block_efficiency:.2f}" in said
    assert "★ fastest" not in table.note
    write_report(untimed, tmp_path)
    assert "Speeds were not measured" in printed(untimed)


# --- the terminal ---


def test_the_terminal_has_the_answer_and_one_table_that_cuts_nothing(results: Results) -> None:
    text = printed(results)
    assert max(map(len, text.splitlines())) <= 80
    assert "…" not in text
    page, said = render_page(results), verdict(results)
    assert " ".join(text.split()).startswith(said)
    assert f'id="verdict">{said}</p>' in page
    assert len(text.splitlines()) <= 18, "a run's end has 25 lines, its own seven among them"
    for name in (PLAIN, "fixed-4", "tree-4x2x1", "biased-0.05 †", "† biased"):
        assert name in text
    assert "[bold red]x[/]" in printed(renamed(results, "[bold red]x[/]"), 200)


# --- pictures and positions ---


def test_the_figures_of_a_position_are_those_of_the_generations(results: Results) -> None:
    for run in results.of("alpaca")[1:]:
        for place, found in enumerate(positions_of(run)):
            assert found.value == pytest.approx(run.acceptance_by_position[place])
            assert found.low <= found.value <= found.high


# --- the texts ---


def test_the_page_shows_a_text_of_each_set_and_marks_who_wrote_it(tmp_path: Path) -> None:
    tokenizer = train_tokenizer(["a short text about nothing at all, 0123456789"] * 4, 280)
    size, sets = len(tokenizer), ("maths", "code")
    prompts = [
        Prompt(f"p{number}", each, "test", tokenizer(f"{EVIL} {each} {number}")["input_ids"])
        for each in sets
        for number in range(2)
    ]
    experiment = Experiment(
        Artefacts(
            tiny_llama(2, vocab=size),
            tiny_llama(1, vocab=size),
            None,
            {"draft": "d", "target": "t", "head": None},
        ),
        prompts,
        tmp_path,
        EvalConfig(
            sets=[PromptSet(each, "test", 2) for each in sets],
            methods=[
                Method(name=PLAIN, decoder="plain"),
                Method(name="both", length=2, lookup=4, match=1),
            ],
            max_new_tokens=24,
        ),
        SamplingConfig(),
        5,
        ENVIRONMENT,
    )
    experiment.measure(lambda done: None)
    results, stored = experiment.results(), experiment.texts()
    assert [prompt for prompt, _ in stored] == [prompts[0], prompts[2]]
    texts = sampled_texts(results, stored, tokenizer)
    page = render_page(results, texts=texts)
    for (_, written), text in zip(stored, texts, strict=True):
        assert "".join(new for new, _ in text.pieces) == tokenizer.decode(written["both"].tokens)
        assert text.prompt.endswith(f"{EVIL} {text.dataset} 0")
    assert "".join(Page(page).text).count(EVIL) == 2
    assert "<script" not in page

    ids = tokenizer("a <b>text</b> näh")["input_ids"]
    parts = [tokenizer.decode(ids[start:end]) for start, end in ((0, 2), (2, 3), (3, 5), (5, None))]
    rounds = [[2, 3, 2], [2, 3, 0], *[[0, 1, 1]] * (len(ids) - 6)]  # the second is a lookup's
    (text,) = sampled_texts(results, [(prompts[0], {"both": Text(ids, rounds)})], tokenizer)
    drafted, target, looked_up, *rest = text.pieces
    assert (drafted, target) == ((parts[0], "draft"), (parts[1], "target"))
    assert looked_up == (parts[2], "lookup")
    assert "".join(new for new, _ in rest) == parts[3]
    assert {who for _, who in rest} == {"target"}
