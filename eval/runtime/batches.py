"""Coroutines that decode, each run alone or many side by side, whose forwards then run together."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Sequence
from typing import TypeVar

from torch import Tensor

from eval.runtime.feeding.plain import Forward
from eval.runtime.model import CachedModel

T = TypeVar("T")

# Tokens of prompts that are read together: after each of them, logits are made.
PACKED_TOKENS = 256

ForwardCoroutine = Generator[Forward, Tensor, T]
"""A generator that yields the forwards it needs, is sent the logits (logits_to_keep, V) of each,
and returns a T. Whoever drives it decides which forwards run together."""


def drive(coroutine: ForwardCoroutine[T]) -> T:
    """Run a coroutine to its end, each of its forwards by itself."""
    try:
        forward = next(coroutine)
        while True:
            forward = coroutine.send(forward.run())
    except StopIteration as stopped:
        result: T = stopped.value
        return result


def run_batch(
    jobs: Sequence[Callable[[int], ForwardCoroutine[T]]],
    size: int,
    *,
    last: CachedModel,
    report: Callable[[int], object] = lambda done: None,
) -> list[T]:
    """Run coroutines side by side; forwards that wait for the same model run as one.

    Args:
        jobs: one for each sequence; called with a slot, it returns the coroutine to run.
        size: jobs that run at a time, in the slots from 0; the next one takes the slot of one that
            ends.
        last: the model whose forwards run only when no other model has any to run. With the target
            here, sequences whose drafts differ in length are still verified together.
        report: called with 1 when a job ends.
    """
    queue = deque(enumerate(jobs))
    # What can go on: job, slot, coroutine, and the logits that it is sent (none to begin with).
    ready: deque[tuple[int, int, ForwardCoroutine[T], Tensor | None]] = deque()
    for slot in range(min(size, len(jobs))):
        number, job = queue.popleft()
        ready.append((number, slot, job(slot), None))
    waiting: dict[int, tuple[int, ForwardCoroutine[T], Forward]] = {}
    results: dict[int, T] = {}
    while ready:
        while ready:
            number, slot, coroutine, logits = ready.popleft()
            try:
                forward = next(coroutine) if logits is None else coroutine.send(logits)
                waiting[number] = slot, coroutine, forward
            except StopIteration as stopped:
                results[number] = stopped.value
                report(1)
                if queue:
                    number, job = queue.popleft()
                    ready.appendleft((number, slot, job(slot), None))
        if not waiting:
            break
        models = [forward.sequence.model for _, _, forward in waiting.values()]
        model = next((model for model in models if model is not last), last)
        served = {n: entry for n, entry in waiting.items() if entry[2].sequence.model is model}
        answers = run_all([forward for _, _, forward in served.values()])
        for (number, (slot, coroutine, _)), logits in zip(served.items(), answers, strict=True):
            del waiting[number]
            ready.append((number, slot, coroutine, logits))
    return [results[number] for number in range(len(jobs))]


def run_all(forwards: Sequence[Forward]) -> list[Tensor]:
    """Run one forward of each of several sequences of a model, together where that pays.

    (logits_to_keep, N) logits of each. Short prompts are read together, too, but apart from
    sequences in progress, beside which they would be padded.
    """
    groups: list[list[Forward]] = [[], []]  # those in progress, and prompts
    for forward in forwards:
        sequence, count = forward.sequence, len(forward.tokens)
        if not sequence.model.traits.packs:
            continue
        if sequence.in_use:
            groups[0].append(forward)
        elif 2 * count <= PACKED_TOKENS:
            if count + sum(len(each.tokens) for each in groups[-1]) > PACKED_TOKENS:
                groups.append([])
            groups[-1].append(forward)
    logits: dict[int, Tensor] = {}
    for group in groups:
        if len(group) > 1:
            parts = [forward.part() for forward in group]
            outputs = group[0].sequence.model.read_packed(parts)
            for forward, part, read in zip(group, parts, outputs, strict=True):
                logits[id(forward)] = forward.sequence.commit(forward, part.layout, read)
    return [logits[id(each)] if id(each) in logits else each.run() for each in forwards]
