"""What several files of tests use of `test_eagle`."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from specdata.sampling import SamplingConfig
from tests.support.initial import ROWS, make
from tests.support.trainings import QUICK, changed, distilled


def norm(x: Tensor, weight: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5) * weight


def turned(x: Tensor) -> Tensor:
    """Rotary positions 0, 1, ... of (T, heads, size)."""
    length, _, size = x.shape
    angles = torch.arange(length)[:, None] / 10000.0 ** (torch.arange(0, size, 2) / size)
    angles = torch.cat([angles, angles], dim=-1)[:, None]
    other = torch.cat([-x[..., size // 2 :], x[..., : size // 2]], dim=-1)
    return x * angles.cos() + other * angles.sin()


def learnt(target: Path, folder: Path, **init: Any) -> dict[str, Any]:
    """What was made as `folder/new`, from which `folder/draft` learnt, as is made sure of."""
    init = {"kind": "states", "layers": 1} | init
    made = make(target, folder / "new", **init)
    settings = {"epochs": 40, "learning_rate": 1e-2, "warp": "raw", "eval_steps": 5}
    config = changed(QUICK, init=init, optimizer="muon", **settings)
    rows = {"target": target, "draft": folder / "new", "train": ROWS, "dev": ROWS}
    found = distilled(folder, folder / "draft", config, SamplingConfig(0.1), **rows)
    assert found.best_step > 0
    return made
