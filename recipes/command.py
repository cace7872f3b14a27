"""The `draftsmith` command: every recipe and tool of the project under one name.

draftsmith pipeline my-pair.yaml
draftsmith launch multi_gpu --num_processes 8 train-head my-pair.yaml
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Sequence
from importlib import import_module
from keyword import iskeyword
from pathlib import Path

from recipes import make_logits, make_rollouts, pipeline, publish, run_eval, train_draft, train_head
from recipes.config import parse, read_yaml
from recipes.recipe import interrupted
from specdata import __version__
from specdata.config import nearest
from specdata.errors import ConfigError
from specdata.interruption import stopping_on_signals
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
    "generate": "Answer a prompt with a run's pair, beside its target alone.",
    "certify": "Certify that an evaluation, a server or a function decodes as its target alone.",
    "engine": "Measure a served engine on a run's prompts, with and without its draft.",
    "verifiers": "Find the best verifier and draft for a pair, and whether speculation pays.",
    "import": "Read a draft in a layout of engines, or a SpecDec++ head, to decode with it.",
    "export": "Write a draft in a layout of engines.",
    "doctor": "Examine a draft, or a target's own head: why it is accepted or not.",
}
"""Tool -> what it does; recipes/tools has a module of its name, with `add_options` and `main`."""
PAPERS = "in a checkout `make papers PAPER=NAME` remakes a paper's tables"
HINTS = {
    "papers": PAPERS,
    "reproduce": PAPERS,
    "plan": "draftsmith pipeline FILE --plan",
    "export --layout": "a draft has the layout that it was trained in (draft.init.layout), or that "
    "of the engine that --for names",
    "init --layout": "--draft names the layout",
}
"""What is asked for under a name that another thing resembles, and where it is."""
# A folder beside the packages, in a checkout as in an installed wheel.
LAUNCH = Path(__file__).parent.parent / "launch"
PROFILES = sorted(path.stem for path in LAUNCH.glob("*.yaml"))


def launch_command(
    profile: str, options: Sequence[str], recipe: str, arguments: Sequence[str]
) -> list[str]:
    """The command line that starts a recipe under a launch profile, from any folder.

    `profile` may be a file of `accelerate config`; `options` are of `accelerate launch` and win.
    """
    command = [sys.executable, "-m", "accelerate.commands.launch"]
    command += ["--config_file", str(_file_of(profile))]
    engine = LAUNCH / f"{profile}.json"
    # The profile itself names it relative to a checkout.
    if profile in PROFILES and engine.exists():
        command += ["--deepspeed_config_file", str(engine)]
    module = f"recipes.{recipe.replace('-', '_')}"
    return [*command, *options, "--module", module, *arguments]


def _file_of(profile: str) -> Path:
    """The file of a launch profile, or of a user's own."""
    return LAUNCH / f"{profile}.yaml" if profile in PROFILES else Path(profile)


