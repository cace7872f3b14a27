"""Settings of a head and of its training: importable without torch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal, Self, get_args

from pydantic import Field, model_validator

from specdata.config import Config

Kind = Literal["specdec++", "immediate"]
Tracker = Literal["none", "tensorboard", "wandb"]
DecisionPointName = Literal["before", "drawn", "consumed"]
FeatureName = Literal[
    "hidden_before",
    "embedding",
    "hidden",
    "log_q",
    "log_q_max",
    "margin",
    "entropy",
    "log_mass_above",
    "position",
    "since_rejection",
]

# What pays for being asked (`benchmarks/head_figures`, `benchmarks/head_call.py`): of the numbers
# one, the cheapest; the decision point `consumed`, for which `hidden` is, costs a second question.
DEFAULT_FEATURES: tuple[FeatureName, ...] = (
    "hidden_before",
    "embedding",
    "log_q",
)
# Features that are not known before the token is drawn, and the decision point from which they are;
# those of `heads.inputs.FEATURES`, which imports torch.
KNOWN_FROM: dict[FeatureName, DecisionPointName] = {
    "embedding": "drawn",
    "hidden": "consumed",
    "log_q": "drawn",
    "log_mass_above": "drawn",
}

_OURS: dict[str, Any] = {
    "mixing": None,
    "rejection_weight": 1.0,
    "batch_size": 12,
    "micro_batch_size": 12,
    "weight_decay": 0.01,
    "warmup_ratio": 0.05,
}
# What differs from the defaults of specdec++, which the fields have.
DEFAULTS: dict[Kind, dict[str, Any]] = {
    "specdec++": {},
    "immediate": {"depth": 0, **_OURS},
}
UNREAD: dict[Kind, tuple[str, ...]] = {
    "specdec++": ("width", "features", "decision_points", "draws", "cache"),
    "immediate": ("rejection_weight",),
}
# Without head.epochs: as many passes as make so many steps, but at least and at most so many. An
# immediate head learns few rows by heart: after 107 passes over 162 rows it was worse than chance.
STEPS: dict[Kind, int] = {"specdec++": 400, "immediate": 1500}
PASSES: dict[Kind, tuple[int, float]] = {
    "specdec++": (3, math.inf),
    "immediate": (12, 24),
}


class HeadConfig(Config):
    """Settings of the head and of its training.

    The defaults are those of SpecDec++ (2405.19715); `kind: immediate` has its own where the
    descriptions say so.
    """

    kind: Kind = Field(
        "specdec++",
        description="specdec++: the published head, on the state after the token; immediate: ours, "
        "on all that is known once the token is drawn, and better",
    )
    depth: int = Field(
        3,
        ge=0,
        description="residual blocks, 0 is a linear head [immediate: layers after the sum of what "
        "it reads, 0]",
    )
    width: int = Field(64, ge=1, description="width of its layers [immediate alone]")
    features: tuple[FeatureName, ...] = Field(
        DEFAULT_FEATURES,
        min_length=1,
        description="what the head reads of a drafted token [immediate alone]",
    )
    decision_points: tuple[DecisionPointName, ...] = Field(
        ("drawn",),
        min_length=1,
        description="when it can be asked: before the token is drawn, when it is, and when the "
        "draft has read it [immediate alone]",
    )
    mixing: float | None = Field(
        0.15,
        ge=0.0,
        lt=1.0,
        description="share of positions that keep the target's token; null: no mixing, each token "
        "is judged after the target's own text [immediate: null]",
    )
    draws: int = Field(
        1,
        ge=1,
        description="drafted tokens a position in one pass, of those that the labels hold; the "
        "next pass takes the next ones [immediate alone]",
    )
    rejection_weight: float = Field(
        6.0,
        gt=0.0,
        description="weight of rejections in the loss, acceptances weigh 1 [specdec++ alone]",
    )
    epochs: int | None = Field(
        None,
        ge=1,
        description=f"passes over the training rows; null: as many as make {STEPS['specdec++']} "
        f"steps, at least {PASSES['specdec++'][0]} [immediate: {STEPS['immediate']} steps, "
        f"{PASSES['immediate'][0]} to {PASSES['immediate'][1]} passes]",
    )
    batch_size: int = Field(32, ge=1, description="rows a step, over all processes [immediate: 12]")
    micro_batch_size: int = Field(
        8,
        ge=1,
        description="rows a forward pass, per process; does not change the result [immediate: 12]",
    )
    learning_rate: float | None = Field(
        None,
        gt=0.0,
        description="Adam's peak rate, then cosine; null: the paper's 5e-5 for states of width "
        "4096, inversely more for narrower ones, at most 1e-3 [immediate: 2e-3]",
    )
    weight_decay: float = Field(
        0.0, ge=0.0, description="AdamW's decay of the weights [immediate: 0.01]"
    )
    warmup_ratio: float = Field(
        0.03,
        ge=0.0,
        lt=1.0,
        description="share of the steps in which the rate rises [immediate: 0.05]",
    )
    max_grad_norm: float = Field(1.0, gt=0.0, description="clip gradients to this norm")
    max_length: int | None = Field(
        None,
        ge=1,
        description="prompt + completion tokens, what is longer is cut; null: whole rows, as far "
        "as the draft has positions",
    )
    cache: Literal["none", "disk"] = Field(
        "none",
        description="what the draft says of the tokens: none computes it at every step; disk once, "
        "and keeps it, states in bfloat16, until the head is done [not of specdec++]",
    )
    save_steps: int = Field(200, ge=1, description="steps between checkpoints")
    report_to: Tracker = Field("none", description="where loss, rate and metrics are also logged")
    folder: str = Field(
        "head",
        pattern=r"^head[\w.-]*$",
        description="its folder in the run's output: head-2 trains another head beside the first, "
        "which is measured into eval-2",
    )

    @model_validator(mode="before")
    @classmethod
    def _defaults_of_its_kind(cls, given: Any) -> Any:
        if isinstance(given, Mapping):
            of_kind: Mapping[str, Any] = next(
                (own for kind, own in DEFAULTS.items() if kind == given.get("kind")), {}
            )
            return {**of_kind, **given}
        return given

    @model_validator(mode="after")
    def _fits_its_kind(self) -> Self:
        unread = [
            f"{name} (got {getattr(self, name)!r})"
            for name in UNREAD[self.kind]
            if getattr(self, name) != _default(self.kind, name)
        ]
        if unread:
            raise ValueError(
                f"kind {self.kind} does not read {', '.join(unread)}: leave that out, or choose "
                "another kind"
            )
        if self.kind == "specdec++" and self.mixing is None:
            raise ValueError(
                "kind specdec++ reads a mixed context: mixing must be a number, got null; 0.15 is "
                "the paper's"
            )
        for name in ("features", "decision_points"):
            values = getattr(self, name)
            if len({*values}) < len(values):
                raise ValueError(f"{name} must name each once, got {list(values)}")
        if self.kind == "immediate":
            order: tuple[DecisionPointName, ...] = get_args(DecisionPointName)
            first = min(self.decision_points, key=order.index)
            known = [KNOWN_FROM.get(name, "before") for name in self.features]
            if not any(order.index(point) <= order.index(first) for point in known):
                raise ValueError(
                    f"of the features {', '.join(self.features)} none is known at the decision "
                    f"point {first}: name one that is, or leave that point out"
                )
            # Nothing of these is there without the target's own text.
            needs: list[str] = [
                name for name in ("position", "since_rejection") if name in self.features
            ]
            needs += ["before"] if "before" in self.decision_points else []
            needs += [f"draws {self.draws}"] if self.draws > 1 else []
            needs += [f"cache {self.cache}"] if self.cache != "none" else []
            if needs and self.mixing is not None:
                raise ValueError(
                    f"mixing {self.mixing} cannot be with {', '.join(needs)}, which need the "
                    "target's own text: leave them out, or set mixing to null"
                )
        return self

    def passes(self, rows: int) -> int:
        """Passes over so many training rows."""
        if self.epochs is not None:
            return self.epochs
        least, most = PASSES[self.kind]
        wanted = math.ceil(STEPS[self.kind] / math.ceil(rows / self.batch_size))
        return int(min(most, max(least, wanted)))

    def peak_rate(self, hidden_size: int) -> float:
        """The largest learning rate, for a draft whose states have this width."""
        if self.learning_rate is not None:
            return self.learning_rate
        if self.kind != "specdec++":
            return 2e-3
        return min(1e-3, 5e-5 * 4096 / hidden_size)

    def decisive(self) -> dict[str, Any]:
        """The settings that decide the head, as JSON values."""
        return self.model_dump(mode="json", exclude={"report_to", "folder"})


def _default(kind: Kind, name: str) -> Any:
    return DEFAULTS[kind].get(name, HeadConfig.model_fields[name].get_default())
