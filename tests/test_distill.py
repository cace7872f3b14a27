"""The toy pair and offline distillation: what is learnt, what is stored, what survives a kill."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TypeVar, get_args

import pytest
import torch
from datasets import Dataset
from safetensors.torch import load_file
from torch import Tensor
from transformers import PreTrainedModel, TrainerCallback

from distill.config import DistilConfig, Objective, ToyPairConfig
from distill.losses import LOSSES
from distill.offline import (
    IGNORED,
    DistilResult,
    collate,
    distil,
    draft_trainer,
    mean_acceptance,
)
from distill.toy import train_toy_pair
from specdata.config import Config, read_config
from specdata.errors import ManifestError, VocabularyMismatchError
from specdata.models import load_model, load_tokenizer
from specdata.probability import SamplingConfig
from specdata.toy.corpus import examples

C = TypeVar("C", bound=Config)
REPOSITORY = Path(__file__).parents[1]
SMALL = ToyPairConfig(
    vocab_size=400,
    examples_per_family=60,
    library_characters=8_000,
    block_size=64,
    target_layers=2,
    target_width=32,
    target_steps=40,
    draft_width=16,
    draft_steps=15,
    save_steps=10,
)
QUICK = DistilConfig(epochs=2, learning_rate=5e-3, save_steps=4)


def changed(config: C, **changes: object) -> C:
    """The configuration with some settings changed, checked again."""
    return type(config)(**{**config.model_dump(), **changes})


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pair")
    train_toy_pair(folder, SMALL, seed=0)
    return folder


def tokenizer_files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.glob("tokenizer*")}


def rollouts(pair: Path, count: int, seed: int) -> Dataset:
    tokenizer = load_tokenizer(str(pair / "target"))
    rows = [
        {
            "prompt_ids": tokenizer(example.prompt)["input_ids"],
            "completion_ids": [*tokenizer(example.completion)["input_ids"], tokenizer.eos_token_id],
        }
        for example in examples("maths", count, seed=seed)
    ]
    return Dataset.from_list(rows)


def distilled(
    pair: Path, out: Path, config: DistilConfig = QUICK, sampling: SamplingConfig | None = None
) -> DistilResult:
    return distil(
        target=pair / "target",
        draft=pair / "draft",
        train=rollouts(pair, 48, seed=1),
        dev=rollouts(pair, 8, seed=2),
        out=out,
        config=config,
        sampling=sampling or SamplingConfig(),
        seed=0,
    )


def weights(folder: Path) -> dict[str, Tensor]:
    return load_file(folder / "model.safetensors")


def assert_same_weights(ours: Path, theirs: Path, tolerance: float = 0.0) -> None:
    actual, expected = weights(ours), weights(theirs)
    assert actual.keys() == expected.keys()
    for name in expected:
        torch.testing.assert_close(actual[name], expected[name], rtol=0.0, atol=tolerance)


def test_the_pair_is_two_ordinary_folders_with_one_vocabulary(pair: Path) -> None:
    assert sorted(path.name for path in pair.iterdir()) == ["draft", "target"]
    for name, layers in (("target", 2), ("draft", 1)):
        model = load_model(str(pair / name))
        assert model.config.num_hidden_layers == layers
        assert model.config.use_cache
        tokenizer = load_tokenizer(str(pair / name))
        assert model.generation_config.eos_token_id == tokenizer.eos_token_id
        assert model.generation_config.top_k == 0
        assert len(tokenizer) == model.config.vocab_size == SMALL.vocab_size
    assert tokenizer_files(pair / "draft") == tokenizer_files(pair / "target")
    settings = json.loads((pair / "target" / "tokenizer_config.json").read_text())
    assert settings["tokenizer_class"] == "PreTrainedTokenizerFast"


def test_a_finished_model_is_kept_and_a_missing_one_comes_out_the_same(
    pair: Path, tmp_path: Path
) -> None:
    (tmp_path / "target").symlink_to(pair / "target")
    before = (pair / "target" / "model.safetensors").stat()
    train_toy_pair(tmp_path, SMALL, seed=0)
    assert (pair / "target" / "model.safetensors").stat() == before
    assert_same_weights(tmp_path / "draft", pair / "draft")


def test_a_model_trained_with_other_settings_is_refused(pair: Path) -> None:
    with pytest.raises(ManifestError, match="target_steps: 40 -> 41"):
        train_toy_pair(pair, changed(SMALL, target_steps=41), seed=0)
    with pytest.raises(ManifestError, match="seed: 0 -> 1"):
        train_toy_pair(pair, SMALL, seed=1)


def test_distillation_raises_acceptance_on_rollouts_it_did_not_see(
    pair: Path, tmp_path: Path
) -> None:
    result = distilled(pair, tmp_path / "draft", changed(QUICK, epochs=6))
    assert result.acceptance_after > result.acceptance_before + 0.02
    assert result.steps == 36
    dev = rollouts(pair, 8, seed=2)
    assert result.positions == sum(map(len, dev["completion_ids"]))
    target, draft = load_model(str(pair / "target")), load_model(str(tmp_path / "draft"))
    stored = mean_acceptance(target, draft, dev, SamplingConfig())
    assert stored == pytest.approx(result.acceptance_after, abs=1e-6)
    assert draft.config.use_cache
    assert tokenizer_files(tmp_path / "draft") == tokenizer_files(pair / "target")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["draft"]
    # A finished stage is read, not run again.
    written = (tmp_path / "draft" / "model.safetensors").stat()
    assert distilled(pair, tmp_path / "draft", changed(QUICK, epochs=6)) == result
    assert (tmp_path / "draft" / "model.safetensors").stat() == written


@pytest.mark.parametrize(
    "sampling",
    [SamplingConfig(temperature=0.0), SamplingConfig(temperature=0.7, top_k=5, top_p=0.9)],
)
def test_distillation_learns_the_distribution_that_serving_uses(
    pair: Path, tmp_path: Path, sampling: SamplingConfig
) -> None:
    result = distilled(pair, tmp_path / "draft", changed(QUICK, epochs=3), sampling)
    assert result.acceptance_after > result.acceptance_before


def test_mean_acceptance_counts_completion_positions_only(pair: Path) -> None:
    target, draft = load_model(str(pair / "target")), load_model(str(pair / "draft"))
    rows = rollouts(pair, 3, seed=4)
    values = []
    for row in rows:
        ids = torch.tensor([row["prompt_ids"] + row["completion_ids"]])
        with torch.no_grad():
            p, q = target(ids).logits.softmax(-1)[0], draft(ids).logits.softmax(-1)[0]
        begin = len(row["prompt_ids"])
        for position in range(begin, ids.shape[1]):
            # The token at `position` was drawn from the distribution one row earlier.
            values.append(sum(map(min, p[position - 1].tolist(), q[position - 1].tolist())))
    expected = sum(values) / len(values)
    measured = mean_acceptance(target, draft, rows, SamplingConfig())
    assert measured == pytest.approx(expected, abs=1e-5)
    assert mean_acceptance(target, target, rows, SamplingConfig()) == pytest.approx(1.0, abs=1e-5)


def test_collator_labels_the_completion_and_hides_the_padding() -> None:
    rows = [
        {"prompt_ids": [5, 6], "completion_ids": [7]},
        {"prompt_ids": [8], "completion_ids": [9, 5, 6]},
    ]
    batch = collate(pad_id=1)(rows)
    assert batch["input_ids"].tolist() == [[5, 6, 7, 1], [8, 9, 5, 6]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1, 0], [1, 1, 1, 1]]
    assert batch["labels"].tolist() == [[IGNORED, IGNORED, 7, IGNORED], [IGNORED, 9, 5, 6]]


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
        rollouts(pair, 8, seed=1),
        out,
        changed(QUICK, epochs=1, batch_size=batch_size, accumulation=accumulation),
        SamplingConfig(),
        seed=0,
    )
    trainer.add_callback(recorder)
    trainer.train()
    assert trainer.state.global_step == 1
    return recorder.gradients


def test_accumulated_small_batches_equal_a_large_one(pair: Path, tmp_path: Path) -> None:
    """The gradient of 4 x 2 rollouts is that of 8 at once, up to the order of the sums.

    A gradient entry is a sum of n terms, one for each token position of the batch. float32 sums of
    the same terms in two orders differ by at most 2 (n - 1) u sum|term|, with u = eps / 2 (Higham,
    Accuracy and Stability of Numerical Algorithms, section 4.2), so by n eps sum|term|. The terms
    cannot be seen; the largest entry of the parameter's gradient stands for sum|term|. Rounding
    errors of either sign grow like sqrt(n) rather than n, which leaves a factor sqrt(n), about 34,
    for terms that cancel and for the rounding within them.
    Comparing weights instead would not do: Adam divides by the gradient's own size, so an entry
    that is all rounding error still moves a weight by a whole learning rate.
    """
    whole = step_gradients(pair, tmp_path / "whole", batch_size=8, accumulation=1)
    parts = step_gradients(pair, tmp_path / "parts", batch_size=2, accumulation=4)
    rows = rollouts(pair, 8, seed=1)
    terms = sum(len(row["prompt_ids"]) + len(row["completion_ids"]) for row in rows)
    tolerance = terms * torch.finfo(torch.float32).eps
    assert whole.keys() == parts.keys()
    for name, gradient in whole.items():
        assert gradient.abs().max() > 0
        difference = (gradient - parts[name]).abs().max() / gradient.abs().max()
        assert difference <= tolerance, (name, float(difference), tolerance)


def test_unusable_inputs_are_named(pair: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="objective: must be 'forward_kl', 'reverse_kl', 'js'"):
        read_config(DistilConfig, {"objective": "kl"})
    with pytest.raises(ValueError, match=r"batch_size: must be greater .* 1 \(got 0\)"):
        read_config(DistilConfig, {"batch_size": 0})
    assert get_args(Objective) == tuple(LOSSES)
    arguments = {
        "target": pair / "target",
        "draft": pair / "draft",
        "train": rollouts(pair, 2, seed=1),
        "dev": rollouts(pair, 2, seed=2),
        "config": QUICK,
        "sampling": SamplingConfig(),
        "seed": 0,
    }
    empty = arguments["dev"].select([])
    with pytest.raises(ValueError, match="dev must hold at least one rollout"):
        distil(**{**arguments, "dev": empty}, out=tmp_path / "draft")
    other = tmp_path / "other"
    train_toy_pair(other, changed(SMALL, vocab_size=390, target_steps=1, draft_steps=1), seed=0)
    with pytest.raises(VocabularyMismatchError):
        distil(**{**arguments, "draft": other / "draft"}, out=tmp_path / "draft")
    assert not (tmp_path / "draft").exists()


DRIVER = """
import sys
from pathlib import Path
import torch
from tests.test_distill import SMALL, DistilConfig, distilled, train_toy_pair
from accelerate import PartialState

