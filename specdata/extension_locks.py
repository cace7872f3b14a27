"""Locks that killed processes left on operators that are compiled: later ones would wait for ever.

torch compiles an operator of DeepSpeed, when it is first used, beside a lock file. A process that
is killed meanwhile leaves the file, and torch waits for it to go without end and without a word.
"""

from __future__ import annotations

import logging
import os
import time
from pathlib import Path

logger = logging.getLogger(__name__)

# Seconds: none of DeepSpeed's operators takes nearly as long to compile; and how long others of
# this launch, which begin at the same time, may hold a lock without a word.
OLD, YOUNG = 1200, 30


def free_locks() -> None:
    """Remove locks of compilations that are over, and name those that may be.

    One is over if its lock is old and no process of this machine works in its folder.
    """
    for lock in _root().glob("**/lock"):
        try:
            age = time.time() - lock.stat().st_mtime
        except FileNotFoundError:  # it was just released
            continue
        if age > OLD and not _is_worked_in(lock.parent):
            lock.unlink(missing_ok=True)
            logger.warning("removed %s, which a process that was killed had left", lock)
        elif age > YOUNG:
            logger.warning(
                "%s has been there for %.0f s: another process compiles a part of DeepSpeed, and "
                "this one waits for it; if that one was killed, remove the file",
                lock,
                age,
            )


def _root() -> Path:
    """Where torch compiles."""
    from torch.utils.cpp_extension import get_default_build_root

    return Path(os.environ.get("TORCH_EXTENSIONS_DIR") or get_default_build_root())


def _is_worked_in(folder: Path) -> bool:
    """Whether a compiler runs there, as far as this machine tells (Linux)."""
    for process in Path("/proc").glob("[0-9]*/cwd"):
        try:
            if process.resolve() == folder.resolve():
                return True
        except OSError:  # it has ended, or is another user's
            continue
    return False
