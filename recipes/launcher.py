"""Start a recipe in several processes under a launch profile, and end with its exit status."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

# A folder beside the packages, in a checkout as in an installed wheel.
LAUNCH = Path(__file__).parent.parent / "launch"
PROFILES = sorted(path.stem for path in LAUNCH.glob("*.yaml"))
ACCELERATE = "accelerate.commands.launch"
# Seconds between the first process that ends and those that torchrun kills because they go on.
LATER = 20


def launch_command(
    profile: str, options: Sequence[str], recipe: str, arguments: Sequence[str]
) -> list[str]:
    """The command line that starts a recipe under a launch profile, from any folder.

    Args:
        profile: a name in `PROFILES`.
        options: of `accelerate launch`; they win over the profile.
        recipe: a name in `recipes.command.RECIPES`.
        arguments: of the recipe.
    """
    command = [sys.executable, "-m", ACCELERATE]
    command += ["--config_file", str(LAUNCH / f"{profile}.yaml")]
    engine = LAUNCH / f"{profile}.json"
    if engine.exists():  # the profile itself names it relative to a checkout
        command += ["--deepspeed_config_file", str(engine)]
    module = f"recipes.{recipe.replace('-', '_')}"
    return [*command, *options, "--module", module, *arguments]


def start(command: Sequence[str]) -> int:
    """Run an `accelerate launch` in this process, whose place a recipe of one process takes.

    So signals reach the recipe, all of its processes by torchrun, and its exit status is this
    one's. `accelerate launch` by itself would end with 1 and a traceback of its own.

    Args:
        command: as `launch_command` gives it.

    Returns:
        The status of the process that ended the others, 2 if that was a configuration or input that
        cannot be used; 128 and the signal's number if one ended it or this launcher; else 0.
    """
    from accelerate.commands.launch import _validate_launch_command, launch_command_parser
    from accelerate.commands.launch import launch_command as run
    from accelerate.utils import prepare_simple_launcher_cmd_env
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    parser, words = launch_command_parser(), command[command.index(ACCELERATE) + 1 :]
    checked, *_ = _validate_launch_command(parser.parse_args(words))
    if not (checked.multi_gpu or checked.use_deepspeed or checked.use_fsdp):
        line, environment = prepare_simple_launcher_cmd_env(checked)
        os.execve(line[0], line, environment)
    if checked.num_processes < max(1, checked.num_machines):
        print(
            "error: --num_processes must be at least 1 for each machine "
            f"(got {checked.num_processes} for {checked.num_machines})",
            file=sys.stderr,
        )
        return 2
    if checked.num_machines > 1 and checked.main_process_ip is None:
        print(
            "error: several machines need --main_process_ip, the address of the first, and "
            "--machine_rank, 0 on the first and 1, 2, ... on the others",
            file=sys.stderr,
        )
        return 2
    # Seconds that torchrun leaves its processes to write a checkpoint once it is told to stop.
    os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "300")
    try:
        run(parser.parse_args(words))
    except ChildFailedError as error:
        return _failed(error.failures)
    except SignalException as error:
        return 128 + int(error.sigval)
    return 0


def _failed(failures: Mapping[int, ProcessFailure]) -> int:
    """Say which process of this machine ended the others, and how; returns its exit status."""
    first = min(failure.timestamp for failure in failures.values())

    def order(rank: int) -> tuple[bool, int]:
        failure = failures[rank]
        if failure.exitcode == 2:  # all are refused the same, and one says so first
            kind = 0
        elif failure.exitcode in (-signal.SIGTERM, 128 + signal.SIGTERM):  # torchrun's
            kind = 3
        else:  # who was killed, then those that missed it in a collective
            kind = 1 if failure.exitcode < 0 else 2
        return failure.timestamp >= first + LATER, kind

    rank = min(failures, key=order)
    failure = failures[rank]
    killed = failure.exitcode < 0
    how = f"by {failure.signal_name()}" if killed else f"with status {failure.exitcode}"
    print(f"rank {rank} ended {how}; what it said is above", file=sys.stderr)
    return 128 - failure.exitcode if killed else failure.exitcode
