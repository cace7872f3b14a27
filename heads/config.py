"""Settings of a head and of its training."""

from __future__ import annotations

from pydantic import Field

from specdata.config import Config


class HeadConfig(Config):
    """Settings of the head and of its training; the defaults are the paper's (2405.19715)."""

    depth: int = Field(3, ge=0, description="residual blocks; 0 is a linear head")
    mixing: float = Field(
        0.15, ge=0.0, lt=1.0, description="share of positions that keep the target's token"
    )
    rejection_weight: float = Field(
        6.0, gt=0.0, description="weight of rejections in the loss, acceptances weigh 1"
    )
    epochs: int = Field(3, ge=1, description="passes over the training rows")
    batch_size: int = Field(32, ge=1, description="rows a step, over all processes")
    micro_batch_size: int = Field(
        8, ge=1, description="rows a forward pass, per process; does not change the result"
    )
    learning_rate: float = Field(5e-5, gt=0.0, description="Adam's peak rate, then cosine")
    warmup_ratio: float = Field(
        0.03, ge=0.0, lt=1.0, description="share of the steps in which the rate rises"
    )
    max_grad_norm: float = Field(1.0, gt=0.0, description="clip gradients to this norm")
    max_length: int = Field(
        512, ge=1, description="prompt + completion tokens; longer rows are cut"
    )
    save_steps: int = Field(200, ge=1, description="steps between checkpoints")
