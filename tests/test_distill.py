"""The toy pair and offline distillation: what is learnt, what is stored, what survives a kill."""

from __future__ import annotations

import json
import math
import re
import shutil
from collections.abc import Mapping
from multiprocessing.context import ForkServerContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import TypeVar, get_args

import pytest
import torch
from accelerate import PartialState
from safetensors.torch import load_file
from torch import Tensor
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Trainer,
    TrainerCallback,
    TrainerState,
)

from distill.batches import collate
from distill.config import DistilConfig, Objective, ToyPairConfig
from distill.distillation import DistilResult, distil
from distill.losses import LOSSES
from distill.toy import train_toy_pair
from distill.trainer import draft_trainer
from distill.training import save_model, train_resumably
from specdata.config import Config, read_config
from specdata.draft_vocabulary import reduce_vocabulary
from specdata.errors import ManifestError, TrainingDivergedError, VocabularyMismatchError
from specdata.models import load_model, load_tokenizer
from specdata.probability import SamplingConfig
from specdata.storage.checkpoints import newest_checkpoint
from specdata.storage.resume import Settings
from specdata.texts import IGNORED
from tests.conftest import TRAINED_PAIR
from tests.random_pair import texts_of
from tests.two_processes import ON_CPU, ZERO_2, ZERO_3, finish, kill, start_two, wait_for

C = TypeVar("C", bound=Config)
TOY_PAIR = ToyPairConfig(**TRAINED_PAIR)
QUICK = DistilConfig(epochs=2, learning_rate=5e-3, save_steps=4)


@pytest.fixture(scope="module")
def pair(trained_pair: Path) -> Path:
    return trained_pair


def changed(config: C, **changes: object) -> C:
    """The configuration with some settings changed, checked again."""
    return type(config)(**{**config.model_dump(), **changes})


def distilled(
    pair: Path,
    out: Path,
    config: DistilConfig = QUICK,
    sampling: SamplingConfig | None = None,
    *,
    rows: int = 48,
) -> DistilResult:
    return distil(
        target=pair / "target",
        draft=pair / "draft",
        train=texts_of(pair, rows, seed=1),
        dev=texts_of(pair, 8, seed=2),
        out=out,
        config=config,
        sampling=sampling or SamplingConfig(),
        seed=0,
    )


def weights(folder: Path) -> dict[str, Tensor]:
    return load_file(folder / "model.safetensors")


def assert_same_weights(ours: Path, theirs: Path) -> None:
    """Bit for bit."""
    actual, expected = weights(ours), weights(theirs)
    assert actual.keys() == expected.keys()
    for name in expected:
        torch.testing.assert_close(actual[name], expected[name], rtol=0.0, atol=0.0)


def test_the_pair_is_two_ordinary_folders_with_one_vocabulary(pair: Path) -> None:
    assert sorted(path.name for path in pair.iterdir()) == ["draft", "target"]
    for name, layers in (("target", 2), ("draft", 1)):
        model = load_model(str(pair / name))
        assert model.config.num_hidden_layers == layers
        assert model.config.use_cache
        tokenizer = load_tokenizer(str(pair / name))
        assert model.generation_config.eos_token_id == tokenizer.eos_token_id
        assert model.generation_config.top_k == 0
        assert len(tokenizer) == model.config.vocab_size == TOY_PAIR.vocab_size
    for path in (pair / "target").glob("tokenizer*"):
        assert (pair / "draft" / path.name).read_bytes() == path.read_bytes()
    settings = json.loads((pair / "target" / "tokenizer_config.json").read_text())
    assert settings["tokenizer_class"] == "PreTrainedTokenizerFast"


def test_a_finished_model_is_kept_a_missing_one_comes_out_the_same_and_other_settings_are_refused(
    pair: Path, tmp_path: Path
) -> None:
    (tmp_path / "target").symlink_to(pair / "target")
    before = (pair / "target" / "model.safetensors").stat()
    train_toy_pair(tmp_path, TOY_PAIR, seed=0)
    assert (pair / "target" / "model.safetensors").stat() == before
    assert_same_weights(tmp_path / "draft", pair / "draft")
    with pytest.raises(ManifestError, match="target_steps: 40 -> 41"):
        train_toy_pair(pair, changed(TOY_PAIR, target_steps=41), seed=0)
    with pytest.raises(ManifestError, match="seed: 0 -> 1"):
        train_toy_pair(pair, TOY_PAIR, seed=1)


