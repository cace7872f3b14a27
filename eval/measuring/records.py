"""What is stored of one generation, and the times of one forward fitted to many.

`eval.measuring.metrics` turns records into the published figures.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from eval.rounds import Round


@dataclass(frozen=True, slots=True)
class PromptRecord:
    """What is stored of one generation; every published figure is a function of these.

    Args:
        prompt_id: names the prompt; the generations of one prompt are resampled together.
        tokens: emitted tokens (N in the paper's letters).
        finish: "eos" or "length".
        rounds: forwards of the target (N_target).
        n_draft: drafted nodes (N_draft).
        n_discarded: drafted nodes that were not accepted (N_discarded).
        accepted: accepted drafted tokens.
        depth: sum over rounds of the deepest drafted position; equals n_draft for chains.
        drafted_by_position: rounds that drafted at least i + 1 deep, for i = 0, 1, ...
        reached_by_position: those among them that accepted at least the i positions before it.
        accepted_by_position: rounds that accepted at least i + 1 tokens.
        draft_forwards: forwards of the draft.
        seconds: wall time of the whole call, prefill included; 0 if it was not measured.
        draft_seconds: the draft's share.
        target_seconds: the target's share.
        overhead_seconds: verification and bookkeeping between them.
    """

    prompt_id: str
    tokens: int
    finish: str
    rounds: int
    n_draft: int
    n_discarded: int
    accepted: int
    depth: int
    drafted_by_position: list[int]
    reached_by_position: list[int]
    accepted_by_position: list[int]
    draft_forwards: int
    seconds: float
    draft_seconds: float
    target_seconds: float
    overhead_seconds: float


def record_prompt(
    prompt_id: str, rounds: Sequence[Round], *, seconds: float | None, finish: str
) -> PromptRecord:
    """Sum the rounds of one generation.

    Args:
        prompt_id: names the prompt within its dataset.
        rounds: the generation's rounds, in order.
        seconds: wall time of the whole call; the caller has synchronised the device. None if it
            was not measured, as of texts that are decoded together.
        finish: "eos" or "length".

    Raises:
        ValueError: if there are no rounds, a round's counts contradict each other, or `seconds` is
            neither None nor positive.
    """
    if not rounds or not (seconds is None or seconds > 0):
        raise ValueError(
            f"prompt {prompt_id!r} needs at least one round and a positive time,"
            f" got {len(rounds)} rounds and {seconds} s"
        )
    for index, one in enumerate(rounds):
        _check_round(one, f"prompt {prompt_id!r}, round {index}", last=index == len(rounds) - 1)
    deepest = range(max(one.depth for one in rounds))
    drafted, accepted = sum(r.drafted for r in rounds), sum(r.accepted for r in rounds)
    return PromptRecord(
        prompt_id=prompt_id,
        tokens=sum(r.emitted for r in rounds),
        finish=finish,
        rounds=len(rounds),
        n_draft=drafted,
        n_discarded=drafted - accepted,
        accepted=accepted,
        depth=sum(r.depth for r in rounds),
        drafted_by_position=[sum(r.depth > i for r in rounds) for i in deepest],
        reached_by_position=[sum(r.depth > i <= r.accepted for r in rounds) for i in deepest],
        accepted_by_position=[sum(r.accepted > i for r in rounds) for i in deepest],
        draft_forwards=sum(r.draft_forwards for r in rounds),
        seconds=seconds or 0.0,
        draft_seconds=sum(r.draft_seconds for r in rounds),
        target_seconds=sum(r.target_seconds for r in rounds),
        overhead_seconds=sum(r.overhead_seconds for r in rounds),
    )


def _check_round(one: Round, where: str, *, last: bool) -> None:
    """Refuse counts that no round can have."""
    if not 0 <= one.accepted <= one.depth <= one.drafted:
        raise ValueError(f"{where}: 0 <= accepted <= depth <= drafted must hold, got {one}")
    without_bonus = last and one.accepted > 0 and one.emitted == one.accepted
    if one.emitted != one.accepted + 1 and not without_bonus:
        raise ValueError(
            f"{where}: a round emits its accepted tokens and one more (only the last may leave out"
            f" the bonus), got {one}; count a token as accepted only if it was emitted"
        )


def check_identity(record: PromptRecord) -> None:
    """Check N_draft + N_target = N + N_discarded, one more if the last bonus was not emitted.

    That bonus is missing exactly when the text ended with an accepted token: every round pays for
    its emitted tokens with drafted ones and one forward of the target.

    Raises:
        ValueError: if the counts of the record contradict each other.
    """
    excess = record.n_draft + record.rounds - record.tokens - record.n_discarded
    if excess not in (0, 1) or record.accepted != record.n_draft - record.n_discarded:
        raise ValueError(
            f"prompt {record.prompt_id!r}: n_draft + n_target must equal tokens + n_discarded (or"
            f" one more after an accepted last token), got {record.n_draft} + {record.rounds} and"
            f" {record.tokens} + {record.n_discarded}; count drafted, accepted and emitted tokens"
            " of the same rounds"
        )


@dataclass(frozen=True, slots=True)
class LatencyFit:
    """Seconds of one draft and one target forward, fitted to whole generations.

    Args:
        t_draft: seconds a drafted token, stop rule included.
        t_target: seconds a round.
        r_squared: share of the variance of the total times that the fit explains.
        generations: how many were fitted.
    """

    t_draft: float
    t_target: float
    r_squared: float
    generations: int

    def seconds_per_token(self, *, discard_rate: float, verification_rate: float) -> float:
        """SpecDec++ Eq. 5.1: t_d + t_d N_discarded/N + (t_t - t_d) N_target/N."""
        return self.t_draft * (1 + discard_rate) + (
            (self.t_target - self.t_draft) * verification_rate
        )


def fit_latency(records: Sequence[PromptRecord]) -> LatencyFit | None:
    """Fit seconds = t_draft * N_draft + t_target * N_target, both non-negative.

    SpecDec++ (Huang et al., arXiv:2405.19715), section 5: one regression over all generations.
    Only meaningful for chains, where a drafted token costs one draft forward.

    Returns:
        None if the counts do not tell the two times apart (fewer than three generations, all plain,
        or one fixed ratio of drafted tokens to rounds), or if all times are equal or unmeasured.
    """
    counts = np.array([[r.n_draft, r.rounds] for r in records], dtype=np.float64).reshape(-1, 2)
    seconds = np.array([r.seconds for r in records], dtype=np.float64)
    if len(records) < 3 or np.linalg.matrix_rank(counts) < 2:
        return None
    spread = float(((seconds - seconds.mean()) ** 2).sum())
    if spread == 0.0:
        return None
    from scipy.optimize import nnls  # here: whoever only reads results does not need it

    times, residual = nnls(counts, seconds)
    return LatencyFit(
        t_draft=float(times[0]),
        t_target=float(times[1]),
        r_squared=1 - float(residual) ** 2 / spread,
        generations=len(records),
    )
