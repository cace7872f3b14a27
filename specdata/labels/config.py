"""Configuration of the labels stage: importable without torch or transformers."""

from __future__ import annotations

from dataclasses import dataclass, field

from specdata.errors import ConfigError, at_least_one


@dataclass(frozen=True, slots=True)
class LabelsConfig:
    """How rollouts are labelled with the draft's acceptance."""

    shard_size: int = field(default=64, metadata={"help": "rollouts of one shard"})
    top_logits: int = field(
        default=0,
        metadata={"help": "largest target logits kept a position, to label again without it"},
    )
    cache: str | None = field(
        default=None,
        metadata={"help": "labels with kept logits to make these from, without the target"},
    )
    bound: bool = field(
        default=False, metadata={"help": "with cache: upper bounds will do where not exact"}
    )

    def __post_init__(self) -> None:
        at_least_one(self, "labels", "shard_size")
        if self.top_logits < 0:
            raise ConfigError(f"labels.top_logits must be 0 (none) or more, got {self.top_logits}")
        if self.top_logits and self.cache:
            raise ConfigError("labels.top_logits must be 0 with labels.cache, which keeps them")