@pytest.mark.parametrize(
    "sampling",
    [SamplingConfig(temperature=0.0), SamplingConfig(temperature=0.7, top_k=5, top_p=0.9)],
)
def test_distillation_learns_the_distribution_that_serving_uses(
    pair: Path, tmp_path: Path, sampling: SamplingConfig
) -> None:
    result = distilled(pair, tmp_path / "draft", QUICK, sampling, rows=24)
    assert result.acceptance_after > result.acceptance_before


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


class GradientRecorder(TrainerCallback):
    """Keeps the gradients that the first optimizer step is about to use."""

    def __init__(self) -> None:
        self.gradients: dict[str, Tensor] = {}

    def on_pre_optimizer_step(self, *_: object, model: PreTrainedModel, **__: object) -> None:
        for name, parameter in model.named_parameters():
            assert parameter.grad is not None
            self.gradients.setdefault(name, parameter.grad.clone())


def step_gradients(
    pair: Path, out: Path, *, batch_size: int, accumulation: int
) -> dict[str, Tensor]:
    """Gradients of one step on the same 8 rollouts, through the trainer that `distil` uses."""
    recorder = GradientRecorder()
    trainer = draft_trainer(
        load_model(str(pair / "target")),
        load_model(str(pair / "draft")),
        texts_of(pair, 8, seed=1),
        out,
        # A smooth one: that of a total variation jumps where rounding turns p > q into p < q.
        changed(
            QUICK,
            epochs=1,
            batch_size=batch_size,
            accumulation=accumulation,
            objective="forward_kl",
        ),
        SamplingConfig(),
        seed=0,
    )
    trainer.add_callback(recorder)
    trainer.train()
    assert trainer.state.global_step == 1
    return recorder.gradients


def assert_same_gradients(
    ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor], terms: int
) -> None:
    """Gradients of one step on the same texts are equal up to the order of the sums.

    A gradient entry is a sum of n terms, one for each token position of the batch. float32 sums of
    the same terms in two orders differ by at most 2 (n - 1) u sum|term|, with u = eps / 2 (Higham,
    Accuracy and Stability of Numerical Algorithms, section 4.2), so by n eps sum|term|. The terms
    cannot be seen; the largest entry of the parameter's gradient stands for sum|term|. Rounding
    errors of either sign grow like sqrt(n) rather than n, which leaves a factor sqrt(n), about 34
    for a thousand, for terms that cancel and for the rounding within them.
    Comparing weights instead would not do: Adam divides by the gradient's own size, so an entry
    that is all rounding error still moves a weight by a whole learning rate.
    """
    tolerance = terms * torch.finfo(torch.float32).eps
    assert ours.keys() == theirs.keys()
    for name, gradient in ours.items():
        assert gradient.abs().max() > 0
        difference = (gradient - theirs[name]).abs().max() / gradient.abs().max()
        assert difference <= tolerance, (name, float(difference), tolerance)


def test_accumulated_small_batches_equal_a_large_one(pair: Path, tmp_path: Path) -> None:
    whole = step_gradients(pair, tmp_path / "whole", batch_size=8, accumulation=1)
    parts = step_gradients(pair, tmp_path / "parts", batch_size=2, accumulation=4)
    rows = texts_of(pair, 8, seed=1)
    terms = sum(len(row["prompt_ids"]) + len(row["completion_ids"]) for row in rows)
    assert_same_gradients(whole, parts, terms)


