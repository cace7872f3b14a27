"""Train an acceptance head on a frozen draft: as a script, under accelerate or under DeepSpeed.

The draft runs at every step, or once if what it says is stored (`heads.contexts.FeatureCache`),
outside DDP and DeepSpeed, and gets no gradient.
"""

from __future__ import annotations

import hashlib
import logging
import math
import shutil
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

import datasets
import torch
from accelerate import Accelerator
from torch import Tensor

from heads.batches import LabelRows, micro_batch_count
from heads.config import HeadConfig
from heads.contexts import Context, FeatureCache, MixedContext, TargetContext, feature_scales
from heads.immediate import ImmediateHead
from heads.inputs import logits_of_states
from heads.loop import (
    Checkpoint,
    Training,
    deprecations_of_deepspeed_hidden,
    main_point,
    prepare,
    start_accelerator,
)
from heads.loss import HeadMetrics
from heads.mixing import COLUMNS
from heads.model import AcceptanceHead, BaseHead
from heads.probe import probe_of
from heads.target_context import TargetBatch, check_tree_states, draws_of
from specdata.lm_head import check_hidden_states
from specdata.models import positions
from specdata.processes import is_main
from specdata.sampling import SamplingConfig
from specdata.storage.checkpoints import checkpoint_to_resume
from specdata.storage.files import write_json
from specdata.storage.resume import Settings, read_record
from specdata.storage.schema import MORE_DRAWS

if TYPE_CHECKING:
    from transformers import PreTrainedModel

logger = logging.getLogger(__name__)

METRICS_NAME = "metrics.json"
CHECKPOINTS_NAME = "checkpoints"
STATES_NAME = "states"
LOGS_NAME = "logs"
RUN_ALONE = ("micro_batch_size", "save_steps")
Scales = Mapping[str, tuple[float, float]]
# Rows by which what a head reads is scaled.
SCALED_ROWS = 128


