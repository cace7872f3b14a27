"""Train several heads on the same stream of rows, with one forward of the draft for all of them.

The draft takes most of the time of a step, and heads that differ in their layers, their loss or
what they read of a token see the same rows in the same order. Each head becomes what
`heads.train.train_head` would make of it alone, to rounding, in a folder of the same form: a head
that is finished there is kept, whichever trained it. One process only.
"""

from __future__ import annotations

import hashlib
import json
import math
import shutil
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import datasets
import torch
from torch import Tensor

from heads.base import BaseHead
from heads.batches import LabelRows, micro_batch_count, micro_batches
from heads.checkpoint import MOMENTS, Checkpoint, latest_checkpoint, newest_file, save_checkpoint
from heads.config import HeadConfig
from heads.contexts import Context, MixedContext, Questions
from heads.immediate import ImmediateHead
from heads.inputs import Moment, logits_of_states
from heads.loop import learning_rates, main_moment
from heads.loss import HeadMetrics, head_metrics, loss_mass, weighted_bce
from heads.train import (
    CHECKPOINTS_NAME,
    METRICS_NAME,
    HeadResult,
    Scales,
    finished_head,
    head_settings,
    longest_text,
    new_head,
    read_rows,
    refuse_a_coin,
    scales_of,
    target_context,
)
from heads.tree import check_tree_states
from specdata.errors import ConfigError, TrainingDivergedError
from specdata.lm_head import check_hidden_states
from specdata.sampling import SamplingConfig
from specdata.storage.files import write_json
from specdata.storage.resume import Settings
from specdata.terminal import progress

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# Settings that decide which rows the heads read, in which order and in which context.
SHARED = (
    "kind",
    "mixing",
    "draws",
    "epochs",
    "batch_size",
    "micro_batch_size",
    "max_length",
    "save_steps",
)


@dataclass(slots=True)
class _Pupil:
    """One head of a group and what trains it.

    Attributes:
        name: of its folder.
        head: its layers.
        config: its settings, with a learning rate.
        settings: all that its weights depend on.
        optimizer: AdamW.
        losses: of the steps that are done.
        before: what the untrained head is worth.
    """

    name: str
    head: BaseHead
    config: HeadConfig
    settings: Settings
    optimizer: torch.optim.AdamW
    losses: list[float]
    before: HeadMetrics | None = None


def train_heads(
    *,
    draft: PreTrainedModel,
    train: datasets.Dataset,
    dev: datasets.Dataset,
    out: Path,
    configs: Mapping[str, HeadConfig],
    seed: int,
    sampling: SamplingConfig | None = None,
) -> dict[str, HeadResult]:
    """Train a head for each name and save it to `out/NAME`, as `train_head` does for one.

    A killed call goes on from its last checkpoint when it is called again with the same arguments.

    Args:
        draft: the frozen draft.
        train: labelled rows.
        dev: held-out labelled rows.
        out: folder of the heads' folders.
        configs: settings by name; those in `SHARED` must be equal, and `cache` be none.
        seed: of initial weights, order and mixing.
        sampling: the distribution under which the labels were made; recorded with each head.

    Returns:
        What was measured of each head.

    Raises:
        ConfigError: if the heads cannot share their rows, or rows or draft cannot be used.
        ManifestError: if a folder holds a head of other settings, rows or draft.
        TrainingDivergedError: if a loss or a metric is not finite.
    """
    first = _check_shared(configs)
    data = read_rows(draft, train, dev, first)
    settings = {
        name: head_settings(config, seed, draft, data, out / name)
        for name, config in configs.items()
    }
    results = {name: finished_head(out / name, settings[name]) for name in configs}
    checkpoints = out / CHECKPOINTS_NAME / _digest(settings)
    if missing := [name for name, result in results.items() if result is None]:
        was_training = draft.training
        try:
            draft.eval()
            check_hidden_states(draft)
            group = _Group.of(draft, data, {n: configs[n] for n in missing}, seed, sampling)
            pupils = group.pupils(settings)
            group.start(pupils, checkpoints)
            group.train(pupils, checkpoints)
            results |= group.finish(pupils, out, checkpoints)
        finally:
            draft.train(was_training)
    shutil.rmtree(checkpoints, ignore_errors=True)
    with suppress(OSError):  # other heads may have checkpoints there, too
        checkpoints.parent.rmdir()
    return {name: result for name, result in results.items() if result is not None}


