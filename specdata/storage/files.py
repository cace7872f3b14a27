"""Files: whole or absent, locked, identified by content. Only this code renames into place."""

from __future__ import annotations

import fcntl
import glob
import hashlib
import json
import os
import shutil
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any

from filelock import Timeout, UnixFileLock

from specdata.interruption import stop_if_asked

# Larger files are recognised by their size, their first megabyte, their last, and pages between.
WHOLE_FILE = 64 << 20
END = 1 << 20
BETWEEN, PAGE_BYTES = 1024, 4096
# Beside a dataset's shards: what they are; what is known of an artefact that is being made; the
# copy of a dataset that is mapped into memory.
MANIFEST, PROGRESS, CACHE_FOLDER = "manifest.json", ".progress", ".cache"
# Records of how an artefact was made, with the times that it took.
TIMED_FILES = ("run.json", "history.json")
# Times that the folder of a lock is made again if it has just been removed.
LOCK_TRIES = 10
# Seconds between two looks at what other processes are doing.
LOCK_PAUSE = 0.2
# Nanoseconds, more than between two times that a file system tells apart (10 ms at most on Linux).
TICK = 100_000_000


@contextmanager
def atomic_write(path: Path) -> Iterator[Path]:
    """Yield a temporary path; when the block ends without an error it becomes `path`.

    A reader, or a run after `kill -9`, sees the old file or the new one, never a part.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    # The same name each time, so that what a killed run left is replaced by the next one.
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        yield temporary
        with temporary.open("rb+") as handle:
            os.fsync(handle.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


@contextmanager
def atomic_folder(path: Path, *, replace: bool = False) -> Iterator[Path]:
    """Yield a new temporary folder; when the block ends without an error it becomes `path`.

    With `replace` it takes the place of a folder that is there, which stays until then; else that
    is a FileExistsError.
    """
    temporary = path.with_name(f".{path.name}.tmp")
    former = path.with_name(f".{path.name}.old")
    _settle(path, former, temporary)  # what a killed run left
    if path.exists() and not replace:
        raise FileExistsError(f"{path} must not exist yet; delete it to make it again")
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary.mkdir()
    mode = temporary.stat().st_mode & 0o666  # which some writers (safetensors) narrow
    try:
        yield temporary
        for file in temporary.rglob("*"):
            if file.is_file() and not file.is_symlink() and file.stat().st_nlink == 1:  # its own
                file.chmod(mode)
        sync_folder(temporary)
        if path.exists():  # a folder that is not empty cannot be renamed over
            path.replace(former)
        temporary.replace(path)
    finally:
        _settle(path, former, temporary)


def _settle(path: Path, former: Path, temporary: Path) -> None:
    """Leave a folder alone in its place: the new one if it is there, or else the former one."""
    shutil.rmtree(temporary, ignore_errors=True)
    if former.exists():
        # Renamed before it is removed, so that `former` is whole whenever it is there.
        former.replace(temporary if path.exists() else path)
        shutil.rmtree(temporary, ignore_errors=True)


def sync_folder(folder: Path) -> None:
    """Have a folder, all that is in it and its own entry on the disk when this returns."""
    for path in (*folder.rglob("*"), folder, folder.parent):
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


@contextmanager
def locked(path: Path, *, wait: bool = True) -> Iterator[bool]:
    """Hold a lock file, which goes with the process, however it ends.

    Yields whether it is held now: True, unless whoever holds it, this process or another, was not
    waited for. Raises OSError if the lock file cannot be made, or its file system has no locks.
    """
    # flock or an error, and the file stays: a lock that consists in the file's existence would
    # outlive a process that was killed.
    lock = UnixFileLock(path, fallback_to_soft=False, preserve_lock_file=True)
    with suppress(Timeout):
        for tries_left in reversed(range(LOCK_TRIES)):
            try:
                lock.acquire(blocking=wait)
                break
            except (FileNotFoundError, FileExistsError):
                # A process that finishes a dataset removes the folder of its locks, which another
                # may be about to use. FileExistsError: `mkdir` found it, and it was gone at a
                # second look.
                if not tries_left:
                    raise
    try:
        yield lock.is_locked
    finally:
        lock.release()


def is_locked(path: Path) -> bool:
    """True if a process holds a lock file (see `locked`).

    Any number of processes may ask at once without one taking another's look for the lock. A
    process that tries to take it without waiting can fail meanwhile, so it should try again.
    """
    try:
        handle = os.open(path, os.O_RDONLY)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(handle)  # and so give it back
    return False


def share_out(parts: Iterable[int], attempt: Callable[[int], bool]) -> None:
    """Attempt parts of a work, in order, until all are done, by this process or another.

    Every process that works on it calls this. `attempt` does a part, unless it is done, and says
    whether it is done now; False if another process is at it, which holds its lock (`locked`).
    """
    waiting = list(parts)
    while waiting:
        left = []
        for part in waiting:
            stop_if_asked()
            if not attempt(part):
                left.append(part)
        if len(left) == len(waiting):
            time.sleep(LOCK_PAUSE)
        waiting = left


def write_text(path: Path, text: str) -> None:
    """Write a text file atomically."""
    with atomic_write(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def write_json(path: Path, value: Any) -> None:
    """Write a JSON file atomically, keys in the order given, NaN refused."""
    write_text(path, json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n")


def read_object(path: Path) -> dict[str, Any]:
    """The JSON object of a file. Raises OSError, or ValueError for what is none."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    if not isinstance(value, dict):
        raise ValueError(f"it must hold a JSON object, not {type(value).__name__}")
    return value


