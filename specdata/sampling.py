"""How tokens are sampled; `specdata.probability` makes distributions of it."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class SamplingConfig:
    """How both models turn logits into a distribution: temperature, then top-k, then top-p.

    A standard dataclass rather than a `Config`, because the library constructs it by position,
    `SamplingConfig(1.0, 0, 1.0)`, and uses it as a value: hashed, compared, part of other settings.

    Args:
        temperature: softmax temperature; 0 makes the distribution one-hot at the largest logit.
        top_k: keep the k largest logits; 0 keeps all.
        top_p: keep the smallest set of most likely tokens whose mass reaches top_p; 1 keeps all.

    Raises:
        ValueError: if a value lies outside its range.
    """

    temperature: float = field(
        default=1.0, metadata={"help": "softmax temperature; 0 takes the likeliest token"}
    )
    top_k: int = field(default=0, metadata={"help": "keep the k largest logits; 0 keeps all"})
    top_p: float = field(
        default=1.0, metadata={"help": "keep the likeliest tokens of this mass; 1 keeps all"}
    )

    def __post_init__(self) -> None:
        if not 0.0 <= self.temperature < float("inf"):
            raise ValueError(f"temperature must be 0 or larger, got {self.temperature}")
        if self.top_k < 0:
            raise ValueError(f"top_k must be 0 (off) or larger, got {self.top_k}")
        if not 0.0 < self.top_p <= 1.0:
            raise ValueError(f"top_p must lie in (0, 1], got {self.top_p}")
