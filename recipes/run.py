"""What every recipe does around its stage: run.json, resume, exit status."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import datasets
import torch
import transformers
import yaml
from rich.console import Console
from safetensors import SafetensorError

from eval.measuring.environment import describe_environment
from recipes.config import PipelineConfig, parse
from recipes.inputs import fingerprint as fingerprint
from specdata.errors import (
    CacheNotRewindableError,
    ConfigError,
    ManifestError,
    VocabularyMismatchError,
)
from specdata.models import device
from specdata.processes import is_main as is_main
from specdata.processes import process_count as process_count
from specdata.storage.files import try_locked, write_json
from specdata.storage.manifest import MANIFEST, PROGRESS, differences

RUN = "run.json"
LOCK = ".lock"
# Seconds between two looks at a folder that the main process works in, and how long it may be away
# from it (between two stages, while it loads models) before the others give up.
PAUSE = 0.5
PATIENCE = 600
# A process that waits holds the lock for a moment to see whether it is free; so it is tried again.
RETRIES = 5
BARE = {RUN, LOCK, MANIFEST, PROGRESS}
# Everything else that is raised is trouble outside (OSError) or a defect with its traceback.
USER_ERRORS = (ConfigError, ManifestError, VocabularyMismatchError, CacheNotRewindableError)
KEYS = ("stage", "settings", "inputs", "finished", "wall_seconds", "results")

# Tables of a report need 100 columns; a narrower terminal wraps them, a log file has no width.
console = Console(highlight=False, soft_wrap=True, width=max(100, Console().width))


@dataclass(frozen=True, slots=True)
class Stage:
    """One stage of the pipeline: what decides its result, and what it reads and writes.

    Args:
        name: its folder in the run's output.
        folder: where it writes.
        settings: everything that decides the result; a folder made with others is refused.
        inputs: name -> folder, file or Hub id that is read; fingerprinted.
        size: what will be written, in words.
    """

    name: str
    folder: Path
    settings: Mapping[str, Any]
    inputs: Mapping[str, str]
    size: str


def run_stage(
    stage: Stage, config: PipelineConfig, work: Callable[[], dict[str, Any]]
) -> dict[str, Any]:
    """Do a stage once: say so if it is done, continue it if it was interrupted.

    With several processes all of them work, and the main one keeps run.json.

    Returns:
        What the stage found, from run.json if it was already done.

    Raises:
        ConfigError: if the folder belongs to another run, or an input is missing.
    """
    path = stage.folder / RUN
    for name, source in stage.inputs.items():
        if Path(source).is_relative_to(config.output) and not Path(source).exists():
            raise ConfigError(
                f"{stage.name} reads {name} from {source}, which is not there: run the stage that "
                "makes it (remove its folder first if it counts as done)"
            )
    record = {
        "schema_version": 1,
        "stage": stage.name,
        "finished": False,
        "arguments": sys.argv,
        "settings": json.loads(json.dumps(stage.settings)),
        "inputs": {name: fingerprint(source) for name, source in stage.inputs.items()},
        "config": json.loads(json.dumps(asdict(config))),
        "seed": config.seed,
        "environment": describe_environment(
            device=str(device()), dtype=config.models.dtype
        ).model_dump(mode="json"),
        "processes": process_count(),
        "wall_seconds": None,
        "results": None,
    }
    stored = _stored(stage, record)
    if stored and stored["finished"]:
        say(
            f"[green]{stage.name}: already done[/] ({stored['wall_seconds']:.0f} s, {stage.folder})"
        )
        return dict(stored["results"])
    say(f"[bold]{stage.name}[/]: {'continuing' if stored else 'starting'} in {stage.folder}")
    begun = time.perf_counter()
    if not is_main():
        _wait(stage.folder, path.exists, PATIENCE)  # the main process has accepted the folder
        found = work()
        wait_for(stage.folder)  # the next stage looks for what the main process writes last
        return found
    with _locked(stage.folder):
        write_json(path, record)
        try:
            record["results"] = work()
        except USER_ERRORS:
            if {file.name for file in stage.folder.iterdir()} <= BARE:
                # Nothing was made yet: the corrected command may use the folder.
                (stage.folder / MANIFEST).unlink(missing_ok=True)
                path.unlink()
            raise
        record["wall_seconds"] = time.perf_counter() - begun  # of the session that finished it
        record["finished"] = True
        write_json(path, record)
    say(f"[green]{stage.name}: done[/] in {record['wall_seconds']:.0f} s")
    return dict(record["results"])


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Refuse a second run in the same folder; the lock goes with the process, however it ends."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / LOCK).touch()
    except OSError as error:
        raise ConfigError(
            f"cannot write into {folder} ({error.strerror}): choose another --output"
        ) from error
    for _ in range(RETRIES):
        with try_locked(folder / LOCK) as mine:
            if mine:
                yield
                return
        time.sleep(PAUSE / RETRIES)
    raise ConfigError(f"another process is working in {folder}: wait for it")


def _stored(stage: Stage, record: Mapping[str, Any]) -> dict[str, Any] | None:
    """An earlier run.json of this folder, if it is of the same run."""
    path = stage.folder / RUN
    if not path.exists():
        # A hidden file may be what a run left that was killed while it wrote run.json.
        mine = [] if not stage.folder.is_dir() else list(stage.folder.glob("[!.]*"))
        if mine and is_main():
            raise ConfigError(
                f"{stage.folder} is not empty and holds no {RUN}, so it is not an output folder of "
                "this program: choose another --output"
            )
        return None
    stored = read_record(stage.folder)
    decisive = ("stage", "settings", "inputs")
    changed = differences(
        {key: stored[key] for key in decisive}, {key: record[key] for key in decisive}
    )
    if changed:
        raise ConfigError(
            f"{stage.folder} belongs to another run; choose another --output, or remove the folder "
            "to make it again. Stored -> asked:\n  " + "\n  ".join(changed)
        )
    return stored


def say(text: str) -> None:
    """Print a line, in the main process only."""
    if is_main():
        console.print(text)


def read_record(folder: Path) -> dict[str, Any]:
    """The run.json of a stage's folder. Raises ConfigError if it is damaged."""
    path = folder / RUN
    try:
        record: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        return {key: record[key] for key in KEYS}
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"{path} was not written by this program ({error!r}): choose another --output, or "
            f"remove {folder}"
        ) from error


