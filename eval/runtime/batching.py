"""Sequences that are decoded side by side: their forwards through one model run as one."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from eval.runtime.budget import Bid, Scheduler
from eval.runtime.model import CachedModel
from eval.runtime.sequence import Forward, ForwardCoroutine

S = TypeVar("S")
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class _Waiting(Generic[S, T]):
    """A job that waits for an answer: for the logits of a forward, or for whether it may go on."""

    slot: S
    coroutine: ForwardCoroutine[T]
    request: Forward | Bid


def run_together(
    jobs: Sequence[Callable[[S], ForwardCoroutine[T]]],
    slots: Sequence[S],
    *,
    last: CachedModel,
    report: Callable[[int], object] = lambda done: None,
    scheduler: Scheduler | None = None,
) -> list[T]:
    """Run jobs side by side; forwards that wait for the same model run as one.

    Args:
        jobs: one for each sequence; called with a slot, it returns the coroutine to run.
        slots: as many jobs run at a time; a slot whose job ends takes the next one.
        last: the model whose forwards run only when no other model has any to run. With the target
            here, sequences whose drafts differ in length are still verified together.
        report: called with 1 when a job ends.
        scheduler: decides on bids, once all forwards of other models than `last` have run; needed
            if jobs make any.

    Returns:
        What each coroutine returned, in the order of the jobs.
    """
    results: dict[int, T] = {}
    waiting: dict[int, _Waiting[S, T]] = {}
    queue = iter(enumerate(jobs))

    def advance(number: int, slot: S, coroutine: ForwardCoroutine[T], answer: Any) -> None:
        try:
            waiting[number] = _Waiting(slot, coroutine, coroutine.send(answer))
        except StopIteration as stopped:
            results[number] = stopped.value
            report(1)
            start_next(slot)

    def start_next(slot: S) -> None:
        if queued := next(queue, None):
            number, job = queued
            advance(number, slot, job(slot), None)

    def answer_all(answers: dict[int, Any]) -> None:
        served = [(number, waiting.pop(number), answer) for number, answer in answers.items()]
        for number, entry, answer in served:
            advance(number, entry.slot, entry.coroutine, answer)

    for slot in slots:
        start_next(slot)
    while waiting:
        requests = {number: entry.request for number, entry in waiting.items()}
        forwards = {n: request for n, request in requests.items() if isinstance(request, Forward)}
        bids = {n: request for n, request in requests.items() if isinstance(request, Bid)}
        models = {id(forward.model): forward.model for forward in forwards.values()}
        model = next((model for model in models.values() if model is not last), None)
        if model is None and bids:
            assert scheduler is not None, "bids need a scheduler"
            scored = [forward.logits_to_keep for forward in forwards.values()]
            admitted = scheduler.admit(list(bids.values()), scored)
            answer_all(dict(zip(bids, admitted, strict=True)))
            continue
        begun = time.perf_counter()
        model = model or last
        ready = {n: forward for n, forward in forwards.items() if forward.model is model}
        answers = model.run_all(list(ready.values()))
        answer_all(dict(zip(ready, answers, strict=True)))
        if scheduler is not None:
            scheduler.ran(
                target=model is last,
                tokens=[forward.logits_to_keep for forward in ready.values()],
                seconds=time.perf_counter() - begun,
            )
    return [results[number] for number in range(len(jobs))]