def _check_shared(configs: Mapping[str, HeadConfig]) -> HeadConfig:
    """The settings of the first head, whose shared ones are those of all."""
    if not configs:
        raise ConfigError("name at least one head to train")
    (name, first), *others = configs.items()
    for other, config in others:
        for key in SHARED:
            if getattr(config, key) != getattr(first, key):
                raise ConfigError(
                    f"heads that are trained together need the same {', '.join(SHARED)}; {key} is "
                    f"{getattr(first, key)!r} for {name} and {getattr(config, key)!r} for {other}: "
                    "train them apart"
                )
    if any(config.cache != "none" or config.report_to != "none" for config in configs.values()):
        raise ConfigError("heads that are trained together need cache none and report_to none")
    return first


def _digest(settings: Mapping[str, Settings]) -> str:
    values = {name: own.values for name, own in settings.items()}
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:16]


@dataclass(frozen=True, slots=True)
class _Group:
    """What the heads share.

    Attributes:
        draft: the frozen draft.
        data: training and dev rows.
        configs: settings by name.
        context: turns label rows into questions for a head that reads all that any of them reads.
        scales: how numbers are standardised.
        seed: of initial weights and order.
        sampling: recorded with each head.
    """

    draft: PreTrainedModel
    data: tuple[LabelRows, LabelRows]
    configs: Mapping[str, HeadConfig]
    context: Context
    scales: Scales | None
    seed: int
    sampling: SamplingConfig | None

    @classmethod
    def of(
        cls,
        draft: PreTrainedModel,
        data: tuple[LabelRows, LabelRows],
        configs: Mapping[str, HeadConfig],
        seed: int,
        sampling: SamplingConfig | None,
    ) -> _Group:
        """Find out what any of the heads reads."""
        union = _union([*configs.values()])
        head = new_head(draft, union, seed, sampling).to(draft.device)
        scales: Scales | None = None
        context: Context | None = None
        if isinstance(head, ImmediateHead) and union.mixing is None:
            if "hidden" in head.reads:
                check_tree_states(draft, max(rows.longest for rows in data))
            scales = scales_of(draft, head, data[0], union, seed)
            context = target_context(draft, head, union, seed)
        elif union.mixing is not None:
            to_logits, longest = logits_of_states(draft), longest_text(draft, union)
            context = MixedContext(head, draft, to_logits, union.mixing, longest, seed)
        if context is None or (isinstance(head, ImmediateHead) and union.mixing is not None):
            raise ConfigError(
                "heads are trained together as kind specdec++ or, without mixing, as kind "
                "immediate: train these apart"
            )
        return cls(draft, data, configs, context, scales, seed, sampling)

    @property
    def config(self) -> HeadConfig:
        """Of the first head; what the group reads of it is shared."""
        return next(iter(self.configs.values()))

    def pupils(self, settings: Mapping[str, Settings]) -> list[_Pupil]:
        """The untrained heads."""
        made = []
        for name, config in self.configs.items():
            head = new_head(self.draft, config, self.seed, self.sampling, self._scales(config))
            head = head.to(self.draft.device)
            optimizer = torch.optim.AdamW(head.parameters(), weight_decay=config.weight_decay)
            rated = config.model_copy(update={"learning_rate": config.peak_rate(head.hidden_size)})
            made.append(_Pupil(name, head, rated, settings[name], optimizer, []))
        return made

    def _scales(self, config: HeadConfig) -> Scales | None:
        if self.scales is None:
            return None
        return {name: scale for name, scale in self.scales.items() if name in config.features}

    def start(self, pupils: Sequence[_Pupil], folder: Path) -> None:
        """Measure the untrained heads, or take up where the checkpoint left off."""
        stored = latest_checkpoint(folder, Settings({}))
        if stored is not None and all(p.name in stored.notes["before"] for p in pupils):
            names = [*stored.notes["before"]]
            for pupil in pupils:
                _restore(pupil, stored, names.index(pupil.name))
            return
        for pupil, metrics in zip(pupils, self.evaluate(pupils), strict=True):
            pupil.before = metrics[main_moment(pupil.head.moments)]

    def train(self, pupils: Sequence[_Pupil], folder: Path) -> None:
        """Do all steps that are not done yet.

        Raises:
            TrainingDivergedError: if a loss is not finite.
        """
        config, rows = self.config, self.data[0]
        per_epoch, epochs = math.ceil(len(rows) / config.batch_size), config.passes(len(rows))
        rates = [learning_rates(epochs * per_epoch, pupil.config) for pupil in pupils]
        done = len(pupils[0].losses)
        with progress(epochs * per_epoch, f"{len(pupils)} heads", "step", done=done) as bar:
            for step in range(done, epochs * per_epoch):
                epoch, batch = divmod(step, per_epoch)
                if step == done or batch == 0:
                    order = [*rows.epoch(self.seed, epoch, config.batch_size)]
                held = [self.context.row(rows[i], i, epoch) for i in order[batch]]
                for pupil, rate in zip(pupils, rates, strict=True):
                    pupil.optimizer.param_groups[0]["lr"] = rate[step]
                self._step(pupils, held)
                for pupil in pupils:
                    if not math.isfinite(pupil.losses[-1]):
                        what = f"the loss of {pupil.name} is not finite in step {step + 1}"
                        raise self._diverged(pupil, what, folder)
                bar.update()
                if (step + 1) % config.save_steps == 0:
                    _save(pupils, folder)

    def _step(self, pupils: Sequence[_Pupil], rows: Sequence[Any]) -> None:
        """Update every head once on a batch, part by part: see `heads.loop.Training.train_step`."""
        size = self.config.micro_batch_size
        count = micro_batch_count(self.config.batch_size, size=size, processes=1)
        masses = [sum(self._mass(p.head, row) for row in rows) or 1.0 for p in pupils]
        totals = [0.0] * len(pupils)
        for part in micro_batches(rows, size=size, count=count, process=0, processes=1):
            questions = self.context.questions(part)
            for index, pupil in enumerate(pupils):
                mine = self._of(pupil.head, questions)
                logits = pupil.head(*mine.arguments).view_as(mine.accept)
                weight = pupil.head.rejection_weight
                loss = weighted_bce(logits, mine.accept, mine.mask, weight) / masses[index]
                torch.autograd.backward(loss)
                totals[index] += float(loss.detach())
        for pupil, total in zip(pupils, totals, strict=True):
            torch.nn.utils.clip_grad_norm_(pupil.head.parameters(), pupil.config.max_grad_norm)
            pupil.optimizer.step()
            pupil.optimizer.zero_grad()
            pupil.losses.append(total)

    @torch.no_grad()
    def evaluate(self, pupils: Sequence[_Pupil]) -> list[dict[Moment, HeadMetrics]]:
        """Judge every head on the dev rows at each of its moments."""
        seen: list[list[Tensor]] = [[] for _ in pupils]  # (n, M, 2) each: logit, label
        rows, size = self.data[1], self.config.micro_batch_size
        held = [self.context.row(rows[index], index, None) for index in range(len(rows))]
        count = micro_batch_count(len(held), size=size, processes=1)
        for part in micro_batches(held, size=size, count=count, process=0, processes=1):
            questions = self.context.questions(part)
            for pupil, pairs in zip(pupils, seen, strict=True):
                mine = self._of(pupil.head, questions)
                logits = pupil.head(*mine.arguments).view_as(mine.accept)
                both = torch.stack([logits, mine.accept], dim=-1)[:, mine.mask[0]]
                pairs.append(both.transpose(0, 1))
        judged = []
        for pupil, pairs in zip(pupils, seen, strict=True):
            logits, labels = torch.cat(pairs).unbind(dim=-1)
            weight = pupil.head.rejection_weight
            judged.append(
                {
                    moment: head_metrics(logits[:, i], labels[:, i], weight)
                    for i, moment in enumerate(pupil.head.moments)
                }
            )
        return judged

    def _mass(self, head: BaseHead, row: Any) -> float:
        """What a row adds to the number that this head's loss is divided by."""
        if isinstance(self.context, MixedContext):
            return float(loss_mass(row.accept, row.mask, head.rejection_weight))
        return float(row.tokens.numel() * len(head.moments) * row.counts)

    def _of(self, head: BaseHead, questions: Questions) -> Questions:
        """What one head is asked: its own features, at its own moments."""
        asked = self.context.head  # type: ignore[attr-defined]
        if not isinstance(head, ImmediateHead):
            return questions
        moments, *features = questions.arguments
        assert moments is not None
        kept = [asked.moments.index(moment) for moment in head.moments]
        known = dict(zip(asked.reads, features, strict=True))
        own = (moments[kept], *(known[name] for name in head.reads))
        return Questions(own, questions.accept[kept], questions.mask[kept])

    def finish(
        self, pupils: Sequence[_Pupil], out: Path, checkpoints: Path
    ) -> dict[str, HeadResult]:
        """Measure the trained heads and save them.

        Raises:
            TrainingDivergedError: if one is worth nothing.
        """
        results = {}
        for pupil, by_moment in zip(pupils, self.evaluate(pupils), strict=True):
            after = by_moment[main_moment(pupil.head.moments)]
            assert pupil.before is not None
            if not math.isfinite(after.kl):
                what = f"what {pupil.name} predicts after the last step is not finite"
                raise self._diverged(pupil, what, checkpoints)
            train, dev = self.data
            results[pupil.name] = HeadResult(
                before=pupil.before,
                after=after,
                losses=tuple(pupil.losses),
                steps=len(pupil.losses),
                train_rows=len(train),
                skipped_rows=train.skipped + dev.skipped,
                processes=1,
                engine="single",
                by_moment={moment.name.lower(): each for moment, each in by_moment.items()},
                labels=train.labels + dev.labels,
                cut_labels=train.cut + dev.cut,
                epochs=self.config.passes(len(train)),
                learning_rate=pupil.config.learning_rate or 0.0,
            )
            refuse_a_coin(
                results[pupil.name],
                f"{pupil.name}'s",
                partial(self._diverged, pupil, folder=checkpoints),
            )
        for pupil in pupils:
            folder = out / pupil.name
            pupil.head.save_pretrained(folder)
            stored = {"settings": pupil.settings.values, **asdict(results[pupil.name])}
            write_json(folder / METRICS_NAME, stored)
        return results

    def _diverged(self, pupil: _Pupil, what: str, folder: Path) -> TrainingDivergedError:
        return TrainingDivergedError(
            f"acceptance heads: {what}",
            kept=newest_file(folder),
            learning_rate=pupil.config.learning_rate or 0.0,
            remedy=pupil.settings.remedy,
        )