def environment(command: Sequence[str]) -> dict[str, str]:
    """Find what a launch command tells its processes, as far as a plan reads it.

    So a launch on several machines is planned on one, in one process, without their GPUs.
    """
    from accelerate.commands.launch import launch_command_parser  # here: it is heavy

    parser = launch_command_parser()
    parser.exit_on_error = False
    try:
        given, unknown = parser.parse_known_args(command[3:])
    except argparse.ArgumentError as error:
        raise ConfigError(f"options before the recipe: {error}") from error
    if unknown:
        known = re.findall(r"--\w[\w-]*", parser.format_usage())
        hint = nearest(unknown[0].split("=")[0], known)
        raise ConfigError(f"unknown option {unknown[0]} of a launch: {hint}")
    profile = read_yaml(Path(given.config_file))
    processes = given.num_processes or profile.get("num_processes", 1)
    machines = given.num_machines or profile.get("num_machines", 1)
    is_deepspeed = given.use_deepspeed or profile.get("distributed_type") == "DEEPSPEED"
    engine = profile.get("deepspeed_config") or {}
    joins = {"WORLD_SIZE": str(processes), "LOCAL_WORLD_SIZE": str(processes // machines)}
    if given.cpu or profile.get("distributed_type") == "MULTI_CPU":  # one, and accelerate is silent
        joins = {"ACCELERATE_USE_CPU": "True"} | ({"MASTER_ADDR": ""} if processes > 1 else {})
    return {
        **joins,
        # An unquoted `no` of YAML is False.
        "ACCELERATE_MIXED_PRECISION": given.mixed_precision
        or profile.get("mixed_precision")
        or "no",
        "ACCELERATE_USE_DEEPSPEED": str(is_deepspeed),
        "ACCELERATE_DEEPSPEED_CONFIG_FILE": str(
            given.deepspeed_config_file or engine.get("deepspeed_config_file")
        ),
        "ACCELERATE_DEEPSPEED_ZERO_STAGE": str(given.zero_stage or engine.get("zero_stage", 2)),
        "ACCELERATE_USE_FSDP": str(given.use_fsdp or profile.get("distributed_type") == "FSDP"),
        "ACCELERATE_DYNAMO_BACKEND": given.dynamo_backend or "no",
    }


def launch(arguments: Sequence[str]) -> int:
    """Start a recipe in several processes as a profile says; alone, a profile's or file's path."""
    files = sorted(
        path.relative_to(LAUNCH).as_posix()
        for path in LAUNCH.rglob("*")
        if path.is_file() and path.suffix != ".md"
    )
    parser = argparse.ArgumentParser(
        "draftsmith launch",
        "draftsmith launch PROFILE_OR_FILE [--num_processes N ...] RECIPE [FILE ...]\n"
        "       draftsmith launch PROFILE",
        "Start a recipe in several processes, as a launch profile says, or a FILE of `accelerate "
        "config`; options before RECIPE are those of `accelerate launch`. With nothing after it, "
        "print the path of a profile or of another launch file.",
        epilog=f"profiles: {', '.join(PROFILES)}; recipes: {', '.join(RECIPES)}; files: "
        f"{', '.join(files)}",
        allow_abbrev=False,
    )
    is_alone = len(arguments) == 1
    choices = [*PROFILES, *(files if is_alone else ())]
    parser.add_argument("profile", metavar="PROFILE_OR_FILE", help="docs/launching.md")
    profile = parser.parse_args(arguments[:1]).profile
    if profile not in choices and not Path(profile).is_file():
        hint = f"is no profile, and no file that is here: {nearest(profile, choices)}"
        parser.error(f"invalid choice: {profile!r} {hint}")
    if not is_alone or profile not in choices:
        place = next((n for n, word in enumerate(arguments) if n and word in RECIPES), None)
        if place is None:
            close = [nearest(word, RECIPES) for word in arguments[1:2] if not word.startswith("-")]
            known = "; ".join(close) or ", ".join(RECIPES)
            parser.error(f"name a recipe after the profile: {known}")
        # Seconds that torchrun leaves its processes to write a checkpoint once it is told to stop.
        os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "300")
        # Or `python -m` would look into the working folder first, where a user may have an eval.py.
        os.environ["PYTHONSAFEPATH"], path = "1", os.environ.get("PYTHONPATH")
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (path, str(LAUNCH.parent))))
        options, recipe, further = arguments[1:place], arguments[place], arguments[place + 1 :]
        command, program = launch_command(profile, options, recipe, further), f"draftsmith {recipe}"
        outside, started = dict(os.environ), RECIPES[recipe]
        try:
            os.environ.update(environment(command))
            if "--plan" in further:
                return started.run(further, program)
            # One answer in place of one from every process.
            started.check(parse(further, started.description, started.sections, program).config)
            import torch  # accelerate has imported it

            if not (read_yaml(_file_of(profile)).get("use_cpu") or torch.cuda.is_available()):
                print(f"no GPU is here: the processes of {profile} use the CPU", file=sys.stderr)
        except Exception as error:  # noqa: BLE001 - raised again if it is a defect
            return tell(error)
        os.execve(command[0], command, outside)  # its signals and exit status are then this one's
    print(LAUNCH / (f"{profile}.yaml" if profile in PROFILES else profile))
    return 0


def run_tool(name: str, arguments: Sequence[str]) -> int:
    """Run one of the tools in `DOES`; returns the exit status, as a recipe's."""
    tool = import_module(f"recipes.tools.{name}_" if iskeyword(name) else f"recipes.tools.{name}")
    accept_any_text()
    parser = argparse.ArgumentParser(
        f"draftsmith {name}",
        description=tool.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    tool.add_options(parser)
    known = re.findall(r"--\w[\w-]*", parser.format_usage())
    if name != "engine":  # its further options are those of a configuration
        options = (each.partition("=")[0] for each in arguments if each.startswith("--"))
        for each in options:
            if each not in ("--", "--help", *known):  # before argparse says what is missing
                hint = HINTS.get(f"{name} {each}") or nearest(each, known)
                parser.error(f"unknown option {each}: {hint}")
    given, further = parser.parse_known_args(arguments)
    if name == "engine":  # its further options are those of a configuration
        given.further = further
    elif further:
        parser.error(f"too many arguments, from {further[0]!r} on")
    with stopping_on_signals():
        try:
            return int(tool.main(given))
        except KeyboardInterrupt as stop:
            return interrupted(stop)
        except Exception as error:  # noqa: BLE001 - raised again if it is a defect
            return tell(error)


TOOLS = (*DOES, "launch")
BEGIN = """\
draftsmith init TARGET --prompts FILE    writes my-pair.yaml for your model and your prompts
draftsmith pipeline my-pair.yaml --plan  says what that would read, write and refuse
draftsmith pipeline my-pair.yaml         trains a draft and a head, measures them, says what pays
draftsmith --help                        lists all commands"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command line; returns the exit status."""
    given = sys.argv[1:] if arguments is None else list(arguments)
    if not given:  # status 2: a script whose command is an empty variable must not go on
        print(BEGIN, file=sys.stderr)
        return 2
    parser = _parser()
    name = parser.parse_args(given[:1]).command  # what follows is for the command itself
    if name in RECIPES:
        return RECIPES[name].run(given[1:], f"draftsmith {name}")
    if name not in TOOLS:
        hint = HINTS.get(name) or nearest(name, [*RECIPES, *TOOLS])
        parser.error(f"unknown command {name!r}: {hint}")
    return launch(given[1:]) if name == "launch" else run_tool(name, given[1:])


def _parser() -> argparse.ArgumentParser:
    described = {name: recipe.description for name, recipe in RECIPES.items()}
    described |= {**DOES, "launch": launch.__doc__ or ""}
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
