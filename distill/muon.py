"""Muon for the matrices of the decoder layers, AdamW for all else, as one optimizer.

Muon (Jordan et al. 2024, https://kellerjordan.github.io/posts/muon; Liu et al. 2025,
arXiv:2502.16982) makes the momentum of a matrix orthogonal before it is subtracted. Its steps are
scaled to the size of AdamW's, as in the second paper, so that both take the same learning rate.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn


class MuonWithAdamW(torch.optim.Optimizer):
    """Both optimizers behind the interface of one, for schedulers, accelerate and checkpoints.

    Muon updates the `matrices`, AdamW the `others`, at least one weight each.
    """

    def __init__(
        self,
        matrices: Iterable[nn.Parameter],
        others: Iterable[nn.Parameter],
        *,
        lr: float,
        betas: tuple[float, float],
    ) -> None:
        self.parts: tuple[torch.optim.Optimizer, torch.optim.Optimizer] = (
            torch.optim.Muon(
                list(matrices), lr=lr, weight_decay=0.0, adjust_lr_fn="match_rms_adamw"
            ),
            torch.optim.AdamW(list(others), lr=lr, betas=betas, weight_decay=0.0),
        )
        super().__init__(self._groups(), {"lr": lr})

    def _groups(self) -> list[dict[str, Any]]:
        """The groups of both, the same objects: who sets a rate here sets it there."""
        return [group for part in self.parts for group in part.param_groups]

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """Update all weights that have a gradient."""
        if closure is not None:
            raise ValueError("closures are not supported: call backward first")
        for part in self.parts:
            part.step()

    def state_dict(self) -> dict[str, Any]:
        """Return the state of both."""
        return {"parts": [part.state_dict() for part in self.parts]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take up the state of both."""
        for part, stored in zip(self.parts, state_dict["parts"], strict=True):
            part.load_state_dict(stored)
        self.param_groups = self._groups()


def muon_optimizer(
    model: nn.Module, inner: nn.ModuleList, *, lr: float, betas: tuple[float, float]
) -> MuonWithAdamW:
    """Muon for the trained matrices in `inner`, AdamW for the model's other trained weights."""
    matrices: list[nn.Parameter] = []
    others: list[nn.Parameter] = []
    hidden = {id(weight) for weight in inner.parameters() if weight.ndim == 2}
    for weight in model.parameters():
        if weight.requires_grad:
            (matrices if id(weight) in hidden else others).append(weight)
    return MuonWithAdamW(matrices, others, lr=lr, betas=betas)
