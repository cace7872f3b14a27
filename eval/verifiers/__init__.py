"""Every verifier by name.

To add one, write its rule (a `NodeRule` for one position, wrapped in `walk`, or a `Rule` for the
whole draft) and add one entry to `VERIFIERS`. `tests/test_verifiers.py` tests every entry.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

from eval.verifiers.batch import batch
from eval.verifiers.biased import biased_opt, biased_uno
from eval.verifiers.block import block, greedy_block
from eval.verifiers.importance import importance
from eval.verifiers.kseq import kseq
from eval.verifiers.multi_candidate import greedy_draft, naive, rrs, rrs_wor
from eval.verifiers.multipath_block import multipath_block
from eval.verifiers.rule import Verdict, Verifier, walk
from eval.verifiers.token import token
from eval.verifiers.traversal import traversal

__all__ = ["VERIFIERS", "Verdict", "Verifier", "VerifierSpec"]


@dataclass(frozen=True, slots=True)
class VerifierSpec:
    """An entry of `VERIFIERS`.

    Args:
        build: builds the verifier; its keyword arguments are the verifier's parameters.
        branching: whether it takes drafts with more than one candidate for a position.
        lossless: whether the output distribution is exactly the target's.
        paper: where it comes from.
    """

    build: Callable[..., Verifier]
    branching: bool
    lossless: bool
    paper: str

    def make(self, **parameters: object) -> Verifier:
        """Build the verifier.

        Raises:
            ValueError: for a parameter that it does not have, lacks, or cannot use.
        """
        try:
            verifier = self.build(**parameters)
        except TypeError as error:
            raise ValueError(f"unusable verifier parameters {parameters}: {error}") from error
        return replace(verifier, branching=self.branching, lossless=self.lossless, paper=self.paper)


# Kinds of drafts (`DraftTree.kind`) that verifiers have proofs for.
IID = ("chain", "siblings, iid", "paths, iid", "tree, iid")
INDEPENDENT = (*IID, "siblings, independent", "paths, independent")
DISTINCT = ("siblings, distinct", "tree, distinct")
GREEDY = ("siblings, greedy", "tree, greedy")

VERIFIERS: Mapping[str, VerifierSpec] = MappingProxyType(
    {
        "token": VerifierSpec(
            lambda: Verifier("token", walk(token), ("chain",)),
            branching=False,
            lossless=True,
            paper="Leviathan et al. 2023 (arXiv:2211.17192); Chen et al. 2023 (arXiv:2302.01318)",
        ),
        "block": VerifierSpec(
            lambda: Verifier("block", block, ("chain",)),
            branching=False,
            lossless=True,
            paper="Sun et al. 2025 (arXiv:2403.10444v2), Algorithm 2",
        ),
        "greedy_block": VerifierSpec(
            lambda: Verifier("greedy_block", greedy_block, ("chain",), carries_residual=True),
            branching=False,
            lossless=True,
            paper="Sun et al. 2024 (arXiv:2403.10444v1), Algorithm 3",
        ),
        "naive": VerifierSpec(
            lambda: Verifier("naive", walk(naive), (*INDEPENDENT, *DISTINCT, *GREEDY)),
            branching=True,
            lossless=True,
            paper="Yang et al. 2024 (arXiv:2401.06706), MCNS",
        ),
        "rrs": VerifierSpec(
            lambda: Verifier("rrs", walk(rrs), INDEPENDENT),
            branching=True,
            lossless=True,
            paper="Miao et al. 2023 (arXiv:2305.09781); Yang et al. 2024 (arXiv:2401.06706)",
        ),
        "rrs_wor": VerifierSpec(
            lambda: Verifier("rrs_wor", walk(rrs_wor), DISTINCT),
            branching=True,
            lossless=True,
            paper="Yang et al. 2024 (arXiv:2401.06706), Algorithm 2",
        ),
        "kseq": VerifierSpec(
            lambda: Verifier("kseq", walk(kseq), IID),
            branching=True,
            lossless=True,
            paper="Sun et al. 2023, SpecTr (arXiv:2310.15141), Algorithm 3",
        ),
        "importance": VerifierSpec(
            lambda *, solver="truncated", s=5, alphabet=None: Verifier(
                "importance", walk(importance(solver=solver, s=s, alphabet=alphabet)), INDEPENDENT
            ),
            branching=True,
            lossless=True,
            paper="Khisti et al. 2025 (arXiv:2410.18234); Luce selection is ours",
        ),
        "multipath_block": VerifierSpec(
            lambda *, solver="truncated", s=5: Verifier(
                "multipath_block",
                multipath_block(solver=solver, s=s),
                ("paths, iid", "paths, independent"),
            ),
            branching=True,
            lossless=True,
            paper="ours: selection (arXiv:2410.18234) and block verification (arXiv:2403.10444)",
        ),
        "greedy_draft": VerifierSpec(
            lambda: Verifier("greedy_draft", walk(greedy_draft), GREEDY),
            branching=True,
            lossless=True,
            paper="Hu et al. 2025 (ICLR), greedy draft sampling",
        ),
        "traversal": VerifierSpec(
            lambda: Verifier("traversal", traversal, ("chain", *INDEPENDENT, *DISTINCT)),
            branching=True,
            lossless=True,
            paper="Weng et al. 2025 (arXiv:2505.12398)",
        ),
        "batch": VerifierSpec(
            lambda: Verifier("batch", batch, ("paths, iid", "paths, independent")),
            branching=True,
            lossless=True,
            paper="Yin et al. 2024 (arXiv:2411.00841), Algorithm 4",
        ),
        "biased_uno": VerifierSpec(
            lambda *, epsilon: Verifier("biased_uno", walk(biased_uno(epsilon)), ("chain",)),
            branching=False,
            lossless=False,
            paper="Yin et al. 2024 (arXiv:2411.00841), Decoding-UNO",
        ),
        "biased_opt": VerifierSpec(
            lambda *, epsilon: Verifier("biased_opt", walk(biased_opt(epsilon)), ("chain",)),
            branching=False,
            lossless=False,
            paper="Yin et al. 2024 (arXiv:2411.00841), Theorems 4 and 5, Decoding-OPT",
        ),
    }
)
