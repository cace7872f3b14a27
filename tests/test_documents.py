"""What the documents say is so."""

from __future__ import annotations

import importlib
import re
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import yaml

import heads.inputs
from eval.decoder import DecodeConfig, SpeculativeDecoder
from eval.drafting.stopping import STOPPING_RULES, DraftedToken
from eval.measuring.methods import MethodConfig, check_methods
from eval.verifiers import VERIFIERS
from heads.inputs import DraftedTokens, HeadInputs
from recipes.command import RECIPES, TOOLS
from recipes.config import build
from recipes.launcher import PROFILES
from specdata.config import read_config
from specdata.processes import TIMEOUT
from tests.tiny import tiny_llama

ROOT = Path(__file__).parent.parent
DOCUMENTS = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
README = (ROOT / "README.md").read_text()
EXTENDING = (ROOT / "docs" / "extending.md").read_text()


def blocks(document: str, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", (ROOT / document).read_text(), re.DOTALL)


def test_the_configurations_in_the_documents_are_usable() -> None:
    (pair,) = map(yaml.safe_load, blocks("README.md", "yaml"))
    large, served = map(yaml.safe_load, blocks("docs/targets.md", "yaml"))
    (draft,) = map(yaml.safe_load, blocks("docs/drafts.md", "yaml"))
    (methods,) = map(yaml.safe_load, blocks("docs/evaluation.md", "yaml"))
    for section in (pair, {**pair, **methods}):
        config = build(section)
        check_methods(config.eval, config.sampling, head=config.head is not None)
    assert build({**pair, **served}).logits is not None
    assert build({**pair, **large}).models.loading("target").is_spread
    del pair["models"]["draft"]  # which the second makes
    build({**pair, **draft})


def test_the_verifier_example_runs_and_is_right() -> None:
    (example,) = blocks("docs/evaluation.md", "python")
    scope: dict[str, object] = {}
    exec(compile(example, "evaluation.md", "exec"), scope)
    stop = scope["verdict"].stop  # type: ignore[attr-defined]
    # Token 2 is accepted with p / (rho q) = .2745789; token 0, where p/q > rho, surely after it.
    assert [round(float(value), 5) for value in stop] == [0.0, 0.27458, 0.72542]


def test_every_command_of_the_documents_exists() -> None:
    texts = [document.read_text() for document in DOCUMENTS]
    command = re.compile(r"^(?:\w+=\S+ )*draftsmith ([a-z][a-z-]+)", re.MULTILINE)
    named = {word for text in texts for word in command.findall(text)}
    assert len(named) > 8
    assert named <= {*RECIPES, *TOOLS}, named - {*RECIPES, *TOOLS}


def test_every_file_that_the_documents_name_exists() -> None:
    rooms = "recipes|specdata|distill|heads|eval|benchmarks|tests|launch"
    path = re.compile(rf"\b((?:{rooms})/[\w/.-]+\.(?:py|yaml|md))(?![.\w])")
    named = [(page, name) for page in DOCUMENTS for name in path.findall(page.read_text())]
    missing = [(page.name, name) for page, name in named if not (ROOT / name).is_file()]
    assert len(named) > 50
    assert not missing


def test_the_stopping_rule_in_extending_is_a_whole_file_that_decodes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (example,) = re.findall(r"```python\n(from.*?class Patience.*?)```", EXTENDING, re.DOTALL)
    (tmp_path / "patience_of_the_document.py").write_text(example)
    monkeypatch.syspath_prepend(str(tmp_path))
    rule = importlib.import_module("patience_of_the_document").Patience
    monkeypatch.setitem(STOPPING_RULES, rule.name, rule)
    # As the document writes it in YAML.
    flat = yaml.safe_load("{name: mine, stop: patience, patience: 2}")
    assert read_config(MethodConfig, flat).stop == rule(patience=2)

    active = rule(patience=2).start(None)
    active.begin()
    should_stop = active.should_stop
    q = torch.tensor([0.75, 0.25])
    answers = [should_stop(DraftedToken(token, q, None)) for token in (1, 0, 0, 1)]
    assert answers == [False, False, False, True]

    target, draft = tiny_llama(0, vocab=40), tiny_llama(1, vocab=40)
    mean_drafted = {}
    for patience in (1, 3):
        config = DecodeConfig(stop="patience", patience=patience, limit=6)
        decoder = SpeculativeDecoder.from_config(target, draft, config)
        generator = torch.Generator().manual_seed(0)
        out = decoder.generate(torch.tensor([2, 3]), max_new_tokens=40, generator=generator)
        lengths = [turn.drafted for turn in out.rounds]
        assert max(lengths) <= 6
        mean_drafted[patience] = sum(lengths) / len(lengths)
    # An end token or the budget ends some drafts earlier, a probable token lengthens some.
    assert mean_drafted[1] < 2 < mean_drafted[3]


def test_the_head_feature_in_extending_is_whether_the_token_is_the_most_probable(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (example,) = re.findall(r"```python\n(def is_best.*?)```", EXTENDING, re.DOTALL)
    monkeypatch.setattr(heads.inputs, "FEATURES", dict(heads.inputs.FEATURES))
    exec(compile(example, "extending.md", "exec"), vars(heads.inputs).copy())
    drafted = DraftedTokens(
        tokens=torch.tensor([[1, 0]]),
        before=lambda: pytest.fail("not read"),
        after=lambda: pytest.fail("not read"),
        distributions=lambda: torch.tensor([[[0.75, 0.25], [0.5, 0.5]]]),
    )
    inputs = HeadInputs.of(["is_best"], drafted)
    assert inputs["is_best"].tolist() == [[0.0, 1.0]]
    assert inputs.moment is heads.inputs.Moment.DRAWN


def test_every_verifier_has_its_row_in_papers() -> None:
    papers = (ROOT / "PAPERS.md").read_text()
    for name in VERIFIERS:
        assert f"`{name}`" in papers, name


def test_every_stopping_rule_is_named_in_papers() -> None:
    papers = (ROOT / "PAPERS.md").read_text()
    for name in STOPPING_RULES:
        assert re.search(rf"\b{name}\b", papers), name


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


@pytest.mark.parametrize(("acceptance", "length"), [(0.6, 3), (0.8, 6), (0.9, 10)])
def test_the_speed_ups_to_expect_are_of_the_best_draft_length(
    acceptance: float, length: int
) -> None:
    speeds = [
        (1 - acceptance ** (k + 1)) / ((1 - acceptance) * (1 + 0.1 * k)) for k in range(1, 40)
    ]
    best = max(speeds)
    assert speeds.index(best) + 1 == length
    expected = rf"{best:.1f}x at (a = )?{acceptance:g}\s\(K = {length}\)".replace("0.", r"\.")
    assert re.search(expected, README)
