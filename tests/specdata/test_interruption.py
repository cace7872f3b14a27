"""Signals: a checkpoint is waited for, statuses are theirs, and SIGKILL leaves no lock behind."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest
from torch.utils import cpp_extension
from torch.utils.file_baton import FileBaton

from specdata.interruption import stop_signal, stopping_on_signals, until_checkpoint
from specdata.processes import remove_left_locks

ROOT = Path(__file__).resolve().parents[2]


def program(code: str) -> subprocess.Popen[str]:
    """A program that has printed its first line, with signals as they are in a terminal."""
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # A suite that runs in the background has them ignored, which its children inherit.
        preexec_fn=lambda: [
            signal.signal(number, signal.SIG_DFL) for number in (signal.SIGINT, signal.SIGHUP)
        ],
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


RECIPE = """
import time
from recipes.recipe import Recipe
class Waiting(Recipe):
    def main(self, config):
        print("ready", flush=True)
        time.sleep(60)
raise SystemExit(Waiting("Wait.", ()).run([]))
"""
TOOL = """
import time
from recipes.command import run_tool
from recipes.tools import doctor
def main(given):
    print("ready", flush=True)
    time.sleep(60)
doctor.main = main
raise SystemExit(run_tool("doctor", ["draft", "--target", "target"]))
"""
# What releases the interpreter's lock and never looks at signals, as a step on many cores does.
STEP = """
import hashlib, select, sys
from specdata import interruption
from specdata.interruption import stop_signal, stopping_on_signals, until_checkpoint
interruption.REPEAT = 1e9  # no signal is late until a line says so
with stopping_on_signals(), until_checkpoint():
    print("ready", flush=True)
    for _ in range(STEPS):
        hashlib.pbkdf2_hmac("sha256", b"step", b"", COUNT)
        if select.select([sys.stdin], [], [], 0)[0] and sys.stdin.readline():
            interruption.REPEAT = 0.0
            print("late", flush=True)
        elif stop_signal():
            print("asked", flush=True)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("code", "number", "status"),
    [
        pytest.param(RECIPE, signal.SIGTERM, 143, id="recipe, SIGTERM"),
        pytest.param(TOOL, signal.SIGHUP, 129, id="tool, SIGHUP"),
    ],
)
def test_a_command_says_so_and_ends_with_the_status_of_the_signal(
    code: str, number: int, status: int
) -> None:
    process = program(code)
    process.send_signal(number)
    _, said = process.communicate(timeout=30)
    assert process.returncode == status
    assert said == "\ninterrupted: run the same command again to continue\n"


@pytest.mark.slow
def test_a_second_signal_ends_the_process_within_a_step_and_one_passed_on_does_not() -> None:
    process = program(STEP.replace("STEPS", "1000").replace("COUNT", str(10**5)))
    assert process.stdin is not None
    assert process.stdout is not None
    process.send_signal(signal.SIGINT)
    # Of two that are pending together the last would be handled first.
    assert process.stdout.readline() == "asked\n"
    process.send_signal(signal.SIGTERM)  # by a launcher, which was signalled itself
    for _ in range(3):
        assert process.stdout.readline() == "asked\n"
    process.stdin.write("later\n")
    process.stdin.flush()
    while (line := process.stdout.readline()) == "asked\n":
        pass
    assert line == "late\n"
    process.send_signal(signal.SIGTERM)
    shown, said = process.communicate(timeout=60)
    assert process.returncode == 130, "the status is that of the first"
    assert set(shown.split()) <= {"asked"}
    assert said.endswith("\nstopped at once\n")


@pytest.mark.slow
def test_a_signal_waits_for_the_checkpoint_and_then_stops_what_did_not_ask() -> None:
    process = program(STEP.replace("STEPS", "2").replace("COUNT", str(10**6)))
    process.send_signal(signal.SIGTERM)
    shown, said = process.communicate(timeout=30)
    assert shown == "asked\nasked\n"
    assert "SIGTERM: stopping at the next checkpoint, after this step" in said
    assert said.strip().endswith("Interrupted: SIGTERM")


def test_what_was_ignored_stays_so_and_handlers_are_given_back() -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    terminate = signal.getsignal(signal.SIGTERM)
    try:
        with stopping_on_signals(), until_checkpoint():
            signal.raise_signal(signal.SIGINT)
            assert stop_signal() == 0
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
        assert signal.getsignal(signal.SIGTERM) is terminate
    finally:
        signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("is_named", [True, False])
def test_the_lock_of_a_build_is_removed_if_its_process_is_gone_and_kept_if_not(
    is_named: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.delenv("TORCH_EXTENSIONS_DIR", raising=False)
    root = tmp_path / "torch_extensions" / "py_cpu"
    monkeypatch.setattr(cpp_extension, "get_default_build_root", lambda: str(root.parent))
    if is_named:
        monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(root))
    living, gone, other = (root / name / "lock" for name in ("cpu_adam", "fused_adam", "async_io"))
    for lock in (living, gone, other):
        lock.parent.mkdir(parents=True)
    baton = FileBaton(str(living))
    assert baton.try_acquire()
    for lock in (gone, other):
        acquire = "from torch.utils.file_baton import FileBaton; import os, sys\n"
        acquire += "assert FileBaton(sys.argv[1]).try_acquire(); os.kill(os.getpid(), 9)"
        assert subprocess.run([sys.executable, "-c", acquire, str(lock)]).returncode == -9
    remove_left_locks()
    assert [lock.exists() for lock in (living, gone, other)] == [True, False, False]
    assert all(f"{lock}, " in caplog.text for lock in (gone, other))
    baton.release()