def test_unusable_inputs_are_named(pair: Path, tiny_pair: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="objective: must be 'forward_kl', 'reverse_kl', 'js'"):
        read_config(DistilConfig, {"objective": "kl"})
    with pytest.raises(ValueError, match=r"batch_size: must be greater .* 1 \(got 0\)"):
        read_config(DistilConfig, {"batch_size": 0})
    assert get_args(Objective) == tuple(LOSSES)
    arguments = {
        "target": pair / "target",
        "draft": pair / "draft",
        "train": texts_of(pair, 2, seed=1),
        "dev": texts_of(pair, 2, seed=2),
        "config": QUICK,
        "sampling": SamplingConfig(),
        "seed": 0,
    }
    empty = arguments["dev"].select([])
    with pytest.raises(ValueError, match="dev must hold at least one rollout"):
        distil(**{**arguments, "dev": empty}, out=tmp_path / "draft")
    with pytest.raises(VocabularyMismatchError):
        distil(**{**arguments, "draft": tiny_pair / "draft"}, out=tmp_path / "draft")
    assert not (tmp_path / "draft").exists()


def with_untied_draft(pair: Path, folder: Path, kept: int | None = None) -> Path:
    """The pair, with a draft whose output matrix is a copy of its input embeddings, or a part."""
    shutil.copytree(pair, folder)
    tied = load_model(str(pair / "draft"))
    if kept is not None:
        reduce_vocabulary(tied, range(kept))
        save_model(tied, folder / "draft")
        return folder
    config = LlamaConfig(**{**tied.config.to_dict(), "tie_word_embeddings": False})
    untied = LlamaForCausalLM(config)
    untied.load_state_dict(tied.state_dict())
    untied.generation_config = tied.generation_config
    untied.save_pretrained(folder / "draft")
    assert "lm_head.weight" in weights(folder / "draft")
    return folder


@pytest.mark.parametrize(
    ("stage", "kept"),
    [
        pytest.param(2, None, marks=pytest.mark.exhaustive),
        pytest.param(3, None, marks=pytest.mark.exhaustive),
        pytest.param(3, 300, marks=pytest.mark.slow),
    ],
)
def test_two_deepspeed_processes_train_the_same_draft_as_one(
    pair: Path, tmp_path: Path, server: ForkServerContext, stage: int, kept: int | None
) -> None:
    """Stage 3 divides the output matrix, too, which the loss reads without calling it.

    That of the embedded pair is tied: the input embedding has it at hand already. So the draft of
    stage 3 has one of its own.
    """
    if stage == 3:
        pair = with_untied_draft(pair, tmp_path / "pair", kept)
    alone = distilled(pair, tmp_path / "alone", QUICK)
    engine = {2: ZERO_2, 3: ZERO_3}[stage]
    finish(start_two(server, distilled, pair, tmp_path / "two", **engine))
    result = json.loads((tmp_path / "two" / "result.json").read_text())
    assert result["steps"] == alone.steps
    assert result["acceptance_after"] == pytest.approx(alone.acceptance_after, abs=1e-4)


# 48 rollouts in batches of 5: shares of two processes are unequal, and an epoch's last batch is
# short. In batches of 47 the last one is a single rollout, of which the second process has none.
@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("processes", "batch_size", "epochs"),
    [((1, 2), 5, 4), ((2, 1), 47, 12)],
    ids=["1 -> 2", "2 -> 1"],
)
def test_a_killed_distillation_goes_on_in_another_number_of_processes(
    pair: Path,
    tmp_path: Path,
    server: ForkServerContext,
    processes: tuple[int, int],
    batch_size: int,
    epochs: int,
) -> None:
    """The steps and weights are those of an uninterrupted run in one process, up to rounding.

    The gradient is summed in another order, so it differs by about n eps in relative terms, n
    tokens of a batch (`test_accumulated_small_batches_equal_a_large_one`): 3e-5 to 3e-4. Adam moves
    a weight by up to the learning rate in each step and passes relative errors on. An entry of the
    gradient that is all rounding moves its weight by a whole learning rate, and which entries are
    depends on the processor: so the root of the mean square difference of each matrix is looked
    at, not its largest. A step on other rollouts, a missing or a doubled one moves all weights by
    about the learning rate; a fiftieth of it lies between.
    """
    config = changed(QUICK, epochs=epochs, batch_size=batch_size)
    alone = distilled(pair, tmp_path / "alone", config)
    out = tmp_path / "out"

    def start(count: int) -> list[BaseProcess]:
        if count == 2:
            return start_two(server, distilled, pair, out, config, **ON_CPU)
        process = server.Process(target=distilled, args=(pair, out, config))
        process.start()
        return [process]

    started = start(processes[0])
    wait_for(tmp_path / "out.training", "checkpoint-*/complete.json", started)
    kill(started)
    assert not out.exists()
    finish(start(processes[1]))
    result = json.loads((out / "result.json").read_text())
    assert result["steps"] == alone.steps
    assert result["acceptance_after"] == pytest.approx(alone.acceptance_after, abs=1e-5)
    actual, expected = weights(out), weights(tmp_path / "alone")
    assert actual.keys() == expected.keys()
    for name in expected:
        difference = (actual[name] - expected[name]).square().mean().sqrt()
        assert difference <= config.learning_rate / 50, name


