"""Expensive things that several test files want, made once for each state of their sources.

They lie beside the virtual environment's own caches, outside the tree. Of the processes that want
the same thing at once one makes it and the others wait, and later sessions find it there.
"""

import hashlib
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

from specdata.storage.files import atomic_folder, locked

ROOT = Path(__file__).resolve().parents[2]
IN_ENVIRONMENT = sys.prefix != sys.base_prefix
CACHE = (Path(sys.prefix) if IN_ENVIRONMENT else Path(tempfile.gettempdir())) / "cache" / "tests"
LIBRARIES = ("torch", "transformers", "tokenizers", "accelerate")
# How processors are used, which decides last bits.
ARITHMETIC = ("ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA", "OMP_NUM_THREADS")
# Seconds after which a thing that nobody made again is of sources that are gone.
OLD = 7 * 24 * 3600


def made_once(name: str, sources: str, make: Callable[[Path], object]) -> Path:
    """A folder that nobody writes into; copy it to change it.

    Args:
        name: what it is, part of its name.
        sources: patterns of files below the repository, separated by spaces: what it is made of
            depends on them, on `LIBRARIES`, `ARITHMETIC` and on nothing else.
        make: fills a folder that it is given.
    """
    given = [*map(version, LIBRARIES), *(os.environ.get(name, "") for name in ARITHMETIC)]
    digest = hashlib.sha256(" ".join(given).encode())
    for pattern in sources.split():
        for path in sorted(ROOT.glob(pattern)):
            digest.update(path.relative_to(ROOT).as_posix().encode() + path.read_bytes())
    folder = CACHE / f"{name}-{digest.hexdigest()[:16]}"
    with locked(CACHE / f"{name}.lock"):
        if not folder.exists():
            for former in CACHE.glob(f"{name}-*"):
                if time.time() - former.stat().st_mtime > OLD:
                    shutil.rmtree(former)
            with atomic_folder(folder) as temporary:
                make(temporary)
    return folder
