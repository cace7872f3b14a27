"""A process that is killed while DeepSpeed compiles does not make later ones wait for ever."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from specdata.extension_locks import OLD, YOUNG, free_locks


@pytest.fixture
def lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The lock of an operator, as torch leaves it."""
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    path = tmp_path / "py311_cpu" / "cpu_adam" / "lock"
    path.parent.mkdir(parents=True)
    path.touch()
    return path


def age(path: Path, seconds: float) -> None:
    then = time.time() - seconds
    os.utime(path, (then, then))


def test_an_old_lock_is_removed(lock: Path, caplog: pytest.LogCaptureFixture) -> None:
    age(lock, OLD + 10)
    free_locks()
    assert not lock.exists()
    assert f"removed {lock}" in caplog.text


def test_a_lock_beside_which_a_compiler_runs_stays_however_old(
    lock: Path, caplog: pytest.LogCaptureFixture
) -> None:
    age(lock, OLD + 10)
    wait = [sys.executable, "-c", "print(flush=True); input()"]
    with subprocess.Popen(
        wait, cwd=lock.parent, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as compiler:
        assert compiler.stdout is not None
        compiler.stdout.readline()
        free_locks()
        compiler.kill()
    assert lock.exists()
    assert "this one waits for it" in caplog.text


def test_a_lock_that_may_be_held_is_named_and_one_of_this_moment_is_not(
    lock: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    free_locks()
    assert not caplog.records
    age(lock, YOUNG + 10)
    free_locks()
    assert lock.exists()
    assert f"{lock} has been there for 4" in caplog.text
    assert "remove the file" in caplog.text
