"""Sequences that are decoded side by side: their forwards through one model run as one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
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

    def answer_all(asked: Iterable[int], answers: Iterable[Any]) -> None:
        served = [(number, waiting.pop(number)) for number in asked]
        for (number, entry), answer in zip(served, answers, strict=True):
            advance(number, entry.slot, entry.coroutine, answer)

    for slot in slots:
        start_next(slot)
    while waiting:
        forwards, bids = _requests(waiting)
        models = {id(forward.model): forward.model for forward in forwards.values()}
        model = next((model for model in models.values() if model is not last), last)
        if model is last and bids:
            assert scheduler is not None, "bids need a scheduler"
            scored = [forward.logits_to_keep for forward in forwards.values()]
            answer_all(bids, scheduler.admit(list(bids.values()), scored))
            continue
        ready = {n: forward for n, forward in forwards.items() if forward.model is model}
        answer_all(ready, model.run_all(list(ready.values())))
        if scheduler is not None:
            tokens = [forward.logits_to_keep for forward in ready.values()]
            scheduler.ran(target=model is last, tokens=tokens)
    return [results[number] for number in range(len(jobs))]


def _requests(waiting: Mapping[int, _Waiting[S, T]]) -> tuple[dict[int, Forward], dict[int, Bid]]:
    """The forwards and the bids that jobs wait for, by job."""
    requests = {number: entry.request for number, entry in waiting.items()}
    return (
        {number: asked for number, asked in requests.items() if isinstance(asked, Forward)},
        {number: asked for number, asked in requests.items() if isinstance(asked, Bid)},
    )
