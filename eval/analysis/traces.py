"""Labelled rollouts as stopping rules read them, and the parameters of rules that fit them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from datasets import Dataset

from eval.drafting.stopping import fit_rules
from eval.drafting.stopping.recorded import RecordedHead, RecordedTokens, pad
from eval.drafting.stopping.rule import StoppingRule
from specdata.labels.make import are_greedy, load_labels
from specdata.sampling import SamplingConfig
from specdata.storage.dataset import of_split


def recorded_tokens(rows: Dataset, head: RecordedHead | None = None) -> RecordedTokens:
    """The drafted tokens of labelled rollouts, at least one, and what a head says of them."""
    return RecordedTokens(
        lengths=np.array([len(row) for row in rows["draft_ids"]], dtype=np.int64),
        q=np.exp(pad(rows["log_q"])),
        q_max=np.exp(pad(rows["log_q_max"])).clip(max=1.0),
        entropy=pad(rows["entropy"]),
        head=head,
    )


def fitted_on(
    folder: Path, rules: Sequence[StoppingRule], sampling: SamplingConfig
) -> dict[str, Any]:
    """Parameters of stopping rules that fit the labels in a folder, if these are of drawn tokens.

    Beside them the number of labelled `rows` that were read: of split dev, because the draft was
    distilled on the others, where it is accepted more often.
    """
    if are_greedy(folder):
        return {"rows": 0}
    labels = of_split(load_labels(folder, sampling), "dev", folder)
    fitted = fit_rules(rules, recorded_tokens(labels), pad(labels["accept_prob"]))
    return {**fitted, "rows": len(labels)}
