"""Train an acceptance head on a frozen draft: as a script, under accelerate or under DeepSpeed.

The draft runs at every step, outside DDP and DeepSpeed, and gets no gradient.
"""

from __future__ import annotations

import hashlib
import math
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import datasets
import torch

from heads.batches import LabelRows, micro_batch_count
from heads.checkpoint import Checkpoint, latest_checkpoint
from heads.config import HeadConfig
from heads.engine import (
    TrainingEngine,
    deprecations_of_deepspeed_hidden,
    prepare,
    start_accelerator,
)
from heads.inputs import logits_of_states
from heads.loop import Training
from heads.loss import HeadMetrics
from heads.model import AcceptanceHead
from specdata.lm_head import check_hidden_states
from specdata.processes import is_main
from specdata.sampling import SamplingConfig
from specdata.storage.files import write_json
from specdata.storage.resume import Settings, defaults_of, read_record

if TYPE_CHECKING:
    from transformers import PreTrainedModel

METRICS_NAME = "metrics.json"
CHECKPOINTS_NAME = "checkpoints"


@dataclass(frozen=True, slots=True)
class HeadResult:
    """What a training run measured; written to `metrics.json` beside the head.

    Attributes:
        before: the untrained head on the dev rows.
        after: the trained head on the same tokens.
        losses: training loss of every step.
        steps: updates done.
        train_rows: rows trained on.
        skipped_rows: train and dev rows whose prompt alone fills max_length.
        processes: how many trained.
        engine: "single", "ddp" or "deepspeed-zeroN", as observed.
    """

    before: HeadMetrics
    after: HeadMetrics
    losses: tuple[float, ...]
    steps: int
    train_rows: int
    skipped_rows: int
    processes: int
    engine: str


def train_head(
    *,
    draft: PreTrainedModel,
    train: datasets.Dataset,
    dev: datasets.Dataset,
    out: Path,
    config: HeadConfig,
    seed: int,
    sampling: SamplingConfig | None = None,
) -> HeadResult:
    """Train a head, save it to `out`, and measure it on held-out rows.

    Runs as a plain script, under `accelerate launch`, and under DeepSpeed ZeRO 1 to 3. A killed
    run continues from its last checkpoint in `out/checkpoints` when called again with the same
    arguments; a finished one returns its result at once. With several nodes, `out` must be on a
    file system that they share.

    Args:
        draft: the frozen draft; its weights and its precision are left alone.
        train: labelled rows, the columns of `heads.mixing.LabelRow`.
        dev: held-out labelled rows.
        out: folder for the head and `metrics.json` (written last), of checkpoints until then.
        config: settings.
        seed: of initial weights, order and mixing. The mixing of dev rows never changes.
        sampling: the distribution under which the labels were made; recorded with the head.

    Returns:
        What was measured.

    Raises:
        ValueError: if rows or draft cannot be used.
        ManifestError: if `out` holds a head of other settings, rows or draft, or its checkpoints
            are damaged.
        TrainingDivergedError: on every process, if a loss, weight or metric is not finite, or the
            trained head predicts worse than the untrained one and than a coin.
        RuntimeError: if the launcher's DeepSpeed or processes were silently lost.
    """
    data = (
        LabelRows.read("train", train, config.max_length),
        LabelRows.read("dev", dev, config.max_length),
    )
    settings = _settings(config, seed, draft, data, out)
    finished = _finished(out, settings)
    if finished is not None:
        if is_main():
            _remove_checkpoints(out)  # of a run killed right before its end
        return finished
    was_training = draft.training
    try:
        with deprecations_of_deepspeed_hidden():
            return _train(draft.eval(), data, out, config, seed, sampling, settings)
    finally:
        draft.train(was_training)


