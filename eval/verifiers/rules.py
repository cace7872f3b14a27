"""The rule of every verifier in `VERIFIERS`, with its parameters as keyword arguments."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from eval.verifiers.biased import biased_opt, biased_uno
from eval.verifiers.block import block, greedy_block
from eval.verifiers.importance import importance
from eval.verifiers.kseq import kseq
from eval.verifiers.multi_candidate import batch, greedy_draft, naive, rrs, rrs_wor, token
from eval.verifiers.multipath_block import multipath_block
from eval.verifiers.rule import Rule, walk
from eval.verifiers.traversal import traversal

RULES: Mapping[str, Callable[..., Rule]] = MappingProxyType(
    {
        "token": lambda: walk(token),
        "block": lambda: block,
        "greedy_block": lambda: greedy_block,
        "naive": lambda: walk(naive),
        "rrs": lambda: walk(rrs),
        "rrs_wor": lambda: walk(rrs_wor),
        "kseq": lambda: walk(kseq),
        "importance": lambda *, solver="truncated", s=5, alphabet=None: walk(
            importance(solver=solver, s=s, alphabet=alphabet)
        ),
        "multipath_block": lambda *, solver="truncated", s=5: multipath_block(solver=solver, s=s),
        "greedy_draft": lambda: walk(greedy_draft),
        "traversal": lambda: traversal,
        "batch": lambda: batch,
        "biased_uno": lambda *, epsilon: walk(biased_uno(epsilon)),
        "biased_opt": lambda *, epsilon: walk(biased_opt(epsilon)),
    }
)
