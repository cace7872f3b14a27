"""Settings of the trainings in this package."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self

from pydantic import Field, model_validator

from specdata.config import MOST_TIMES, MOST_TOKENS, Config, Count, Few
from specdata.drafts import DRAFT_KINDS
from specdata.drafts.kind import DraftKind
from specdata.errors import ConfigError
from specdata.processes import zero_settings

TOY_POSITIONS = 1024
"""The context of the embedded pair, in tokens."""
LossName = Literal["forward_kl", "reverse_kl", "js", "tv", "tvd++", "neg_log_overlap", "lk_hybrid"]
"""Names of the losses in `distill.losses.LOSSES`."""
FRESH = {
    **{"num_hidden_layers": 2, "hidden_size": 768},
    **{"num_attention_heads": 12, "intermediate_size": 3072},
}
"""Sizes of a fresh draft: those of JackFram/llama-68m (SpecInfer, arXiv:2305.09781)."""
Reporter = Literal["tensorboard", "wandb", "trackio"]
if TYPE_CHECKING:
    LayoutName = str
else:  # kinds of drafts on their target's states, but the usual one
    LayoutName = Literal[
        tuple(n for n, k in DRAFT_KINDS.items() if k.reads_states and n not in ("states", "mtp"))
    ]
BLOCK = 7
"""Tokens that a draft in blocks proposes after one forward, as published ones do."""


class InitConfig(Config):
    """The origin of a draft: what it is before it is trained."""

    kind: Literal["model", "fresh", "target", "states", "mtp"] = Field(
        default="model",
        description="model (models.draft), fresh (random weights, sizes of LLaMA-68M), target "
        "(layers of the target), states (the target's last layers, or some of Llama's kind, "
        "which read its states) or mtp (the head that the target brings along)",
    )
    layers: Few = Field(
        default=2,  # untrained, the first of a real model start at .09, evenly spaced ones at 0
        ge=1,
        description="layers cut from the target: so many of the first (of the last, with kind "
        "states; 1 with kind mtp, the head's)",
    )
    taps: list[int] | None = Field(
        default=None,
        min_length=1,
        description="with kind states: the target's states that are read; 0 enters the first of n "
        "layers, n leaves the last (default: 2, n/2, n - 3 and n)",
    )
    layout: LayoutName | None = Field(
        default=None,
        description="with kind states: one that engines load (`draftsmith export`; default taps 2, "
        "n/2 and n - 3), eagle3 (layers: 1) or dspark (new layers, which draft a block after one "
        "forward), or ours",
    )
    block: Few | None = Field(
        default=None,
        ge=2,
        description=f"with layout dspark: tokens drafted after one forward (default: {BLOCK})",
    )
    engine: Literal["vllm", "sglang", "llama.cpp"] = Field(
        default="vllm", description="with kind mtp: the engine that feeds the head as it will be"
    )
    vocabulary: int | None = Field(
        default=None,
        ge=1,
        le=MOST_TOKENS,
        description="tokens that the draft can propose: the most frequent in the rollouts "
        "(default: all)",
    )

    align: bool = Field(
        default=False,
        description="with kind target: fit the output matrix to the draft's own last states (least "
        "squares on rollouts), as it is made for those of the target's last layer",
    )

    @model_validator(mode="before")
    @classmethod
    def _layers_of_a_head(cls, values: Any) -> Any:
        is_head = isinstance(values, dict) and values.get("kind") == "mtp"
        return {"layers": 1, **values} if is_head else values

    @model_validator(mode="after")
    def _parts_fit_each_other(self) -> Self:
        for name, given, kind in (
            ("align", self.align or None, "target"),
            ("taps", self.taps, "states"),
            ("layout", self.layout, "states"),
        ):
            if given is not None and self.kind != kind:
                raise ValueError(f"{name} needs kind {kind}, got {self.kind}")
        if self.layers > (most := self.draft_kind.most_layers or self.layers):
            those = f"layout {self.layout}" if self.layout else f"kind {self.kind}"
            raise ValueError(f"{those} needs layers: {most}, got {self.layers}")
        if self.block is not None and not self.draft_kind.in_blocks:
            those = " or ".join(kind.name for kind in DRAFT_KINDS.values() if kind.in_blocks)
            raise ValueError(f"block needs layout {those}, got {self.layout or 'none'}")
        if self.taps is not None and self.taps != sorted(set(self.taps)):
            raise ValueError(f"taps must be in order, each once, got {self.taps}")
        return self

    def layers_of(self, count: int, target: str | Path) -> list[int]:
        """The numbers of the layers that are cut from a target of so many."""
        if self.kind == "mtp":  # it is none of them
            return []
        if self.layers > count:
            raise ConfigError(
                f"draft.init.layers must be 1 to {count}, because {target} has {count} layers; got "
                f"{self.layers}"
            )
        first = count - self.layers if self.kind == "states" else 0
        return [*range(first, first + self.layers)]

    @property
    def draft_kind(self) -> DraftKind:
        """The kind of draft that is made, before it learns to read masks."""
        if self.kind in ("states", "mtp"):
            return DRAFT_KINDS[self.layout or self.kind]
        return DRAFT_KINDS["plain"]

    def taps_of(self, count: int) -> list[int]:
        """The states that the draft reads of a target of so many layers, or none."""
        return self.draft_kind.taps_of(self.taps, count)


def check_layout(layout: str | None, model_type: str | None, target: str) -> None:
    """Refuse a draft of a layout that cannot begin with the last layer or norm of such a target.

    `model_type` is the target's, if it is known. Raises ConfigError.
    """
    targets = DRAFT_KINDS[layout].targets if layout else ()
    if targets and model_type and model_type not in targets:
        raise ConfigError(
            f"draft.init.{'kind' if layout == 'mtp' else 'layout'} {layout} needs a target of "
            f"{', '.join(targets)}, and {target} is {model_type}: leave it out"
        )


class FinetuneConfig(Config):
    """Training on texts, before distillation: next-token prediction of what the assistant says."""

    conversations: list[str] = Field(
        default=[],
        description="conversations: JSONL, JSON or parquet files, folders, sharegpt or Hub ids "
        "(default: the rollouts, which is sequence-level distillation)",
    )
    epochs: float = Field(default=3.0, gt=0.0, le=MOST_TIMES, description="passes over the texts")
    max_length: Count = Field(
        default=2048, ge=2, description="tokens of a row; longer texts become several"
    )
    batch_size: Count = Field(default=8, ge=1, description="rows in a batch, over all processes")
    accumulation: Few = Field(
        default=1, ge=1, description="batches added up before an optimizer step"
    )
    learning_rate: float = Field(default=2e-5, gt=0.0, description="largest learning rate")
    warmup_ratio: float = Field(
        default=0.03,
        ge=0.0,
        lt=1.0,
        description="share of the steps over which the learning rate rises",
    )

    def check_context(self, positions: int, draft: str | Path) -> None:
        """Raise ConfigError if a draft has fewer positions than a row may have tokens."""
        if self.max_length > positions:
            raise ConfigError(
                f"draft.finetune.max_length must be at most {positions}, the positions of {draft}, "
                f"got {self.max_length}: lower it, or take a draft with a longer context"
            )


class LoraConfig(Config):
    """Low-rank adapters in place of full weights, merged when the draft is saved."""

    rank: Count = Field(
        default=16, ge=1, description="rank of the adapters, which are scaled by two (alpha / rank)"
    )

    def check_width(self, width: int) -> None:
        """Raise ConfigError if adapters would be wider than the draft's states."""
        if self.rank > width:
            raise ConfigError(
                f"draft.lora.rank must not exceed the draft's hidden size, {width}, got "
                f"{self.rank}: lower it, or leave out draft.lora to train all weights"
            )


