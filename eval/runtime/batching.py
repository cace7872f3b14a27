"""Sequences that are decoded side by side: their forwards through one model run as one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from eval.runtime.budget import Bid, Scheduler
from eval.runtime.model import CachedModel
from eval.runtime.sequence import Forward, ForwardCoroutine, ForwardRunner

S = TypeVar("S")
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class _Waiting(Generic[S, T]):
    """A job that waits for an answer: for the logits of a forward, or whether it may go on."""

    slot: S
    coroutine: ForwardCoroutine[T]
    request: Forward | Bid


class _Running(Generic[S, T]):
    """Jobs of which as many run as there are slots.

    Args:
        jobs: see `run_together`.
        report: called with 1 when a job ends.

    Attributes:
        waiting: the jobs that run, by number, and what they wait for.
        results: what each finished job returned.
    """

    def __init__(
        self,
        jobs: Sequence[Callable[[S], ForwardCoroutine[T]]],
        report: Callable[[int], object],
    ) -> None:
        self.waiting: dict[int, _Waiting[S, T]] = {}
        self.results: dict[int, T] = {}
        self._queue = iter(enumerate(jobs))
        self._report = report

    def start_next(self, slot: S) -> None:
        """Run the next job in a slot, if there is one."""
        if queued := next(self._queue, None):
            number, job = queued
            self._advance(number, slot, job(slot), None)

    def answer(self, asked: Iterable[int], answers: Iterable[Any]) -> None:
        """Let jobs go on with what they waited for."""
        served = [(number, self.waiting.pop(number)) for number in asked]
        for (number, entry), answer in zip(served, answers, strict=True):
            self._advance(number, entry.slot, entry.coroutine, answer)

    def _advance(self, number: int, slot: S, coroutine: ForwardCoroutine[T], answer: Any) -> None:
        try:
            self.waiting[number] = _Waiting(slot, coroutine, coroutine.send(answer))
        except StopIteration as stopped:
            self.results[number] = stopped.value
            self._report(1)
            self.start_next(slot)


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
    running = _Running(jobs, report)
    for slot in slots:
        running.start_next(slot)
    while running.waiting:
        model, asked = _next(running.waiting, last)
        if model is None:
            assert scheduler is not None, "bids need a scheduler"
            others = _tokens(entry.request for entry in running.waiting.values())
            running.answer(asked, scheduler.admit(list(asked.values()), others))
            continue
        running.answer(asked, model.run_all(list(asked.values())))
        if scheduler is not None:
            scheduler.ran(target=model is last, tokens=_tokens(asked.values()))
    return [running.results[number] for number in range(len(jobs))]


def _next(
    waiting: Mapping[int, _Waiting[S, T]], last: CachedModel
) -> tuple[ForwardRunner | None, dict[int, Any]]:
    """What is answered next, by job: forwards of one model, or bids if the model is None."""
    bids, forwards = dict[int, Bid](), dict[int, Forward]()
    for number, entry in waiting.items():
        if isinstance(entry.request, Bid):
            bids[number] = entry.request
        else:
            forwards[number] = entry.request
    models = {id(forward.model): forward.model for forward in forwards.values()}
    model = next((model for model in models.values() if model is not last), None)
    if model is None and bids:
        return None, bids
    model = model or last
    return model, {n: forward for n, forward in forwards.items() if forward.model is model}


def _tokens(requests: Iterable[Forward | Bid]) -> list[int]:
    """Logits that are made of each sequence by those requests that are forwards."""
    return [request.logits_to_keep for request in requests if isinstance(request, Forward)]