def _train(
    draft: PreTrainedModel,
    data: tuple[LabelRows, LabelRows],
    out: Path,
    config: HeadConfig,
    seed: int,
    sampling: SamplingConfig | None,
    settings: Settings,
) -> HeadResult:
    """Train on the first rows, measure on the second, save."""
    joined = torch.distributed.is_initialized()  # then leaving is up to whoever joined
    head = _new_head(draft, config, seed, sampling)
    engine, checkpoint = _start(draft, head, config, out, settings)
    training = Training(
        engine,
        draft,
        config,
        seed,
        settings,
        out / CHECKPOINTS_NAME,
        logits_of_states(draft),
    )
    before, losses = training.start(checkpoint, data[1])
    losses = training.train(data[0], before, losses)
    result = HeadResult(
        before=before,
        after=training.evaluate(data[1]),
        losses=tuple(losses),
        steps=len(losses),
        train_rows=len(data[0]),
        skipped_rows=data[0].skipped + data[1].skipped,
        processes=engine.accelerator.num_processes,
        engine=engine.name,
    )
    weights = training.whole_weights()
    if not all(
        math.isfinite(value) for value in asdict(result.after).values() if value is not None
    ):
        raise training.diverged("what it predicts after the last step is not finite")
    # A coin, which predicts one half, has a KL of at most ln 2.
    if result.after.kl > max(math.log(2.0), before.kl):
        raise training.diverged(
            "its predictions are worse than a coin's after the last step (KL "
            f"{result.after.kl:.3g} on held-out tokens, {before.kl:.3g} untrained)"
        )
    if engine.accelerator.is_main_process:
        final = _new_head(draft, config, seed, sampling)
        final.load_state_dict(weights)
        final.save_pretrained(out)
        write_json(out / METRICS_NAME, {"settings": settings.values, **asdict(result)})
        _remove_checkpoints(out)
    engine.close(leave=not joined)
    return result


def _remove_checkpoints(out: Path) -> None:
    shutil.rmtree(out / CHECKPOINTS_NAME, ignore_errors=True)


def _start(
    draft: PreTrainedModel, head: AcceptanceHead, config: HeadConfig, out: Path, settings: Settings
) -> tuple[TrainingEngine, Checkpoint | None]:
    """Join the other processes and wrap the head, with the last checkpoint's weights if any."""
    accelerator = start_accelerator()
    checkpoint = latest_checkpoint(out / CHECKPOINTS_NAME, settings)
    accelerator.wait_for_everyone()  # no process writes before all have looked
    draft.to(accelerator.device)
    check_hidden_states(draft)
    if checkpoint is not None:
        head.load_state_dict(checkpoint.weights)
    engine = prepare(
        accelerator,
        head,
        micro_batch_size=config.micro_batch_size,
        accumulation=micro_batch_count(
            config.batch_size, size=config.micro_batch_size, processes=accelerator.num_processes
        ),
        max_norm=config.max_grad_norm,
    )
    return engine, checkpoint


def _new_head(
    draft: PreTrainedModel, config: HeadConfig, seed: int, sampling: SamplingConfig | None
) -> AcceptanceHead:
    with torch.random.fork_rng(devices=[]):  # layers initialise from the global generator
        torch.manual_seed(seed)
        return AcceptanceHead(
            hidden_size=draft.get_output_embeddings().weight.shape[-1],
            depth=config.depth,
            rejection_weight=config.rejection_weight,
            draft=draft.name_or_path or None,
            sampling=None if sampling is None else asdict(sampling),
        )


def _settings(
    config: HeadConfig,
    seed: int,
    draft: PreTrainedModel,
    data: tuple[LabelRows, LabelRows],
    out: Path,
) -> Settings:
    """All that decides the result: a folder belongs to one such value."""
    return Settings(
        {
            "config": config.model_dump(exclude={"micro_batch_size", "save_steps"}),  # these do not
            "seed": seed,
            "draft": weights_fingerprint(draft),
            "train": data[0].fingerprint,
            "dev": data[1].fingerprint,
        },
        defaults_of(HeadConfig, "config"),
        remedy=f"delete {out} or choose another output folder",
    )


def weights_fingerprint(model: torch.nn.Module) -> str:
    """Hex digest of a sample of every parameter: changes whenever the model was trained further."""
    digest = hashlib.sha256()
    for name, parameter in model.named_parameters():
        digest.update(name.encode())
        digest.update(parameter.detach().flatten()[:1024].float().cpu().numpy().tobytes())
    return digest.hexdigest()


def _finished(out: Path, settings: Settings) -> HeadResult | None:
    path = out / METRICS_NAME
    if not path.is_file():
        return None
    stored = read_record(path, ("settings",), settings.remedy)
    settings.check(stored.pop("settings"), out)
    stored["before"], stored["after"] = (HeadMetrics(**stored[k]) for k in ("before", "after"))
    stored["losses"] = tuple(stored["losses"])
    return HeadResult(**stored)