def finished(folder: Path) -> bool:
    """Whether a stage's folder is complete."""
    return (folder / RUN).is_file() and bool(read_record(folder)["finished"])


def wait_for(folder: Path, patience: float = PATIENCE) -> None:
    """Wait until the main process has finished a stage.

    Not a barrier of the process group: such a stage may outlast its time limit. If the main
    process fails, the launcher of its machine ends the others there; on other machines they see
    that nobody holds the folder's lock.

    Raises:
        TimeoutError: if the main process is gone.
    """
    _wait(folder, lambda: finished(folder), patience)


def _wait(folder: Path, done: Callable[[], bool], patience: float) -> None:
    alone = time.monotonic()
    while not done():
        time.sleep(PAUSE)
        if _held(folder / LOCK):
            alone = time.monotonic()
        elif time.monotonic() - alone > patience and not done():
            raise TimeoutError(f"no main process has been at work in {folder} for {patience:.0f} s")


def _held(lock: Path) -> bool:
    if not lock.exists():
        return False
    with try_locked(lock) as free:
        return not free


def need(folder: Path, recipe: str) -> None:
    """Raise ConfigError unless an earlier stage has finished its folder."""
    if not finished(folder):
        raise ConfigError(f"{folder} is missing or unfinished: run recipes/{recipe} first")


def show_plan(config: PipelineConfig, stages: Sequence[Stage]) -> None:
    """Print the resolved configuration and what each stage would read and write."""
    console.print(yaml.safe_dump(asdict(config), sort_keys=False).rstrip(), markup=False)
    for stage in stages:
        state = "would be made"
        if (stage.folder / RUN).is_file():
            state = "done" if finished(stage.folder) else "begun"
            if read_record(stage.folder)["settings"] != json.loads(json.dumps(stage.settings)):
                state = "made with other settings, would be refused"
        console.print(f"\n[bold]{stage.name}[/] ({state})")
        for name, source in stage.inputs.items():
            there = "" if Path(source).exists() else " (not there yet, or on the Hub)"
            console.print(f"  reads {name}: {source}{there}", markup=False)
        console.print(f"  writes {stage.folder}: {stage.size}", markup=False)


def cli(
    main: Callable[[PipelineConfig], Any],
    stages: Callable[[PipelineConfig], Sequence[Stage]],
    description: str,
    arguments: Sequence[str] | None = None,
) -> int:
    """Run a recipe from a command line and return its exit status: 0, 1 or 2."""
    if torch.cuda.is_available():
        # Before any model is loaded: each process has a GPU of its own.
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    else:
        # DeepSpeed guesses the same, with a warning.
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    datasets.disable_progress_bars()
    try:
        command = parse(sys.argv[1:] if arguments is None else arguments, description)
        if command.plan:
            show_plan(command.config, stages(command.config))
        else:
            main(command.config)
    except USER_ERRORS as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except (OSError, SafetensorError) as error:  # the latter for a disk that is full, too
        print(
            f"error while running: {error}. Nothing finished is lost: mend the cause and run the "
            "same command again",
            file=sys.stderr,
        )
        return 1
    except KeyboardInterrupt:
        print("\ninterrupted: run the same command again to continue", file=sys.stderr)
        return 130
    return 0
