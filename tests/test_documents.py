"""What the documents say is so."""

from __future__ import annotations

import importlib
import importlib.util
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
from recipes.config import build
from recipes.launcher import PROFILES
from specdata.config import read_config
from specdata.processes import TIMEOUT
from tests.tiny import tiny_llama

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
ARCHITECTURE = (ROOT / "ARCHITECTURE.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)


def test_the_configuration_in_the_readme_is_usable() -> None:
    pair, large, served, draft = map(yaml.safe_load, blocks("yaml"))
    config = build(pair)
    check_methods(config.eval, config.sampling, head=config.head is not None)
    assert build({**pair, **served}).logits is not None
    assert build({**pair, **large}).models.loading("target").is_spread
    del pair["models"]["draft"]  # which the second makes
    build({**pair, **draft})


def test_the_verifier_example_in_the_readme_runs_and_is_right() -> None:
    example = blocks("python")[1]
    scope: dict[str, object] = {"torch": torch}
    exec(compile(example, "README.md", "exec"), scope)
    stop = scope["verdict"].stop  # type: ignore[attr-defined]
    # Token 2 is accepted with p / (rho q) = .2745789; token 0, where p/q > rho, surely after it.
    assert [round(float(value), 5) for value in stop] == [0.0, 0.27458, 0.72542]


def test_every_module_that_the_readme_runs_exists_and_explains_itself(
    capsys: pytest.CaptureFixture[str],
) -> None:
    modules = set(re.findall(r"python -m ((?:eval|specdata)[\w.]+)", README))
    assert len(modules) > 1
    for name in sorted(modules):
        assert importlib.util.find_spec(name) is not None, name
        if not name.startswith("eval.analysis."):
            continue
        with pytest.raises(SystemExit) as end:
            importlib.import_module(name).main(["--help"])
        assert end.value.code == 0
        assert f"usage: python -m {name}" in capsys.readouterr().out


def test_every_command_of_the_readme_names_files_that_exist() -> None:
    named = re.findall(r"(?:recipes|launch)/[\w/.-]+\.(?:py|yaml|md)", README)
    assert len(named) > 8
    for name in named:
        assert (ROOT / name).is_file(), name


def test_every_file_in_the_tree_of_the_readme_exists() -> None:
    tree = README.split("## What is where\n```\n")[1].split("```")[0]
    folder = ""
    seen = 0
    for line in tree.splitlines():
        if line and not line.startswith(" "):
            folder = line.split()[0]
            assert (ROOT / folder).is_dir(), folder
        for name in re.findall(r"[\w/]+(?:\.py|\.yaml|/)(?=[\s,])", line):
            assert any(
                (ROOT / base / name).exists() for base in ("", folder, f"{folder}configs")
            ), name
            seen += 1
    assert seen > 15


def test_the_stopping_rule_in_architecture_is_a_whole_file_that_decodes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (example,) = re.findall(r"```python\n(from.*?class Patience.*?)```", ARCHITECTURE, re.DOTALL)
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


def test_the_head_feature_in_architecture_is_whether_the_token_is_the_most_probable(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (example,) = re.findall(r"```python\n(def is_best.*?)```", ARCHITECTURE, re.DOTALL)
    monkeypatch.setattr(heads.inputs, "FEATURES", dict(heads.inputs.FEATURES))
    exec(compile(example, "ARCHITECTURE.md", "exec"), vars(heads.inputs).copy())
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
    for document in ROOT.glob("*.md"):
        for link in re.findall(r"\]\(([^)#]+)\)", document.read_text()):
            assert link.startswith("https://") or (ROOT / link).exists(), (document.name, link)


def test_the_launch_page_names_every_profile_and_what_the_code_waits() -> None:
    page = (ROOT / "launch" / "README.md").read_text()
    profiles = page.split("| (none)")[1].split("\n\n")[0]
    assert {*re.findall(r"^\| `([\w-]+)`", profiles, re.MULTILINE)} == {*PROFILES}
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
