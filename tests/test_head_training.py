"""Training a head: it learns, and nothing about how it is run changes what it learns."""

from __future__ import annotations

import json
import math
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from safetensors.torch import load_file

from heads import AcceptanceHead
from heads.config import HeadConfig
from heads.loop import learning_rates
from heads.loss import soft_auroc
from heads.train import HeadResult, train_head
from specdata.config import Config, read_config
from specdata.errors import ConfigError, ManifestError, TrainingDivergedError
from specdata.storage.checkpoints import step_of
from tests.drive_head import LEVELS, drive, synthetic_rows, tiny_draft


class Sections(Config):
    """A file with a head section, as recipes read it."""

    head: HeadConfig


def changed(config: HeadConfig, **changes: object) -> HeadConfig:
    """The configuration with some settings changed, checked again."""
    return HeadConfig.model_validate({**config.model_dump(), **changes})


ROOT = Path(__file__).resolve().parent.parent
SCRIPT = Path(__file__).resolve().parent / "drive_head.py"
CONFIG = HeadConfig(
    depth=1, batch_size=16, micro_batch_size=8, learning_rate=3e-3, epochs=2, save_steps=3
)


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Sums are ordered alike here and in the processes that the tests start."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def reference(
    one_thread: None, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, HeadResult]:
    out = tmp_path_factory.mktemp("reference") / "head"
    return out, drive(keeping_checkpoints(out), CONFIG)


def keeping_checkpoints(out: Path) -> Path:
    """Let a run's checkpoints outlive it: it removes its own folder, not what a link leads to."""
    kept = out.with_name(f"{out.name}.checkpoints")
    kept.mkdir(parents=True)
    out.mkdir(parents=True)
    (out / "checkpoints").symlink_to(kept)
    return out


