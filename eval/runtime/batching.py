"""Texts that are decoded side by side: the forwards that they want of one model run as one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from eval.runtime.model import CachedModel
from eval.runtime.sequence import Forward, ForwardCoroutine

S = TypeVar("S")
T = TypeVar("T")


def run_together(
    jobs: Sequence[Callable[[S], ForwardCoroutine[T]]],
    slots: Sequence[S],
    *,
    last: CachedModel,
    report: Callable[[int], object],
) -> list[T]:
    """Run procedures side by side, with the forwards that are wanted of one model run as one.

    Args:
        jobs: one procedure for each text, which is given a slot.
        slots: as many run at a time; a slot whose procedure ends takes up the next.
        last: the model that waits until no other has anything to do: the target, so that texts
            whose drafts have different lengths are verified together.
        report: called with 1 when a procedure ends.
    """
    found: dict[int, T] = {}
    waiting: dict[int, tuple[S, ForwardCoroutine[T], Forward]] = {}
    queue = iter(enumerate(jobs))

    def advance(number: int, slot: S, steps: ForwardCoroutine[T], answer: Any) -> None:
        try:
            waiting[number] = slot, steps, steps.send(answer)
        except StopIteration as done:
            found[number] = done.value
            report(1)
            take(slot)

    def take(slot: S) -> None:
        if entry := next(queue, None):
            number, job = entry
            advance(number, slot, job(slot), None)

    for slot in slots:
        take(slot)
    while waiting:
        models = {id(forward.model): forward.model for _, _, forward in waiting.values()}
        model = next((one for one in models.values() if one is not last), last)
        ready = [number for number, entry in waiting.items() if entry[2].model is model]
        answers = model.run_all([waiting[number][2] for number in ready])
        entries = [waiting.pop(number) for number in ready]
        for number, (slot, steps, _), answer in zip(ready, entries, answers, strict=True):
            advance(number, slot, steps, answer)
    return [found[number] for number in range(len(jobs))]
