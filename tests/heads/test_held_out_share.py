"""Rollouts that are held out from a draft: its head learns from these alone."""

from pathlib import Path
from typing import Any

import pytest
import yaml
from datasets import Dataset

from recipes import make_rollouts, train_draft, train_head
from recipes.config import parse
from specdata.errors import ConfigError
from specdata.storage.dataset import is_held_out, load_stored, of_split
from tests.support.word_pair import with_train_and_dev

SHARE = 0.4


def test_a_share_is_about_that_share_and_with_the_rest_of_a_split_all_of_it() -> None:
    names = [f"prompt {number}" for number in range(4000)]
    some, more = ({name for name in names if is_held_out(name, share)} for share in (0.2, 0.5))
    assert some < more
    assert len(some) == pytest.approx(800, abs=4 * (4000 * 0.2 * 0.8) ** 0.5)
    assert not any(is_held_out(name, 0.0) for name in names)
    rows = Dataset.from_list(
        [
            {"example_id": f"prompt {number}", "split": ("train", "dev")[number % 2], "dataset": ""}
            for number in range(40)
        ]
    )

    def names_of(**asked: Any) -> list[str]:
        return sorted(of_split(rows, "train", Path("r"), **asked)["example_id"])

    shares = [names_of(held_out_share=SHARE, wants_held_out=wanted) for wanted in (False, True)]
    assert sorted(shares[0] + shares[1]) == names_of() == names_of(wants_held_out=True)
    for wanted, share in enumerate(shares):
        assert all(is_held_out(name, SHARE) == wanted for name in share)
    with pytest.raises(ConfigError, match="are among the share 1e-09 that is held out"):
        names_of(held_out_share=1e-9, wants_held_out=True)


@pytest.mark.slow
def test_draft_and_head_learn_from_different_rollouts(word_pair: Path, tmp_path: Path) -> None:
    tree = with_train_and_dev(word_pair, tmp_path)
    tree["rollouts"]["store_states"] = True
    tree["output"] = str(tmp_path / "out")
    # The draft is made of the target in float32, the target's states are kept in bfloat16.
    tree["models"] = {"target": tree["models"]["target"], "dtype": "bfloat16"}
    init = {"kind": "target", "layers": 1, "align": True}
    tree["draft"] = {"init": init, "epochs": 1, "held_out_share": SHARE, "report_to": []}
    tree["head"] = {"depth": 1, "epochs": 1}
    (tmp_path / "pair.yaml").write_text(yaml.safe_dump(tree))
    asked = ["--config", str(tmp_path / "pair.yaml")]
    for recipe in (make_rollouts, train_draft, train_head):
        assert recipe.RECIPE.run(asked) == 0
    rollouts = load_stored(tmp_path / "out" / "rollouts")
    of = {
        split: {row["example_id"] for row in rollouts if row["split"] == split}
        for split in ("train", "dev")
    }
    held_out = {name for name in of["train"] if is_held_out(name, SHARE)}
    assert 0 < len(held_out) < len(of["train"])
    draft = train_draft.Draft(parse(asked).config)
    learnt = draft.rollouts("train")
    assert {*learnt["example_id"]} == of["train"] - held_out
    assert {*draft.rollouts("dev")["example_id"]} == of["dev"]
    # States in another precision would be read as other numbers.
    other = parse([*asked, "--models.dtype", "float16"]).config
    for stage in (train_draft.Draft(other).run, train_head.Labels(other).run):
        with pytest.raises(ConfigError, match="dtype: 'bfloat16' -> 'float16'"):
            stage()
    labels = load_stored(tmp_path / "out" / "labels")
    assert {*labels["example_id"]} == held_out | of["dev"]
    assert {row["split"] for row in labels} == {"train", "dev"}
