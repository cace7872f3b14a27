"""Work uses the number of threads that is fastest for it now, unless somebody gave one.

The clock is one of pretence: what a unit takes depends on the number of threads alone.
"""

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from specdata import threads as module
from specdata.threads import Threads, choosing_threads, threads_of, using_threads

CPU = torch.device("cpu")


class Clock:
    """Seconds that have passed, and those of them on a processor."""

    def __init__(self) -> None:
        self.wall = self.worked = 0.0

    def perf_counter(self) -> float:
        return self.wall

    def thread_time(self) -> float:
        return self.worked


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[Clock]:
    """A clock that only `work` moves; torch has eight threads, and nobody gave a number."""
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    made, before = Clock(), torch.get_num_threads()
    monkeypatch.setattr(module, "time", made)
    torch.set_num_threads(8)
    yield made
    torch.set_num_threads(before)


def work(
    threads: Threads, clock: Clock, takes: Callable[[int], float], units: int, share: float = 1.0
) -> list[int]:
    """The numbers of threads that so many units were done with."""
    used = []
    for _ in threads.units(range(units)):
        used.append(torch.get_num_threads())
        clock.wall += takes(used[-1])
        clock.worked += share * takes(used[-1])
    return used


def busy(count: int) -> float:
    """Seconds of a unit beside other programs: threads wait for each other."""
    return 0.1 * count**3


@pytest.mark.parametrize(
    ("takes", "best"),
    [
        pytest.param(lambda count: 0.1, 1, id="a small model, whose threads gain nothing"),
        pytest.param(lambda count: 0.8 / count, 8, id="a large model on a quiet machine"),
        pytest.param(lambda count: 0.1 + abs(count - 2), 2, id="a model of two threads"),
        pytest.param(busy, 1, id="a busy machine"),
        pytest.param(lambda count: 30.0 / count, 8, id="steps of half a minute"),
    ],
)
def test_the_fastest_number_is_used(clock: Clock, takes: Callable[[int], float], best: int) -> None:
    threads = Threads(CPU)
    used = work(threads, clock, takes, 200)
    assert used[-1] == best
    assert threads.is_settled
    assert torch.get_num_threads() == 8  # whoever comes next finds what was there


def test_a_number_that_is_slow_by_far_is_hardly_used(clock: Clock) -> None:
    used = work(Threads(CPU), clock, lambda count: 100.0 if count == 8 else 0.1, 50)
    assert used.count(8) == 1


def test_one_unit_that_was_held_up_decides_nothing(clock: Clock) -> None:
    held_up = iter([0.0] * 2 + [3.0])  # the second of those that are compared
    used = work(Threads(CPU), clock, lambda count: 0.1 / count + next(held_up, 0.0), 300)
    assert used[-1] == 8


def test_work_that_waits_goes_on_with_fewer_and_with_more_again_later(clock: Clock) -> None:
    threads = Threads(CPU)
    assert work(threads, clock, lambda count: 0.8 / count, 50)[-1] == 8
    assert work(threads, clock, busy, 100, share=0.6)[-1] == 1
    assert work(threads, clock, lambda count: 0.8 / count, 2000)[-1] == 8


@pytest.mark.parametrize("given", ["environment", "block", "later", "launcher", "gpu"])
def test_a_number_that_was_given_stays(
    clock: Clock, given: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if given == "environment":
        monkeypatch.setitem(os.environ, "OMP_NUM_THREADS", "8")
    if given == "launcher":
        monkeypatch.setitem(os.environ, "WORLD_SIZE", "2")
    with using_threads(4 if given == "block" else 0):
        threads = Threads(torch.device("cuda") if given == "gpu" else CPU)
        if given == "later":
            torch.set_num_threads(3)
        expected = {"block": 4, "later": 3}.get(given, 8)
        assert {*work(threads, clock, busy, 50)} == {expected}


def test_a_resumed_stage_uses_what_it_chose(clock: Clock, tmp_path: Path) -> None:
    with choosing_threads(tmp_path):
        assert work(threads_of("labels", CPU), clock, busy, 50)[-1] == 1
    with choosing_threads(tmp_path):
        assert {*work(threads_of("labels", CPU), clock, busy, 5)} == {1}
        assert {*work(threads_of("others", CPU), clock, busy, 1)} == {4}


@pytest.mark.parametrize("killed_at", [3, 6, 40])
def test_a_resumed_training_repeats_its_steps_as_they_were(
    clock: Clock, tmp_path: Path, killed_at: int
) -> None:
    def train(first: int, last: int) -> list[int]:
        used = []
        with choosing_threads(tmp_path):
            for step in range(first, last + 1):
                threads_of("draft", CPU).begin(step)
                used.append(torch.get_num_threads())
                clock.wall += busy(used[-1])
                threads_of("draft", CPU).end()
        return used

    begun = train(1, killed_at)
    assert len({*begun}) > 1  # there is something to repeat
    assert train(2, killed_at) == begun[1:]
    assert train(killed_at, 60)[-1] == 1
