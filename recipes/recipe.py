"""A recipe as a command: its options, its plan, its exit status."""

from __future__ import annotations

import gc
import os
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from recipes.config import SHARED, PipelineConfig, absolute, named, parse
from recipes.models import (
    check_decodable,
    check_models,
    generation_config_of,
    has_chat_template,
    is_without_weights,
    model_config,
    positions_of,
)
from recipes.run import RUN, Stage, check_files, console, run_stage, say, stage_record
from specdata.errors import USER_ERRORS, ConfigError, ManifestError, OtherSettingsError
from specdata.interruption import Interrupted, stop_signal, stopping_on_signals
from specdata.loading import shorter
from specdata.processes import (
    check_launcher,
    in_group,
    is_launched,
    is_main,
    is_one_of_several,
    keep_freed_memory,
    leave_processes,
    process_count,
    rank,
)
from specdata.sampling import endless_words, sampling_words, unapplied_words
from specdata.sources import is_hub_id
from specdata.terminal import accept_any_text, tell

INTERRUPTED = (129, 130, 143)  # exit statuses after SIGHUP, SIGINT (Ctrl-C) and SIGTERM


@dataclass(frozen=True)
class Recipe:
    """The stages that one command does, in order, and its sentence for `--help`.

    Those that a configuration asks for are done, the last one in any case.
    """

    description: str
    stages: tuple[type[Stage], ...]

    @property
    def sections(self) -> tuple[str, ...]:
        """The keys of the configuration that it reads."""
        return (*SHARED, *dict.fromkeys(key for stage in self.stages for key in stage.sections))

    def stages_of(self, config: PipelineConfig) -> list[Stage]:
        """The stages of a run. Raises ConfigError if there are none."""
        *_, last = every = [stage(config) for stage in self.stages]
        asked = [stage for stage in every if stage.is_configured]
        section = last.sections[0]
        if not asked and getattr(config, section) is None:
            raise ConfigError(
                f"this configuration has no {section} section, so there is nothing to do: add one"
            )
        return asked or [last]

    def check(self, config: PipelineConfig) -> tuple[bool, bool]:
        """Refuse what a run would; whether all is made already, and whether it is of many parts."""
        stages = self.stages_of(config)
        is_made, is_whole = check_stages(stages), len({stage.recipe for stage in stages}) > 1
        if is_whole and not is_made:
            check_whole_run(config)
        return is_made, is_whole

    def main(self, config: PipelineConfig) -> None:
        """Do every stage, after a look at all of them."""
        begun, stages = time.perf_counter(), self.stages_of(config)
        is_made, is_whole = self.check(config)
        answers = []
        for stage in stages:
            results = run_stage(stage)
            if is_whole and stage.is_answer:
                answers.append((stage, results))
            elif is_main():
                stage.show(results)
        if is_whole:
            took = f"in {time.perf_counter() - begun:.0f} s"
            names = ", ".join(stage.name for stage in stages)
            say(f"\nmade {'before' if is_made else took}, in {config.output}: {names}")
        for stage, results in answers if is_main() else ():
            stage.show(results)

    def run(self, arguments: Sequence[str] | None = None, program: str | None = None) -> int:
        """Run the recipe from a command line, by default this process's.

        Returns:
            The exit status: 0 done, 1 failure while running, 2 unusable configuration or input,
            130 interrupted by SIGINT (Ctrl-C), 143 by SIGTERM, 129 by SIGHUP.
        """
        given = sys.argv[1:] if arguments is None else arguments
        accept_any_text()
        keep_freed_memory()
        gc.disable()  # as in `prepare_libraries`, which ends it: checks import most before it
        with stopping_on_signals():
            try:
                status = self._run(given, program)
            finally:
                gc.enable()
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
            command = parse(given, self.description, self.sections, program)
            config = command.config
            if is_one_of_several():
                say(
                    "this is one process, whatever --num_processes says: with --cpu or MULTI_CPU, "
                    "accelerate starts no more without mpirun (launch/cpu-2.yaml does)"
                )
            if command.plan:
                stages = self.stages_of(config)
                is_made = check_stages(stages)
                read = {key: each for key, each in command.given.items() if key in self.sections}
                show_plan(read, stages)
                if is_main() and (command.memory or is_launched()):
                    from recipes.memory import show_memory  # here: it needs torch

                    show_memory(stages, command.memory)
                if not is_made:
                    show_doubts(stages)
            else:
                self.main(config)
                for line in self.stages_of(config)[-1].next(given):
                    say(line)
        except KeyboardInterrupt as stop:
            return interrupted(stop)
        except Exception as error:  # noqa: BLE001 - raised again if it is a defect
            if not isinstance(error, (*USER_ERRORS, OSError)) and (number := stop_signal()):
                return interrupted(Interrupted(number))  # another process of this run stopped first
            return tell(error)
        return 0


