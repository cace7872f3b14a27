"""Every verifier by name, and nothing else.

To add one: write its rule (a `NodeRule` of one place, wrapped in `walk`, or a whole `Rule`), then
add its line below. `tests/test_verifiers.py` drives every entry through the same laws.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from eval.verifiers.rule import Verdict, Verifier, walk
from eval.verifiers.single import token

__all__ = ["VERIFIERS", "Entry", "Verdict", "Verifier"]


@dataclass(frozen=True, slots=True)
class Entry:
    """One verifier of the zoo.

    Args:
        make: builds the verifier; its keyword arguments are the verifier's parameters.
        branching: whether it takes drafts with more than one candidate for a place.
        lossless: whether the output law is exactly the target's.
        paper: where it comes from.
    """

    make: Callable[..., Verifier]
    branching: bool
    lossless: bool
    paper: str


VERIFIERS: Mapping[str, Entry] = MappingProxyType(
    {
        "token": Entry(
            lambda: Verifier("token", walk(token), ("chain",)),
            branching=False,
            lossless=True,
            paper="Leviathan et al. 2023 (arXiv:2211.17192); Chen et al. 2023 (arXiv:2302.01318)",
        ),
    }
)
