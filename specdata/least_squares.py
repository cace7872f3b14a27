"""Linear maps that are fitted to rollouts (ridge regression): how a draft begins untrained."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from datasets import Dataset
from torch import Tensor

from specdata.errors import ConfigError
from specdata.terminal import progress

FITTED_ROWS = 128
"""Rollouts that maps and output matrices are fitted on: some ten thousand positions."""
RIDGE = 1e-3
"""Added to the diagonal, of columns scaled to unit mean square.

States of few rollouts may not span the space; this keeps the map small where they do not.
"""
PART = 1 << 27
"""Numbers of inputs that the least squares hold at a time: a GiB in float64."""


def fit_rows(
    rollouts: Dataset, device: torch.device, *, least: int = 0
) -> Iterator[tuple[dict[str, Any], Tensor, int]]:
    """The rollouts that maps are fitted on, evenly of all: rows, (1, T) ids, the prompt's tokens.

    Of completions of at least so many tokens.
    """
    count = min(FITTED_ROWS, len(rollouts))
    with progress(count, "states to fit the draft to", "row") as bar:
        for row in rollouts.select([index * len(rollouts) // count for index in range(count)]):
            if len(row["completion_ids"]) >= least:
                ids = torch.tensor([row["prompt_ids"] + row["completion_ids"]], device=device)
                yield row, ids, len(row["prompt_ids"])
            bar.update()


def ridge(pairs: Iterable[tuple[Tensor, Tensor]]) -> Tensor:
    """(n, F) and (n, H), several times -> (F, H), the map of least squares, in bounded memory."""
    scale = gram = cross = torch.zeros((), dtype=torch.float64)
    count = 0
    for inputs, outputs in _parts(pairs):
        x = inputs.double()
        if not count:
            scale = x.square().mean(dim=0).sqrt().clamp(min=torch.finfo(torch.float32).tiny)
        x = x / scale
        gram, cross = gram.to(x) + x.T @ x, cross.to(x) + x.T @ outputs.double()
        count += len(x)
    if not count:
        raise ConfigError(
            "maps of a draft are fitted to completions, and none has two tokens: raise "
            "rollouts.max_new_tokens and make the rollouts again"
        )
    gram.diagonal().add_(RIDGE * count)
    fitted: Tensor = torch.linalg.solve(gram, cross) / scale[:, None]
    return fitted


def _parts(pairs: Iterable[tuple[Tensor, Tensor]]) -> Iterator[tuple[Tensor, Tensor]]:
    """The same positions, as many together as have `PART` numbers."""
    inputs, outputs = list[Tensor](), list[Tensor]()
    for x, y in pairs:
        if inputs and sum(each.numel() for each in (*inputs, x)) > PART:
            yield torch.cat(inputs), torch.cat(outputs)
            inputs, outputs = [], []
        inputs.append(x)
        outputs.append(y)
    if inputs:
        yield torch.cat(inputs), torch.cat(outputs)