# --- divergence


def test_a_training_that_diverges_ends_with_a_message_and_stores_nothing_that_is_not_finite(
    pair: Path, tmp_path: Path
) -> None:
    out, work = tmp_path / "out", tmp_path / "out.training"
    config = changed(QUICK, epochs=8, learning_rate=1e6)
    with pytest.raises(TrainingDivergedError) as refusal:
        distilled(pair, out, config)
    # The next checkpoint would have been that of step 4.
    assert re.match(
        r"distilling the draft: the (loss|norm of the gradient) is nan in steps 1 to 4, so the "
        r"training diverged \(no checkpoint was written before\): lower its learning_rate, 1e\+06,",
        str(refusal.value),
    )
    assert str(refusal.value).endswith(f"or remove {out} and {work}")
    assert not out.exists()
    assert not list(work.glob("checkpoint-*"))
    shutil.rmtree(work)  # as the message says
    assert distilled(pair, out, QUICK, rows=16).acceptance_after > 0.5


def stepwise_trainer(pair: Path, folder: Path, *, steps: int) -> tuple[Trainer, Settings]:
    """A trainer of 8 rollouts a step with a checkpoint every 4 steps, and any settings."""
    trainer = draft_trainer(
        load_model(str(pair / "target")),
        load_model(str(pair / "draft")),
        texts_of(pair, 8, seed=1),
        folder / "out.training",
        changed(QUICK, epochs=steps),
        SamplingConfig(),
        seed=0,
    )
    return trainer, Settings({"steps": steps}, remedy="train elsewhere")


def test_weights_that_are_not_finite_are_not_stored_and_the_last_good_checkpoint_is_kept(
    pair: Path, tmp_path: Path
) -> None:
    """A last update that overflows leaves no loss to be looked at."""

    class Overflow(TrainerCallback):
        def on_optimizer_step(
            self, _: object, state: TrainerState, *__: object, model: PreTrainedModel, **___: object
        ) -> None:
            if state.global_step + 1 == 8:
                model.get_output_embeddings().weight.data[0, 0] = math.inf

    trainer, settings = stepwise_trainer(pair, tmp_path, steps=8)
    trainer.add_callback(Overflow())
    work = tmp_path / "out.training"
    with pytest.raises(TrainingDivergedError) as refusal:
        train_resumably(trainer, work, settings, label="distilling the draft")
    assert "weights are not finite after step 8, so the training" in str(refusal.value)
    assert f"({work / 'checkpoint-4'} is kept)" in str(refusal.value)
    assert [path.name for path in work.glob("checkpoint-*")] == ["checkpoint-4"]
    assert newest_checkpoint(work, engine="PyTorch") == work / "checkpoint-4"


def distilled_to_nothing(pair: Path, out: Path) -> None:
    with pytest.raises(TrainingDivergedError, match=" is nan in steps 1 to 4, so the training div"):
        distilled(pair, out, changed(QUICK, learning_rate=1e6))
    PartialState().wait_for_everyone()  # so every process was told


@pytest.mark.exhaustive
def test_every_process_learns_that_the_training_diverged(
    pair: Path, tmp_path: Path, server: ForkServerContext
) -> None:
    finish(start_two(server, distilled_to_nothing, pair, tmp_path / "out", **ON_CPU))
    assert not (tmp_path / "out").exists()
