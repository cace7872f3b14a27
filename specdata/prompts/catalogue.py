"""The prompt sets of the papers (catalogue.yaml): source, licence, template and splits.

A split is either one of the source's own, or a part of it that is cut by content: prompts are
ranked by the sha256 of their columns, and a split is a range of ranks. So it depends on no seed and
no row order, and equal rows are never in two splits.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path

import yaml
from pydantic import TypeAdapter

from specdata.prompts.natural import LONG, NATURAL
from specdata.toy.corpus import FAMILIES

EMBEDDED = (*FAMILIES, *NATURAL, LONG)


@dataclass(frozen=True, slots=True)
class Part:
    """A split of the source, or a part of it: the prompts between two ranks, as shares of 1."""

    of: str
    start: float = 0.0
    stop: float = 1.0


@dataclass(frozen=True, slots=True)
class Form:
    """The way from a row to prompts.

    Args:
        ask: the user's message where the target has a chat template: the first of these texts
            whose columns are all filled.
        plain: the text for a target without one, chosen alike.
        questions: column with the user's turns, whose later ones depend on the model's answers.
        messages: column with a recorded conversation.
        roles: what the recorded roles are called here.
        keys: names of a message's role and of its content.
        keep: share of the words that is the prompt; the rest is what a model would write.
        reference: the text that an answer is scored against, if rows have one.
    """

    ask: tuple[str, ...] = ()
    plain: tuple[str, ...] = ()
    questions: str | None = None
    messages: str | None = None
    roles: Mapping[str, str] = field(default_factory=dict)
    keys: tuple[str, str] = ("role", "content")
    keep: float = 1.0
    reference: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CataloguedSet:
    """One catalogued set.

    Args:
        hub: id on the Hub, or the URL of a file to download where the set is not there.
        licence: as its page states it.
        splits: our splits in terms of the source's.
        form: how a row becomes a prompt.
        subset: the source's configuration.
        revision: branch or commit.
        files: which files hold a split, where the repository holds more.
    """

    hub: str
    licence: str
    splits: Mapping[str, Part]
    form: Form
    subset: str | None = None
    revision: str | None = None
    files: Mapping[str, str] = field(default_factory=dict)


def _read() -> dict[str, CataloguedSet]:
    """The sets of catalogue.yaml; a split there is "train", or "train 0 2/52" for a part of it."""
    sets = yaml.safe_load((Path(__file__).parent / "catalogue.yaml").read_text("utf-8"))
    for each in sets.values():
        parts = {name: split.split() for name, split in each["splits"].items()}
        each["splits"] = {
            name: Part(of, *(float(Fraction(share)) for share in shares))
            for name, (of, *shares) in parts.items()
        }
    return TypeAdapter(dict[str, CataloguedSet]).validate_python(sets)


CATALOGUE: Mapping[str, CataloguedSet] = _read()
