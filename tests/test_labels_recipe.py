"""Labels by the recipe, as users make them: by two processes, and from top logits."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import yaml

from recipes import make_logits, make_rollouts, train_head
from specdata.labels.make import load_labels
from specdata.probability import SamplingConfig
from tests.word_pair import with_train_and_dev

pytestmark = pytest.mark.slow
SAMPLING = SamplingConfig(top_k=8)


@pytest.fixture(scope="module")
def labelled(word_pair: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with rollouts, ten logits a position, and labels of three draws, by one process."""
    folder = tmp_path_factory.mktemp("labelled")
    tree = with_train_and_dev(word_pair, folder)
    tree |= {"output": str(folder / "out"), "sampling": {"top_k": 8}}
    tree |= {"labels": {"shard_size": 4, "draws": 3}, "logits": {"top_logits": 10}}
    tree |= {"head": {"depth": 1, "epochs": 1}}
    (folder / "pair.yaml").write_text(yaml.safe_dump(tree))
    asked = ["--config", str(folder / "pair.yaml")]
    for recipe in (make_rollouts, make_logits, train_head):
        assert recipe.RECIPE.run(asked) == 0
    return folder


def unlabelled(labelled: Path, out: Path) -> list[str]:
    """Arguments for a run in a folder of its own, which has the rollouts alone."""
    shutil.copytree(labelled / "out" / "rollouts", out / "rollouts")
    return ["--config", str(labelled / "pair.yaml"), "--output", str(out)]


def test_labels_from_top_logits_are_those_of_the_target_and_keep_none(
    labelled: Path, tmp_path: Path
) -> None:
    asked = unlabelled(labelled, tmp_path / "out")
    asked += ["--labels.logits", str(labelled / "out" / "logits")]
    assert train_head.RECIPE.run(asked) == 0
    again = load_labels(tmp_path / "out" / "labels", SAMPLING)
    first = load_labels(labelled / "out" / "labels", SAMPLING)
    assert again.column_names == first.column_names
    for mine, theirs in zip(again, first, strict=True):
        assert mine["draft_ids"] == theirs["draft_ids"]
        assert mine["more_draft_ids"] == theirs["more_draft_ids"]
        several = 2 * len(mine["draft_ids"]) if mine["split"] == "train" else 0
        assert len(mine["more_accept_prob"]) == several
        assert mine["overlap"] == pytest.approx(theirs["overlap"], abs=1e-5)
        assert mine["accept_prob"] == pytest.approx(theirs["accept_prob"], abs=1e-5)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--models.target", "draft"], "target.revision"),
        (["--models.dtype", "bfloat16"], "dtype: 'float32' -> 'bfloat16'"),
        (["--sampling.top_k", "20"], "10 top logits of 40 do not give the target's distributions"),
        (["--labels.logits", "rollouts"], "rollouts keeps no target logits: name a dataset"),
    ],
)
def test_top_logits_that_do_not_fit_the_run_are_refused_before_anything_is_made(
    labelled: Path,
    word_pair: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    message: str,
) -> None:
    asked = unlabelled(labelled, tmp_path / "out")
    asked += ["--labels.logits", str(labelled / "out" / "logits")]
    places = {"draft": str(word_pair / "draft"), "rollouts": str(tmp_path / "out" / "rollouts")}
    asked += [places.get(argument, argument) for argument in arguments]
    assert train_head.RECIPE.run(asked) == 2
    assert message in capsys.readouterr().err
    assert not list((tmp_path / "out" / "labels").glob("[!.]*"))


def test_other_rollouts_than_those_of_the_top_logits_are_refused(
    labelled: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ["--config", str(labelled / "pair.yaml"), "--output", str(tmp_path / "out")]
    assert make_rollouts.RECIPE.run([*asked, "--seed", "1"]) == 0
    asked += ["--labels.logits", str(labelled / "out" / "logits")]
    assert train_head.RECIPE.run(asked) == 2
    assert "rollouts: '" in capsys.readouterr().err
