"""The `draftsmith` command: every recipe and tool of the project under one name.

draftsmith pipeline --config my-pair.yaml
draftsmith launch multi_gpu --num_processes 8 train-head --config my-pair.yaml
"""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from collections.abc import Callable, Sequence

from recipes import make_logits, make_rollouts, pipeline, publish, run_eval, train_draft, train_head
from recipes.launcher import LAUNCH, PROFILES, launch_command, start
from recipes.recipe import LAUNCHED
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


def inspect(arguments: Sequence[str]) -> int:
    """Show what stored rollouts or labels hold."""
    from specdata.inspect.__main__ import main

    return main(arguments, "draftsmith inspect")


def compare(arguments: Sequence[str]) -> int:
    """Compare greedy decoding with transformers' own: identical, tied, or a bug."""
    from eval.analysis.compare import main

    return main(arguments, "draftsmith compare")


def replay(arguments: Sequence[str]) -> int:
    """Replay stopping rules on recorded acceptance, against the oracle."""
    from eval.analysis.replay import main

    return main(arguments, "draftsmith replay")


def sweep(arguments: Sequence[str]) -> int:
    """Train and compare SpecDec++'s grid of acceptance heads."""
    from eval.analysis.sweep import main

    return main(arguments, "draftsmith sweep")


def trees(arguments: Sequence[str]) -> int:
    """Search for the best draft tree along held-out text of the target."""
    from eval.analysis.trees import main

    return main(arguments, "draftsmith trees")


def table(arguments: Sequence[str]) -> int:
    """Print a finished evaluation as a table for a README, and copy what to commit of it."""
    from eval.reporting.table import main

    return main(arguments, "draftsmith table")


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
    here = next((n for n, word in enumerate(arguments) if n and word in RECIPES), None)
    if here is None:
        close = [nearest(word, RECIPES) for word in arguments[1:2] if not word.startswith("-")]
        parser.error(f"name a recipe after the profile: {'; '.join(close) or ', '.join(RECIPES)}")
    os.environ[LAUNCHED] = shlex.join(["draftsmith", "launch", *arguments[:here]])
    return start(launch_command(profile, arguments[1:here], arguments[here], arguments[here + 1 :]))


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


TOOLS: dict[str, Callable[[Sequence[str]], int]] = {
    "inspect": inspect,
    "compare": compare,
    "replay": replay,
    "sweep": sweep,
    "trees": trees,
    "table": table,
    "launch": launch,
    "profile": profile,
}


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
    return TOOLS[name](given[1:])


def _parser() -> argparse.ArgumentParser:
    described = {name: recipe.description for name, recipe in RECIPES.items()}
    described |= {name: tool.__doc__ or "" for name, tool in TOOLS.items()}
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
