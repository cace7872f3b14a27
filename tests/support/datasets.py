"""What several files of tests use of `test_datasets`."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


@contextmanager
def small_disk(folder: Path, size: str) -> Iterator[None]:
    """A real file system of this size; the test is skipped where none may be mounted."""
    if os.geteuid() != 0:
        pytest.skip("only root may mount a small file system")
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)]
    done = subprocess.run(mount, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"this container may not mount: {done.stderr.strip()}")
    try:
        yield
    finally:
        # Lazily: a dataset that this process has loaded is still mapped from there.
        subprocess.run(["umount", "--lazy", str(folder)], check=True)
