"""The command that starts a recipe in several processes under a launch profile."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

# A folder beside the packages, in a checkout as in an installed wheel.
LAUNCH = Path(__file__).parent.parent / "launch"
PROFILES = sorted(path.stem for path in LAUNCH.glob("*.yaml"))


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
    command = [sys.executable, "-m", "accelerate.commands.launch"]
    command += ["--config_file", str(LAUNCH / f"{profile}.yaml")]
    engine = LAUNCH / f"{profile}.json"
    if engine.exists():  # the profile itself names it relative to a checkout
        command += ["--deepspeed_config_file", str(engine)]
    module = f"recipes.{recipe.replace('-', '_')}"
    return [*command, *options, "--module", module, *arguments]


def start(command: Sequence[str]) -> NoReturn:
    """Become an `accelerate launch`, whose signals and exit status are then this process's."""
    # Seconds that torchrun leaves its processes to write a checkpoint once it is told to stop.
    os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "300")
    os.execv(command[0], list(command))
