"""The documents' statements are so."""

import re
from datetime import timedelta

import pytest
import yaml

from eval.drafting.stopping import STOPPING_RULES
from eval.measuring.methods import check_methods
from eval.verifiers import VERIFIERS
from recipes.command import PROFILES, RECIPES, TOOLS, main
from recipes.config import PipelineConfig, build
from specdata.config import fields_of, section_type
from specdata.drafts.mtp import FAMILIES, FEEDING
from specdata.processes import TIMEOUT
from tests.support.documents import ROOT, blocks

ROOM = ("recipes", "specdata", "distill", "heads", "eval", "benchmarks")
DOCUMENTS = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]


def test_the_configurations_in_the_documents_are_usable() -> None:
    (pair,) = map(yaml.safe_load, blocks("docs/configuration.md", "yaml"))
    large, served = map(yaml.safe_load, blocks("docs/targets.md", "yaml"))
    (draft,) = map(yaml.safe_load, blocks("docs/drafts.md", "yaml"))
    on_states = map(yaml.safe_load, blocks("docs/drafts-on-states.md", "yaml"))
    (head,) = map(yaml.safe_load, blocks("docs/heads.md", "yaml"))
    (methods,) = map(yaml.safe_load, blocks("docs/evaluation.md", "yaml"))
    for section in (pair, {**pair, **methods}, {**pair, **head}):
        config = build(section)
        check_methods(config.eval, config.sampling, head=config.head is not None)
    given = {**pair, "draft": {}}  # which names one
    assert build({**given, **served}).logits is not None
    assert build({**given, **large}).models.loading("target").is_spread
    build({**pair, **draft})
    for each in on_states:
        build({**pair, **each})


def test_the_table_of_targets_heads_says_what_each_engine_feeds() -> None:
    rows: dict[tuple[str, ...], list[str]] = {}
    for name, family in FAMILIES.items():
        fed: dict[tuple[str, ...], list[str]] = {}
        for engine, convention in family.engines.items():
            fed.setdefault(convention.words, []).append(engine)
        for words, engines in fed.items():
            rows.setdefault((", ".join(engines), *words), []).append(f"`{name}`")
    lines = [("`model_type`", "engine", *FEEDING), ("---",) * 7]
    lines += [(", ".join(names), *each) for each, names in rows.items()]
    table = "".join(f"| {' | '.join(line)} |\n" for line in lines)
    assert table in (ROOT / "docs/target-heads.md").read_text(), table


def test_the_verifier_example_runs_and_is_right() -> None:
    (example,) = blocks("docs/evaluation.md", "python")
    scope: dict[str, object] = {}
    exec(compile(example, "evaluation.md", "exec"), scope)
    stop = scope["verdict"].stop  # type: ignore[attr-defined]
    # Token 2 is accepted with p / (rho q) = .2745789; token 0, where p/q > rho, surely after it.
    assert [round(float(value), 5) for value in stop] == [0.0, 0.27458, 0.72542]


def test_tokens_per_target_call_have_one_name_in_what_users_read() -> None:
    other = re.compile(
        r"(?<!\bdrafts \d )tokens (?:a|per) (?:round|call|target forward)|block effic"
    )
    pages = [page for page in DOCUMENTS if "papers" not in page.parts]  # captions of papers stay
    pages += [*(ROOT / "eval/reporting").rglob("*.py"), *(ROOT / "eval").rglob("*.jinja")]
    for page in pages:
        text = page.read_text().replace("papers block efficiency", "")  # where it is defined
        assert not (found := other.findall(text)), (page, found)


def test_every_file_that_the_documents_name_exists() -> None:
    rooms = "|".join((*ROOM, "tests", "launch"))
    path = re.compile(rf"\b((?:{rooms})/[\w/.-]+\.(?:py|yaml|md))(?![.\w])")
    named = [(page, name) for page in DOCUMENTS for name in path.findall(page.read_text())]
    sources = [path for room in ROOM for path in (ROOT / room).rglob("*.py")]
    of_tests = re.compile(r"\btests/[\w/]+\.py")
    named += [(path, name) for path in sources for name in of_tests.findall(path.read_text())]
    # docs/extending*.md have them made.
    pages = [page.read_text() for page in (ROOT / "docs").glob("extending*.md")]
    new = {name for page in pages for name in re.findall(r"^New file `(.*)`", page, re.M)}
    missing = [(page.name, name) for page, name in named if not (ROOT / name).is_file()]
    assert len(named) > 50
    assert [each for each in missing if each[1] not in new] == []


