"""What a recipe says to do next: commands that its neighbours take, with this run's paths."""

from __future__ import annotations

import ast
import shlex

import pytest

from recipes.command import RECIPES
from recipes.config import parse
from recipes.next_steps import CommandLine, Step

GIVEN = ["--output", "runs/my #1", "--toy", "null", "--seed", "2"]


def steps(recipe: str, *more: str, program: str | None = "draftsmith x") -> list[Step]:
    """The next steps of a recipe that was called with GIVEN and more."""
    given = [*GIVEN, *more]
    return list(RECIPES[recipe].next_steps(parse(given).config, CommandLine(given, program)))


@pytest.mark.parametrize("recipe", RECIPES)
def test_every_command_is_one_of_ours_with_the_same_configuration(recipe: str) -> None:
    assert steps(recipe)
    for step in steps(recipe):
        program, *rest = shlex.split(step.line) if step.purpose != "load" else ["python"]
        if program == "draftsmith" and rest[0] == "inspect":
            assert rest[1] == "runs/my #1/rollouts"
        elif program == "draftsmith":
            again = parse(rest[1:]).config
            assert rest[0] in RECIPES
            assert (again.output, again.seed) == ("runs/my #1", 2)
        elif step.purpose == "load":
            ast.parse(step.line)
            assert "runs/my #1" in step.line


@pytest.mark.parametrize(
    ("recipe", "more", "expected"),
    [
        ("make-rollouts", [], ["look", "distil"]),
        ("make-rollouts", ["--draft", "null"], ["look", "train"]),
        ("train-draft", ["--head", "null"], ["load", "measure"]),
        ("run-eval", [], ["look", "publish"]),
        ("run-eval", ["--draft", "null", "--head", "null"], ["look"]),
        ("pipeline", ["--draft", "null", "--head", "null"], ["look"]),
        ("publish", ["--head", "null", "--publish.draft_id", "me/d"], ["load", "serve"]),
    ],
)
def test_only_what_applies_is_said(recipe: str, more: list[str], expected: list[str]) -> None:
    assert [step.purpose for step in steps(recipe, *more)] == expected


def test_what_was_uploaded_is_loaded_and_served_from_the_hub() -> None:
    load, serve = steps("publish", "--head", "null", "--publish.draft_id", "me/my-draft")
    assert '"me/my-draft"' in load.line
    assert '"model": "me/my-draft"' in serve.line


def test_a_script_names_scripts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["recipes/train_draft.py"])
    _, train = steps("train-draft", program=None)
    assert train.line.startswith("python recipes/train_head.py --output 'runs/my #1'")
