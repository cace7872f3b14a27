"""Settings of a head and of its training: importable without torch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import import_module
from typing import TYPE_CHECKING, Any, Literal, Self

from pydantic import Field, model_validator

from specdata.config import MOST_TIMES, Config, Count, Few
from specdata.errors import ConfigError

if TYPE_CHECKING:
    from heads.model import BaseHead

Tracker = Literal["none", "tensorboard", "wandb", "trackio"]
FeatureName = Literal["hidden_before", "embedding", "log_q", "entropy"]

# What pays for being asked (docs/evidence/head-clock.md): of the
# numbers one, the cheapest.
DEFAULT_FEATURES: tuple[FeatureName, ...] = ("hidden_before", "embedding", "log_q")


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadKind:
    """A kind of head as far as it is known without torch: its code, and how it is trained.

    The defaults are those of heads that judge a token when it is drawn.
    """

    head: str  # "module.Class" in `heads/kinds`
    description: str  # what help says of it
    title: str = ""  # what cards call it, if not by its name
    lag: int = 0  # of its class
    # Without `head.epochs` as many passes as make so many steps, but at least and at most so many.
    # An immediate head learns few rows by heart: after 107 passes over 162, worse than chance.
    steps: int = 1500
    passes: tuple[int, float] = (12, 24)
    # The peak of the learning rate: so much over the width of states, but at most so much.
    rate: tuple[float, float] = (math.inf, 2e-3)
    weight_decay: float = 0.01
    warmup_ratio: float = 0.05
    # Where the defaults of settings differ from those of `HeadConfig`'s fields.
    defaults: Mapping[str, Any] = field(
        default_factory=lambda: {
            **{"depth": 0, "rejection_weight": 1.0},
            **{"batch_size": 12, "micro_batch_size": 12},
        }
    )
    # Settings that it does not read, so only their defaults are taken.
    unread: tuple[str, ...] = ("depth", "width", "mixing", "rejection_weight")

    def load(self) -> type[BaseHead]:
        """Import its class, and torch."""
        file, name = self.head.split(".")
        head: type[BaseHead] = getattr(import_module(f"heads.kinds.{file}"), name)
        return head


HEAD_KINDS: dict[str, HeadKind] = {
    "specdec++": HeadKind(
        head="specdecpp.AcceptanceHead",
        description="the published head, on the state after the token",
        title="SpecDec++, arXiv:2405.19715",
        lag=1,
        steps=400,
        passes=(3, math.inf),
        rate=(5e-5 * 4096, 1e-3),
        weight_decay=0.0,
        warmup_ratio=0.03,
        defaults={},
        unread=("width", "features", "draws"),
    ),
    "immediate": HeadKind(
        head="immediate.ImmediateHead",
        description="ours, on what is known once the token is drawn, and better",
        unread=("mixing", "rejection_weight"),
    ),
    "confidence": HeadKind(
        head="confidence.ConfidenceHead",
        description="one linear map of the state before the token, as engines ask it of drafts in "
        "blocks",
        rate=(2.5, 2e-2),
        unread=("depth", "width", "features", "mixing"),
    ),
}
"""Every kind of head by its name in the configuration and in a head's config.json."""

if TYPE_CHECKING:
    Kind = str
else:
    Kind = Literal[tuple(HEAD_KINDS)]


def _readers(setting: str) -> str:
    """The kinds that read a setting, for help."""
    return ", ".join(name for name, kind in HEAD_KINDS.items() if setting not in kind.unread)


def check_depths(kind: str, depths: int) -> None:
    """Refuse a head of states that a draft with masks does not have. Raises ConfigError."""
    if HEAD_KINDS[kind].lag and depths != 1:
        others = ", or ".join(name for name, each in HEAD_KINDS.items() if not each.lag)
        raise ConfigError(
            f"head.kind {kind} judges a token by the draft's state after it, and after masks "
            f"(depths {depths}) there is none: train one of kind {others}"
        )


