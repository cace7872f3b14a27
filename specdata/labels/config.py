"""Configuration of the labels stage: importable without torch or transformers."""

from __future__ import annotations

from pydantic import Field

from specdata.config import Config, Count, Few


class LabelsConfig(Config):
    """The labelling of rollouts with the draft's acceptance."""

    shard_size: Count = Field(default=64, ge=1, description="rollouts of one shard")
    draws: Few = Field(
        default=1,
        ge=1,
        description="draft tokens labelled a position of the training rollouts, from one pass of "
        "each model; with greedy and at temperature 0 all are equal, and there is one",
    )
    greedy: bool = Field(
        default=False,
        description="label the draft's likeliest token, which is accepted with p: what an engine "
        "drafts that does not ask for the draft's distribution (vLLM's custom_class)",
    )
    logits: str | None = Field(
        default=None,
        description="dataset of stage logits to make these from, without the target",
    )
    bound: bool = Field(
        default=False, description="with logits: upper bounds will do where not exact"
    )
