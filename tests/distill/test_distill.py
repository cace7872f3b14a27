"""The toy pair and offline distillation: what is learnt, stored and refused."""

import math
import shutil
from pathlib import Path
from typing import get_args

import pytest
import torch
from transformers import PreTrainedModel, TrainerCallback, TrainerState

from distill.batches import collate
from distill.config import LossName, ToyPairConfig
from distill.losses import LOSSES
from distill.toy import train_toy_pair
from distill.training import train_resumably
from specdata.errors import TrainingDivergedError, VocabularyMismatchError
from specdata.models import load_model
from specdata.storage.checkpoints import newest_checkpoint
from specdata.texts import IGNORED
from tests.conftest import TRAINED_PAIR
from tests.support.random_pair import texts_of
from tests.support.trainings import (
    QUICK,
    assert_same_weights,
    changed,
    distilled,
    trainer_of,
    weights_of,
)

TOY_PAIR = ToyPairConfig(**TRAINED_PAIR)


def test_a_finished_model_is_kept_and_a_missing_one_comes_out_the_same(
    trained_pair: Path, tmp_path: Path
) -> None:
    (tmp_path / "target").symlink_to(trained_pair / "target")
    before = (trained_pair / "target" / "model.safetensors").stat()
    train_toy_pair(tmp_path, TOY_PAIR, seed=0)
    assert (trained_pair / "target" / "model.safetensors").stat() == before
    assert_same_weights(tmp_path / "draft", trained_pair / "draft")


def test_processes_divide_the_rows_of_a_batch_that_are_ordered_by_length() -> None:
    """They are known by their places in the global batch; where none is left, no label is."""
    rows = [{"prompt_ids": [5] * length, "completion_ids": [6]} for length in (4, 2, 3, 1)]
    alone = collate(pad_id=1)(rows)
    assert alone["rows"].tolist() == [3, 1, 2, 0]
    assert alone["input_ids"][:2].tolist() == [[5, 6, 1, 1, 1], [5, 5, 6, 1, 1]]
    assert alone["labels"][0].tolist() == [IGNORED, 6, IGNORED, IGNORED, IGNORED]
    assert alone["attention_mask"].sum(dim=1).tolist() == [2, 3, 4, 5]
    shares = [collate(1, process=index, processes=2)(rows) for index in range(2)]
    assert [share["rows"].tolist() for share in shares] == [[3, 2], [1, 0]]
    without = collate(1, process=3, processes=4)(rows[:3])
    assert without["rows"].tolist() == [-1]
    assert without["labels"].eq(IGNORED).all()


def test_unusable_inputs_are_named(trained_pair: Path, tiny_pair: Path, tmp_path: Path) -> None:
    assert get_args(LossName) == tuple(LOSSES)
    rows = texts_of(trained_pair, 2, seed=1)
    given = {"train": rows, "dev": rows}
    with pytest.raises(ValueError, match="dev must hold at least one rollout"):
        distilled(trained_pair, tmp_path / "draft", train=rows, dev=rows.select([]))
    with pytest.raises(VocabularyMismatchError):
        distilled(trained_pair, tmp_path / "draft", draft=tiny_pair / "draft", **given)
    assert not (tmp_path / "draft").exists()


def test_a_draft_is_stored_in_its_targets_precision_and_measured_as_it_is_stored(
    trained_pair: Path, tmp_path: Path
) -> None:
    pair, first, again = (tmp_path / name for name in ("pair", "first", "again"))
    shutil.copytree(trained_pair, pair)
    load_model(str(pair / "target")).bfloat16().save_pretrained(pair / "target")
    kept = changed(QUICK, epochs=0)
    distilled(pair, tmp_path / "kept", kept, rows=16)
    assert_same_weights(tmp_path / "kept", pair / "draft")  # in float32
    trained = distilled(pair, first, rows=16)
    assert trained.acceptance_after != trained.acceptance_before
    measured = distilled(pair, again, kept, draft=first, rows=16)
    assert measured.acceptance_before == trained.acceptance_after
    assert {weight.dtype for weight in weights_of(first).values()} == {torch.bfloat16}
    assert_same_weights(again, first)


# --- divergence


def test_a_training_that_diverges_ends_with_a_message_and_stores_nothing_that_is_not_finite(
    trained_pair: Path, tmp_path: Path
) -> None:
    config = changed(QUICK, epochs=8, learning_rate=1e6)
    # The next checkpoint would have been that of step 4.
    with pytest.raises(TrainingDivergedError, match=r"is nan in steps 1 to 4.*learning_rate"):
        distilled(trained_pair, tmp_path / "out", config)
    assert not (tmp_path / "out").exists()
    assert not list(tmp_path.glob("out.training/checkpoint-*"))


def test_weights_that_are_not_finite_are_not_stored_and_the_last_good_checkpoint_is_kept(
    trained_pair: Path, tmp_path: Path
) -> None:
    """A last update that overflows leaves no loss to be looked at."""

    class Overflow(TrainerCallback):
        def on_optimizer_step(
            self, _: object, state: TrainerState, *__: object, model: PreTrainedModel, **___: object
        ) -> None:
            if state.global_step + 1 == 8:
                model.draft.get_output_embeddings().weight.data[0, 0] = math.inf

    rows, work = texts_of(trained_pair, 8, seed=1), tmp_path / "out.training"
    trainer = trainer_of(
        trained_pair / "target", trained_pair / "draft", rows, work, changed(QUICK, epochs=8)
    )
    trainer.add_callback(Overflow())
    with pytest.raises(TrainingDivergedError, match=r"not finite after step 8.*checkpoint-4 is ke"):
        train_resumably(trainer, work, label="the draft")
    assert [path.name for path in work.glob("checkpoint-*")] == ["checkpoint-4"]
    assert newest_checkpoint(work, engine="PyTorch") == work / "checkpoint-4"
