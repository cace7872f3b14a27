"""Every verifier by name: one declaration says what it takes and promises, and how it is tried.

To add one, write its rule in a file of this folder (a `NodeRule` for one position, or a `Rule` for
the whole draft), and declare it in `VERIFIERS`. `tests/eval/test_verifiers.py` tests every entry.

This file is imported without torch, so that a configuration is checked, and help and plans are
shown, at once; `VerifierSpec.make` imports the rule.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

    from eval.verifiers.rule import Verifier

__all__ = ["VERIFIERS", "VerifierSpec"]

Grid = tuple[Mapping[str, Any], ...]


@dataclass(frozen=True, slots=True)
class VerifierSpec:
    """All that the project knows of a verifier.

    The grid has settings worth trying, {} for one without parameters; where it will not do, tests
    drive it with the examples. What all settings in both have is required.
    """

    name: str  # its key in `VERIFIERS`
    rule: str  # "module.function" in this folder: the rule, or what makes it of its parameters
    takes: tuple[str, ...]  # the `DraftTree.kind`s that it has a proof for
    paper: str
    whole_draft: bool = False  # it is a `Rule`; if not, it is a `NodeRule`, applied by `Walk`
    # "module.function" of (p (V,), q (V,), **parameters): the total variation between p and the
    # token emitted at one position. Empty: it is lossless.
    bias: str = ""
    residual_persists: bool = False  # see `Verifier`
    grid: Grid = ({},)
    examples: Grid = ()

    @property
    def lossless(self) -> bool:
        """Whether the output distribution is exactly the target's."""
        return not self.bias

    @property
    def branching(self) -> bool:
        """True if it takes drafts with more than one candidate for a position."""
        return self.takes != ("chain",)

    @property
    def parameters(self) -> tuple[str, ...]:
        """The names of its parameters."""
        return tuple(dict.fromkeys(n for each in (*self.grid, *self.examples) for n in each))

    def check_names(self, given: Mapping[str, object]) -> None:
        """Raise ValueError for a parameter that it does not have or lacks, without torch."""
        settings, names = (*self.grid, *self.examples), self.parameters
        unknown = [name for name in given if name not in names]
        missing = [n for n in names if n not in given and all(n in each for each in settings)]
        if unknown or missing:
            wrong = f"it has no {', '.join(unknown)}" if unknown else f"it needs {missing[0]}"
            raise ValueError(
                f"unusable parameters {dict(given)}: {wrong}"
                f" (parameters: {', '.join(names) or 'none'})"
            )

    def make(self, **parameters: object) -> Verifier:
        """Build the verifier."""
        self.check_names(parameters)
        from eval.verifiers.rule import Verifier, Walk

        rule = _imported(self.rule)
        rule = rule(**parameters) if any(self.grid) else rule
        return Verifier(
            self.name,
            rule if self.whole_draft else Walk(rule),
            self.takes,
            self.residual_persists,
            branching=self.branching,
            lossless=self.lossless,
            paper=self.paper,
        )

    def bias_at(self, p: Tensor, q: Tensor, **parameters: object) -> float:
        """Total variation between p and the token that a biased verifier emits at one position."""
        return float(_imported(self.bias)(p, q, **parameters))


def _imported(name: str) -> Any:
    module, function = name.split(".")
    return getattr(import_module(f"eval.verifiers.{module}"), function)


# Kinds of drafts (`DraftTree.kind`) that verifiers have proofs for.
IID = ("chain", "siblings, iid", "paths, iid", "tree, iid")
INDEPENDENT = (*IID, "siblings, independent", "paths, independent")
DISTINCT = ("siblings, distinct", "tree, distinct")
GREEDY = ("siblings, greedy", "tree, greedy")
CHOSEN = ("siblings, chosen", "tree, chosen")
PATHS = ("paths, iid", "paths, independent")

_EPSILONS = ({"epsilon": 0.02}, {"epsilon": 0.1})

