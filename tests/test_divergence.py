"""A training that diverges, as users see it: what the recipe says, followed, succeeds."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import yaml

from recipes import train_draft, train_head
from tests.test_labels_recipe import labelled
from tests.test_sharding import pair

__all__ = ["labelled", "pair"]
pytestmark = pytest.mark.slow


@pytest.mark.parametrize(("section", "rate"), [("draft", "1e6"), ("head", "1e6"), ("head", "1e30")])
def test_a_diverged_stage_works_in_the_same_folder_once_its_message_is_followed(
    labelled: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    section: str,
    rate: str,
) -> None:
    out = tmp_path / "out"
    for stage in ("rollouts", "labels"):
        shutil.copytree(labelled / "out" / stage, out / stage)
    tree = yaml.safe_load((labelled / "pair.yaml").read_text())
    if section == "draft":
        tree |= {"draft": {"epochs": 4, "batch_size": 4, "save_steps": 3}, "head": None}
    tree |= {"output": str(out)}
    (tmp_path / "pair.yaml").write_text(yaml.safe_dump(tree))
    recipe = {"draft": train_draft, "head": train_head}[section].RECIPE
    arguments = ["--config", str(tmp_path / "pair.yaml"), f"--{section}.learning_rate"]
    assert recipe.run([*arguments, rate]) == 2
    printed = capsys.readouterr().err
    message = printed[printed.index("error: ") :].strip()
    assert "so the training diverged" in message
    assert f"lower its learning_rate, {float(rate):g}, to a tenth" in message
    _, _, folders = message.rpartition(", or remove ")
    assert folders.split(", ")[0] == str(out / section)
    for folder in folders.split(", "):  # later stages, too, where they are there
        shutil.rmtree(folder)
    assert recipe.run([*arguments, "1e-4"]) == 0
