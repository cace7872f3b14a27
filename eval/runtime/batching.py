"""Sequences that are decoded side by side: their forwards through one model run as one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from eval.runtime.budget import Bid, Scheduler
from eval.runtime.model import CachedModel
from eval.runtime.sequence import Forward, ForwardCoroutine, Request, RequestRunner

S = TypeVar("S")
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class _Waiting(Generic[S, T]):
    """A job that waits for an answer: for the logits of a forward, or for whether it may go on."""

    slot: S
    coroutine: ForwardCoroutine[T]
    request: Request | Bid


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
        model, asked = _next(waiting, last)
        if model is None:
            assert scheduler is not None, "bids need a scheduler"
            others = _tokens(entry.request for entry in waiting.values())
            answer_all(asked, scheduler.admit(list(asked.values()), others))
            continue
        answer_all(asked, model.run_all(list(asked.values())))
        if scheduler is not None and (tokens := _tokens(asked.values())):
            scheduler.ran(target=model is last, tokens=tokens)
    return [results[number] for number in range(len(jobs))]


def _next(
    waiting: Mapping[int, _Waiting[S, T]], last: CachedModel
) -> tuple[RequestRunner | None, dict[int, Any]]:
    """What is answered next, by job: requests of one model; or bids, and then None for the model."""
    bids, requests = dict[int, Bid](), dict[int, Request]()
    for number, entry in waiting.items():
        if isinstance(entry.request, Bid):
            bids[number] = entry.request
        else:
            requests[number] = entry.request
    models = {id(request.model): request.model for request in requests.values()}
    model = next((model for model in models.values() if model is not last), None)
    if model is None and bids:
        return None, bids
    model = model or last
    return model, {n: request for n, request in requests.items() if request.model is model}


def _tokens(requests: Iterable[Request | Bid]) -> list[int]:
    """Logits that are made of each sequence by those requests that are forwards."""
    return [request.logits_to_keep for request in requests if isinstance(request, Forward)]
