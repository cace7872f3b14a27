"""Sequences that are decoded side by side: their forwards through one model run as one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from eval.runtime.model import CachedModel
from eval.runtime.sequence import Forward, ForwardCoroutine

S = TypeVar("S")
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class _Waiting(Generic[S, T]):
    """A job that waits for the logits of a forward."""

    slot: S
    coroutine: ForwardCoroutine[T]
    forward: Forward


def run_together(
    jobs: Sequence[Callable[[S], ForwardCoroutine[T]]],
    slots: Sequence[S],
    *,
    last: CachedModel,
    report: Callable[[int], object],
) -> list[T]:
    """Run jobs side by side; forwards that wait for the same model run as one.

    Args:
        jobs: one for each sequence; called with a slot, it returns the coroutine to run.
        slots: as many jobs run at a time; a slot whose job ends takes the next one.
        last: the model whose forwards run only when no other model has any to run. With the target
            here, sequences whose drafts differ in length are still verified together.
        report: called with 1 when a job ends.

    Returns:
        What each coroutine returned, in the order of the jobs.
    """
    results: dict[int, T] = {}
    waiting: dict[int, _Waiting[S, T]] = {}
    queue = iter(enumerate(jobs))

    def advance(number: int, slot: S, coroutine: ForwardCoroutine[T], logits: Any) -> None:
        try:
            waiting[number] = _Waiting(slot, coroutine, coroutine.send(logits))
        except StopIteration as stopped:
            results[number] = stopped.value
            report(1)
            start_next(slot)

    def start_next(slot: S) -> None:
        if queued := next(queue, None):
            number, job = queued
            advance(number, slot, job(slot), None)

    for slot in slots:
        start_next(slot)
    while waiting:
        models = {id(entry.forward.model): entry.forward.model for entry in waiting.values()}
        model = next((model for model in models.values() if model is not last), last)
        ready = [number for number, entry in waiting.items() if entry.forward.model is model]
        answers = model.run_all([waiting[number].forward for number in ready])
        served = [waiting.pop(number) for number in ready]
        for number, entry, logits in zip(ready, served, answers, strict=True):
            advance(number, entry.slot, entry.coroutine, logits)
    return [results[number] for number in range(len(jobs))]
