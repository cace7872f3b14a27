"""The toy pair and offline distillation: what is learnt, stored and refused."""

from __future__ import annotations

import json
import math
import re
import shutil
from pathlib import Path
from typing import get_args

import pytest
from transformers import PreTrainedModel, TrainerCallback, TrainerState

from distill.batches import collate
from distill.config import DistilConfig, Objective, ToyPairConfig
from distill.losses import LOSSES
from distill.toy import train_toy_pair
from distill.training import train_resumably
from specdata.config import read_config
from specdata.errors import TrainingDivergedError, VocabularyMismatchError
from specdata.models import load_model, load_tokenizer
from specdata.storage.checkpoints import newest_checkpoint
from specdata.texts import IGNORED
from tests.conftest import TRAINED_PAIR
from tests.support.random_pair import texts_of
from tests.support.trainings import QUICK, assert_same_weights, changed, distilled, trainer_of

TOY_PAIR = ToyPairConfig(**TRAINED_PAIR)


def test_the_pair_is_two_ordinary_folders_with_one_vocabulary(trained_pair: Path) -> None:
    assert sorted(path.name for path in trained_pair.iterdir()) == ["draft", "target"]
    for name, layers in (("target", 2), ("draft", 1)):
        model = load_model(str(trained_pair / name))
        assert model.config.num_hidden_layers == layers
        assert model.config.use_cache
        tokenizer = load_tokenizer(str(trained_pair / name))
        assert model.generation_config.eos_token_id == tokenizer.eos_token_id
        assert model.generation_config.top_k == 0
        assert len(tokenizer) == model.config.vocab_size == TOY_PAIR.vocab_size
    for path in (trained_pair / "target").glob("tokenizer*"):
        assert (trained_pair / "draft" / path.name).read_bytes() == path.read_bytes()
    settings = json.loads((trained_pair / "target" / "tokenizer_config.json").read_text())
    assert settings["tokenizer_class"] == "PreTrainedTokenizerFast"


def test_a_finished_model_is_kept_and_a_missing_one_comes_out_the_same(
    trained_pair: Path, tmp_path: Path
) -> None:
    (tmp_path / "target").symlink_to(trained_pair / "target")
    before = (trained_pair / "target" / "model.safetensors").stat()
    train_toy_pair(tmp_path, TOY_PAIR, seed=0)
    assert (trained_pair / "target" / "model.safetensors").stat() == before
    assert_same_weights(tmp_path / "draft", trained_pair / "draft")


def test_processes_divide_the_rows_of_a_batch_and_have_a_batch_without_labels_if_none_is_left() -> (
    None
):
    rows = [{"prompt_ids": [5], "completion_ids": [token]} for token in (6, 7, 8)]
    shares = [collate(1, process=index, processes=4)(rows) for index in range(4)]
    assert [share["labels"][:, 1:].tolist() for share in shares] == [[[6]], [[7]], [[8]], [[]]]
    assert shares[3]["input_ids"].tolist() == [[5]]
    pair_of = [collate(1, process=index, processes=2)(rows) for index in range(2)]
    assert [share["labels"][:, 1].tolist() for share in pair_of] == [[6, 8], [7]]
    assert [share["rows"].tolist() for share in shares] == [[0], [1], [2], [-1]]


def test_rows_of_a_batch_are_ordered_by_length_and_known_by_their_place_in_the_global_batch() -> (
    None
):
    rows = [{"prompt_ids": [5] * length, "completion_ids": [6]} for length in (4, 2, 3, 1)]
    alone = collate(pad_id=1)(rows)
    assert alone["rows"].tolist() == [3, 1, 2, 0]
    assert alone["input_ids"][:2].tolist() == [[5, 6, 1, 1, 1], [5, 5, 6, 1, 1]]
    assert alone["labels"][0].tolist() == [IGNORED, 6, IGNORED, IGNORED, IGNORED]
    assert alone["attention_mask"].sum(dim=1).tolist() == [2, 3, 4, 5]
    shares = [collate(1, process=index, processes=2)(rows) for index in range(2)]
    assert [share["rows"].tolist() for share in shares] == [[3, 2], [1, 0]]


def test_unusable_inputs_are_named(trained_pair: Path, tiny_pair: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="objective: must be 'forward_kl', 'reverse_kl', 'js'"):
        read_config(DistilConfig, {"objective": "kl"})
    with pytest.raises(ValueError, match=r"batch_size: must be greater .* 1 \(got 0\)"):
        read_config(DistilConfig, {"batch_size": 0})
    assert get_args(Objective) == tuple(LOSSES)
    rows = texts_of(trained_pair, 2, seed=1)
    given = {"train": rows, "dev": rows}
    with pytest.raises(ValueError, match="dev must hold at least one rollout"):
        distilled(trained_pair, tmp_path / "draft", train=rows, dev=rows.select([]))
    with pytest.raises(VocabularyMismatchError):
        distilled(trained_pair, tmp_path / "draft", draft=tiny_pair / "draft", **given)
    assert not (tmp_path / "draft").exists()


# --- divergence


def test_a_training_that_diverges_ends_with_a_message_and_stores_nothing_that_is_not_finite(
    trained_pair: Path, tmp_path: Path
) -> None:
    out, work = tmp_path / "out", tmp_path / "out.training"
    config = changed(QUICK, epochs=8, learning_rate=1e6)
    with pytest.raises(TrainingDivergedError) as refusal:
        distilled(trained_pair, out, config)
    # The next checkpoint would have been that of step 4.
    assert re.match(
        r"distilling the draft: the (loss|norm of the gradient) is nan in steps 1 to 4, so the "
        r"training diverged \(no checkpoint was written before\): lower its learning_rate, 1e\+06,",
        str(refusal.value),
    )
    assert str(refusal.value).endswith("remove what it left, or choose another output folder")
    assert not out.exists()
    assert not list(work.glob("checkpoint-*"))
    shutil.rmtree(work)  # as the message says
    assert distilled(trained_pair, out, QUICK, rows=16).acceptance_after > 0.5


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
    with pytest.raises(TrainingDivergedError) as refusal:
        train_resumably(trainer, work, label="the draft")
    assert "weights are not finite after step 8, so the training" in str(refusal.value)
    assert f"({work / 'checkpoint-4'} is kept)" in str(refusal.value)
    assert [path.name for path in work.glob("checkpoint-*")] == ["checkpoint-4"]
    assert newest_checkpoint(work, engine="PyTorch") == work / "checkpoint-4"
