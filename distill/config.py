"""Settings of the trainings in this package."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from specdata.config import Config

TOY_POSITIONS = 1024
"""The context of the embedded pair, in tokens."""
Objective = Literal["forward_kl", "reverse_kl", "js", "tv", "neg_log_overlap", "lk_hybrid"]
"""Names of the losses in `distill.losses.LOSSES`."""


class DistilConfig(Config):
    """What the draft is trained to minimise, how long and how fast."""

    objective: Objective = Field("lk_hybrid", description="the loss")
    sets: list[str] | None = Field(
        None,
        min_length=1,
        description="names of the prompt sets whose rollouts it is trained and measured on, of "
        "those in rollouts.sets (default: all)",
    )
    epochs: float = Field(3.0, gt=0.0, description="passes over the training rollouts")
    batch_size: int = Field(8, ge=1, description="rollouts in a batch, over all processes")
    accumulation: int = Field(1, ge=1, description="batches added up before an optimizer step")
    learning_rate: float = Field(1e-4, gt=0.0, description="largest learning rate")
    warmup_ratio: float = Field(
        0.1, ge=0.0, lt=1.0, description="share of the steps over which the learning rate rises"
    )
    save_steps: int = Field(
        100, ge=1, description="steps between checkpoints, from which a killed run goes on"
    )


class ToyPairConfig(Config):
    """The two models and how long they train; the defaults take minutes on two cores."""

    vocab_size: int = Field(2048, ge=1, description="tokens of the shared vocabulary")
    examples_per_family: int = Field(
        2000, ge=1, description="training documents of each prompt family"
    )
    library_characters: int = Field(
        100_000, ge=0, description="library text in the training documents, at most"
    )
    block_size: int = Field(128, ge=1, description="tokens of one training block")
    batch_size: int = Field(4, ge=1, description="blocks of one training step")
    target_layers: int = Field(12, ge=1, description="layers of the target")
    target_width: int = Field(256, ge=6, multiple_of=2, description="hidden size of the target")
    target_steps: int = Field(450, ge=1, description="training steps of the target")
    target_learning_rate: float = Field(
        3e-3, gt=0.0, description="largest learning rate of the target"
    )
    draft_layers: int = Field(1, ge=1, description="layers of the draft")
    draft_width: int = Field(128, ge=6, multiple_of=2, description="hidden size of the draft")
    draft_steps: int = Field(
        400, ge=1, description="training steps of the base draft; distillation goes on"
    )
    draft_learning_rate: float = Field(
        4e-3, gt=0.0, description="largest learning rate of the draft"
    )
    save_steps: int = Field(
        100, ge=1, description="steps between checkpoints, from which a killed run goes on"
    )
