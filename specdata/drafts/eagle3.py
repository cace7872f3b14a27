"""Drafts in EAGLE-3's layout (Li et al. 2025, arXiv:2503.01840), which engines serve."""

from __future__ import annotations

from dataclasses import dataclass

from specdata.config import checked_taps
from specdata.drafts.kind import LLAMA_LIKE, DraftKind, Served, has_record, usual_taps


@dataclass(frozen=True, slots=True)
class Norms:
    """The places where a draft normalises, in the words of speculators' config.json.

    Attributes:
        norm_before_residual: the residual stream begins with the normalised state.
        norm_before_fc: one norm over the target's states together.
        fc_norm: one norm over each of them.
        norm_output: the draft's own states are fed back after its final norm (EAGLE 3.1).
    """

    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False


EAGLE3 = DraftKind(
    "eagle3",
    is_of=has_record("layout"),
    served=Served(
        method="eagle3",
        tags=("eagle3", "vllm", "sglang", "llama-cpp", "arxiv:2503.01840"),
        fastest=2,
    ),
    reads_states=True,
    record_key="layout",
    record_class=Norms,
    taps_of=lambda taps, count: checked_taps(taps or usual_taps(count)[:-1], count),
    targets=LLAMA_LIKE,
    most_layers=1,
    layouts={"eagle3": "EAGLE-3's own code, which vLLM, SGLang and llama.cpp's converter load"},
    architecture="Eagle3",
    section="init: {kind: states, layout: eagle3, layers: 1}",
)
