"""SpecDec++'s sweep over acceptance heads (arXiv:2405.19715, Table 3), on labels."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from eval.analysis.expectation import Times, Traces, expected_counts
from eval.drafting.stopping.head import Head
from eval.drafting.stopping.recorded import recorded_lengths
from heads.config import HeadConfig

if TYPE_CHECKING:
    import datasets
    from transformers import PreTrainedModel

    from specdata.sampling import SamplingConfig


def sweep(
    grid: Sequence[HeadConfig],
    thresholds: Sequence[float],
    *,
    draft: PreTrainedModel,
    train: datasets.Dataset,
    dev: datasets.Dataset,
    sampling: SamplingConfig,
    out: Path,
    times: Times,
    seed: int,
) -> Iterator[tuple[HeadConfig, float, dict[str, list[dict[str, float]]]]]:
    """Train a head of each configuration, and replay it at each threshold.

    A head that is finished is kept, so the same call goes on after a kill.

    Args:
        grid: configurations of other depths or weights of rejections.
        thresholds: that each head is replayed at.
        draft: the draft that made the labels.
        train: labels that heads learn from.
        dev: labels that they are judged on.
        sampling: how the draft's tokens were drawn.
        out: folder of the heads, each in `depth-D-weight-W`.
        times: t_d and t_t.
        seed: of the heads.

    Yields:
        A head's configuration, its binary KL on dev rows, and its points: prompt set, or "" for
        all -> one for each threshold.

    Raises:
        ManifestError: if `out` holds heads of other settings, rows or draft.
    """
    from eval.analysis.traces import acceptance_traces
    from heads import BaseHead
    from heads.train import train_head

    sets = np.array(dev["dataset"])
    for config in grid:
        folder = out / f"depth-{config.depth}-weight-{config.rejection_weight:g}"
        trained = train_head(
            draft=draft,
            train=train,
            dev=dev,
            out=folder,
            config=config,
            seed=seed,
            sampling=sampling,
        )
        head = BaseHead.from_pretrained(folder)
        traces = acceptance_traces(dev, draft=draft, sampling=sampling, head=head)
        of_set = {name: traces.select(sets == name) for name in dict.fromkeys(dev["dataset"])}
        points = {
            name: [point(each, h, times) for h in thresholds]
            for name, each in {"": traces, **of_set}.items()
        }
        yield config, trained.after.kl_raw, points


def point(traces: Traces, threshold: float, times: Times) -> dict[str, Any]:
    """A head's replay at a threshold; the speed-up is over the target alone."""
    lengths = recorded_lengths(Head(threshold=threshold), traces.tokens)
    assert lengths is not None
    counts = expected_counts(traces, lengths)
    tokens = float(counts.tokens.sum())
    return {
        "threshold": threshold,
        "speedup": times.target_seconds / counts.seconds_per_token(times),
        "discard_rate": float(counts.n_discarded.sum()) / tokens,
        "verification_rate": float(counts.n_target.sum()) / tokens,
    }
