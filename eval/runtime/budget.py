"""One verification budget for sequences that are decoded side by side.

A batch's forward of the target takes longer for every token that it scores, whichever sequence the
token is of. So positions of all drafts compete: each sequence bids with the probability that its
next token will be accepted with all before it, bids are ranked, and as many are admitted as are
expected to save more time than they cost. For one sequence that is the rule of
`eval.drafting.stopping.cost`; DSpark (arXiv:2607.05147) chooses the lengths to verify by survival
and a throughput profile, too.

A bid is made before its token is drawn, from the distribution that it would be drawn from and from
tokens that are kept, of this sequence and of others. Given all that, the token has the distribution
q whether it is admitted or not, so the length of each draft is a stopping time and every verifier
that takes adaptive chains stays lossless, for all sequences jointly.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

Reals = NDArray[np.float64]

MEMORY = 50.0
"""Forwards of the target that the speed reached is averaged over."""
PRIOR_ROUNDS = 2
"""Rounds of plain decoding that the average begins with."""
MEASURED_ROUNDS = 3
"""Rounds of each length that costs are measured over, at least."""
MEAN_ACCEPTANCE, PRIOR_TOKENS = 0.8, 20
"""Acceptance of a token of which nothing is known, and how many tokens that guess counts for."""


@dataclass(frozen=True, slots=True)
class Bid:
    """One more token of a sequence's draft, before it is drawn.

    Args:
        survival: estimated probability that all tokens of the draft so far are accepted; with
            `known`, the next one included.
        drafted: tokens of the draft so far.
        known: whether the draft's forward for the token has run, so that its distribution is known.
    """

    survival: float
    drafted: int
    known: bool


@dataclass(frozen=True, slots=True)
class CostTable:
    """What a forward of a batch takes, in seconds, with all that follows from it.

    Times between the entries are interpolated linearly, beyond the last along its slope.

    Args:
        sequences: s sizes of a batch, ascending from 1.
        tokens: w tokens scored of each sequence, ascending from 1.
        target: s rows of w times of the target's forward with drawing and verification.
        draft: s times of a drafting step, which drafts one token of each sequence.

    Raises:
        ValueError: unless sizes agree and times are positive and nowhere fall.
    """

    sequences: tuple[int, ...]
    tokens: tuple[int, ...]
    target: tuple[tuple[float, ...], ...]
    draft: tuple[float, ...]

    def __post_init__(self) -> None:
        target, draft = np.array(self.target, dtype=float), np.array(self.draft, dtype=float)
        for axis, name in ((self.sequences, "sequences"), (self.tokens, "tokens")):
            rises = all(left < right for left, right in pairwise(axis))
            if len(axis) < 1 + (name == "tokens") or axis[0] != 1 or not rises:
                raise ValueError(
                    f"{name} of a cost table must ascend from 1 (at least two numbers of tokens), "
                    f"got {axis}"
                )
        if target.shape != (len(self.sequences), len(self.tokens)) or len(draft) != len(target):
            raise ValueError(
                f"a cost table of {len(self.sequences)} sizes and {len(self.tokens)} numbers of "
                f"tokens needs as many times, got {target.shape} of the target and {len(draft)} "
                "of the draft"
            )
        falls = [np.diff(target, axis=0), np.diff(target, axis=1), np.diff(draft)]
        if min(target.min(), draft.min()) <= 0 or min(d.min(initial=0.0) for d in falls) < 0:
            raise ValueError(
                "times of a cost table must be positive and must not fall with sequences or "
                "tokens: smooth them (CostTable.smoothed)"
            )

    @classmethod
    def smoothed(
        cls, sequences: Sequence[int], tokens: Sequence[int], target: Reals, draft: Reals
    ) -> CostTable:
        """The monotone table next to measured times: isotonic in tokens, then in sequences.

        Args:
            sequences: s sizes.
            tokens: w numbers of tokens.
            target: (s, w) seconds.
            draft: (s,) seconds.
        """
        from scipy.optimize import isotonic_regression

        rows = [isotonic_regression(row).x for row in target]
        columns = [isotonic_regression(column).x for column in np.array(rows).T]
        smooth = np.maximum.accumulate(np.array(columns).T, axis=1)
        return cls(
            tuple(sequences),
            tuple(tokens),
            tuple(tuple(map(float, row)) for row in smooth),
            tuple(map(float, isotonic_regression(draft).x)),
        )

    def target_seconds(self, sequences: int, tokens: float) -> float:
        """A forward of the target over some sequences that scores `tokens` tokens of them in all.

        Args:
            sequences: how many.
            tokens: at least one of each.
        """
        return _at(self.tokens, self.of_batch(sequences), tokens / sequences)

    def of_batch(self, sequences: int) -> tuple[float, ...]:
        """The w times of the target for batches of one size, which need not be in the table."""
        return tuple(
            _at(self.sequences, column, sequences) for column in zip(*self.target, strict=True)
        )

    def draft_seconds(self, sequences: int) -> float:
        """A drafting step over some sequences; none takes no time."""
        return _at(self.sequences, self.draft, sequences) if sequences else 0.0


def _at(axis: Sequence[int], values: Sequence[float], at: float) -> float:
    """Linear interpolation, beyond the ends along the last slope."""
    if len(axis) == 1:
        return values[0] * at
    right = 1
    while right < len(axis) - 1 and axis[right] < at:
        right += 1
    left = right - 1
    share = (at - axis[left]) / (axis[right] - axis[left])
    return values[left] + share * (values[right] - values[left])


class Scheduler(Protocol):
    """What decides on the bids of sequences that are decoded side by side."""

    def admit(self, bids: Sequence[Bid], scored: Sequence[int]) -> list[bool]:
        """Whether each bid is admitted.

        Args:
            bids: of the sequences that would draft on.
            scored: tokens that the target will score of each other sequence.
        """

    def ran(self, *, target: bool, tokens: Sequence[int]) -> None:
        """Take note of a forward, once its sequences have gone on with it.

        Args:
            target: of the target, or of a draft.
            tokens: logits that were made of each of its sequences.
        """


class SharedBudget:
    """Admits the bids that are expected to save more time than they cost, the likeliest first.

    With lambda the time of a token that is emitted by any sequence, admitting a set of bids saves
    lambda times their summed survival and costs what the forwards take longer. That is the rule of
    `eval.drafting.stopping.cost` for a whole batch. lambda is the time that the last rounds would
    have taken by the table over the tokens that they emitted, which is Dinkelbach's iteration. It
    is held as a share of the time of plain decoding at the same number of sequences, so that it
    follows a batch that grows or drains. No clock is read: the table and the tokens decide.

    Args:
        costs: what forwards take; None if that is to be measured.
        packed: whether a forward of the target pays only for its own tokens; if not, for as many
            tokens of each sequence as of the longest.

    Attributes:
        learners: called to forget what was learned from sequences, when decoding begins.
    """

    def __init__(self, costs: CostTable | None, *, packed: bool = True) -> None:
        self._given = costs
        self.measured: CostTable | None = None
        self._packed = packed
        self.learners: list[Callable[[], None]] = []
        self.restart()

    def needs_costs(self, size: int) -> bool:
        """Whether costs are not given, nor measured for batches of this size."""
        measured = self.measured
        return self._given is None and (measured is None or measured.sequences[-1] < size)

    @property
    def costs(self) -> CostTable | None:
        """What forwards take, if it is known."""
        return self._given or self.measured

    @property
    def _costs(self) -> CostTable:
        costs = self.costs
        assert costs is not None, "costs are measured before anything is decoded"
        return costs

    def restart(self) -> None:
        """Forget what was decoded."""
        for forget in self.learners:
            forget()
        # Seconds by the table: what was spent, and what plain decoding would have taken.
        self._spent = self._plain = 0.0
        self._of_batch: dict[int, tuple[float, ...]] = {}  # what was read of the table
        self._emitted = 0  # since the last forward of the target was charged
        self._known, self._accepted = float(PRIOR_TOKENS), PRIOR_TOKENS * MEAN_ACCEPTANCE

    @property
    def mean_acceptance(self) -> float:
        """Of a token that is not drawn yet."""
        return self._accepted / self._known

    @property
    def share_of_plain(self) -> float:
        """Time per emitted token, over that of plain decoding."""
        return self._spent / self._plain if self._plain else 1.0

    def admit(self, bids: Sequence[Bid], scored: Sequence[int]) -> list[bool]:
        """The likeliest bids, as many as pay together; see `Scheduler.admit`."""
        sequences = len(bids) + len(scored)
        token = self.share_of_plain * self._target_seconds(sequences, sequences, 1) / sequences
        gains = [bid.survival * (1.0 if bid.known else self.mean_acceptance) for bid in bids]
        ranked = sorted(range(len(bids)), key=lambda number: -gains[number])
        least = [*scored, *(bid.drafted + 1 for bid in bids)]
        total, longest = sum(least), max(least)
        unpaid, best, most, gain = 0, 0, 0.0, 0.0
        before = self._target_seconds(sequences, total, longest)
        for count, number in enumerate(ranked, start=1):
            bid = bids[number]
            gain += gains[number]
            unpaid += not bid.known
            longest = max(longest, bid.drafted + 2)
            after = self._target_seconds(sequences, total + count, longest)
            saved = token * gain - self._costs.draft_seconds(unpaid) - (after - before)
            if saved > most:
                best, most = count, saved
        admitted = set(ranked[:best])
        return [number in admitted for number in range(len(bids))]

    def ran(self, *, target: bool, tokens: Sequence[int]) -> None:
        """Charge a forward by the table; see `Scheduler.ran`."""
        sequences = len(tokens)
        if not target:
            self._spent += self._costs.draft_seconds(sequences)
            return
        plain = self._target_seconds(sequences, sequences, 1)
        if not self._plain:  # begin as if some rounds of plain decoding had been before
            self._spent, self._plain = self._spent + PRIOR_ROUNDS * plain, PRIOR_ROUNDS * plain
        keep = 1.0 - 1.0 / MEMORY  # once a round: both sums forget at one rate
        now = self._target_seconds(sequences, sum(tokens), max(tokens))
        self._spent = keep * self._spent + now
        self._plain = keep * self._plain + self._emitted * plain / sequences
        self._emitted = 0

    def emitted(self, emitted: int, drafted: int, accepted: int) -> None:
        """Learn what a sequence's round came to, before the round is charged.

        Args:
            emitted: tokens.
            drafted: tokens of its draft.
            accepted: how many of these.
        """
        self._emitted += emitted
        self._accepted += accepted
        self._known += accepted + (accepted < drafted)

    def _target_seconds(self, sequences: int, total: int, longest: int) -> float:
        if sequences not in self._of_batch:
            self._of_batch[sequences] = self._costs.of_batch(sequences)
        each = total / sequences if self._packed else longest
        return _at(self._costs.tokens, self._of_batch[sequences], each)


class PlannedDrafts:
    """Admits drafts of lengths that are laid down, the same for all sequences, and takes the times.

    Every round has the next of the lengths. Rounds of fewer sequences than began, and the first
    one, which reads prompts, are not counted. The time of a forward is all that passed since the
    one before, drawing, estimates and verification included.

    Args:
        scored: tokens that the target is to score of each sequence, ascending from 1.
        clock: gives seconds.
    """

    def __init__(self, scored: Sequence[int], clock: Callable[[], float]) -> None:
        self._scored = tuple(scored)
        self._clock = clock
        self._target: dict[int, dict[int, list[float]]] = {}
        self._draft: dict[int, list[float]] = {}

    @property
    def most_tokens(self) -> int:
        """Tokens to decode of each sequence, so that every length has its rounds."""
        return MEASURED_ROUNDS * sum(self._scored) + self._scored[-1]

    def begin(self, sequences: int) -> None:
        """Measure batches of this size next."""
        self._sequences, self._round, self._before = sequences, 0, self._clock()
        self._target[sequences] = {tokens: [] for tokens in self._scored}
        self._draft[sequences] = []

    def admit(self, bids: Sequence[Bid], scored: Sequence[int]) -> list[bool]:
        """Whether each bid is within the length of the round; see `Scheduler.admit`."""
        length = self._scored[self._round % len(self._scored)] - 1
        return [bid.drafted < length for bid in bids]

    def ran(self, *, target: bool, tokens: Sequence[int]) -> None:
        """Keep the time; see `Scheduler.ran`."""
        now = self._clock()
        seconds, self._before = now - self._before, now
        whole = len(tokens) == self._sequences and self._round > 0
        if whole and not target:
            self._draft[self._sequences].append(seconds)
        elif whole and len({*tokens}) == 1 and tokens[0] in self._scored:
            self._target[self._sequences][tokens[0]].append(seconds)
        self._round += target

    def table(self) -> CostTable:
        """The medians of what was measured, smoothed, of the lengths that drafts have had."""
        sizes = sorted(self._target)
        scored = [w for w in self._scored if all(self._target[n][w] for n in sizes)]
        return CostTable.smoothed(
            sizes,
            scored,
            np.array([[np.median(self._target[n][w]) for w in scored] for n in sizes]),
            np.array([np.median(self._draft[n]) for n in sizes]),
        )