def check_stages(stages: Sequence[Stage]) -> bool:
    """Refuse what cannot be made, for a plan and a run alike; True if all is made already."""
    check_launcher()
    for stage in stages:
        stage.check_folder()
    is_made = all(stage.is_made for stage in stages)
    if not is_made:
        for stage in stages:
            stage.check()
        check_paths(stages)
    return is_made


def check_paths(stages: Sequence[Stage]) -> None:
    """Refuse an output that cannot be written, and inputs that are nowhere. Raises ConfigError."""
    output = stages[0].config.output
    folder = next(path for path in (absolute(output), *absolute(output).parents) if path.exists())
    if not folder.is_dir() or not os.access(folder, os.W_OK | os.X_OK):
        why = "may not be written into" if folder.is_dir() else "is no folder"
        raise ConfigError(f"cannot write into {output} ({folder} {why}): choose another --output")
    for stage in stages:
        for name, source in stage.inputs.items():
            if "://" in source or stage.config.holds(source):
                continue  # what is missing in the output may be made before the run
            if not Path(source).exists() and not is_hub_id(source):
                raise ConfigError(
                    f"{stage.name} reads {name} from {source}, and there is no such file or "
                    "folder: mend the path, or give a Hub id (OWNER/NAME)"
                )


def check_whole_run(config: PipelineConfig) -> None:
    """Refuse what only a run that ends in an evaluation needs, and what only the Hub tells.

    That is `check_models`, and prompt sets of the Hub. Downloads the sets (conversations, too), and
    of models config.json and the tokenizer. Raises ConfigError.
    """
    from specdata.models import load_tokenizer
    from specdata.prompts.chat_templates import require_template
    from specdata.prompts.conversations import check_conversations
    from specdata.prompts.loading import check_sets
    from specdata.prompts.reading import is_remote

    check_models(config)
    check_decodable(config)
    if config.draft and config.draft.finetune and config.draft.finetune.conversations:
        tokenizer = load_tokenizer(config.models.target)
        require_template(tokenizer)
        with named("draft.finetune.conversations"):
            check_conversations(
                config.draft.finetune.conversations,
                config.seed,
                tokenizer=tokenizer,
                variables=config.chat_template_kwargs,
            )
    trained = config.rollouts.sets if config.draft or config.head or config.toy else []
    for sets in (trained, config.eval.sets):
        remote = [dataset for dataset in sets if is_remote(dataset)]
        check_sets(remote, config.seed, has_template=has_chat_template(config))


def interrupted(stop: KeyboardInterrupt) -> int:
    """Say that a command was interrupted; the exit status that this gives it."""
    who = f"rank {rank()}: " if process_count() > 1 else ""
    print(f"\n{who}interrupted: run the same command again to continue", file=sys.stderr)
    return stop.status if isinstance(stop, Interrupted) else 128 + signal.SIGINT


def show_plan(given: Mapping[str, Any], stages: Sequence[Stage]) -> None:
    """Print, in the main process, what was configured, and what stages would read and write."""
    if not is_main():
        return
    text = yaml.safe_dump(dict(given), sort_keys=False, default_flow_style=None, width=100)
    console.print(text + "# everything else has its default: see --help", markup=False)
    config = stages[0].config
    models, generation = config.given_models, generation_config_of(config.models.target)
    for words in (
        sampling_words(config.sampling, generation),
        unapplied_words(generation),
        endless_words(generation, model_config(config.models.target)),
        shorter(models[-1], *(positions_of(config, each) for each in reversed(models))),
    ):
        if words:
            console.print(f"# {words}", markup=False)
    is_new = False
    for stage in stages:
        state = _state(stage)
        if is_new and stage.is_copy and state == "done":
            state = "of others: it is made again"
        is_new = is_new or state != "done"
        console.print(f"\n{stage.name} ({state})", style="bold", markup=False)
        for name, source in stage.inputs.items():
            there = " (from the Hub: no such folder here)"
            if Path(source).exists():
                there = " (its config.json, no weights)" if is_without_weights(source) else ""
            elif config.holds(source):
                there = " (not made yet)"
            console.print(f"  reads {name}: {source}{there}", markup=False)
        console.print(f"  writes {stage.folder}: {stage.size}", markup=False)


def show_doubts(stages: Sequence[Stage]) -> None:
    """Print what a run would refuse that a plan takes."""
    try:
        if any(stage.name == "eval" for stage in stages):
            check_models(stages[0].config, here_alone=True)
    except USER_ERRORS as error:
        say(f"\nwould fail:\n  {error}")


def _state(stage: Stage) -> str:
    """The contents that the recipe would find in a stage's folder."""
    if not (stage.folder / RUN).exists():
        return "would be made"
    is_finished = stage_record(stage.folder)["finished"]
    try:
        stage.check_settings()
        if is_finished:
            check_files(stage.folder)
    except OtherSettingsError:  # of what may be made again
        return "made with other settings: it is made again"
    except ManifestError as error:
        return "changed: it is made again" if stage.is_copy else str(error)
    return "done" if is_finished else "begun, would be continued"
