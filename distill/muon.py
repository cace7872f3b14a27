"""Muon for the matrices of a draft's layers and maps, AdamW for all else of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from distill.adapters import base_of
from specdata.drafts.states_network import states_input
from specdata.drafts.taps import decoder_layers
from specdata.prepack import multiplies


class Float32Muon(torch.optim.Muon):
    """torch's Muon, whose Newton-Schulz iteration is in bfloat16, in float32.

    For processors that do not multiply bfloat16, where its step takes some twenty times as long.
    With Nesterov's momentum and no weight decay, as `MuonWithAdamW` asks.
    """

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update all weights that have a gradient."""
        for group in self.param_groups:
            a, b, c = group["ns_coefficients"]
            for weight in group["params"]:
                if weight.grad is None:
                    continue
                buffer = self.state[weight].setdefault("momentum_buffer", weight.new_zeros(()))
                buffer = torch.lerp(buffer, weight.grad, 1 - group["momentum"])
                self.state[weight]["momentum_buffer"] = buffer
                update = torch.lerp(weight.grad, buffer, group["momentum"])
                is_tall = update.shape[0] > update.shape[1]
                update = update.T if is_tall else update
                update = update / update.norm().clamp(min=group["eps"])
                for _ in range(group["ns_steps"]):
                    gram = update @ update.T
                    update = a * update + (b * gram + c * gram @ gram) @ update
                rate = group["lr"] * 0.2 * max(weight.shape) ** 0.5  # match_rms_adamw
                weight.sub_(update.T if is_tall else update, alpha=rate)


class MuonWithAdamW(torch.optim.Optimizer):
    """Both optimizers behind the interface of one, for schedulers, accelerate and checkpoints.

    Muon (Jordan et al. 2024, https://kellerjordan.github.io/posts/muon; Liu et al. 2025,
    arXiv:2502.16982) makes the momentum of a matrix orthogonal before it is subtracted. Its steps
    are scaled to the size of AdamW's, as in the second paper, so that both take the same rate.
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
        matrices = list(matrices)
        device = matrices[0].device
        is_quick = device.type != "cpu" or multiplies(device, torch.bfloat16)
        muon = torch.optim.Muon if is_quick else Float32Muon
        self.parts: tuple[torch.optim.Optimizer, torch.optim.Optimizer] = (
            muon(matrices, lr=lr, weight_decay=0.0, adjust_lr_fn="match_rms_adamw"),
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
    student: PreTrainedModel, *, lr: float, betas: tuple[float, float]
) -> MuonWithAdamW:
    """Muon for the trained matrices of layers and maps of states, AdamW for all else."""
    inner: list[nn.Module] = [decoder_layers(student)[1]]
    input_embedding = states_input(base_of(student))
    if input_embedding is not None:
        inner += [each for each in input_embedding.children() if isinstance(each, nn.Linear)]
    matrices: list[nn.Parameter] = []
    others: list[nn.Parameter] = []
    hidden = {id(weight) for each in inner for weight in each.parameters() if weight.ndim == 2}
    for weight in student.parameters():
        if weight.requires_grad:
            (matrices if id(weight) in hidden else others).append(weight)
    return MuonWithAdamW(matrices, others, lr=lr, betas=betas)