class HeadConfig(Config):
    """Settings of the head and of its training.

    The defaults are those of SpecDec++ (2405.19715); the other kinds have their own where the
    descriptions say so.
    """

    kind: Kind = Field(
        "specdec++",
        description="; ".join(f"{name}: {kind.description}" for name, kind in HEAD_KINDS.items()),
    )
    depth: Few = Field(
        3,
        ge=0,
        description="residual blocks, 0 is a linear head [immediate: layers after the sum of what "
        "it reads, 0; not of confidence]",
    )
    width: Count = Field(64, ge=1, description=f"width of its layers [{_readers('width')} alone]")
    features: tuple[FeatureName, ...] = Field(
        DEFAULT_FEATURES,
        min_length=1,
        description=f"what the head reads of a drafted token [{_readers('features')} alone]",
    )
    mixing: float = Field(
        0.15,
        ge=0.0,
        lt=1.0,
        description="share of positions that keep the target's token [specdec++ alone: the others "
        "judge each token after the target's own text]",
    )
    draws: Few = Field(
        1,
        ge=1,
        description="drafted tokens a position in one pass, of those that the labels hold; the "
        "next pass takes the next ones [not of specdec++]",
    )
    rejection_weight: float = Field(
        6.0,
        gt=0.0,
        description="weight of rejections in the loss, acceptances weigh 1 [confidence: 1; not of "
        "immediate]",
    )
    epochs: int | None = Field(
        None,
        ge=1,
        le=MOST_TIMES,
        description="passes over the training rows; null: as many as make 400 steps, at least 3 "
        "[other kinds: 1500 steps, 12 to 24 passes]",
    )
    batch_size: Count = Field(
        32, ge=1, description="rows a step, over all processes [other kinds: 12]"
    )
    micro_batch_size: Count = Field(
        8,
        ge=1,
        description="rows a forward pass, per process; does not change the result [other "
        "kinds: 12]",
    )
    learning_rate: float | None = Field(
        None,
        gt=0.0,
        description="Adam's peak rate, then cosine; null: the paper's 5e-5 for states of width "
        "4096, inversely more for narrower ones, at most 1e-3 [confidence: 6e-4 for that "
        "width, at most 2e-2; other kinds: 2e-3]",
    )
    save_steps: Count = Field(200, ge=1, description="steps between checkpoints")
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
        if isinstance(given, Mapping) and isinstance(name := given.get("kind"), str):
            return {**(HEAD_KINDS[name].defaults if name in HEAD_KINDS else {}), **given}
        return given

    @property
    def kind_facts(self) -> HeadKind:
        """The entry of `HEAD_KINDS`."""
        return HEAD_KINDS[self.kind]

    @model_validator(mode="after")
    def _fits_its_kind(self) -> Self:
        default = {n: field.get_default() for n, field in HeadConfig.model_fields.items()}
        default |= self.kind_facts.defaults
        unread = [
            f"{name} (got {getattr(self, name)!r})"
            for name in self.kind_facts.unread
            if getattr(self, name) != default[name]
        ]
        if unread:
            raise ValueError(
                f"kind {self.kind} does not read {', '.join(unread)}: leave that out, or choose "
                "another kind"
            )
        if len({*self.features}) < len(self.features):
            raise ValueError(f"features must name each once, got {list(self.features)}")
        return self

    def passes(self, rows: int) -> int:
        """Passes over so many training rows."""
        if self.epochs is not None:
            return self.epochs
        least, most = self.kind_facts.passes
        enough = math.ceil(self.kind_facts.steps / math.ceil(rows / self.batch_size))
        return int(min(most, max(least, enough)))

    def peak_rate(self, hidden_size: int) -> float:
        """The largest learning rate, for a draft whose states have this width."""
        if self.learning_rate is not None:
            return self.learning_rate
        of_width, most = self.kind_facts.rate
        return min(most, of_width / hidden_size)

    def stored_settings(self) -> dict[str, Any]:
        """The settings that decide the head, and not how it is trained, as JSON values."""
        alone = {"report_to", "folder", "micro_batch_size", "save_steps"}
        return self.model_dump(mode="json", exclude=alone)
