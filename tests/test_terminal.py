"""Output to a terminal, or a file in its place: progress, and any text."""

from __future__ import annotations

import pytest

from specdata import terminal
from specdata.terminal import progress, visible


def test_progress_in_a_file_is_lines_that_say_how_far_it_is(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for seconds, rows in ((0.0, range(10, 51)), (1e9, (10, 50))):
        monkeypatch.setattr(terminal, "LINE_SECONDS", seconds)
        with progress(50, "work", "row", done=10) as bar:
            for _ in range(40):
                bar.update()
        lines = capsys.readouterr().err.splitlines(keepends=True)
        assert all(line.endswith("row\n") or " row [" in line for line in lines)
        assert "\r" not in "".join(lines)
        told = [line.partition("/")[0] for line in lines]
        assert list(dict.fromkeys(told)) == [f"work: {row}" for row in rows]
        assert len(told) <= len(rows) + 1, "the last may be said again"


def test_control_characters_are_spelt_out_and_other_letters_stay() -> None:
    assert visible("a\x1b[2J\r\x07\x9b\udcff") == "a\\x1b[2J\\r\\x07\\x9b\\udcff"
    assert visible("ligne\n\tété ★ 龘 [bold]") == "ligne\n\tété ★ 龘 [bold]"
