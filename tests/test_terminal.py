"""Output to a terminal, or a file in its place: progress, any text, the end after Ctrl-C."""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from specdata import terminal
from specdata.terminal import progress, visible, whole_number

ROOT = Path(__file__).parent.parent


def test_progress_in_a_file_is_lines_that_say_how_far_it_is(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(terminal, "LINE_SECONDS", 0.2)
    begun = time.monotonic()
    with progress(50, "work", "row", done=10) as bar:
        for _ in range(40):
            bar.update()
            time.sleep(0.02)
    lines = capsys.readouterr().err.splitlines(keepends=True)
    assert all(line.endswith("row\n") or " row [" in line for line in lines)
    assert "\r" not in "".join(lines)
    assert "work: 10/50" in lines[0]
    assert "work: 50/50" in lines[-1]
    assert 4 <= len(lines) <= 2 + (time.monotonic() - begun) / 0.2


def test_control_characters_are_spelt_out_and_other_letters_stay() -> None:
    assert visible("a\x1b[2J\r\x07\x9b\udcff") == "a\\x1b[2J\\r\\x07\\x9b\\udcff"
    assert visible("ligne\n\tété ★ 龘 [bold]") == "ligne\n\tété ★ 龘 [bold]"


@pytest.mark.slow
@pytest.mark.parametrize("module", ["recipes", "torch"])
def test_an_interruption_during_imports_ends_in_one_line_with_status_130(
    module: str, tmp_path: Path
) -> None:
    process = subprocess.Popen(
        [sys.executable, "-X", "importtime", ROOT / "recipes" / "pipeline.py"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        # A suite that runs in the background has it ignored, which its children inherit.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    assert process.stderr is not None
    for line in process.stderr:
        if line.split("|")[-1].strip().startswith(module):
            process.send_signal(signal.SIGINT)
            break
    shown = process.communicate()[1].splitlines()
    rest = [line for line in shown if not line.startswith("import time:")]
    assert process.returncode == 130, rest
    assert [line for line in rest if line][-1].startswith("interrupted")
    assert not any(line.startswith(("Traceback", "Exception")) for line in rest), rest


@pytest.mark.slow
def test_importing_the_recipes_leaves_ctrl_c_to_the_program_that_imports_them() -> None:
    code = "import sys, recipes.config; print(sys.excepthook is sys.__excepthook__)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout == "True\n", done.stderr


@pytest.mark.parametrize("text", ["-1", "1.5", "x", "", str(10**23), "9" * 5000])
def test_a_count_that_nothing_has_is_refused_at_the_command_line(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="whole number"):
        whole_number(text)