def test_every_command_and_option_of_the_documents_exists(
    capsys: pytest.CaptureFixture[str],
) -> None:
    texts = [document.read_text() for document in DOCUMENTS]
    command = re.compile(r"^(?:\w+=\S+ )*draftsmith ([a-z][a-z0-9-]+)", re.MULTILINE)
    commands = {word for text in texts for word in command.findall(text)}
    assert len(commands) > 8
    assert commands <= {*RECIPES, *TOOLS}, commands - {*RECIPES, *TOOLS}
    line = re.compile(r"draftsmith ([a-z][a-z0-9-]+)((?:[^`\n#|]|\\\n)*)")
    named = {
        (command, option)
        for text in texts
        for command, rest in line.findall(text)
        for option in re.findall(r"(?<!\S)--([a-z][\w.-]*)", rest)
        if command in {*RECIPES, *TOOLS} - {"launch"}
    }
    helps = {}
    for command in {command for command, _ in named}:
        with pytest.raises(SystemExit):
            main([command, "--help"])
        helps[command] = capsys.readouterr().out
    missing = [each for each in named if not re.search(rf"--{each[1]}\b", helps[each[0]])]
    assert len(named) > 10
    assert not missing


def test_every_key_of_a_configuration_that_the_documents_name_exists() -> None:
    sections = "|".join(fields_of(PipelineConfig))
    # As `draft.init.vocabulary: 8192`, or after the section's own page: `init.kind`.
    key = re.compile(rf"`((?:{sections})(?:\.[a-z_]+)+)(?=[:`])")
    pages = [path.read_text() for path in DOCUMENTS if path.name != "CHANGELOG.md"]
    named = {name for page in pages for name in key.findall(page)}
    assert len(named) > 15
    for name in named:
        here: type | None = PipelineConfig
        for part in name.split("."):
            assert here is not None, name
            assert part in fields_of(here), name
            here = section_type(fields_of(here)[part].annotation)


def test_every_file_function_and_test_that_papers_names_exists() -> None:
    papers = (ROOT / "PAPERS.md").read_text()
    tests = {*re.findall(r"\b(test_\w+\.py)", papers)}
    assert len(tests) > 30
    assert tests <= {path.name for path in (ROOT / "tests").rglob("test_*.py")}
    paths = {*re.findall(r"`([a-z_]+/[\w/.-]+)`", papers)}
    assert len(paths) > 30
    assert [name for name in paths if not (ROOT / name).exists()] == []
    named = re.findall(r"`([\w/]+\.py)` `(\w+)`", papers)
    theory = re.findall(r"`theory\.(\w+)`", papers)
    for path, name in [*named, *(("benchmarks/papers/theory.py", name) for name in theory)]:
        defined = re.search(rf"^(def|class) {name.rstrip('_*')}", (ROOT / path).read_text(), re.M)
        assert defined, (path, name)


def test_papers_names_every_verifier_and_every_stopping_rule() -> None:
    papers = (ROOT / "PAPERS.md").read_text()
    assert [name for name in VERIFIERS if f"`{name}`" not in papers] == []
    assert [name for name in STOPPING_RULES if not re.search(rf"\b{name}\b", papers)] == []


def test_links_between_documents_lead_somewhere() -> None:
    for document in DOCUMENTS:
        for link in re.findall(r"\]\(([^)#\s]+)\)", document.read_text()):
            there = document.parent / link
            assert link.startswith("https://") or there.exists(), (document.name, link)


def test_the_launch_page_names_every_profile_and_what_the_code_waits() -> None:
    page = (ROOT / "docs" / "launching.md").read_text()
    profiles = page.split("| (none)")[1].split("\n\n")[0]
    rows = [row.split("|")[1] for row in profiles.splitlines() if row.startswith("| `")]
    assert {name for row in rows for name in re.findall(r"`([\w-]+)`", row)} == {*PROFILES}
    assert "after 15 minutes" in page
    assert timedelta(minutes=15) == TIMEOUT
