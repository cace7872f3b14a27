"""What identifies an input of a stage, so that a changed one is noticed."""

from __future__ import annotations

import hashlib
import os
from functools import cache
from pathlib import Path

from specdata.storage.files import sha256

# Larger files are recognised by their size, their first megabyte and their last.
WHOLE_FILE = 64 << 20
END = 1 << 20


def fingerprint(source: str) -> str:
    """Identify an input by its content.

    run.json is left out, because it holds times; checkpoints and hidden files (a lock, what a
    killed run left) are not part of an artefact.

    Args:
        source: a file, a folder or a Hub id.

    Returns:
        16 hexadecimal digits: a hash of a file, or of the files of a folder; a Hub id itself.
    """
    path = Path(source)
    if path.is_file():
        return sha256(path)[:16]
    if not path.is_dir():
        return source
    parts = [
        f"{file.name} {file.stat().st_size} {_digest(file)}"
        for file in sorted(path.iterdir())
        if file.is_file() and file.name != "run.json" and not file.name.startswith(".")
    ]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]


def _digest(path: Path) -> str:
    """A hash of a file's bytes; of a very large one, of its two ends."""
    status = path.stat()
    if status.st_size < END:
        return sha256(path)
    # Several stages read the same model; times of small files are too coarse to tell them apart.
    return _digest_once(path, status.st_ino, status.st_size, status.st_mtime_ns)


@cache
def _digest_once(path: Path, _inode: int, size: int, _modified: int) -> str:
    if size <= WHOLE_FILE:
        return sha256(path)
    with path.open("rb") as handle:
        digest = hashlib.sha256(handle.read(END))
        handle.seek(-END, os.SEEK_END)
        digest.update(handle.read())
    return digest.hexdigest()
