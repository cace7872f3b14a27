"""Processes forked off one that has imported what trainings need: a group, or one to kill.

A group is told what `accelerate launch` tells its processes; the launcher itself (`launch`) and its
profiles are tested in test_pipeline.py and test_launch_profiles.py. `server` is the fixture of
conftest.py.
"""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from multiprocessing.context import ForkServerContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
Work = Callable[..., object]
ON_CPU = {"ACCELERATE_USE_CPU": "true"}
ZERO_2 = {"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_DEEPSPEED_ZERO_STAGE": "2"}
ZERO_2 |= {"DS_ACCELERATOR": "cpu"}
ZERO_3 = {**ZERO_2, "ACCELERATE_DEEPSPEED_ZERO_STAGE": "3"}
ZERO_3 |= {"ACCELERATE_DEEPSPEED_ZERO3_SAVE_16BIT_MODEL": "true"}
ENGINES = {"DDP": ON_CPU, "ZeRO-1": {**ZERO_2, "ACCELERATE_DEEPSPEED_ZERO_STAGE": "1"}}
ENGINES |= {"ZeRO-2": ZERO_2, "ZeRO-3": ZERO_3}


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def launch(folder: Path, profile: str, *words: str) -> subprocess.Popen[str]:
    """Start a launcher of a recipe as users do, in a folder that is no checkout."""
    (folder / "eval.py").write_text("raise SystemExit('the user has a module of this name')\n")
    return subprocess.Popen(
        [sys.executable, "-P", "-m", "recipes.command", "launch", profile, *words],
        cwd=folder,
        env={**os.environ, "DS_ACCELERATOR": "cpu", "PYTHONPATH": str(ROOT)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )


def as_rank(rank: int, environment: dict[str, str], work: Work, *arguments: Any) -> None:
    """Do some work as a launcher's process."""
    os.environ.update(environment, RANK=str(rank), LOCAL_RANK=str(rank))
    work(*arguments)


def start_group(
    server: ForkServerContext,
    world: int,
    work: Work,
    *arguments: Any,
    ranks: Sequence[int] = (),
    **environment: str,
) -> list[BaseProcess]:
    """Start a group of processes that do the same work, a function at the top of a module.

    Of those, some `ranks` may be all that there is.
    """
    common = {"WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(world), **environment}
    common |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    processes: list[BaseProcess] = [
        server.Process(target=as_rank, args=(rank, common, work, *arguments))
        for rank in ranks or range(world)
    ]
    for process in processes:
        process.start()
    return processes


def start_two(
    server: ForkServerContext, work: Work, *arguments: Any, **environment: str
) -> list[BaseProcess]:
    """A group of two processes."""
    return start_group(server, 2, work, *arguments, **environment)


def finish(processes: list[BaseProcess]) -> None:
    for process in processes:
        process.join()
        assert process.exitcode == 0


def wait_for(work: Path, pattern: str, processes: list[BaseProcess]) -> None:
    """Wait until a file or folder lies in `work`, while the processes run."""
    while not list(work.glob(pattern)):
        assert all(each.is_alive() for each in processes), "it ended before it could be killed"
        time.sleep(0.001)


def kill(processes: list[BaseProcess]) -> None:
    """`kill -9`."""
    for process in processes:
        process.kill()
    for process in processes:
        process.join()
        assert process.exitcode == -signal.SIGKILL
