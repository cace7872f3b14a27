"""Work in parts that any number of processes share out among themselves, by locks on the parts.

What a part holds is fixed before any work. A process takes a part by locking a file; the system
releases the lock however the process ends, so a part that a dead process had begun is done by
another one, or by the next run. Nobody waits for a process that is gone.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

from specdata.interruption import stop_if_asked

# Seconds between two looks at what other processes are doing.
PAUSE = 0.2


def share_out(parts: Iterable[int], attempt: Callable[[int], bool]) -> None:
    """Attempt parts of a work until all are done, by this process or another.

    Every process that works on it calls this, and returns when all parts are done.

    Args:
        parts: numbers of the parts, in the order in which they are attempted.
        attempt: does a part, under its lock (`files.try_locked`), unless it is done. Whether it is
            done now; False if another process is at it.
    """
    waiting = list(parts)
    while waiting:
        left = []
        for part in waiting:
            stop_if_asked()
            if not attempt(part):
                left.append(part)
        if len(left) == len(waiting):
            time.sleep(PAUSE)
        waiting = left