def as_pattern(path: str | Path) -> str:
    """The pattern that matches one path alone, for `datasets`, which takes paths for patterns.

    It is absolute because `datasets` would take the name of the working folder for a pattern, too.
    """
    return glob.escape(str(Path(path).absolute()))


def sha256(path: Path) -> str:
    """Hex digest of a file's bytes, which are read once a process as long as they do not change.

    Those of a small file that has just been written are read each time, because another change
    might come at what is the same time to the file system.
    """
    status = path.stat()
    changed = status.st_mtime_ns, status.st_ctime_ns
    is_told = status.st_size >= END or time.time_ns() - max(changed) > TICK
    hashed = _sha256_once if is_told else _sha256_once.__wrapped__
    return hashed(path, status.st_ino, status.st_size, changed)


@cache
def _sha256_once(path: Path, _inode: int, _size: int, _changed: tuple[int, int]) -> str:
    with path.open("rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()


def fingerprint(source: str) -> str:
    """Identify a file, a folder or a Hub id by its content, in 16 hexadecimal digits.

    A Hub id is itself. run.json and history.json are left out, because they hold times; checkpoints
    and hidden files (a lock, what a killed run left) are not part of an artefact.
    """
    path = Path(source)
    if path.is_file():
        return _digest(path)[:16]
    if not path.is_dir():
        return source
    parts = [
        f"{file.name} {file.stat().st_size} {_digest(file)}"
        for file in sorted(path.iterdir())
        if file.is_file() and file.name not in TIMED_FILES and not file.name.startswith(".")
    ]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]


def digests(folder: Path) -> dict[str, str]:
    """Path in a folder -> digest, of the files that `fingerprint` reads and those in its folders.

    Weights are read whole, however large: they were made here, and nothing else checks them.
    Pages and cards are left out: people edit them. So are logs of a training: nothing reads them.
    """
    files = {file.relative_to(folder): file for file in sorted(folder.rglob("*"))}
    return {
        str(name): _digest(file, whole=file.suffix == ".safetensors")[:16]
        for name, file in files.items()
        if file.is_file()
        and file.suffix not in (".md", ".html")
        and file.name not in TIMED_FILES
        and not any(part.startswith(".") or part.endswith(".logs") for part in name.parts)
    }


def _digest(path: Path, *, whole: bool = False) -> str:
    """A hash of a file's bytes; of a very large one, unless the whole is asked, of some of them.

    Those are its two ends, and pages in between, so that matrices of changed weights show.
    """
    size = path.stat().st_size
    if whole or size <= WHOLE_FILE:
        return sha256(path)
    with path.open("rb") as handle:
        digest = hashlib.sha256(handle.read(END))
        for place in range(END, size - END, size // BETWEEN):
            handle.seek(place)
            digest.update(handle.read(PAGE_BYTES))
        handle.seek(-END, os.SEEK_END)
        digest.update(handle.read())
    return digest.hexdigest()
