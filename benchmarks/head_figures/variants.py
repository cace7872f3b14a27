"""The heads that are trained: the shipped one, and others with one ingredient changed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks.head_figures.data import DOMAINS, Data, of_domains
from heads import BaseHead
from heads.config import HeadConfig
from heads.inputs import NUMBERS
from heads.train import train_head
from specdata.sampling import numpy_generator_for

if TYPE_CHECKING:
    import datasets

Rows = Callable[["datasets.Dataset"], "datasets.Dataset"]
SHIPPED = HeadConfig(kind="immediate")
MORE_DRAWS = ("more_draft_ids", "more_accept_prob")


def all_rows(rows: datasets.Dataset) -> datasets.Dataset:
    """As they are."""
    return rows


def one_draw(rows: datasets.Dataset) -> datasets.Dataset:
    """With the first drafted token of each position alone."""
    return rows.remove_columns([name for name in MORE_DRAWS if name in rows.column_names])


def drawn_labels(rows: datasets.Dataset) -> datasets.Dataset:
    """With outcomes, 0 or 1, drawn from the probabilities of acceptance."""

    def outcomes(row: dict[str, Any]) -> dict[str, Any]:
        drawn = {}
        for name in ("accept_prob", "more_accept_prob"):
            if name in row:
                uniforms = numpy_generator_for("outcome", name, row["example_id"])
                values = np.asarray(row[name])
                drawn[name] = (uniforms.random(len(values)) < values).astype(float).tolist()
        return drawn

    return rows.map(outcomes, load_from_cache_file=False, keep_in_memory=True)


def instructions_alone(rows: datasets.Dataset) -> datasets.Dataset:
    """Of the first domain."""
    return of_domains(rows, {DOMAINS[0]: len(rows)})


@dataclass(frozen=True, slots=True)
class Variant:
    """A head and what it is trained on.

    Attributes:
        name: what tables call it.
        changes: settings that differ from the shipped head's.
        rows: makes its training rows of the common ones.
    """

    name: str
    changes: Mapping[str, Any] = field(default_factory=dict)
    rows: Rows = all_rows

    def config(self, passes: int | None) -> HeadConfig:
        """The settings that it is trained with, for so many passes over the rows."""
        return HeadConfig(**{"kind": "immediate", "epochs": passes, **self.changes})


def _without(*names: str) -> dict[str, Any]:
    return {"features": tuple(name for name in SHIPPED.features if name not in names)}


def _with(*names: str) -> dict[str, Any]:
    return {"features": (*SHIPPED.features, *names)}


FULL = Variant("as shipped")
ALONE = Variant("instructions alone", rows=instructions_alone)
PUBLISHED = Variant("SpecDec++", {"kind": "specdec++"})
ABLATION = (
    FULL,
    Variant("without the state before the token", _without("hidden_before")),
    Variant("without the token's embedding", _without("embedding")),
    Variant("without the numbers", _without(*NUMBERS)),
    *(Variant(f"without {name}", _without(name)) for name in SHIPPED.features if name in NUMBERS),
    Variant("with the other numbers", _with("log_q_max", "margin", "entropy", "log_mass_above")),
    Variant("one draw a position", rows=one_draw),
    Variant("drawn outcomes as labels", rows=drawn_labels),
    ALONE,
    Variant("a layer more", {"depth": 1}),
    Variant("half the width", {"width": 32}),
    Variant("four times the width", {"width": 256}),
    PUBLISHED,
)

KINDS = (
    FULL,
    PUBLISHED,
    Variant("confidence", {"kind": "confidence"}),
    # What needs no head, as a curve that is fitted on the same labels.
    Variant("max q alone", {"features": ("log_q_max",)}),
    Variant("margin alone", {"features": ("margin",)}),
)


def trained(
    variant: Variant,
    data: Data,
    counts: Mapping[str, int],
    *,
    passes: int | None,
    seed: int,
    name: str,
) -> BaseHead:
    """Train a variant, unless that was done; the head is in `RUN/heads/NAME`.

    Args:
        variant: which head.
        data: what it is trained on.
        counts: domain -> most training rollouts.
        passes: over them; None for as many as the recipe would make.
        seed: of its initial weights and the order of rows.
        name: of its folder.
    """
    out = Path(data.config.output) / "heads" / name
    train_head(
        draft=data.draft,
        train=variant.rows(of_domains(data.train, counts)),
        dev=data.dev,
        out=out,
        config=variant.config(passes),
        seed=seed,
        sampling=data.sampling,
    )
    return BaseHead.from_pretrained(out).eval()
