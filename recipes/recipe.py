"""A recipe as a command: its options, its plan, its exit status."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from safetensors import SafetensorError

from recipes.config import SHARED, PipelineConfig, parse
from recipes.next_steps import CommandLine, Step
from recipes.run import (
    RUN,
    USER_ERRORS,
    Stage,
    check_settings,
    console,
    is_within,
    made_as_asked,
    say,
    stage_record,
)
from recipes.sizes import is_without_weights
from specdata.errors import OtherSettingsError, full_disk, without_passwords
from specdata.interruption import Interrupted, asked, stopping_on_signals
from specdata.processes import in_group, is_main, leave_processes, process_count, rank
from specdata.terminal import accept_any_text, visible

INTERRUPTED = (130, 143)  # exit statuses after SIGINT (Ctrl-C) and SIGTERM


@dataclass(frozen=True, slots=True)
class Recipe:
    """What one recipe does.

    Args:
        main: does it.
        stages: says what it would do, without doing anything.
        description: one sentence for `--help`.
        sections: the keys of the configuration that it reads besides `SHARED`.
        next_steps: says what can be done with what was made.
        check: finds what would stop it, before anything is made; raises ConfigError.
    """

    main: Callable[[PipelineConfig], Any]
    stages: Callable[[PipelineConfig], Sequence[Stage]]
    description: str
    sections: tuple[str, ...]
    next_steps: Callable[[PipelineConfig, CommandLine], Sequence[Step]] = lambda _config, _line: []
    check: Callable[[PipelineConfig], None] = lambda _config: None

    def run(self, arguments: Sequence[str] | None = None, program: str | None = None) -> int:
        """Run the recipe from a command line.

        Args:
            arguments: the command line; by default this process's.
            program: how it was called, for `--help`; by default the script's name.

        Returns:
            The exit status: 0 done, 1 failure while running, 2 unusable configuration or input,
            130 interrupted by SIGINT (Ctrl-C), 143 by SIGTERM.

        Raises:
            SystemExit: for `--help`.
        """
        given = sys.argv[1:] if arguments is None else arguments
        accept_any_text()
        with stopping_on_signals():
            status = self._run(given, program)
            if status not in INTERRUPTED:
                leave_processes()
            elif in_group():
                # Leaving would wait for what is under way between processes, and to end without it
                # may abort this one, which would hide its status.
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(status)
        return status

    def _run(self, given: Sequence[str], program: str | None) -> int:
        """The exit status; what `run` says."""
        try:
            sections = (*SHARED, *self.sections)
            command = parse(given, self.description, sections, program)
            if command.plan:
                values = {key: value for key, value in command.given.items() if key in sections}
                stages = self.stages(command.config)
                if not all(map(made_as_asked, stages)):  # as a run, which then has nothing to do
                    self.check(command.config)
                show_plan(values, stages)
            else:
                self.main(command.config)
                show_steps(self.next_steps(command.config, CommandLine(given, program)))
        except USER_ERRORS as error:
            print(f"error: {visible(without_passwords(str(error)))}", file=sys.stderr)
            return 2
        except (OSError, SafetensorError) as error:
            return _failed(error)
        except KeyboardInterrupt as stop:
            return _interrupted(stop.number if isinstance(stop, Interrupted) else signal.SIGINT)
        except Exception as error:
            if number := asked():  # another process of this run stopped first
                return _interrupted(number)
            # Libraries have errors of their own for it, which no other place needs to know.
            if full := full_disk(error):
                return _failed(full)
            raise
        return 0


def show_steps(steps: Sequence[Step]) -> None:
    """Print, in the main process, what can be done next, a line to copy for each."""
    if steps:
        say("what next:")
    for step in steps:
        say(f"  {step.purpose:<8} {step.line}")


def _interrupted(number: int) -> int:
    who = f"rank {rank()}: " if process_count() > 1 else ""
    print(f"\n{who}interrupted: run the same command again to continue", file=sys.stderr)
    return 128 + number


def _failed(error: Exception) -> int:
    said = visible(without_passwords(str(error)))
    print(
        f"error while running: {said}. Nothing finished is lost: mend the "
        "cause and run the same command again",
        file=sys.stderr,
    )
    return 1


def show_plan(given: Mapping[str, Any], stages: Sequence[Stage]) -> None:
    """Print, in the main process, what was configured, and what stages would read and write.

    Args:
        given: values of the file and of the command line that the recipe reads.
        stages: what the recipe would do.
    """
    if not is_main():
        return
    text = yaml.safe_dump(dict(given), sort_keys=False, default_flow_style=None, width=100)
    console.print(text + "# everything else has its default: see --help", markup=False)
    for stage in stages:
        console.print(f"\n{stage.name} ({_state(stage)})", style="bold", markup=False)
        for name, source in stage.inputs.items():
            there = _absent(source, str(given.get("output")))
            console.print(f"  reads {name}: {source}{there}", markup=False)
        console.print(f"  writes {stage.folder}: {stage.size}", markup=False)


def _absent(source: str, output: str) -> str:
    """What to say of an input that is not on this machine, or not whole; nothing of one that is."""
    if Path(source).exists():
        return " (its config.json, no weights)" if is_without_weights(source) else ""
    # A Hub id is OWNER/NAME or NAME, its revision aside; an address has "://".
    is_path = source.startswith((".", "/")) or source.partition("@")[0].count("/") > 1
    here = is_within(source, output) or (is_path and "://" not in source)
    return " (not made yet)" if here else " (from the Hub)"


def _state(stage: Stage) -> str:
    """What the recipe would find in a stage's folder."""
    if not (stage.folder / RUN).exists():
        return "would be made"
    record = stage_record(stage.folder)
    try:
        check_settings(stage)
    except OtherSettingsError:
        return f"made with other settings: {stage.settings.remedy}"
    return "done" if record["finished"] else "begun, would be continued"
