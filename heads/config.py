"""Settings of a head and of its training."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field

from specdata.errors import ConfigError


@dataclass(frozen=True, slots=True)
class HeadConfig:
    """Settings of the head and of its training; the defaults are the paper's (2405.19715)."""

    depth: int = field(default=3, metadata={"help": "residual blocks; 0 is a linear head"})
    mixing: float = field(
        default=0.15, metadata={"help": "share of positions that keep the target's token"}
    )
    rejection_weight: float = field(
        default=6.0, metadata={"help": "weight of rejections in the loss, acceptances weigh 1"}
    )
    epochs: int = field(default=3, metadata={"help": "passes over the training rows"})
    batch_size: int = field(default=32, metadata={"help": "rows a step, over all processes"})
    micro_batch_size: int = field(
        default=8, metadata={"help": "rows a forward pass, per process; does not change the result"}
    )
    learning_rate: float = field(default=5e-5, metadata={"help": "Adam's peak rate, then cosine"})
    warmup_ratio: float = field(
        default=0.03, metadata={"help": "share of the steps in which the rate rises"}
    )
    max_grad_norm: float = field(default=1.0, metadata={"help": "clip gradients to this norm"})
    max_length: int = field(
        default=512, metadata={"help": "prompt + completion tokens; longer rows are cut"}
    )
    save_steps: int = field(default=200, metadata={"help": "steps between checkpoints"})

    def __post_init__(self) -> None:
        for name in ("epochs", "batch_size", "micro_batch_size", "max_length", "save_steps"):
            if asdict(self)[name] < 1:
                raise ConfigError(f"head.{name} must be 1 or larger, got {asdict(self)[name]}")
        for name in ("rejection_weight", "learning_rate", "max_grad_norm"):
            if not 0.0 < asdict(self)[name] < math.inf:
                raise ConfigError(f"head.{name} must be positive, got {asdict(self)[name]}")
        for name in ("mixing", "warmup_ratio"):
            if not 0.0 <= asdict(self)[name] < 1.0:
                raise ConfigError(f"head.{name} must lie in [0, 1), got {asdict(self)[name]}")
        if self.depth < 0:
            raise ConfigError(f"head.depth must be 0 or larger, got {self.depth}")


def learning_rate(step: int, steps: int, config: HeadConfig) -> float:
    """Rate of update `step` (from 0) of `steps`: linear warm-up, then a cosine down to 0."""
    warmup = math.ceil(config.warmup_ratio * steps)
    if step < warmup:
        return config.learning_rate * (step + 1) / warmup
    done = (step - warmup) / max(1, steps - warmup)
    return config.learning_rate * 0.5 * (1.0 + math.cos(math.pi * done))