@dataclass(frozen=True, slots=True)
class HeadResult:
    """The measurements of a training run; written to `metrics.json` beside the head.

    Attributes:
        before: the untrained head on the dev rows, when tokens are drawn if it can be asked then.
        after: the trained head on the same tokens.
        losses: training loss of every step.
        steps: updates done.
        train_rows: rows trained on.
        skipped_rows: train and dev rows whose prompt alone fills max_length.
        processes: how many trained.
        engine: "single", "ddp" or "deepspeed-zeroN", as observed.
        by_decision_point: the trained head at each of its decision points, "before" the token is
            drawn, when it is "drawn" and when the draft has "consumed" it.
        labels: positions with a label, in train and dev rows.
        cut_labels: those of them beyond max_length or the draft's context.
        epochs: passes over the training rows.
        learning_rate: the largest.
    """

    before: HeadMetrics
    after: HeadMetrics
    losses: tuple[float, ...]
    steps: int
    train_rows: int
    skipped_rows: int
    processes: int
    engine: str
    by_decision_point: Mapping[str, HeadMetrics]
    labels: int
    cut_labels: int
    epochs: int
    learning_rate: float


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
        train: labelled rows, the columns of `heads.mixing.LabelRow`: of kind immediate with
            `overlap`, and with more draws a position if they hold any.
        dev: held-out labelled rows.
        out: folder for the head and `metrics.json` (written last), of checkpoints until then.
        config: settings.
        seed: of initial weights, order and mixing, or simulated rounds. How dev rows are read never
            changes.
        sampling: the distribution under which the labels were made; recorded with the head.

    Returns:
        What was measured.

    Raises:
        ValueError: if rows or draft cannot be used.
        ManifestError: if `out` holds a head of other settings, rows or draft, or its checkpoints
            are damaged.
        TrainingDivergedError: on every process, if a loss, weight or metric is not finite, or the
            trained head predicts worse than the untrained one and than chance.
        RuntimeError: if the launcher's DeepSpeed or processes were silently lost.
    """
    required, optional = COLUMNS, ()
    if config.kind == "immediate":
        required, optional = (*COLUMNS, "overlap"), MORE_DRAWS.names
    longest = longest_text(draft, config)
    data = (
        LabelRows.read("train", train, longest, required=required, optional=optional),
        LabelRows.read("dev", dev, longest, required=required, optional=optional),
    )
    settings = head_settings(config, seed, draft, data, out)
    finished = finished_head(out, settings)
    if finished is not None:
        if is_main():
            _remove_leftovers(out)  # of a run killed right before its end
        return finished
    if is_main():
        _tell_of_cut(data, longest, config)
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
    training, checkpoint, scales = _start(draft, data, config, seed, sampling, out, settings)
    engine, head = training.engine, training.engine.head
    before, losses = training.start(checkpoint, data[1])
    losses = training.train(data[0], before, losses)
    by_decision_point = training.evaluate(data[1])
    result = HeadResult(
        before=before,
        after=by_decision_point[main_point(head.decision_points)],
        losses=tuple(losses),
        steps=len(losses),
        train_rows=len(data[0]),
        skipped_rows=data[0].skipped + data[1].skipped,
        processes=engine.accelerator.num_processes,
        engine=engine.name,
        by_decision_point={
            point.name.lower(): metrics for point, metrics in by_decision_point.items()
        },
        labels=data[0].labels + data[1].labels,
        cut_labels=data[0].cut + data[1].cut,
        epochs=config.passes(len(data[0])),
        learning_rate=training.learning_rate,
    )
    training.log_metrics(by_decision_point, len(losses))
    weights = training.whole_weights()
    if not all(
        math.isfinite(value) for value in asdict(result.after).values() if value is not None
    ):
        raise training.diverged("what it predicts after the last step is not finite")
    # Chance, which predicts one half, has a KL of at most ln 2.
    if result.after.kl > max(math.log(2.0), before.kl):
        error = training.diverged(
            "its predictions are worse than chance after the last step (KL "
            f"{result.after.kl:.3g} on held-out tokens, {before.kl:.3g} untrained)"
        )
        last = fmean(losses[-max(1, len(losses) // 10) :])
        if result.epochs > 1 and last < min(losses[0], result.after.kl / 2):
            error.by_heart = (
                f"give it more than {len(data[0]):,} rows, or a head.epochs below {result.epochs}"
            )
        raise error
    if engine.accelerator.is_main_process:
        final = new_head(draft, config, seed, sampling, scales)
        final.load_state_dict(weights)
        final.save_pretrained(out)
        write_json(out / METRICS_NAME, {"settings": settings.values, **asdict(result)})
        _remove_leftovers(out)
    engine.close(leave=not joined)
    return result


def _remove_leftovers(out: Path) -> None:
    for name in (CHECKPOINTS_NAME, STATES_NAME):
        shutil.rmtree(out / name, ignore_errors=True)


def _tell_of_cut(data: tuple[LabelRows, LabelRows], longest: int, config: HeadConfig) -> None:
    """Say how many labels are lost to a maximum length."""
    labels, cut = sum(rows.labels for rows in data), sum(rows.cut for rows in data)
    if cut:
        given = longest == config.max_length
        logger.warning(
            "%s of %d tokens cuts off %d of %d labels%s",
            "head.max_length" if given else "the draft's context",
            longest,
            cut,
            labels,
            ": leave it out to learn from whole rows" if given else "",
        )


def _start(
    draft: PreTrainedModel,
    data: tuple[LabelRows, LabelRows],
    config: HeadConfig,
    seed: int,
    sampling: SamplingConfig | None,
    out: Path,
    settings: Settings,
) -> tuple[Training, Checkpoint | None, Scales | None]:
    """Join the other processes and wrap the head, with the last checkpoint's weights if any."""
    accelerator = start_accelerator(config.report_to, out / LOGS_NAME)
    folder = out / CHECKPOINTS_NAME
    newest = checkpoint_to_resume(folder, settings)
    checkpoint = None if newest is None else Checkpoint.read(newest)
    accelerator.wait_for_everyone()  # no process writes before all have looked
    if draft.device != accelerator.device:  # which packed weights refuse even where they are there
        draft.to(accelerator.device)
    check_hidden_states(draft)
    head = new_head(draft, config, seed, sampling)
    scales = None
    if isinstance(head, ImmediateHead):
        if config.mixing is None and "hidden" in head.reads:
            check_tree_states(draft, max(rows.longest for rows in data))
        scales = scales_of(draft, head, data[0], config, seed)
        head = new_head(draft, config, seed, sampling, scales)
    context: Context
    if config.mixing is None:
        context = target_context(draft, head, config, seed)
        if config.cache == "disk":
            cache = _cached(accelerator, context, data[0], config, out / STATES_NAME)
            context = replace(context, cache=cache)
    else:
        to_logits, longest = logits_of_states(draft), longest_text(draft, config)
        context = MixedContext(head, draft, to_logits, config.mixing, longest, seed)
    if checkpoint is not None:
        head.load_state_dict(checkpoint.weights)
    if config.report_to != "none":
        shown = {
            name: value if isinstance(value, int | float | str) else str(value)
            for name, value in settings.values["config"].items()
        }
        accelerator.init_trackers("acceptance-head", config=shown)
    engine = prepare(
        accelerator,
        head,
        micro_batch_size=config.micro_batch_size,
        accumulation=micro_batch_count(
            config.batch_size, size=config.micro_batch_size, processes=accelerator.num_processes
        ),
        max_norm=config.max_grad_norm,
        weight_decay=config.weight_decay,
    )
    config = config.model_copy(update={"learning_rate": config.peak_rate(head.hidden_size)})
    return Training(engine, context, config, seed, settings, folder), checkpoint, scales


def longest_text(draft: PreTrainedModel, config: HeadConfig) -> int:
    """Tokens of prompt and completion that are kept of a row."""
    return min(config.max_length or sys.maxsize, positions(draft.config))


