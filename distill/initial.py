"""Where a draft comes from: layers cut from its target, or random weights, and its vocabulary."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from datasets import Dataset

from distill.config import InitConfig
from specdata.sampling import SamplingConfig


def make_initial(
    *,
    target: str | Path,
    draft: str | Path | None,
    rollouts: Dataset,
    out: Path,
    config: InitConfig,
    sampling: SamplingConfig,
    seed: int,
) -> dict[str, Any]:
    """Make the draft that training starts from and save it as a model folder.

    Args:
        target: folder or Hub id of the target.
        draft: folder or Hub id of an existing draft, if `config.kind` is "model".
        rollouts: of split "train", with `prompt_ids` and `completion_ids`: what the vocabulary is
            counted on, and layers are searched on.
        out: the new model folder; it appears once it is complete.
        config: what to make.
        sampling: the warp of serving.
        seed: decides random weights.

    Returns:
        What was made, as JSON values.
    """
    raise NotImplementedError