def environment(**changes: str) -> dict[str, str]:
    """This process's environment with one thread and without traces of another launcher."""
    inherited = {key: value for key, value in os.environ.items() if key[:11] != "ACCELERATE_"}
    return {**inherited, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", **changes}


def launch(profile: str, out: Path, *more: str, **changes: str) -> subprocess.CompletedProcess[str]:
    """Run the script in several processes, as launch/README.md says, and wait for its end."""
    command = [sys.executable, "-m", "accelerate.commands.launch"]
    command += ["--config_file", f"launch/{profile}.yaml", str(SCRIPT), "--out", str(out)]
    command += ["--epochs", str(CONFIG.epochs), "--save-steps", str(CONFIG.save_steps)]
    # Three rows a process are not a divisor of the batch of 16: rows must be filled up.
    command += ["--micro-batch-size", "3", *more]
    return subprocess.run(
        command,
        cwd=ROOT,
        env=environment(**changes),
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )


def metrics(out: Path) -> dict[str, object]:
    loaded: dict[str, object] = json.loads((out / "metrics.json").read_text())
    return loaded


def assert_same_training(out: Path, reference: tuple[Path, HeadResult]) -> None:
    losses = metrics(out)["losses"]
    torch.testing.assert_close(
        torch.tensor(losses), torch.tensor(reference[1].losses), rtol=1e-5, atol=1e-6
    )
    expected = load_file(reference[0] / "model.safetensors")
    weights = load_file(out / "model.safetensors")
    assert weights.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(weights[name], value, rtol=1e-4, atol=1e-5)


# --- learning


def test_a_head_learns_acceptance_that_the_hidden_state_reveals(tmp_path: Path) -> None:
    config = changed(CONFIG, depth=2, epochs=25, micro_batch_size=16, learning_rate=1e-2)
    result = drive(tmp_path, config, rows=64)
    levels = torch.from_numpy(LEVELS).double().repeat(100)
    best = soft_auroc(levels, levels)  # soft labels: even the truth scores below 1
    assert best is not None
    assert result.after.auroc is not None
    assert result.before.auroc is not None
    assert result.before.auroc < 0.7
    assert result.after.auroc > 0.97 * best
    assert result.after.kl < 0.06 < 0.3 < result.after.kl_constant
    assert result.after.kl < 0.1 * result.before.kl
    assert result.after.ece < 0.06
    # The raw output is biased by the loss; the probability that users get is not.
    assert result.after.kl_raw > 3 * result.after.kl
    head = AcceptanceHead.from_pretrained(tmp_path)
    assert head.rejection_weight == 6.0
    assert head.sampling == {"temperature": 1.0, "top_k": 50, "top_p": 1.0}


def test_the_draft_is_left_as_it_was(tmp_path: Path) -> None:
    draft = tiny_draft().bfloat16()
    draft.train()
    before = {name: value.clone() for name, value in draft.state_dict().items()}
    train_head(
        draft=draft,
        train=synthetic_rows(20, seed=1),
        dev=synthetic_rows(10, seed=2),
        out=tmp_path,
        config=CONFIG,
        seed=0,
    )
    assert draft.training
    assert all(parameter.grad is None for parameter in draft.parameters())
    assert all(torch.equal(before[name], value) for name, value in draft.state_dict().items())
    saved = load_file(tmp_path / "model.safetensors")
    assert {value.dtype for value in saved.values()} == {torch.float32}


def test_training_draws_nothing_from_the_global_generator(tmp_path: Path) -> None:
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    drive(tmp_path, changed(CONFIG, epochs=1), rows=20)
    assert torch.equal(torch.rand(3), expected)


# --- invariance


@pytest.mark.parametrize("micro_batch_size", [3, 16])
def test_accumulation_does_not_change_losses_or_weights(
    micro_batch_size: int, tmp_path: Path, reference: tuple[Path, HeadResult]
) -> None:
    result = drive(tmp_path, changed(CONFIG, micro_batch_size=micro_batch_size))
    assert_same_training(tmp_path, reference)
    assert result.after.kl == pytest.approx(reference[1].after.kl, rel=1e-4)


def test_the_seed_decides_everything(tmp_path: Path, reference: tuple[Path, HeadResult]) -> None:
    drive(tmp_path / "same", CONFIG)
    other = drive(tmp_path / "other", CONFIG, seed=8)
    weights = (reference[0] / "model.safetensors").read_bytes()
    assert (tmp_path / "same" / "model.safetensors").read_bytes() == weights
    assert other.losses != reference[1].losses
    # Heads of different seeds are compared on the same mixing of the dev rows.
    assert other.after.tokens == reference[1].after.tokens
    assert other.after.kl_constant == reference[1].after.kl_constant


def test_a_trainer_in_half_precision_before_does_not_change_the_head(
    tmp_path: Path, reference: tuple[Path, HeadResult]
) -> None:
    AcceleratorState._reset_state(reset_partial_state=True)  # accelerate keeps one a process
    try:
        Accelerator(mixed_precision="bf16", cpu=True)
        drive(tmp_path, CONFIG)
    finally:
        AcceleratorState._reset_state(reset_partial_state=True)
    weights = (reference[0] / "model.safetensors").read_bytes()
    assert (tmp_path / "model.safetensors").read_bytes() == weights


@pytest.mark.slow
def test_two_processes_train_the_same_head_as_one(
    tmp_path: Path, reference: tuple[Path, HeadResult]
) -> None:
    done = launch("cpu-2", tmp_path)
    assert done.returncode == 0, done.stderr
    assert (metrics(tmp_path)["engine"], metrics(tmp_path)["processes"]) == ("ddp", 2)
    assert_same_training(tmp_path, reference)
    assert done.stdout == ""
    assert "Warning" not in done.stderr
    assert done.stderr.count(" 0/8 step") == 1  # one progress line, the main process's


@pytest.mark.parametrize(
    "stage",
    [pytest.param(2, marks=pytest.mark.exhaustive), pytest.param(3, marks=pytest.mark.slow)],
)
def test_deepspeed_shards_and_trains_the_same_head_and_one_process_can_go_on(
    stage: int, tmp_path: Path, reference: tuple[Path, HeadResult]
) -> None:
    out = keeping_checkpoints(tmp_path / "two")
    done = launch(f"zero{stage}", out, DS_ACCELERATOR="cpu")
    assert done.returncode == 0, done.stderr
    assert metrics(out)["engine"] == f"deepspeed-zero{stage}"
    assert metrics(out)["processes"] == 2
    assert_same_training(out, reference)
    assert "Warning" not in done.stderr
    # Its last checkpoint is of step 6 of 8.
    shutil.copytree(out / "checkpoints", tmp_path / "one" / "checkpoints")
    assert drive(tmp_path / "one", CONFIG).engine == "single"
    assert_same_training(tmp_path / "one", reference)


@pytest.mark.slow
def test_deepspeed_that_was_silently_lost_is_an_error() -> None:
    done = subprocess.run(
        [sys.executable, "-c", "from specdata.processes import join_processes; join_processes()"],
        cwd=ROOT,
        env=environment(ACCELERATE_USE_DEEPSPEED="true", ACCELERATE_USE_CPU="true"),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode != 0
    assert "asked for DeepSpeed but accelerate runs without it" in done.stderr


# --- resuming


def test_a_checkpoint_is_gone_on_from_and_goes_when_the_head_is_done(
    reference: tuple[Path, HeadResult], tmp_path: Path
) -> None:
    kept = {path.name for path in (reference[0] / "checkpoints").glob("checkpoint-*")}
    assert kept == {"checkpoint-3", "checkpoint-6"}
    shutil.copytree(reference[0] / "checkpoints", tmp_path / "checkpoints")
    state = tmp_path / "checkpoints" / "checkpoint-6" / "state.safetensors"
    state.write_bytes(state.read_bytes()[:-1])  # so it is gone on from step 3
    assert drive(tmp_path, CONFIG) == reference[1]
    expected = (reference[0] / "model.safetensors").read_bytes()
    assert (tmp_path / "model.safetensors").read_bytes() == expected
    assert not (tmp_path / "checkpoints").exists()


def test_a_head_that_diverges_ends_with_a_message_and_keeps_the_last_good_checkpoint(
    tmp_path: Path, reference: tuple[Path, HeadResult]
) -> None:
    wild = changed(CONFIG, depth=3, learning_rate=1e9, warmup_ratio=0.9, save_steps=1)
    with pytest.raises(TrainingDivergedError) as refusal:
        drive(tmp_path, wild)
    checkpoints = sorted((tmp_path / "checkpoints").glob("checkpoint-*"), key=step_of)
    assert str(refusal.value).startswith(
        f"acceptance head: the loss is inf in step {len(checkpoints) + 1}, so the training "
        f"diverged ({checkpoints[-1]} is kept): lower its learning_rate, 1e+09, to a tenth"
    )
    for path in checkpoints:
        assert all(v.isfinite().all() for v in load_file(path / "state.safetensors").values())
    assert not (tmp_path / "metrics.json").exists()
    assert not (tmp_path / "model.safetensors").exists()
    assert str(refusal.value).endswith(f"delete {tmp_path} or choose another output folder")
    shutil.rmtree(tmp_path)  # as the message says
    assert drive(tmp_path, CONFIG) == reference[1]


def test_a_head_that_knows_its_rows_by_heart_and_nothing_else_is_refused(tmp_path: Path) -> None:
    """Acceptance is a coin's: there is nothing to learn but the rows."""
    draw = np.random.default_rng(0)

    def coins(row: dict[str, Any]) -> dict[str, Any]:
        return {
            name: draw.integers(0, 2, len(row[name])).astype(float).tolist()
            for name in ("accept_prob", "overlap")
        }

    train, dev = (
        synthetic_rows(count, seed).map(coins, load_from_cache_file=False)
        for count, seed in ((4, 0), (8, 1))
    )
    config = HeadConfig(kind="immediate", epochs=120, learning_rate=3e-2, save_steps=50)
    with pytest.raises(TrainingDivergedError) as refusal:
        train_head(draft=tiny_draft(), train=train, dev=dev, out=tmp_path, config=config, seed=0)
    assert " so it learned its rows by heart (" in str(refusal.value)
    assert "is kept): give it more than 4 rows, or a head.epochs below 120, and " in str(
        refusal.value
    )
    assert not list(tmp_path.glob("**/metrics.json"))


def test_a_finished_run_is_not_trained_again(
    reference: tuple[Path, HeadResult], tmp_path: Path
) -> None:
    shutil.copytree(reference[0], tmp_path / "head")
    written = (tmp_path / "head" / "model.safetensors").stat().st_mtime_ns
    # Neither setting decides what is learned, so both may change between the two calls.
    again = drive(tmp_path / "head", changed(CONFIG, micro_batch_size=5, save_steps=50))
    assert again == reference[1]
    assert (tmp_path / "head" / "model.safetensors").stat().st_mtime_ns == written


@pytest.mark.parametrize("unfinished", [False, True])
def test_a_folder_of_another_run_is_refused(
    reference: tuple[Path, HeadResult], unfinished: bool, tmp_path: Path
) -> None:
    shutil.copytree(reference[0], tmp_path / "head")
    if unfinished:
        (tmp_path / "head" / "metrics.json").unlink()
    for config, rows, seed in [
        (changed(CONFIG, mixing=0.2), 50, 7),
        (CONFIG, 49, 7),
        (CONFIG, 50, 8),
    ]:
        with pytest.raises(ManifestError, match="choose another output folder"):
            drive(tmp_path / "head", config, rows=rows, seed=seed)


# --- what cannot be used


def test_rows_without_labels_are_refused(tmp_path: Path) -> None:
    rows = synthetic_rows(4, seed=1).remove_columns("accept_prob")
    with pytest.raises(ValueError, match="accept_prob missing; label the rollouts first"):
        train_head(draft=tiny_draft(), train=rows, dev=rows, out=tmp_path, config=CONFIG, seed=0)


def test_rows_whose_prompts_fill_the_context_are_counted_or_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="none of the 50 train rows has a completion token"):
        drive(tmp_path, changed(CONFIG, max_length=2))
    result = drive(tmp_path, changed(CONFIG, max_length=5))  # prompts have 2 to 5 tokens
    assert 0 < result.skipped_rows < 80
    assert result.train_rows < 50


@pytest.mark.parametrize(
    "change",
    [{"batch_size": 0}, {"mixing": 1.0}, {"rejection_weight": 0.0}, {"depth": -1}, {"epochs": 0}],
)
def test_settings_out_of_range_are_refused_by_name(change: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match=rf"head\.{next(iter(change))}: must be "):
        read_config(Sections, {"head": {**CONFIG.model_dump(), **change}})


@pytest.mark.parametrize("steps", [1, 2, 33, 3000])
@pytest.mark.parametrize("warmup_ratio", [0.0, 0.03, 0.2, 0.9])
def test_the_schedule_is_the_closed_form(steps: int, warmup_ratio: float) -> None:
    warmup = math.ceil(warmup_ratio * steps)
    expected = [
        (step + 1) / warmup
        if step < warmup
        else 0.5 * (1.0 + math.cos(math.pi * (step - warmup) / max(1, steps - warmup)))
        for step in range(steps)
    ]
    rates = learning_rates(steps, changed(CONFIG, learning_rate=1.0, warmup_ratio=warmup_ratio))
    assert rates[:-1] == pytest.approx(expected, abs=1e-12)
