"""The `draftsmith` command: every recipe and tool of the project under one name.

draftsmith pipeline --config my-pair.yaml
draftsmith launch multi_gpu --num_processes 8 train-head --config my-pair.yaml
"""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path

from recipes import make_logits, make_rollouts, pipeline, publish, run_eval, train_draft, train_head
from recipes.steps import LAUNCHED
from specdata import __version__
from specdata.config import nearest

RECIPES = {
    "make-rollouts": make_rollouts.RECIPE,
    "make-logits": make_logits.RECIPE,
    "train-draft": train_draft.RECIPE,
    "train-head": train_head.RECIPE,
    "run-eval": run_eval.RECIPE,
    "publish": publish.RECIPE,
    "pipeline": pipeline.RECIPE,
}


MODULES = {
    "init": ("recipes.tools.init", "Write a configuration for a target and a file of prompts."),
    "inspect": ("recipes.tools.inspect", "Show what stored rollouts or labels hold."),
    "certify": (
        "recipes.tools.certify",
        "Certify that what an evaluation decoded is distributed as the target alone.",
    ),
    "compare": (
        "recipes.tools.compare",
        "Compare greedy decoding with transformers' own: identical, tied, or a bug.",
    ),
    "replay": (
        "recipes.tools.replay",
        "Replay stopping rules on recorded acceptance, against the oracle.",
    ),
    "reproduce": (
        "recipes.tools.reproduce",
        "Run a paper's experiments on a pair, and print its tables.",
    ),
    "verifiers": (
        "recipes.tools.verifiers",
        "Find the best verifier and draft for a pair, and whether speculation pays.",
    ),
    "trees": (
        "recipes.tools.trees",
        "Search for the best draft tree along held-out text of the target.",
    ),
    "import-eagle3": (
        "recipes.tools.eagle3",
        "Read a published EAGLE-3 draft, to decode with it here.",
    ),
    "export-eagle3": (
        "recipes.tools.eagle3:export",
        "Write a draft in EAGLE-3's layout, for engines.",
    ),
    "doctor": (
        "recipes.tools.doctor",
        "Examine a published EAGLE-3 draft: why it is accepted or not.",
    ),
    "table": (
        "recipes.tools.table",
        "Print a finished evaluation as a table for a README, and copy what to commit of it.",
    ),
}
"""Tool -> its module, whose `main` (or what follows the colon) is called, and what it does."""
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
        recipe: a name in `RECIPES`.
        arguments: of the recipe.
    """
    command = [sys.executable, "-m", "accelerate.commands.launch"]
    command += ["--config_file", str(LAUNCH / f"{profile}.yaml")]
    engine = LAUNCH / f"{profile}.json"
    if engine.exists():  # the profile itself names it relative to a checkout
        command += ["--deepspeed_config_file", str(engine)]
    module = f"recipes.{recipe.replace('-', '_')}"
    return [*command, *options, "--module", module, *arguments]


def launch(arguments: Sequence[str]) -> int:
    """Start a recipe in several processes, as a launch profile says."""
    parser = argparse.ArgumentParser(
        "draftsmith launch",
        "draftsmith launch PROFILE [--num_processes N ...] RECIPE [--config FILE ...]",
        f"{launch.__doc__} Options before RECIPE are those of `accelerate launch`.",
        epilog=f"profiles: {', '.join(PROFILES)}; recipes: {', '.join(RECIPES)}",
        allow_abbrev=False,
    )
    parser.add_argument("profile", choices=PROFILES, metavar="PROFILE", help="docs/launching.md")
    profile = parser.parse_args(arguments[:1]).profile
    place = next((n for n, word in enumerate(arguments) if n and word in RECIPES), None)
    if place is None:
        close = [nearest(word, RECIPES) for word in arguments[1:2] if not word.startswith("-")]
        parser.error(f"name a recipe after the profile: {'; '.join(close) or ', '.join(RECIPES)}")
    os.environ[LAUNCHED] = shlex.join(["draftsmith", "launch", *arguments[:place]])
    # Seconds that torchrun leaves its processes to write a checkpoint once it is told to stop.
    os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "300")
    command = launch_command(profile, arguments[1:place], arguments[place], arguments[place + 1 :])
    os.execv(command[0], command)  # whose signals and exit status are then this process's


def profile(arguments: Sequence[str]) -> int:
    """Print the path of a launch file."""
    files = sorted(
        path.relative_to(LAUNCH).as_posix()
        for path in LAUNCH.rglob("*")
        if path.is_file() and path.suffix != ".md"
    )
    parser = argparse.ArgumentParser("draftsmith profile", description=profile.__doc__)
    parser.add_argument("name", choices=[*PROFILES, *files], metavar="NAME", help=", ".join(files))
    name = parser.parse_args(arguments).name
    print(LAUNCH / (f"{name}.yaml" if name in PROFILES else name))
    return 0


TOOLS = (*MODULES, "launch", "profile")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command line; returns the exit status.

    Raises:
        SystemExit: for `--help` and `--version`, and with status 2 for an unknown command.
    """
    given = sys.argv[1:] if arguments is None else list(arguments)
    parser = _parser()
    name = parser.parse_args(given[:1]).command  # what follows is for the command itself
    if name in RECIPES:
        return RECIPES[name].run(given[1:], f"draftsmith {name}")
    if name not in TOOLS:
        parser.error(f"unknown command {name!r}: {nearest(name, [*RECIPES, *TOOLS])}")
    if name in MODULES:
        module, _, function = MODULES[name][0].partition(":")
        tool = getattr(import_module(module), function or "main")
        return int(tool(given[1:], f"draftsmith {name}"))
    return (launch if name == "launch" else profile)(given[1:])


def _parser() -> argparse.ArgumentParser:
    described = {name: recipe.description for name, recipe in RECIPES.items()}
    described |= {name: does for name, (_, does) in MODULES.items()}
    described |= {tool.__name__: tool.__doc__ or "" for tool in (launch, profile)}
    lines = [f"  {name:<14} {text}" for name, text in described.items()]
    parser = argparse.ArgumentParser(
        "draftsmith",
        "draftsmith COMMAND [OPTION ...]",
        "Train draft models and acceptance heads for speculative decoding, and measure them.",
        epilog="commands (each has a --help of its own):\n" + "\n".join(lines),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"draftsmith {__version__}")
    parser.add_argument("command", metavar="COMMAND", help="a recipe or a tool, listed below")
    return parser


if __name__ == "__main__":
    sys.exit(main())
