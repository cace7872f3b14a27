"""What identifies an input of a stage, so that a changed one is noticed."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

from specdata.storage.files import sha256

# Larger files are recognised by their size and their two ends.
WHOLE_FILE = 64 << 20


def fingerprint(source: str) -> str:
    """What identifies an input: a hash over a file, or over a folder's files; a Hub id itself.

    run.json is left out, because it holds times; checkpoints and hidden files (a lock, what a
    killed run left) are not part of an artefact.
    """
    path = Path(source)
    if path.is_file():
        return sha256(path)[:16]
    if not path.is_dir():
        return source
    parts = [
        f"{file.name} {file.stat().st_size} {_sample(file)}"
        for file in sorted(path.iterdir())
        if file.is_file() and file.name != "run.json" and not file.name.startswith(".")
    ]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]


def _sample(path: Path) -> str:
    if path.stat().st_size <= WHOLE_FILE:
        return sha256(path)
    with path.open("rb") as handle:
        digest = hashlib.sha256(handle.read(1 << 20))
        handle.seek(-(1 << 20), os.SEEK_END)
        digest.update(handle.read())
    return digest.hexdigest()
