"""A recipe's last lines: what can be looked at, served or uploaded, with its own configuration."""

import json
import shlex
from pathlib import Path

import pytest

from recipes.command import RECIPES
from recipes.config import parse
from specdata.storage.files import write_json

GIVEN = ["--output", "runs/my #1", "--toy", "null", "--seed", "2"]


def steps(recipe: str, *more: str) -> dict[str, str]:
    """The last lines of a recipe that was called with GIVEN and more, by their first word."""
    given = [*GIVEN, *more]
    lines = RECIPES[recipe].stages_of(parse(given).config)[-1].next(given)
    return {purpose: line.strip() for purpose, _, line in (each.partition(" ") for each in lines)}


def test_an_upload_is_of_the_same_configuration_and_what_was_uploaded_is_served() -> None:
    program, recipe, *given = shlex.split(steps("pipeline")["upload"])
    again = parse(given).config
    assert (program, recipe, again.output, again.seed) == ("draftsmith", "publish", "runs/my #1", 2)
    assert (again.publish.draft_id, again.publish.head_id) == ("OWNER/NAME", "OWNER/NAME")
    uploaded = steps("publish", "--head", "null", "--publish.draft_id", "me/d")
    assert [*uploaded] == ["look", "serve"]
    assert '"model": "me/d"' in uploaded["serve"]


@pytest.mark.parametrize(("size", "serves"), [(100, True), (128, False)])
def test_the_line_for_vllm_runs_as_it_is_for_a_pair_that_vllm_takes(
    size: int, serves: bool, tmp_path: Path
) -> None:
    """It refuses output matrices of two sizes."""
    write_json(tmp_path / "target" / "config.json", {"vocab_size": size})
    draft = tmp_path / "out" / "release" / "draft"
    write_json(draft / "config.json", {"vocab_size": 100})
    write_json(draft / "generation_config.json", {"num_assistant_tokens": 9})
    given = ["--output", str(tmp_path / "out"), "--models.target", str(tmp_path / "target")]
    said = steps("publish", "--head", "null", *given)
    assert ("serve" in said) is serves
    if serves:
        settings = json.loads(shlex.split(said["serve"], comments=True)[-1])
        assert (settings["model"], settings["num_speculative_tokens"]) == (str(draft), 5)
