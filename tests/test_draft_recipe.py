"""The recipe that makes a draft: what is refused before it begins, and what later stages say."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from recipes import train_draft
from recipes.config import PipelineConfig, parse
from recipes.layout import folder
from recipes.make_rollouts import Rollouts
from recipes.publish import _texts_of_draft
from recipes.run import run_stage
from tests.test_initial import stored

ACCEPTANCE = {"acceptance_before": 0.5, "acceptance_after": 0.5, "steps": 0, "is_bound": False}


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return stored(tmp_path / "target", max_position_embeddings=64)


def arguments(target: Path, *more: str) -> list[str]:
    """A draft cut from a target, with rollouts that it has room for."""
    own = ["--toy", "null", "--models.target", str(target), "--models.draft", "null"]
    own += ["--draft.init.kind", "target", "--rollouts.max_new_tokens", "8"]
    return [*own, "--head", "null", "--output", str(target.parent / "run"), *more]


def finish(config: PipelineConfig) -> None:
    """Folders of finished stages, as the recipes write them, around no models."""
    for stage in [Rollouts(config), *train_draft.RECIPE.asked(config)]:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(type(stage), "run", lambda _stage: ACCEPTANCE)
            run_stage(stage)
        (stage.folder / "model").mkdir()


def test_a_draft_of_other_settings_is_refused_before_anything_is_trained(
    target: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = arguments(target)
    config = parse(asked).config
    finish(config)
    assert train_draft.RECIPE.run(asked) == 0
    assert "not distilled (draft.epochs 0)" in capsys.readouterr().out
    more = ["--draft.finetune.epochs", "1", "--draft.finetune.max_length", "32"]
    assert train_draft.RECIPE.run([*asked, *more]) == 2
    assert "draft.finetune: None ->" in capsys.readouterr().err
    assert not folder(config, "finetuned").exists()


@pytest.mark.parametrize("kind", ["target", "fresh"])
def test_rows_longer_than_the_context_of_a_draft_yet_to_be_made_are_refused(
    kind: str, target: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = arguments(target, "--draft.init.kind", kind, "--plan", "--draft.finetune.max_length")
    assert train_draft.RECIPE.run([*asked, "65"]) == 2
    assert f"must be at most 64, the positions of {target}" in capsys.readouterr().err
    assert train_draft.RECIPE.run([*asked, "64"]) == 0


@pytest.mark.parametrize(
    ("row", "said"),
    [({"text": "x"}, "has no column 'messages'; it has 'text'. Each row must hold"), (None, "")],
)
def test_what_is_said_of_conversations_names_the_key(
    row: dict[str, str] | None, said: str, target: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = target.parent / "talks.jsonl"
    if row is not None:
        path.write_text(json.dumps(row) + "\n")
    asked = arguments(target, "--draft.finetune.conversations", f"[{path}]", "--plan")
    assert train_draft.RECIPE.run(asked) == 2
    error = " ".join(capsys.readouterr().err.split())
    assert error.startswith("error: draft.finetune.conversations: ")
    assert said in error
    assert "template" not in error


def test_a_reporter_that_is_not_installed_is_refused_in_a_plan(
    target: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("distill.callbacks.is_wandb_available", lambda: False)
    assert train_draft.RECIPE.run([*arguments(target), "--plan"]) == 0
    asked = arguments(target, "--draft.report_to", "[wandb]", "--plan")
    assert train_draft.RECIPE.run(asked) == 2
    assert "draft.report_to names 'wandb'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "texts"),
    [
        ([], ["instruct", "maths", "code"]),
        (
            ["--draft.finetune.conversations", "[sharegpt]"],
            ["sharegpt", "instruct", "maths", "code"],
        ),
        (["--draft.finetune.conversations", "[me/talks]", "--draft.epochs", "0"], ["me/talks"]),
        (["--draft.finetune.epochs", "1", "--draft.epochs", "0"], ["instruct", "maths", "code"]),
        (["--draft.epochs", "0"], []),
    ],
)
def test_a_card_names_the_texts_that_the_draft_was_trained_on(
    flags: list[str], texts: list[str], target: Path
) -> None:
    config = parse(arguments(target, *flags)).config
    assert config.draft is not None
    found = _texts_of_draft(config, config.draft)
    hub = "anon8231489123/ShareGPT_Vicuna_unfiltered"
    assert found == [hub if name == "sharegpt" else name for name in texts]