torch.set_num_threads(1)
stage, folder, out, config = sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]), sys.argv[4]
if stage == "pair":
    train_toy_pair(out, SMALL, seed=0)
else:
    distilled(folder, out, DistilConfig(**__import__("json").loads(config)))
    print("engine", PartialState().distributed_type.value)
"""


def command(stage: str, pair: Path, out: Path, config: DistilConfig = QUICK) -> list[str]:
    driver = out.with_name("driver.py")
    driver.write_text(DRIVER)
    return [str(driver), stage, str(pair), str(out), config.model_dump_json()]


def environment(**extra: str) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1", **extra}


def kill_after_checkpoint(arguments: list[str], work: Path) -> None:
    """Start a run and `kill -9` it once a complete checkpoint lies in `work`."""
    with subprocess.Popen([sys.executable, *arguments], env=environment()) as process:
        while not list(work.glob("checkpoint-*/complete.json")):
            assert process.poll() is None, "the run ended before it could be killed"
            time.sleep(0.001)
        process.send_signal(signal.SIGKILL)


def tear(work: Path) -> None:
    """Leave what a kill in the middle of a save leaves: a newer checkpoint without its end."""
    (work / "checkpoint-9999").mkdir()
    (work / "checkpoint-9999" / "model.safetensors").write_bytes(b"torn")


def test_a_killed_pair_training_ends_in_the_same_weights(pair: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    kill_after_checkpoint(command("pair", pair, out), out / "target.training")
    assert not (out / "target").exists()
    tear(out / "target.training")
    train_toy_pair(out, SMALL, seed=0)
    for name in ("target", "draft"):
        assert_same_weights(out / name, pair / name)


def test_a_killed_distillation_ends_in_the_same_weights(pair: Path, tmp_path: Path) -> None:
    config = changed(QUICK, epochs=8)
    uninterrupted = distilled(pair, tmp_path / "whole", config)
    out = tmp_path / "out"
    kill_after_checkpoint(command("distil", pair, out, config), tmp_path / "out.training")
    assert not out.exists()
    with pytest.raises(ManifestError, match=r"config\."):
        distilled(pair, out, changed(config, learning_rate=1e-3))
    tear(tmp_path / "out.training")
    assert distilled(pair, out, config) == uninterrupted
    assert_same_weights(out, tmp_path / "whole")


TORCHRUN = "torch.distributed.run --nproc_per_node=2"
DEEPSPEED = (
    "accelerate.commands.launch --use_deepspeed --zero_stage=2 --mixed_precision=no "
    "--num_machines=1 --num_processes=2 --main_process_port=0 --dynamo_backend=no"
)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("launcher", "engine"), [(TORCHRUN, "MULTI_CPU"), (DEEPSPEED, "DEEPSPEED")]
)
def test_two_processes_train_the_same_draft_as_one(
    pair: Path, tmp_path: Path, launcher: str, engine: str
) -> None:
    alone = distilled(pair, tmp_path / "alone", QUICK)
    arguments = command("distil", pair, tmp_path / "two", changed(QUICK, batch_size=4))
    done = subprocess.run(
        [sys.executable, "-m", *launcher.split(), *arguments],
        env=environment(DS_ACCELERATOR="cpu"),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert f"engine {engine}" in done.stdout
    result = json.loads((tmp_path / "two" / "distillation.json").read_text())
    assert result["acceptance_after"] == pytest.approx(alone.acceptance_after, abs=1e-4)
