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
from specdata.labels.labeller import Labeller
from specdata.lm_head import find_lm_head
from specdata.prepack import prepacked
from specdata.probability import SamplingConfig
from specdata.storage.dataset import fill_dataset, load_stored, read_manifest
from specdata.storage.resume import Settings, differences
from specdata.storage.schema import LABELS, MORE_DRAWS, Label
from specdata.texts import ModelSource, Source, TopLogitSource, tokens_at_once
from specdata.top_logits import TopLogits, check_decided


def make_labels(  # noqa: PLR0913 - what is labelled, how, and who is told
    target: PreTrainedModel | TopLogits,
    draft: PreTrainedModel,
    rollouts: datasets.Dataset,
    folder: Path,
    config: LabelsConfig,
    *,
    sampling: SamplingConfig,
    seed: int,
    settings: Settings,
    report: Callable[[int], object],
    tensor_parallel: bool = False,
) -> int:
    """Label every position of every rollout, under the sampler that serving will use.

    One teacher-forced pass of each model, in batches that the shard alone decides. With
    `config.draws` = S above 1, rows of split "train" get S - 1 more tokens of the draft at each
    position, in the columns `MORE_DRAWS`. The first token does not depend on S, nor does any other;
    a row's own seed is made of the run's and of what identifies the row. `fill_dataset` describes
    several processes, resume and errors.

    From top logits, which the rollouts must be stored with (columns of `LOGITS`), the target is not
    run (`TopLogitDistributions` says what is exact then). A rollout with positions that they do not
    decide is stored in parts, without them.
    """
    q = find_lm_head(draft)
    source: Source
    if isinstance(target, TopLogits):
        source, heads = TopLogitSource(target.distributions(sampling, bound=config.bound)), [q]
        check_decided(rollouts, source.distributions)
        settings = settings.extended({"bound": config.bound})
    else:
        heads = [find_lm_head(target), q]
        source = ModelSource(heads[0], sampling)
    # At temperature 0 every draw is the most probable token, too.
    draws = 1 if config.greedy or sampling.temperature == 0 else config.draws
    at_once = tokens_at_once(*heads)
    label = Labeller(source, q, sampling, seed, at_once, draws, config.greedy)

    def shard(start: int) -> list[Label]:
        stop = min(start + config.shard_size, len(rollouts))
        return label(rollouts.select(range(start, stop)).to_list())

    decided_by = {
        "sampling": asdict(sampling),
        "seed": seed,
        "vocabulary": source.vocabulary,
        "draws": draws,
        "greedy": config.greedy,
    }
    with prepacked(*(head.model for head in heads)):
        return fill_dataset(
            folder,
            pa.schema([*LABELS, *(MORE_DRAWS if draws > 1 else ())]),
            settings.extended(decided_by),
            [partial(shard, start) for start in range(0, len(rollouts), config.shard_size)],
            report,
            tensor_parallel=tensor_parallel,
        )


def sampling_of(folder: Path) -> SamplingConfig:
    """The sampler that labels were made under. Raises ManifestError if the folder holds none."""
    stored = read_manifest(folder)["settings"].get("sampling")
    if stored is None:
        raise ManifestError(f"{folder} holds no labels: its manifest names no sampler; label them")
    return SamplingConfig(**stored)


def are_greedy(folder: Path) -> bool:
    """Whether labels are of likeliest tokens where the draft's tokens are drawn."""
    settings = read_manifest(folder)["settings"]
    return bool(settings.get("greedy")) and settings["sampling"]["temperature"] > 0


def load_labels(folder: Path, sampling: SamplingConfig) -> datasets.Dataset:
    """Read labels that were made under this sampler."""
    stored = read_manifest(folder)["settings"].get("sampling")
    if changed := differences(stored or {}, asdict(sampling)):
        raise ManifestError(
            f"the labels in {folder} were made under another sampler than the one asked for: label "
            "the rollouts again, or ask for theirs. Stored -> asked:\n  " + "\n  ".join(changed)
        )
    return load_stored(folder)


def mean_overlap(labels: datasets.Dataset) -> dict[str, float]:
    """Mean of sum_x min(p, q) over all positions of each "set/split"."""
    sums: dict[str, float] = {}
    counts: dict[str, int] = {}
    for row in labels.select_columns(["dataset", "split", "overlap"]):
        name = f"{row['dataset']}/{row['split']}"
        sums[name] = sums.get(name, 0.0) + sum(row["overlap"])
        counts[name] = counts.get(name, 0) + len(row["overlap"])
    return {name: total / max(1, counts[name]) for name, total in sums.items()}
