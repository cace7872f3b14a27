"""Configuration of the labels stage: importable without torch or transformers."""

from __future__ import annotations

from typing import Self

from pydantic import Field, model_validator

from specdata.config import Config


class LabelsConfig(Config):
    """The labelling of rollouts with the draft's acceptance."""

    shard_size: int = Field(default=64, ge=1, description="rollouts of one shard")
    draws: int = Field(
        default=1,
        ge=1,
        description="draft tokens labelled a position of the training rollouts, from one pass of "
        "each model; at temperature 0 all are equal, and there is one",
    )
    top_logits: int = Field(
        default=0,
        ge=0,
        description="largest target logits a position to store, to label again without it; 0: none",
    )
    cache: str | None = Field(
        default=None,
        description="labels with top logits to make these from, without the target",
    )
    bound: bool = Field(
        default=False, description="with cache: upper bounds will do where not exact"
    )

    @model_validator(mode="after")
    def _cache_holds_logits(self) -> Self:
        if self.top_logits and self.cache:
            raise ValueError("top_logits must be 0 with cache, which keeps them")
        return self
