"""SIGTERM, SIGHUP and SIGINT (Ctrl-C): stop with a checkpoint, or at once if asked again.

Outside a training the first signal raises `Interrupted` wherever the program is: whatever is
written is written whole or not at all, so nothing that is finished is lost. A training would lose
the steps since its last checkpoint. Within `until_checkpoint` the signal is therefore only noted;
the training asks after each step (`stop_signal_of_any`), and all its processes stop after the same
one.

A second signal ends the process at once. One request often arrives several times: a terminal
signals every process of its group, SLURM every process of a job, and a launcher passes on what it
got itself. So a signal counts as the second only if it comes `REPEAT` seconds or more after the
first.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType

from specdata.processes import largest_of_all, process_count, rank

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
# Seconds from the first signal to one that counts as the second.
REPEAT = 2.0


class Interrupted(KeyboardInterrupt):
    """The program was asked to stop by a signal of this `number`.

    `status` is the exit status that shells give it: 130 for SIGINT, 143 SIGTERM, 129 SIGHUP.
    """

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number
        self.status = 128 + number


@dataclass(slots=True)
class _Request:
    """The first signal and when it came, 0 before it; whether it must wait for a checkpoint."""

    number: int = 0
    begun: float = 0.0
    waits: bool = False


_request = _Request()


@contextmanager
def stopping_on_signals() -> Iterator[None]:
    """Stop on these signals, as the module describes, while the block runs.

    Only in the main thread; elsewhere, and for a signal that this process
    ignores (SIGINT in the background of a shell, SIGHUP under nohup), nothing changes.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    former = {number: signal.getsignal(number) for number in SIGNALS}
    former = {number: handler for number, handler in former.items() if handler != signal.SIG_IGN}
    for number in former:
        signal.signal(number, _ask)
    try:
        yield
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)
        _request.number, _request.waits = 0, False


@contextmanager
def until_checkpoint() -> Iterator[None]:
    """Let a signal wait while the block runs, which must ask for it (`stop_signal_of_any`).

    One that it did not ask for raises Interrupted at the block's end.
    """
    _request.waits = True
    try:
        yield
    finally:
        _request.waits = False
    stop_if_asked()


def stop_signal() -> int:
    """The number of the signal by which this process was asked to stop; 0 if it was not."""
    return _request.number


def stop_signal_of_any() -> int:
    """The `stop_signal` of any process of a training; each must call this at the same point."""
    return largest_of_all(_request.number)


def stop_if_asked() -> None:
    """Raise Interrupted if this process was asked to stop; loops call it between two results."""
    if _request.number:
        raise Interrupted(_request.number)


def _ask(number: int, _frame: FrameType | None) -> None:
    now = time.monotonic()
    if not _request.number:
        _request.number, _request.begun = number, now
        if not _request.waits:
            raise Interrupted(number)
        _tell(
            f"{signal.Signals(number).name}: stopping at the next checkpoint, after this step; "
            "press Ctrl-C or send it again to stop at once"
        )
    elif now - _request.begun >= REPEAT:
        _tell("stopped at once")
        os._exit(128 + _request.number)


def _tell(text: str) -> None:
    """Write a line to stderr, past its buffer, which may be in the middle of another."""
    who = f"rank {rank()}: " if process_count() > 1 else ""
    os.write(2, f"\n{who}{text}\n".encode())