_SPECS = (
    VerifierSpec(
        "token",
        "multi_candidate.token",
        ("chain",),
        "Leviathan et al. 2023 (arXiv:2211.17192); Chen et al. 2023 (arXiv:2302.01318)",
    ),
    VerifierSpec(
        "block",
        "block.block",
        ("chain",),
        "Sun et al. 2025 (arXiv:2403.10444v2), Algorithm 2",
        whole_draft=True,
    ),
    VerifierSpec(
        "greedy_block",
        "block.greedy_block",
        ("chain",),
        "Sun et al. 2024 (arXiv:2403.10444v1), Algorithm 3",
        whole_draft=True,
        residual_persists=True,
    ),
    VerifierSpec(
        "naive",
        "multi_candidate.naive",
        (*INDEPENDENT, *DISTINCT, *GREEDY, *CHOSEN),
        "Yang et al. 2024 (arXiv:2401.06706), MCNS",
    ),
    VerifierSpec(
        "rrs",
        "multi_candidate.rrs",
        INDEPENDENT,
        "Miao et al. 2023 (arXiv:2305.09781); Yang et al. 2024 (arXiv:2401.06706)",
    ),
    VerifierSpec(
        "rrs_wor",
        "multi_candidate.rrs_wor",
        DISTINCT,
        "Yang et al. 2024 (arXiv:2401.06706), Algorithm 2",
    ),
    VerifierSpec(
        "kseq",
        "kseq.kseq",
        IID,
        "Sun et al. 2023, SpecTr (arXiv:2310.15141), Algorithm 3",
    ),
    VerifierSpec(
        "importance",
        "importance.importance",
        INDEPENDENT,
        "Khisti et al. 2025 (arXiv:2410.18234); Luce selection is ours",
        grid=(
            {"solver": "truncated", "s": 5},
            {"solver": "truncated", "s": 5, "alphabet": 40},
            {"solver": "luce"},
        ),
        examples=(
            {"solver": "lp"},
            {"solver": "truncated", "s": 2},
            {"solver": "truncated_nosort", "s": 1},
            {"solver": "luce"},
            {"solver": "truncated", "alphabet": 2},
            {},
        ),
    ),
    VerifierSpec(
        "multipath_block",
        "multipath_block.multipath_block",
        PATHS,
        "selection (arXiv:2410.18234) and block verification (arXiv:2403.10444) combined",
        whole_draft=True,
        grid=({"solver": "truncated", "s": 5}, {"solver": "luce"}),
        examples=({"solver": "lp"}, {"solver": "truncated", "s": 1}, {"solver": "luce"}, {}),
    ),
    VerifierSpec(
        "greedy_draft",
        "multi_candidate.greedy_draft",
        GREEDY,
        "Hu et al. 2025 (ICLR), greedy draft sampling",
    ),
    VerifierSpec(
        "traversal",
        "traversal.traversal",
        ("chain", *INDEPENDENT, *DISTINCT),
        "Weng et al. 2025 (arXiv:2505.12398)",
        whole_draft=True,
    ),
    VerifierSpec(
        "batch",
        "multi_candidate.batch",
        PATHS,
        "Yin et al. 2024 (arXiv:2411.00841), Algorithm 4",
        whole_draft=True,
    ),
    VerifierSpec(
        "biased_uno",
        "biased.biased_uno",
        ("chain",),
        "Yin et al. 2024 (arXiv:2411.00841), Decoding-UNO",
        bias="biased.uno_loss",
        grid=_EPSILONS,
        examples=({"epsilon": 0.0}, {"epsilon": 0.1}, {"epsilon": 2.0}),
    ),
    VerifierSpec(
        "biased_opt",
        "biased.biased_opt",
        ("chain",),
        "Yin et al. 2024 (arXiv:2411.00841), Theorems 4 and 5, Decoding-OPT",
        bias="biased.opt_loss",
        grid=_EPSILONS,
        examples=({"epsilon": 0.0}, {"epsilon": 0.1}, {"epsilon": 2.0}),
    ),
)
VERIFIERS: Mapping[str, VerifierSpec] = MappingProxyType({spec.name: spec for spec in _SPECS})
