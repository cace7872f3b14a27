"""Processes of several nodes know who of them is at work, done, lost, or ended with a message."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from recipes import peers
from recipes.peers import FOLDER, Peers, watched
from specdata.errors import ConfigError
from specdata.storage.files import locked, write_json

ROOT = Path(__file__).parent.parent


@pytest.fixture
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """This process is the first of three on three nodes; where their locks are."""
    three = {"WORLD_SIZE": "3", "RANK": "0", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    for name, value in {**three, "MASTER_PORT": "7"}.items():
        monkeypatch.setenv(name, value)
    return tmp_path / FOLDER / "7"


def note(folder: Path, rank: int, status: int | None = None, error: str | None = None) -> Path:
    """The record of a process, and the path of its lock."""
    values = {"host": "far", "pid": 40 + rank, "status": status, "error": error}
    write_json(folder / f"rank-{rank:05d}.json", values)
    return folder / f"rank-{rank:05d}.lock"


def test_a_process_that_is_gone_in_two_looks_is_lost(
    node: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peers, "INTERVAL", 0.0)
    found = Peers(node, 0, 2)
    with locked(note(node, 1)):
        assert found.look() is None
    lost = found.look()
    assert lost is not None
    assert (lost.rank, lost.status) == (1, 1)
    assert "on far (process 41) was lost" in lost.said
    monkeypatch.setattr(peers, "INTERVAL", 60.0)
    assert found.look() is None, "the next look may find it at work"


def test_what_an_earlier_launch_left_is_not_a_lost_process(node: Path) -> None:
    note(node, 1, 1, "OSError: of an earlier launch").touch()
    found = Peers(node, 0, 2)
    assert found.look(farewell=0) is None
    found.begun -= peers.PATIENCE
    lost = found.look()
    assert lost is not None
    assert "never began" in lost.said


def test_a_process_that_is_done_is_not_missed(
    node: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peers, "INTERVAL", 0.0)
    found = Peers(node, 1, 2)
    with watched(tmp_path):
        assert found.look() is None
    assert found.look() is None
    assert found.others == set()
    assert not (tmp_path / FOLDER).exists(), "the last one removes the folders"


def test_a_refusal_is_told_to_the_others_with_its_status(node: Path, tmp_path: Path) -> None:
    found = Peers(node, 1, 2)

    def work() -> None:
        with watched(tmp_path):
            assert found.look() is None
            raise ConfigError("no such set")

    with pytest.raises(ConfigError, match="no such set"):
        work()
    assert found.look() is None, "they have time to end by themselves"
    lost = found.look(farewell=0)
    assert lost is not None
    assert lost.status == 2
    assert re.search(rf"process {os.getpid()}\) ended: ConfigError: no such set", lost.said)


def test_a_rank_that_is_still_held_by_an_earlier_launch_is_refused(
    node: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peers, "OCCUPIED", 0.0)
    held, refused = locked(note(node, 0)), pytest.raises(ConfigError, match="process 40 on far")
    with held, refused, watched(tmp_path):
        pytest.fail("both would be at work")


def test_processes_of_one_machine_leave_each_other_to_the_launcher(
    node: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "3")
    with watched(tmp_path):
        assert not list(tmp_path.iterdir())


WAITS = """
import sys, time
from pathlib import Path
from recipes import peers
peers.INTERVAL = .1
with peers.watched(Path(sys.argv[1])):
    print("at work", flush=True)
    time.sleep(60)
"""


def test_a_process_that_waits_ends_when_another_is_killed(node: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-c", WAITS, str(tmp_path)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "WORLD_SIZE": "2"}
    ranks = [
        subprocess.Popen(
            command,
            env={**environment, "RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in (0, 1)
    ]
    assert [rank.stdout and rank.stdout.readline() for rank in ranks] == ["at work\n"] * 2
    time.sleep(1)  # the first has seen the second
    ranks[1].kill()
    said = ranks[0].communicate(timeout=60)[1]
    assert ranks[0].returncode == 1
    assert f"(process {ranks[1].pid}) was lost" in said
    assert "run the same command again on every node" in said
    ranks[1].communicate()