class DistilConfig(Config):
    """The training of a draft: what it minimises, on what, how long and how fast."""

    init: InitConfig = Field(InitConfig(), description="where the draft comes from")
    finetune: FinetuneConfig | None = Field(
        None, description="training on texts before distillation"
    )
    lora: LoraConfig | None = Field(
        None, description="train low-rank adapters (default: all weights)"
    )
    on_policy: float = Field(
        0.0,
        ge=0.0,
        le=1.0,
        description="share of the rollouts of a batch whose completion the draft writes anew",
    )
    objective: LossName = Field("lk_hybrid", description="the loss")
    warp: Literal["sampler", "raw"] = Field(
        "sampler",
        description="the distributions compared: those that serving draws from (sampling), or the "
        "models' own at temperature 1",
    )
    logits: str | None = Field(
        None,
        description="dataset with top target logits (stage logits) to "
        "learn from, without the target: all tokens outside them count as one",
    )
    # A draft is accepted more on text that it has learnt: on SmolLM2's first whole run .77 against
    # .66 (code), .63 against .40 (questions), and its head expected what it had been shown.
    held_out_share: float = Field(
        0.0,
        ge=0.0,
        lt=1.0,
        description="share of the training rollouts that the draft does not learn from, so that "
        "the head, which then learns from these alone, sees acceptance as it is on new text",
    )
    epochs: float = Field(
        3.0,
        ge=0.0,
        le=MOST_TIMES,
        description="passes over the training rollouts; 0 keeps the draft as it starts",
    )
    # At equal seconds two gave SmolLM2's draft more acceptance and more tokens of a round than
    # three; EAGLE-3's 7 are for drafts that train a hundred times as long.
    readings: Few = Field(
        2,
        ge=2,
        description="with init.kind states: times that a batch is read, first after the target's "
        "states, then after the draft's own (training-time test)",
    )
    depths: Few = Field(
        1,
        ge=1,
        description="tokens that a draft which reads tokens alone proposes after one forward, with "
        "masks for those between (PARD); served with as many; 1: as many as models.draft has "
        "learnt to, else one",
    )
    max_length: int | None = Field(
        None,
        ge=2,
        le=MOST_TOKENS,
        description="tokens of a rollout; what is longer is cut (default: nothing is)",
    )
    batch_size: Count = Field(8, ge=1, description="rollouts in a batch, over all processes")
    accumulation: Few = Field(1, ge=1, description="batches added up before an optimizer step")
    learning_rate: float = Field(1e-4, gt=0.0, description="largest learning rate")
    optimizer: Literal["adamw", "muon"] = Field(
        "adamw",
        description="adamw, or muon for the matrices of layers and maps and adamw for all else: "
        "fewer, slower steps; not under DeepSpeed, not with lora",
    )
    freeze_embeddings: bool = Field(
        False,
        description="leave the input embedding as it is; needs an output matrix of its own, as a "
        "reduced vocabulary has",
    )
    start_share: float = Field(
        0.0,
        ge=0.0,
        lt=1.0,
        description="share of the weights before training in the draft, which is their average "
        "with the trained ones (WiSE-FT): a head of the target's is accepted more often so on text "
        "unlike the rollouts",
    )
    warmup_ratio: float = Field(
        0.1, ge=0.0, lt=1.0, description="share of the steps over which the learning rate rises"
    )
    save_steps: Count = Field(
        100, ge=1, description="steps between checkpoints, from which a killed run goes on"
    )
    precision: Literal["float32", "bfloat16"] = Field(
        "float32", description="of the draft's forward; its weights and their updates stay float32"
    )
    eval_steps: Count = Field(
        50, ge=1, description="steps between measurements on rollouts that are not trained on"
    )
    eval_rollouts: Count = Field(
        128,
        ge=1,
        description="how many of these are read each time, evenly over prompt sets; all are before "
        "and after",
    )
    report_to: list[Reporter] | None = Field(
        None,
        description="where losses and measurements are also reported: tensorboard, wandb, trackio",
    )

    @model_validator(mode="after")
    def _parts_fit_each_other(self) -> Self:
        for name, given, other, why in (
            (
                "optimizer muon",
                self.optimizer == "muon",
                "lora",
                "its matrices are not the layers'",
            ),
            ("freeze_embeddings", self.freeze_embeddings, "lora", "it freezes them"),
            ("on_policy", self.on_policy, "logits", "they are along the target's own texts"),
            ("freeze_embeddings", self.freeze_embeddings, "depths", "the mask is learnt"),
            ("lora", self.lora, "depths", "the mask is learnt"),
            ("start_share", self.start_share, "lora", "adapters have no average"),
        ):
            has_other = self.depths > 1 if other == "depths" else getattr(self, other) is not None
            if given and has_other:
                raise ValueError(f"{name} must be left out with {other}: {why}")
        if self.readings > 2 and self.init.kind in ("fresh", "target"):
            raise ValueError(f"readings needs init.kind states or mtp, got {self.init.kind}")
        if self.init.kind in ("states", "mtp"):
            self.check_states(f"init.kind {self.init.kind}")
        return self

    def check_engine(self) -> None:
        """Refuse what cannot be trained under the launcher's DeepSpeed. Raises ConfigError."""
        if (zero := zero_settings()) is None:
            return
        if self.optimizer == "muon":
            raise ConfigError(
                "draft.optimizer muon needs whole matrices, and DeepSpeed divides them: launch "
                "without it, or set draft.optimizer to adamw"
            )
        if self.on_policy > 0 and zero["stage"] == 3:
            raise ConfigError(
                "draft.on_policy has each process call the whole draft as often as it has rows to "
                "write, and ZeRO-3 divides it: launch under DDP or ZeRO-2, or leave on_policy out"
            )

    def check_states(self, what: str) -> None:
        """Refuse what a draft that reads its target's states cannot do. Raises ConfigError."""
        for name, given, why in (
            ("logits", self.logits, "top logits come without the target's states"),
            ("on_policy", self.on_policy, "it learns from its own states in readings"),
            ("finetune", self.finetune, "the target does not read texts there"),
            ("lora", self.lora, "its maps are trained whole"),
            ("depths", self.depths > 1, "masks are of drafts that read tokens alone"),
            ("readings", self.readings > 2 and self.init.draft_kind.in_blocks, "a block has one"),
        ):
            if given:
                raise ConfigError(f"{name} must be left out with {what}: {why}")

    def stored_settings(self) -> dict[str, Any]:
        """The settings that the draft depends on, as JSON values."""
        return self.model_dump(mode="json", exclude={"report_to"})


class ToyPairConfig(Config):
    """The two models and how long they train; the defaults take minutes on two cores."""

    vocab_size: Count = Field(2048, ge=1, description="tokens of the shared vocabulary")
    examples_per_family: Count = Field(
        2000, ge=1, description="training documents of each prompt family"
    )
    library_characters: Count = Field(
        100_000, ge=0, description="library text in the training documents, at most"
    )
    block_size: Count = Field(128, ge=1, description="tokens of one training block")
    target_layers: Few = Field(12, ge=1, description="layers of the target")
    target_width: Count = Field(256, ge=6, multiple_of=2, description="hidden size of the target")
    target_steps: Count = Field(450, ge=1, description="training steps of the target")
    draft_layers: Few = Field(1, ge=1, description="layers of the draft")
    draft_width: Count = Field(128, ge=6, multiple_of=2, description="hidden size of the draft")
    draft_steps: Count = Field(
        400, ge=1, description="training steps of the base draft; distillation goes on"
    )
    save_steps: Count = Field(
        100, ge=1, description="steps between checkpoints, from which a killed run goes on"
    )
