"""The processes of a launch over several nodes: one that is lost is named, and the others end.

On one machine the launcher sees which process ends, and ends the others. On another machine nobody
sees it: a collective of gloo fails without a name, one of NCCL waits, and so does a process for
which there is nothing to do. So each process holds the lock of a file in the run's folder, which
the system releases however the process ends, and the first process of each machine looks at the
locks of all. The file goes when its process is done. (What a machine without power held, an NFS
server releases after its lease, 90 s by default.)
"""

from __future__ import annotations

import os
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from recipes.run import USER_ERRORS
from specdata.errors import ConfigError, ManifestError
from specdata.interruption import Interrupted
from specdata.processes import leads_node, process_count, rank, spans_nodes
from specdata.storage.files import is_locked, try_locked, write_json
from specdata.storage.resume import read_record
from specdata.terminal import visible

FOLDER = ".processes"
# Seconds between two looks; a process that is gone in two looks is lost.
INTERVAL = 5.0
# Seconds that a process has to begin, and those that the others have to write a checkpoint after
# one of them has ended with a message (it was interrupted, say, and so were they).
PATIENCE = 600.0
FAREWELL = 120.0
# Seconds in which a rank's lock must become free. A machine that went down may hold it for a while.
OCCUPIED = 120.0
KEYS = ("host", "pid", "status", "error")


@dataclass(frozen=True, slots=True)
class Lost:
    """A process that is gone before its work was done.

    Args:
        rank: which.
        status: what this process should end with: that one's own, or 1 if it was lost.
        said: host, process id and what is known of the reason, in words.
    """

    rank: int
    status: int
    said: str


class Peers:
    """The other processes, as one of them sees them.

    Args:
        folder: where the locks are.
        own: this process's rank.
        count: how many processes there are.
    """

    def __init__(self, folder: Path, own: int, count: int) -> None:
        self.folder = folder
        self.others = {other for other in range(count) if other != own}
        self.begun = time.monotonic()
        self.seen: set[int] = set()
        self.free_since: dict[int, float] = {}

    def look(self, *, farewell: float = FAREWELL) -> Lost | None:
        """The first process, by rank, that is lost; to be called again and again.

        Args:
            farewell: seconds for which one that ended with a message is not yet lost.
        """
        for other in sorted(self.others):
            if lost := self._look_at(other, time.monotonic(), farewell):
                return lost
        return None

    def _look_at(self, other: int, now: float, farewell: float) -> Lost | None:
        lock = _lock(self.folder, other)
        if is_locked(lock):
            self.seen.add(other)
            self.free_since.pop(other, None)
            return None
        if other not in self.seen:  # the file may be what an earlier launch left
            if now - self.begun < PATIENCE:
                return None
            return Lost(other, 1, f"never began, or does not see {self.folder}")
        if not lock.exists():
            self.others.discard(other)  # it is done
            return None
        free = now - self.free_since.setdefault(other, now)
        record = read_record(_record(self.folder, other), KEYS, f"remove {self.folder}")
        where = f"on {record['host']} (process {record['pid']})"
        if record["error"] is None:
            killed = f"{where} was lost: it was killed, ran out of memory, or its machine is down"
            return Lost(other, 1, killed) if free >= INTERVAL else None
        said = f"{where} ended: {record['error']}"
        return Lost(other, record["status"], said) if free >= farewell else None


@contextmanager
def watched(output: Path) -> Iterator[None]:
    """Within, this process ends if another one of the launch, on another node, is lost.

    It says which on stderr and ends at once, as if it were killed: everything is written whole or
    not at all, so the same command continues. Nothing is done for the processes of one machine.

    Args:
        output: the run's folder, on a file system that all nodes share.

    Raises:
        ConfigError: if a process of an earlier launch still holds this one's lock.
    """
    if not spans_nodes():
        yield
        return
    # The port tells launches into the same folder apart: nodes agree on it, and on nothing else.
    folder, own = output / FOLDER / os.environ.get("MASTER_PORT", "0"), rank()
    with _held(folder, own):
        failing, ended = threading.Event(), threading.Event()
        _note(folder, own)
        watch = threading.Thread(target=_watch, args=(folder, own, failing, ended), daemon=True)
        if leads_node():
            watch.start()
        try:
            yield
        except BaseException as error:
            failing.set()
            refused = isinstance(error, USER_ERRORS)
            if isinstance(error, RuntimeError) and not refused:
                # It may be a collective that failed because a process is lost: then the one that
                # watches says so, and ends this one.
                time.sleep(4 * INTERVAL)
            stopped = error.status if isinstance(error, Interrupted) else 1
            _note(folder, own, 2 if refused else stopped, f"{type(error).__name__}: {error}")
            raise
        finally:
            ended.set()
        for path in (_record(folder, own), _lock(folder, own)):
            path.unlink(missing_ok=True)
    with suppress(OSError):  # the last one removes the folders
        folder.rmdir()
        folder.parent.rmdir()


def _watch(folder: Path, own: int, failing: threading.Event, ended: threading.Event) -> None:
    peers = Peers(folder, own, process_count())
    while not ended.wait(INTERVAL):
        try:
            lost = peers.look(farewell=INTERVAL if failing.is_set() else FAREWELL)
        except (OSError, ManifestError):  # a busy network file system: the next look may do
            continue
        if lost is not None and not ended.is_set():
            _note(folder, own, lost.status, f"rank {lost.rank} {lost.said}")
            said = visible(f"rank {lost.rank} {lost.said}")
            print(
                f"error while running: {said}. Rank {own} ends, too. Nothing finished is lost: run "
                "the same command again on every node",
                file=sys.stderr,
                flush=True,
            )
            os._exit(lost.status)  # the main thread may be in a collective that never returns


@contextmanager
def _held(folder: Path, own: int) -> Iterator[None]:
    """Hold this rank's lock."""
    folder.mkdir(parents=True, exist_ok=True)
    give_up = time.monotonic() + OCCUPIED
    while True:
        with try_locked(_lock(folder, own)) as mine:
            if mine:
                yield
                return
        if time.monotonic() > give_up:
            break
        time.sleep(0.1)  # others hold it for a moment when they look
    record: dict[str, Any] = read_record(_record(folder, own), KEYS, f"remove {folder}")
    raise ConfigError(
        f"rank {own} of an earlier launch is still at work in {folder.parent.parent}: wait for "
        f"process {record['pid']} on {record['host']}, or end it"
    )


def _note(folder: Path, own: int, status: int | None = None, error: str | None = None) -> None:
    values = {"host": socket.gethostname(), "pid": os.getpid(), "status": status, "error": error}
    write_json(_record(folder, own), values)


def _lock(folder: Path, number: int) -> Path:
    return folder / f"rank-{number:05d}.lock"


def _record(folder: Path, number: int) -> Path:
    return folder / f"rank-{number:05d}.json"
