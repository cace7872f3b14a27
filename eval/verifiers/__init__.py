"""Every verifier by name: what it takes, what it promises, where it comes from.

To add one, write its rule (a `NodeRule` for one position, wrapped in `walk`, or a `Rule` for the
whole draft), give it a name in `RULES` (`rules.py`), and add its entry to `VERIFIERS`.
`tests/test_verifiers.py` tests every entry.

This file is imported without torch, so that a configuration is checked, and help and plans are
shown, at once; `VerifierSpec.make` imports the rules.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from eval.verifiers.rule import Verifier

__all__ = ["VERIFIERS", "VerifierSpec"]


@dataclass(frozen=True, slots=True)
class VerifierSpec:
    """An entry of `VERIFIERS`.

    Args:
        name: its key, and that of its rule in `RULES`.
        takes: the `DraftTree.kind`s that it has a proof for.
        lossless: whether the output distribution is exactly the target's.
        paper: where it comes from.
        residual_persists: see `Verifier`.
        parameters: names of what its rule can be given.
        required: names of what its rule must be given.
    """

    name: str
    takes: tuple[str, ...]
    lossless: bool
    paper: str
    residual_persists: bool = False
    parameters: tuple[str, ...] = ()
    required: tuple[str, ...] = ()

    @property
    def branching(self) -> bool:
        """True if it takes drafts with more than one candidate for a position."""
        return self.takes != ("chain",)

    def check_names(self, given: Mapping[str, object]) -> None:
        """Raise ValueError for a parameter that it does not have or lacks, without torch."""
        unknown = [name for name in given if name not in self.parameters]
        missing = [name for name in self.required if name not in given]
        if unknown or missing:
            known = ", ".join(self.parameters) or "none"
            wrong = f"it has no {', '.join(unknown)}" if unknown else f"it needs {missing[0]}"
            raise ValueError(f"unusable parameters {dict(given)}: {wrong} (parameters: {known})")

    def make(self, **parameters: object) -> Verifier:
        """Build the verifier.

        Raises:
            ValueError: for a parameter that it does not have, lacks, or cannot use.
        """
        self.check_names(parameters)
        from eval.verifiers.rule import Verifier
        from eval.verifiers.rules import RULES

        return Verifier(
            self.name,
            RULES[self.name](**parameters),
            self.takes,
            self.residual_persists,
            branching=self.branching,
            lossless=self.lossless,
            paper=self.paper,
        )


# Kinds of drafts (`DraftTree.kind`) that verifiers have proofs for.
IID = ("chain", "siblings, iid", "paths, iid", "tree, iid")
INDEPENDENT = (*IID, "siblings, independent", "paths, independent")
DISTINCT = ("siblings, distinct", "tree, distinct")
GREEDY = ("siblings, greedy", "tree, greedy")
CHOSEN = ("siblings, chosen", "tree, chosen")
PATHS = ("paths, iid", "paths, independent")

_SPECS = (
    VerifierSpec(
        "token",
        ("chain",),
        lossless=True,
        paper="Leviathan et al. 2023 (arXiv:2211.17192); Chen et al. 2023 (arXiv:2302.01318)",
    ),
    VerifierSpec(
        "block",
        ("chain",),
        lossless=True,
        paper="Sun et al. 2025 (arXiv:2403.10444v2), Algorithm 2",
    ),
    VerifierSpec(
        "greedy_block",
        ("chain",),
        lossless=True,
        paper="Sun et al. 2024 (arXiv:2403.10444v1), Algorithm 3",
        residual_persists=True,
    ),
    VerifierSpec(
        "naive",
        (*INDEPENDENT, *DISTINCT, *GREEDY, *CHOSEN),
        lossless=True,
        paper="Yang et al. 2024 (arXiv:2401.06706), MCNS",
    ),
    VerifierSpec(
        "rrs",
        INDEPENDENT,
        lossless=True,
        paper="Miao et al. 2023 (arXiv:2305.09781); Yang et al. 2024 (arXiv:2401.06706)",
    ),
    VerifierSpec(
        "rrs_wor",
        DISTINCT,
        lossless=True,
        paper="Yang et al. 2024 (arXiv:2401.06706), Algorithm 2",
    ),
    VerifierSpec(
        "kseq",
        IID,
        lossless=True,
        paper="Sun et al. 2023, SpecTr (arXiv:2310.15141), Algorithm 3",
    ),
    VerifierSpec(
        "importance",
        INDEPENDENT,
        lossless=True,
        paper="Khisti et al. 2025 (arXiv:2410.18234); Luce selection is ours",
        parameters=("solver", "s", "alphabet"),
    ),
    VerifierSpec(
        "multipath_block",
        PATHS,
        lossless=True,
        paper="ours: selection (arXiv:2410.18234) and block verification (arXiv:2403.10444)",
        parameters=("solver", "s"),
    ),
    VerifierSpec(
        "greedy_draft",
        GREEDY,
        lossless=True,
        paper="Hu et al. 2025 (ICLR), greedy draft sampling",
    ),
    VerifierSpec(
        "traversal",
        ("chain", *INDEPENDENT, *DISTINCT),
        lossless=True,
        paper="Weng et al. 2025 (arXiv:2505.12398)",
    ),
    VerifierSpec(
        "batch",
        PATHS,
        lossless=True,
        paper="Yin et al. 2024 (arXiv:2411.00841), Algorithm 4",
    ),
    VerifierSpec(
        "biased_uno",
        ("chain",),
        lossless=False,
        paper="Yin et al. 2024 (arXiv:2411.00841), Decoding-UNO",
        parameters=("epsilon",),
        required=("epsilon",),
    ),
    VerifierSpec(
        "biased_opt",
        ("chain",),
        lossless=False,
        paper="Yin et al. 2024 (arXiv:2411.00841), Theorems 4 and 5, Decoding-OPT",
        parameters=("epsilon",),
        required=("epsilon",),
    ),
)
VERIFIERS: Mapping[str, VerifierSpec] = MappingProxyType({spec.name: spec for spec in _SPECS})
