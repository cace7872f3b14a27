"""Texts that are decoded side by side: the forwards that they want of one model run as one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor

from eval.cached import CachedModel
from eval.drafters import Drafter
from eval.metrics import Round
from eval.texts import CachedText, Forward, Steps


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


@dataclass(slots=True)
class Lane:
    """The caches of one text: the target's, and the drafter's."""

    target: CachedText
    drafter: Drafter | None

    def begin(self) -> None:
        """Forget the text before."""
        self.target.reset()
        if self.drafter is not None:
            self.drafter.reset()


def decode_together(
    jobs: Sequence[Callable[[Lane], Steps[Generation]]],
    lanes: Sequence[Lane],
    *,
    last: CachedModel,
    report: Callable[[int], object],
) -> list[Generation]:
    """Run procedures side by side, with the forwards that are wanted of one model run as one.

    Args:
        jobs: one procedure for each text, which is given a lane.
        lanes: as many run at a time; a lane whose procedure ends takes up the next.
        last: the model that waits until no other has anything to do: the target, so that texts
            whose drafts have different lengths are verified together.
        report: called with 1 when a procedure ends.
    """
    found: dict[int, Generation] = {}
    waiting: dict[int, tuple[Lane, Steps[Generation], Forward]] = {}
    queue = iter(enumerate(jobs))

    def advance(number: int, lane: Lane, steps: Steps[Generation], answer: Any) -> None:
        try:
            waiting[number] = lane, steps, steps.send(answer)
        except StopIteration as done:
            found[number] = done.value
            report(1)
            take(lane)

    def take(lane: Lane) -> None:
        if entry := next(queue, None):
            number, job = entry
            advance(number, lane, job(lane), None)

    for lane in lanes:
        take(lane)
    while waiting:
        models = {id(forward.model): forward.model for _, _, forward in waiting.values()}
        model = next((one for one in models.values() if one is not last), last)
        ready = [number for number, entry in waiting.items() if entry[2].model is model]
        answers = model.run_all([waiting[number][2] for number in ready])
        entries = [waiting.pop(number) for number in ready]
        for number, (lane, steps, _), answer in zip(ready, entries, answers, strict=True):
            advance(number, lane, steps, answer)
    return [found[number] for number in range(len(jobs))]
