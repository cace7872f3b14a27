"""How many threads torch computes with on a CPU: measured on the work itself, unless given.

Threads that share an operation meet at its end, and those that come first spin until the last one
is there. Beside other programs one of them may be waiting for a processor: two threads then take
up to a hundred times as long as one. Small models are no faster with two anyhow
(docs/evidence/busy.md).
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import TypeVar

import torch

from specdata.processes import IDLE, process_count
from specdata.storage.files import PROGRESS, write_json

T = TypeVar("T")
THREADS_FILE = "threads.json"
UNITS, SECONDS = 5, 0.5
"""Each number of threads is tried on at least so many units of work, and for so long."""
CLEAR = 1.5
"""A number that takes so many times as long in two units needs no more."""
GAIN = 1.03
"""More threads must be faster by so much."""
LOOK, SOON_AND_LATE = 1.0, (60.0, 600.0)
"""Seconds between looks at this; the least and the most before more threads are tried again."""
COST = 100
"""More threads are tried in at most one of so many seconds, fewer in one of a quarter."""

_count_is_fixed = _working = False
_folder: Path | None = None
_stage_threads: dict[str, Threads] = {}


class Threads:
    """Chooses the number of threads of repeated work, whose `units` it is told of.

    Half of those that torch has are compared with all, and with half as many, and so on while that
    is better; later again, if the work waits, and now and then with twice as many. Nothing is
    chosen where a user or a launcher gave the number, on a GPU, and inside other such work.

    Args:
        device: of the work.
        kept: file of what was chosen, by which resumed work goes on as it was.
        name: of the work in that file.
        warm_up: units that are not compared: memory is taken, kernels are chosen, graphs are made.
    """

    def __init__(
        self, device: torch.device, kept: Path | None = None, name: str = "", warm_up: int = 1
    ) -> None:
        self._most = torch.get_num_threads()
        self._is_open = device.type == "cpu" and self._most > 1 and not are_given()
        self._kept, self._name, self._step = kept, name, 0
        stored = {}
        if self._is_open and kept is not None and kept.is_file():
            stored = json.loads(kept.read_text(encoding="utf-8")).get(name, {})
        self._log: list[list[int]] = stored.get("log", [])  # [step, number], where it changed
        self._until = self._log[-1][0] if self._log else 0  # steps are done as they were
        chosen = stored.get("chosen")
        self.count = chosen or (self._most + 1) // 2  # beside others all may be the slowest by far
        self._rivals = [] if chosen else self._beside(self._most, self.count // 2)
        self._tried: dict[int, list[float]] = {}
        self._warm_up = warm_up
        self._wall = self._worked = self._rested = self._spent = 0.0
        self._entered: tuple[int, int, float, float] | None = None

    @property
    def is_settled(self) -> bool:
        """True if no numbers are being compared."""
        return not (self._is_open and self._rivals)

    def units(self, each: Iterable[T]) -> Iterator[T]:
        """Do a unit of work with each of these."""
        for one in each:
            self.begin()
            try:
                yield one
            finally:
                self.end()

    def begin(self, step: int = 0, *, is_unit: bool = True) -> None:
        """Begin a unit with the number that is to be used now, at a training's `step`, from 1.

        Without `is_unit` it is unlike the others, and is done with the number in use.
        """
        global _working
        self._step, self._is_unit = step, is_unit
        if not self._is_open or _working or torch.get_num_threads() != self._most:
            return
        _working = True
        now, before = self._now(), torch.get_num_threads()
        torch.set_num_threads(now)
        self._entered = now, before, time.perf_counter(), time.thread_time()

    def end(self) -> None:
        """End the unit, if one has begun, and choose."""
        global _working
        if self._entered is None:
            return
        now, before, begun, worked = self._entered
        seconds, worked = time.perf_counter() - begun, time.thread_time() - worked
        torch.set_num_threads(before)
        self._entered, _working = None, False
        if not self._is_unit or 0 < self._step <= self._until:
            return
        if self._warm_up:
            self._warm_up -= 1
        elif self._rivals:
            self._tried.setdefault(now, []).append(seconds)
            self._compare()
        else:
            self._look(seconds, worked)

    def _now(self) -> int:
        """The number of the unit that begins."""
        if 0 < self._step <= self._until:
            return [number for step, number in self._log if step <= self._step][-1]
        now = self.count
        if self._rivals and self._is_unit and not self._warm_up:
            now = min(now, self._rivals[0], key=lambda number: sum(self._tried.get(number, [])))
        if self._step and (self._rivals or self._log[-1][1] != now):
            self._log.append([self._step, now])
            self._keep()
        return now

    def _beside(self, *numbers: int) -> list[int]:
        """Those of these numbers that can be tried beside the one in use."""
        return [number for number in numbers if 1 <= number <= self._most and number != self.count]

    def _compare(self) -> None:
        """Choose between the number in use and its rival, once enough is known."""
        rival, *others = self._rivals
        more, fewer = max(self.count, rival), min(self.count, rival)
        slow, fast = (self._tried.get(number, []) for number in (fewer, more))
        if min(sum(slow), sum(fast)) < SECONDS:
            return
        ratio = median(slow) / median(fast)
        if (few := min(len(slow), len(fast))) < UNITS:
            ratio = min(slow) / min(fast)  # one may have been held up, as where a graph is made
            if few < 2 or 1 / CLEAR < ratio < CLEAR:
                return
        self._spent += sum(self._tried[rival])
        self._tried = {}
        if rival == (more if ratio > GAIN else fewer):
            self.count = rival
            others = self._beside(2 * rival if rival == more else rival // 2)
        self._rivals = others
        if not others:
            self._rested = self._wall = self._worked = 0.0
            self._keep()

    def _look(self, seconds: float, worked: float) -> None:
        """Compare again if the work waits, or has rested long enough."""
        self._wall, self._worked = self._wall + seconds, self._worked + worked
        if self._wall < LOOK:
            return
        self._rested += self._wall
        waits = self._worked < IDLE * self._wall
        self._wall = self._worked = 0.0
        soon, late = SOON_AND_LATE
        if waits and self._rested > min(soon, COST / 4 * self._spent):
            self._rivals = self._beside(self.count // 2)
        elif self._rested > min(late, max(soon, COST * self._spent)):
            self._rivals = self._beside(2 * self.count)
        if self._rivals:
            self._spent = 0.0

    def _keep(self) -> None:
        """Store what this work goes on with."""
        if self._kept is None:
            return
        kept = json.loads(self._kept.read_text(encoding="utf-8")) if self._kept.exists() else {}
        kept[self._name] = {"chosen": self.count if self.is_settled else None, "log": self._log}
        write_json(self._kept, kept)


def are_given() -> bool:
    """True if a user or a launcher said how many threads there are to be."""
    named = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
    return _count_is_fixed or process_count() > 1 or any(os.environ.get(each) for each in named)


@contextmanager
def using_threads(count: int) -> Iterator[None]:
    """Have torch use so many threads in the block; 0 leaves it as it is."""
    global _count_is_fixed
    before, was_given = torch.get_num_threads(), _count_is_fixed
    torch.set_num_threads(count or before)
    _count_is_fixed = was_given or count > 0
    try:
        yield
    finally:
        torch.set_num_threads(before)
        _count_is_fixed = was_given


@contextmanager
def choosing_threads(folder: Path) -> Iterator[dict[str, Threads]]:
    """Keep what the block chooses in a stage's folder, for as long as that is unfinished.

    Gives what is chosen, by name.
    """
    global _folder, _working
    before, _folder = torch.get_num_threads(), folder
    try:
        yield _stage_threads
    finally:
        _folder, _working = None, False
        _stage_threads.clear()
        torch.set_num_threads(before)


def threads_of(name: str, device: torch.device) -> Threads:
    """The `Threads` of a stage's work of this name; outside a stage, new ones."""
    kept = _folder and _folder / PROGRESS / THREADS_FILE
    made = _stage_threads.get(name) or Threads(device, kept, name)
    if _folder is not None:
        _stage_threads[name] = made
    return made