def target_context(
    draft: PreTrainedModel, head: BaseHead, config: HeadConfig, seed: int
) -> TargetContext:
    """The target's own text as the context in which tokens are judged."""
    longest = longest_text(draft, config)
    return TargetContext(head, draft, logits_of_states(draft), config.draws, longest, seed)


def scales_of(
    draft: PreTrainedModel, head: ImmediateHead, rows: LabelRows, config: HeadConfig, seed: int
) -> Scales:
    """The scales of what it reads: by some of the rows, the same ones in every process."""
    reader = ImmediateHead(
        hidden_size=head.hidden_size,
        embedding_size=head.embedding_size,
        reads=["hidden_before", *(name for name in head.reads if name != "hidden_before")],
        decision_points=["drawn"],
        sampling=head.sampling,
    )
    context = target_context(draft, reader, config, seed)
    step = max(1, len(rows) // SCALED_ROWS)
    some = [context.row(rows[index], -1, 0) for index in range(0, len(rows), step)]
    size = config.micro_batch_size
    parts = [some[start : start + size] for start in range(0, len(some), size)]
    scales = feature_scales(
        [context.inputs(TargetBatch.of(part).to(context.draft.device)) for part in parts]
    )
    return {"hidden": scales["hidden_before"], **scales}


def _cached(
    accelerator: Accelerator,
    context: TargetContext,
    rows: LabelRows,
    config: HeadConfig,
    folder: Path,
) -> FeatureCache:
    """The draft's states along the training rows, on the disk; made here if they are not there."""
    device = context.draft.device

    def features(here: range) -> dict[str, Tensor]:
        pieces = []
        for start in range(here.start, here.stop, config.micro_batch_size):
            part = range(start, min(start + config.micro_batch_size, here.stop))
            held = [rows[index] for index in part]
            batch = TargetBatch.of([context.all_of(row, range(draws_of(row))) for row in held])
            pieces.append(context.of_draft(batch.to(device)))
        return {name: torch.cat([piece[name] for piece in pieces]) for name in pieces[0]}

    cache = FeatureCache.of(folder, rows.sizes)
    cache.fill(accelerator, features)
    return cache


def new_head(
    draft: PreTrainedModel,
    config: HeadConfig,
    seed: int,
    sampling: SamplingConfig | None,
    scales: Scales | None = None,
) -> BaseHead:
    """An untrained head of the kind that is asked for, the same one for the same seed."""
    embedding_size = int(draft.get_input_embeddings().weight.shape[-1])
    hidden_size = int(draft.get_output_embeddings().weight.shape[-1])
    provenance: dict[str, Any] = {
        "draft": draft.name_or_path or None,
        "sampling": None if sampling is None else asdict(sampling),
        "probe": probe_of(draft),
    }
    with torch.random.fork_rng(devices=[]):  # layers initialise from the global generator
        torch.manual_seed(seed)
        if config.kind == "specdec++":
            return AcceptanceHead(
                hidden_size=hidden_size,
                depth=config.depth,
                rejection_weight=config.rejection_weight,
                **provenance,
            )
        return ImmediateHead(
            hidden_size=hidden_size,
            embedding_size=embedding_size,
            reads=config.features,
            decision_points=config.decision_points,
            width=config.width,
            depth=config.depth,
            scales=scales,
            **provenance,
        )


def head_settings(
    config: HeadConfig,
    seed: int,
    draft: PreTrainedModel,
    data: tuple[LabelRows, LabelRows],
    out: Path,
) -> Settings:
    """All that decides the result: a folder belongs to one such value."""
    decisive = config.decisive()
    return Settings(
        {
            # How it is run does not decide what is learned.
            "config": {k: v for k, v in decisive.items() if k not in RUN_ALONE},
            "seed": seed,
            "draft": weights_fingerprint(draft),
            "train": data[0].fingerprint,
            "dev": data[1].fingerprint,
        },
        f"delete {out} or choose another output folder",
    )


def weights_fingerprint(model: torch.nn.Module) -> str:
    """Hex digest of a sample of every parameter: changes whenever the model was trained further."""
    digest = hashlib.sha256()
    for name, parameter in model.named_parameters():
        digest.update(name.encode())
        digest.update(parameter.detach().flatten()[:1024].float().cpu().numpy().tobytes())
    return digest.hexdigest()


def finished_head(out: Path, settings: Settings) -> HeadResult | None:
    """The measurements of the head in a folder; None if it is not done there.

    Raises:
        ManifestError: if it is a head of other settings.
    """
    path = out / METRICS_NAME
    if not path.is_file():
        return None
    stored = read_record(path, ("settings",), settings.remedy)
    settings.check(stored.pop("settings"), out)
    stored["before"], stored["after"] = (HeadMetrics(**stored[k]) for k in ("before", "after"))
    stored["losses"] = tuple(stored["losses"])
    stored["by_decision_point"] = {
        name: HeadMetrics(**m) for name, m in stored["by_decision_point"].items()
    }
    return HeadResult(**stored)
