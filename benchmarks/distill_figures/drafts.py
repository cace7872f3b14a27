"""The drafts that are compared: one start, one setting changed at a time."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from benchmarks.distill_figures.data import DOMAINS, Data, of_domains
from distill.config import TOY_POSITIONS, DistilConfig, FinetuneConfig
from distill.distillation import distil
from distill.finetune import finetune
from eval.measuring.environment import describe_environment
from specdata.storage.files import write_json

SFT = "sft"
"""The loss that is none of distillation's: cross entropy of the target's tokens."""

# Every draft is its last checkpoint, so that losses are compared after the same steps; what is
# measured while training is kept short.
MEASURED = {"keep": "last", "eval_steps": 10_000, "save_steps": 10_000, "report_to": []}
DEV_ROLLOUTS = 8


@dataclass(frozen=True, slots=True)
class Training:
    """A distillation.

    Attributes:
        objective: the loss of `distill.losses`, or `SFT`.
        rollouts: domain -> training rollouts.
        share: of the rollouts of a batch that carry the draft's own text (`draft.on_policy`).
        epochs: passes over the rollouts.
        learning_rate: the largest.
        batch_size: rollouts of a step.
        start: what `started` returned, the draft that it starts from; None is the pair's.
    """

    objective: str
    rollouts: Mapping[str, int] = field(default_factory=dict)
    share: float = 0.0
    epochs: float = 1.0
    learning_rate: float = 1e-3
    batch_size: int = 8
    start: Path | None = None

    def changed(self, **changes: Any) -> Training:
        """The same with some settings changed."""
        return replace(self, **changes)

    def config(self) -> DistilConfig:
        """The settings that it is trained with."""
        return DistilConfig.model_validate(
            {
                "objective": self.objective,
                "epochs": self.epochs,
                "learning_rate": self.learning_rate,
                "batch_size": self.batch_size,
                "on_policy": self.share,
                **MEASURED,
            }
        )

    def name(self, seed: int) -> str:
        """Of its folder: different for different trainings."""
        start = "" if self.start is None else f"{self.start.parent.name}, "
        counts = "+".join(str(self.rollouts.get(domain, 0)) for domain in DOMAINS)
        share = f" {self.share:g} own" if self.share else ""
        return (
            f"{start}{self.objective}{share}, {counts} x {self.epochs:g}, "
            f"{self.learning_rate:g}, {self.batch_size}, seed {seed}"
        )

    @property
    def count(self) -> int:
        """Training rollouts in all."""
        return sum(self.rollouts.values())


def trained(training: Training, data: Data, *, seed: int) -> Path:
    """Train a draft, unless that was done, and return its model folder."""
    out = data.run / "drafts" / training.name(seed)
    if out.exists():
        return out
    train, begun = of_domains(data.train, training.rollouts), time.process_time()
    start = training.start or data.draft
    if training.objective == SFT:
        finetune(
            target=data.target,
            draft=start,
            rollouts=train,
            out=out,
            config=FinetuneConfig(
                epochs=training.epochs,
                max_length=TOY_POSITIONS,
                batch_size=max(1, training.batch_size // 8),  # a row holds some eight texts
                learning_rate=training.learning_rate,
                warmup_ratio=DistilConfig.model_validate({}).warmup_ratio,
            ),
            lora=None,
            seed=seed,
            save_steps=100,
        )
    else:
        distil(
            target=data.target,
            draft=start,
            train=train,
            dev=of_domains(data.dev, dict.fromkeys(DOMAINS, DEV_ROLLOUTS)),
            out=out,
            config=training.config(),
            sampling=data.sampling,
            seed=seed,
        )
    write_json(_record(out), {**made(), "cpu_seconds": time.process_time() - begun})
    return out


def made() -> dict[str, Any]:
    """With which code, and when."""
    environment = describe_environment(device="cpu", dtype="float32").model_dump()
    return {name: environment[name] for name in ("git_commit", "git_dirty", "date")}


def record(out: Path) -> dict[str, Any]:
    """When and with which code a draft was made, and what processor time that took."""
    path = _record(out)
    read: dict[str, Any] = json.loads(path.read_text("utf-8")) if path.exists() else {}
    return read


def _record(out: Path) -> Path:
    return out.with_name(f"{out.name}.json")
