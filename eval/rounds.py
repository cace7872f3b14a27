"""The record of a decoding: one entry a round, and the generation that the rounds made."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import Tensor


@dataclass(frozen=True, slots=True)
class Round:
    """One forward of the target, and the draft before it.

    A round of plain decoding has drafted=0 and emitted=1.
    """

    drafted: int  # drafted nodes that the target scored in this round
    depth: int  # length of the longest drafted path; equals `drafted` for a chain
    accepted: int  # drafted tokens that were accepted
    # Tokens added to the sequence: accepted + 1, the bonus token included, or accepted if the last
    # accepted token ended the sequence.
    emitted: int
    draft_forwards: int
    draft_seconds: float
    target_seconds: float
    overhead_seconds: float  # verification, cache work and bookkeeping


@dataclass(frozen=True, slots=True)
class Generation:
    """One decoded sequence, ended by an end token ("eos") or at max_new_tokens."""

    tokens: Tensor  # (n,) new tokens; n <= max_new_tokens; the last is an end token if "eos"
    rounds: tuple[Round, ...]
    finish: Literal["eos", "length"]
    seconds: float
    cpu_seconds: float = 0.0  # of these, in which its thread ran on a core; 0 if not measured
