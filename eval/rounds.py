"""What decoding did: one record a round, and the generation that the rounds made."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import Tensor


@dataclass(frozen=True, slots=True)
class Round:
    """One forward of the target and the draft work before it. Plain decoding: drafted=0, emitted=1.

    Args:
        drafted: drafted nodes that the target scored in this round.
        depth: deepest drafted position; equals `drafted` for a chain.
        accepted: accepted drafted tokens.
        emitted: tokens added to the text, the bonus token included; accepted + 1, or accepted in a
            last round whose accepted path already ended the text.
        draft_forwards: forwards of the draft.
        draft_seconds: time in the draft, its stop rule included.
        target_seconds: time in the target.
        overhead_seconds: verification, cache work and bookkeeping.
    """

    drafted: int
    depth: int
    accepted: int
    emitted: int
    draft_forwards: int
    draft_seconds: float
    target_seconds: float
    overhead_seconds: float


@dataclass(frozen=True, slots=True)
class Generation:
    """One decoded text.

    Args:
        tokens: (n,) new tokens; n <= max_new_tokens; the last is an end token if finish == "eos".
        rounds: one record a forward of the target.
        finish: why it ended.
        seconds: wall time of the call.
    """

    tokens: Tensor
    rounds: tuple[Round, ...]
    finish: Literal["eos", "length"]
    seconds: float
