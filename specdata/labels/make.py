"""Labels: what one draft would have proposed along the target's completions, and its acceptance."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path

import datasets
import pyarrow as pa
from transformers import PreTrainedModel

from specdata.errors import ManifestError
from specdata.labels.config import LabelsConfig
from specdata.labels.labeller import (
    Labeller,
    PartDone,
    distributions_of_top_logits,
    target_distributions,
    tokens_at_once,
)
from specdata.labels.top_logits import TopLogits, check_decided
from specdata.lm_head import find_lm_head
from specdata.prepack import prepacked
from specdata.probability import SamplingConfig
from specdata.storage.dataset import fill_dataset, load_stored
from specdata.storage.manifest import read_manifest
from specdata.storage.resume import Settings, differences
from specdata.storage.schema import LABELS, MORE_DRAWS, TOP_LOGITS, Label


def make_labels(  # noqa: PLR0913 - what is labelled, how, and who is told
    target: PreTrainedModel,
    draft: PreTrainedModel,
    rollouts: datasets.Dataset,
    folder: Path,
    config: LabelsConfig,
    *,
    sampling: SamplingConfig,
    seed: int,
    settings: Settings,
    report: Callable[[int], object],
    part_done: PartDone | None = None,
    tensor_parallel: bool = False,
) -> int:
    """Label every position of every rollout, under the sampler that serving will use.

    One teacher-forced pass of each model, in batches that the shard alone decides. With
    `config.draws` = S above 1, rows of split "train" get S - 1 more tokens of the draft at each
    position, in the columns `MORE_DRAWS`. The first token does not depend on S, nor does any other.
    `fill_dataset` describes several processes, resume and errors.

    Args:
        target: the model of p.
        draft: the model of q.
        rollouts: the target's completions, columns of `ROLLOUTS`.
        folder: where the dataset goes.
        config: rollouts of a shard, tokens drawn at each position, logits to keep.
        sampling: the sampler that tokens are served with; stored, and checked by `load_labels`.
        seed: the run's seed; a row's own seed is made of it and of what identifies the row.
        settings: what else decides the rows; stored in the manifest, compared on resume.
        report: called with the number of rows done.
        part_done: told of work within a shard, as by `Labeller`.
        tensor_parallel: whether each process holds a part of the target; see `fill_dataset`.

    Returns:
        Number of labelled rollouts.

    Raises:
        ConfigError: if a rollout is longer than a model's context.
    """
    p, q = find_lm_head(target), find_lm_head(draft)
    top = min(config.top_logits, p.vocabulary)
    work = Labeller(
        partial(target_distributions, p, sampling, top),
        q,
        p.vocabulary,
        sampling,
        seed,
        tokens_at_once(p, q),
        _draws(config, sampling),
        part_done,
    )
    settings = settings.extended({"top_logits": top})
    with prepacked(target, draft):
        return _fill(
            rollouts,
            folder,
            work,
            config,
            settings,
            report,
            stores_logits=top > 0,
            tensor_parallel=tensor_parallel,
        )


def labels_from_cache(  # noqa: PLR0913 - as `make_labels`
    source: Path,
    draft: PreTrainedModel,
    folder: Path,
    config: LabelsConfig,
    *,
    sampling: SamplingConfig,
    seed: int,
    settings: Settings,
    report: Callable[[int], object],
    part_done: PartDone | None = None,
    rows: datasets.Dataset | None = None,
) -> int:
    """Label the rollouts of an earlier dataset, from the target logits that it keeps.

    The target is not run. What is exact, and what is refused: see `TopLogitDistributions`. A
    rollout with positions that are not decided is stored in parts, without them.

    Args:
        source: a logits dataset, or labels made with `top_logits`.
        draft: the model of q.
        folder: where the new dataset goes.
        config: sizes, and whether a bound will do; see `TopLogitDistributions`.
        sampling: the sampler that tokens are served with.
        seed: as in `make_labels`; the same seed draws the same tokens.
        settings: what else decides the rows.
        report: called with the number of rows done.
        part_done: told of work within a shard, as by `Labeller`.
        rows: those of it to label (default: all).

    Raises:
        ConfigError: if the dataset keeps no logits, or not enough of them for this sampler.
    """
    distributions = TopLogits.of(source).distributions(sampling, bound=config.bound)
    q, distributions_at = find_lm_head(draft), partial(distributions_of_top_logits, distributions)
    work = Labeller(
        distributions_at,
        q,
        distributions.vocabulary,
        sampling,
        seed,
        tokens_at_once(q),
        _draws(config, sampling),
        part_done,
    )
    settings = settings.extended({"bound": config.bound})
    with prepacked(draft):
        rows = load_stored(source) if rows is None else rows
        check_decided(rows, distributions)
        return _fill(rows, folder, work, config, settings, report)


def sampling_of(folder: Path) -> SamplingConfig:
    """The sampler that labels were made under. Raises ManifestError if the folder holds none."""
    stored = read_manifest(folder)["settings"].get("sampling")
    if stored is None:
        raise ManifestError(f"{folder} holds no labels: its manifest names no sampler; label them")
    return SamplingConfig(**stored)


def load_labels(folder: Path, sampling: SamplingConfig) -> datasets.Dataset:
    """Read labels that were made under this sampler.

    Raises:
        ManifestError: if the dataset cannot be read, or was made with another sampler: a head
            would learn the acceptance of distributions that are never served.
    """
    stored = read_manifest(folder)["settings"].get("sampling")
    if changed := differences(stored or {}, asdict(sampling)):
        raise ManifestError(
            f"the labels in {folder} were made under another sampler than the one asked for: label "
            "the rollouts again, or ask for theirs. Stored -> asked:\n  " + "\n  ".join(changed)
        )
    return load_stored(folder)


def _draws(config: LabelsConfig, sampling: SamplingConfig) -> int:
    """S; 1 at temperature 0, where every draw is the most probable token."""
    return 1 if sampling.temperature == 0 else config.draws


def _fill(
    rollouts: datasets.Dataset,
    folder: Path,
    work: Labeller,
    config: LabelsConfig,
    settings: Settings,
    report: Callable[[int], object],
    *,
    stores_logits: bool = False,
    tensor_parallel: bool = False,
) -> int:
    more = [*(MORE_DRAWS if work.draws > 1 else ()), *(TOP_LOGITS if stores_logits else ())]
    schema = pa.schema([*LABELS, *more])

    def shard(start: int) -> list[Label]:
        stop = min(start + config.shard_size, len(rollouts))
        return work(rollouts.select(range(start, stop)).to_list())

    own = {"sampling": asdict(work.sampling), "seed": work.seed, "vocabulary": work.vocabulary}
    own["draws"] = work.draws
    shards = [partial(shard, start) for start in range(0, len(rollouts), config.shard_size)]
    return fill_dataset(
        folder, schema, settings.extended(own), shards, report, tensor_parallel=tensor_parallel
    )


def mean_overlap(labels: datasets.Dataset) -> dict[str, float]:
    """Mean of sum_x min(p, q) over all positions of each "set/split"."""
    sums: dict[str, float] = {}
    counts: dict[str, int] = {}
    for row in labels.select_columns(["dataset", "split", "overlap"]):
        name = f"{row['dataset']}/{row['split']}"
        sums[name] = sums.get(name, 0.0) + sum(row["overlap"])
        counts[name] = counts.get(name, 0) + len(row["overlap"])
    return {name: total / max(1, counts[name]) for name, total in sums.items()}
