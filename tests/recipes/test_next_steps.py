"""A recipe's advice on what to do next: commands that its neighbours take, with these paths."""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path

import pytest

from recipes.command import RECIPES
from recipes.config import parse
from recipes.steps import LAUNCHED, CommandLine, Step
from specdata.storage.files import write_json

GIVEN = ["--output", "runs/my #1", "--toy", "null", "--seed", "2"]


def steps(recipe: str, *more: str, program: str | None = "draftsmith x") -> list[Step]:
    """The next steps of a recipe that was called with GIVEN and more."""
    given = [*GIVEN, *more]
    return RECIPES[recipe].stages_of(parse(given).config)[-1].next(CommandLine(given, program))


@pytest.mark.parametrize("recipe", RECIPES)
def test_every_command_is_one_of_ours_with_the_same_configuration(recipe: str) -> None:
    more = ["--logits.top_logits", "4"] if recipe == "make-logits" else []
    assert steps(recipe, *more)
    for step in steps(recipe, *more):
        program, *rest = shlex.split(step.line, comments=step.purpose == "serve")
        if program == "draftsmith":
            again = parse(rest[1:]).config
            assert rest[0] in RECIPES
            assert (again.output, again.seed) == ("runs/my #1", 2)


@pytest.mark.parametrize(
    ("recipe", "more", "expected"),
    [
        ("make-rollouts", [], ["distil"]),
        ("make-rollouts", ["--draft", "null"], ["train"]),
        ("train-draft", ["--head", "null"], ["measure"]),
        ("run-eval", [], ["look", "publish"]),
        ("run-eval", ["--draft", "null", "--head", "null"], ["look"]),
        ("pipeline", ["--draft", "null", "--head", "null"], ["look"]),
        ("publish", ["--head", "null", "--publish.draft_id", "me/d"], ["look", "serve"]),
    ],
)
def test_only_what_applies_is_said(recipe: str, more: list[str], expected: list[str]) -> None:
    assert [step.purpose for step in steps(recipe, *more)] == expected


def test_what_was_uploaded_is_served_from_the_hub() -> None:
    _, serve = steps("publish", "--head", "null", "--publish.draft_id", "me/my-draft")
    assert '"model": "me/my-draft"' in serve.line


def released(tmp_path: Path, target: int) -> list[str]:
    """Where a pair of these output sizes and its released draft are: the arguments that say so."""
    write_json(tmp_path / "target" / "config.json", {"vocab_size": target})
    draft = tmp_path / "out" / "release" / "draft"
    write_json(draft / "config.json", {"vocab_size": 100})
    write_json(draft / "generation_config.json", {"num_assistant_tokens": 9})
    return ["--output", str(tmp_path / "out"), "--models.target", str(tmp_path / "target")]


def test_the_line_for_vllm_runs_as_it_is_and_its_length_is_to_be_measured(tmp_path: Path) -> None:
    _, serve, _ = steps("publish", "--head", "null", *released(tmp_path, 100))
    assert serve.line.endswith("# which length pays in vLLM, draftsmith engine measures")
    settings = json.loads(shlex.split(serve.line, comments=True)[-1])
    assert settings["model"] == str(tmp_path / "out" / "release" / "draft")
    assert settings["num_speculative_tokens"] == 5


def test_a_pair_that_vllm_refuses_is_not_served_with_it(tmp_path: Path) -> None:
    said = steps("publish", "--head", "null", *released(tmp_path, 128))
    assert [step.purpose for step in said] == ["look", "upload"]


def test_a_draft_learns_from_the_logits_that_were_stored() -> None:
    (keep,) = steps("make-rollouts", "--logits.top_logits", "4")
    assert shlex.split(keep.line)[1] == "make-logits"
    (distil,) = steps("make-logits", "--logits.top_logits", "4")
    assert shlex.split(distil.line)[-2:] == ["--draft.logits", "runs/my #1/logits"]
    (given,) = steps("make-logits", "--logits.top_logits", "4", "--draft.logits", "elsewhere")
    assert shlex.split(given.line)[-2:] == ["--draft.logits", "elsewhere"]


def test_what_follows_a_launched_recipe_is_launched_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(LAUNCHED, "draftsmith launch cpu-2 --num_processes 3")
    for program in (None, "draftsmith train-draft"):
        (train,) = steps("train-draft", program=program)
        assert shlex.split(train.line)[:6] == [
            *("draftsmith", "launch", "cpu-2", "--num_processes", "3"),
            "train-head",
        ]
    (distil,) = steps("make-rollouts", program=None)
    assert " train-draft " in distil.line
    _, publish = steps("run-eval", program=None)
    assert publish.line.startswith("draftsmith publish "), "which one process does"


def test_a_script_names_its_interpreter() -> None:
    (train,) = steps("train-draft", program=None)
    python, *rest = shlex.split(train.line)
    assert Path(python).resolve() == Path(sys.executable).resolve()
    assert rest[:4] == ["-m", "recipes.command", "train-head", "--output"]