def _union(configs: Sequence[HeadConfig]) -> HeadConfig:
    """Settings of a head that reads all that any of these reads, at all their moments."""
    first = configs[0]
    if first.kind != "immediate":
        return first
    features = dict.fromkeys(name for config in configs for name in config.features)
    moments = dict.fromkeys(name for config in configs for name in config.moments)
    return first.model_copy(update={"features": (*features,), "moments": (*moments,)})


def _save(pupils: Sequence[_Pupil], folder: Path) -> None:
    """Write one checkpoint of all heads."""
    weights: dict[str, Tensor] = {}
    moments: dict[str, dict[str, Tensor]] = {moment: {} for moment in MOMENTS}
    for pupil in pupils:
        for name, parameter in pupil.head.named_parameters():
            key = f"{pupil.name}/{name}"
            weights[key] = parameter.detach().cpu().clone().contiguous()
            for moment in MOMENTS:
                value = pupil.optimizer.state[parameter][moment]
                moments[moment][key] = value.detach().cpu().clone().contiguous()
    losses = torch.tensor([pupil.losses for pupil in pupils], dtype=torch.float64)
    before = {p.name: None if p.before is None else asdict(p.before) for p in pupils}
    step = losses.shape[1]
    notes = {"before": before}
    save_checkpoint(folder, Checkpoint(step, {}, notes, weights, moments, losses))


def _restore(pupil: _Pupil, stored: Checkpoint, index: int) -> None:
    pupil.before = HeadMetrics(**stored.notes["before"][pupil.name])
    pupil.losses = stored.losses[index].tolist()
    for name, parameter in pupil.head.named_parameters():
        key = f"{pupil.name}/{name}"
        with torch.no_grad():
            parameter.copy_(stored.weights[key])
        pupil.optimizer.state[parameter] = {
            "step": torch.tensor(float(stored.step)),
            **{m: stored.moments[m][key].to(parameter.device) for m in MOMENTS},
        }
