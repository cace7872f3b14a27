"""What surrounds every stage: run.json, resume, one main process, library settings."""

from __future__ import annotations

import dataclasses
import os
import re
import shutil
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from recipes.config import PipelineConfig
from specdata.errors import (
    CacheNotRewindableError,
    ConfigError,
    ManifestError,
    OtherSettingsError,
    TrainingDivergedError,
    VocabularyMismatchError,
)
from specdata.processes import is_main, local_rank, process_count, rank
from specdata.storage.files import (
    fingerprint,
    is_locked,
    try_locked,
    write_json,
)
from specdata.storage.manifest import CACHE, MANIFEST, PROGRESS
from specdata.storage.resume import Settings, read_record
from specdata.terminal import visible

RUN = "run.json"
# Stays in a finished folder: if it were removed, a process that has just opened it and one that
# makes a new one could both hold "the" lock.
LOCK = ".lock"
# Seconds between two looks at a folder that the main process works in; how long it may take to
# begin a stage (it may be reading prompts) before the others give up; and how long its lock may be
# free before they see that a stage which it had begun is finished. (It holds the lock all the while
# and loses it when it ends, however it does; NFS shows files up to a minute late by default.)
PAUSE = 0.5
PATIENCE = 600
GRACE = 75
# Seconds after which a process says what it waits for, and says it again.
REMINDER = 15
# A process that waits holds the lock for a moment to see whether it is free; so it is tried again.
RETRIES = 5
# Everything else that is raised is trouble outside (OSError) or a defect with its traceback.
USER_ERRORS = (ConfigError, ManifestError, VocabularyMismatchError, CacheNotRewindableError)
# Stands, in what is stored, for the run's own output folder.
OUTPUT = "OUTPUT"
KEYS = ("stage", "settings", "inputs", "finished", "wall_seconds", "results")

# Tables of a report need 100 columns; a narrower terminal wraps them, a log file has no width.
console = Console(highlight=False, soft_wrap=True, width=max(100, Console().width))


@dataclass(frozen=True, slots=True)
class Stage:
    """One stage of the pipeline: what decides its result, and what it reads and writes.

    Args:
        name: what it is called in messages.
        folder: where it writes.
        settings: everything that decides the result, with what to do about a folder that was made
            with other settings.
        inputs: name -> folder, file or Hub id that is read; fingerprinted.
        size: what will be written, in words and numbers.
    """

    name: str
    folder: Path
    settings: Settings
    inputs: Mapping[str, str]
    size: str


def run_stage(
    stage: Stage, config: PipelineConfig, work: Callable[[], dict[str, Any]]
) -> dict[str, Any]:
    """Do a stage once: say so if it is done, continue it if it was interrupted.

    With several processes all of them work, and the main one keeps run.json.

    Args:
        stage: what is made.
        config: the whole configuration, stored for the record.
        work: makes it, and returns its results as JSON values.

    Returns:
        The results of `work`, from run.json if the stage was already done.

    Raises:
        ConfigError: if the folder belongs to another run (with what differs and the stage's
            remedy), another process works in it, or an input is missing.
        ManifestError: if run.json is damaged.
    """
    decisive = _decisive(stage, config)
    stored = _stored(stage, decisive)
    if stored and stored["finished"]:
        took = f"{stored['wall_seconds']:.0f} s, {stage.folder}"
        say(f"{stage.name}: already done ({took})", style="green")
        return dict(stored["results"])
    say(f"{stage.name}: {'continuing' if stored else 'starting'} in {stage.folder}", style="bold")
    prepare_libraries()
    begun = time.perf_counter()
    if not is_main():
        # Until the main process has accepted the folder, and is seen at work there: run.json alone
        # may be that of an earlier run.
        _wait(stage.folder, lambda: _begun(stage.folder), PATIENCE)
        with _stage_remedy(stage):
            results = work()
        wait_for(stage.folder, GRACE)  # the next stage looks for what the main process writes last
        return results
    with _locked(stage.folder):
        record = _new_record(decisive, config)
        write_json(stage.folder / RUN, record)
        try:
            with _stage_remedy(stage):
                record["results"] = work()
        except USER_ERRORS:
            _free(stage.folder)
            raise
        record["wall_seconds"] = time.perf_counter() - begun  # of the session that finished it
        record["finished"] = True
        write_json(stage.folder / RUN, record)
    say(f"{stage.name}: done in {record['wall_seconds']:.0f} s", style="green")
    return dict(record["results"])


@contextmanager
def _stage_remedy(stage: Stage) -> Iterator[None]:
    """Have an error that a lower learning rate mends say what to do about the whole stage."""
    try:
        yield
    except TrainingDivergedError as error:
        error.remedy = stage.settings.remedy  # run.json holds the learning rate, too
        raise


def prepare_libraries() -> None:
    """Choose this process's GPU and quieten the libraries, before anything is computed."""
    import datasets
    import torch
    import transformers
    from huggingface_hub.utils.tqdm import disable_progress_bars
    from transformers.integrations.deepspeed import unset_hf_deepspeed_config

    # A training under ZeRO-3 in this process leaves it behind, and every model that is loaded
    # afterwards would be split, too.
    unset_hf_deepspeed_config()
    if torch.cuda.is_available():
        # Before any model is loaded: each process has a GPU of its own, if there are enough.
        torch.cuda.set_device(local_rank() % torch.cuda.device_count())
    else:
        # DeepSpeed guesses the same, with a warning.
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    datasets.disable_progress_bars()
    if not sys.stderr.isatty():  # bars of downloads, which are drawn over and over
        disable_progress_bars()


def made_as_asked(stage: Stage) -> bool:
    """Whether a stage's folder is complete and was made with these settings.

    Inputs are not looked at: `run_stage` refuses those that changed.
    """
    if not finished(stage.folder):
        return False
    try:
        check_settings(stage)
    except ManifestError:
        return False
    return True


def made_otherwise(stage: Stage, config: PipelineConfig) -> bool:
    """Whether a stage's folder was made, or begun, with other settings or of other inputs."""
    try:
        _stored(stage, _decisive(stage, config))
    except OtherSettingsError:
        return True
    return False


def check_begun(stages: Iterable[Stage]) -> None:
    """Raise OtherSettingsError if one was made, or begun, with other settings.

    Before the first of several is made, which would be for nothing if a later one is refused.
    """
    for stage in stages:
        if (stage.folder / RUN).is_file():
            check_settings(stage)


def check_settings(stage: Stage) -> None:
    """Raise OtherSettingsError if a stage's folder was made with other settings."""
    asked = portable(stage.settings.values, str(stage.folder.parent))
    stored = stage_record(stage.folder)["settings"]
    dataclasses.replace(stage.settings, values=asked).check(stored, stage.folder)


def finished(folder: Path) -> bool:
    """Whether a stage's folder is complete."""
    return (folder / RUN).is_file() and bool(stage_record(folder)["finished"])


def stage_record(folder: Path) -> dict[str, Any]:
    """The run.json of a stage's folder, paths in the run's output as `portable` gives them.

    Raises:
        ManifestError: if it is damaged.
    """
    record = read_record(folder / RUN, KEYS, f"choose another --output, or remove {folder}")
    config = record.get("config")
    was = config.get("output") if isinstance(config, Mapping) else None
    if not isinstance(was, str):
        return record
    return {**record, **{key: portable(record[key], was) for key in ("settings", "inputs")}}


def portable(values: Any, output: str) -> Any:
    """JSON values whose paths in the run's output are written relative to it: OUTPUT/...

    So a run can be moved, or its output named in another way, and is still the same run.

    Args:
        values: settings or inputs; keys are changed, too ("path draft PATH").
        output: the run's folder, as it was called when these paths were.
    """
    root = absolute(output)
    if Path.cwd().is_relative_to(root):
        return values  # there, every name would be a path in the output

    def text(value: str) -> str:
        kind, path = re.fullmatch(r"(path draft |prompts |)(.*)", value, re.DOTALL).groups()  # type: ignore[union-attr]
        here = absolute(path)
        is_inside = here != root and here.is_relative_to(root)
        return f"{kind}{OUTPUT}/{here.relative_to(root)}" if is_inside else value

    def walk(value: Any) -> Any:
        if isinstance(value, Mapping):
            return {text(key): walk(item) for key, item in value.items()}
        if isinstance(value, list):
            return [walk(item) for item in value]
        return text(value) if isinstance(value, str) else value

    return walk(values)


def is_within(path: str, output: str) -> bool:
    """Whether a path lies in the run's output, however both are written."""
    return absolute(path).is_relative_to(absolute(output))


def absolute(path: str | Path) -> Path:
    """A path from the root, without "..", symbolic links as they are."""
    return Path(os.path.normpath(Path(path).absolute()))


def wait_for(folder: Path, patience: float) -> None:
    """Wait until the main process has finished a stage that it has begun.

    Not a barrier of the process group: such a stage may outlast its time limit. If the main
    process fails, the launcher of its machine ends the others there; on other machines they see
    that the folder's lock is free.

    Args:
        folder: of the stage.
        patience: seconds that the lock may be free before the stage is finished.

    Raises:
        TimeoutError: if the main process is gone.
    """
    _wait(folder, lambda: finished(folder), patience)


def need(folder: Path, recipe: str) -> None:
    """Raise ConfigError unless an earlier stage has finished its folder."""
    if not finished(folder):
        command = recipe.removesuffix(".py").replace("_", "-")
        raise ConfigError(
            f"{folder} is missing or unfinished: run recipes/{recipe} first (draftsmith {command})"
        )


def remove_caches(config: PipelineConfig) -> None:
    """Remove the copies of datasets that stages mapped into memory, as large as the datasets.

    Whoever reads a dataset again makes its copy again. Nothing is removed while another process
    works on this run.
    """
    output = Path(config.output)
    if not any(is_locked(lock) for lock in output.glob(f"*/{LOCK}")):
        for cache in output.glob(f"*/{CACHE}"):
            shutil.rmtree(cache, ignore_errors=True)


def say(text: str, style: str = "") -> None:
    """Print a line, in the main process only.

    Args:
        text: taken as it is, but for control characters, which are spelt out.
        style: of the whole line, in rich's words.
    """
    if is_main():
        console.print(visible(text), style=style, markup=False, emoji=False)


def _decisive(stage: Stage, config: PipelineConfig) -> Settings:
    """What run.json stores of a stage and compares on resume."""
    for name, source in stage.inputs.items():
        if is_within(source, config.output) and not Path(source).exists():
            raise ConfigError(
                f"{stage.name} reads {name} from {source}, which is not there: run the stage that "
                "makes it; if that says it is already done, remove its folder and run it again"
            )
    inputs = {name: fingerprint(source) for name, source in stage.inputs.items()}
    return Settings(
        {
            "stage": stage.name,
            "settings": portable(stage.settings.values, config.output),
            "inputs": portable(inputs, config.output),
        },
        stage.settings.remedy,
    )


def _stored(stage: Stage, decisive: Settings) -> dict[str, Any] | None:
    """An earlier run.json of this folder, if it is of the same run."""
    if not (stage.folder / RUN).exists():
        # A hidden file may be what a run left that was killed while it wrote run.json.
        mine = [] if not stage.folder.is_dir() else list(stage.folder.glob("[!.]*"))
        if mine and is_main():
            raise ConfigError(
                f"{stage.folder} is not empty and holds no {RUN}, so it is not an output folder of "
                "this program: choose another --output"
            )
        return None
    stored = stage_record(stage.folder)
    decisive.check({key: stored[key] for key in decisive.values}, stage.folder)
    return stored


def _new_record(decisive: Settings, config: PipelineConfig) -> dict[str, Any]:
    from eval.measuring.environment import describe_environment
    from specdata.models import device

    where = describe_environment(device=str(device()), dtype=config.models.dtype)
    return {
        "schema_version": 1,
        "stage": decisive.values["stage"],
        "finished": False,
        "arguments": sys.argv,
        "settings": decisive.values["settings"],
        "inputs": decisive.values["inputs"],
        "config": config.model_dump(mode="json"),
        "seed": config.seed,
        "environment": where.model_dump(mode="json"),
        "processes": process_count(),
        "wall_seconds": None,
        "results": None,
    }


def _free(folder: Path) -> None:
    """Let another command use a folder in which nothing was made before a mistake was found."""
    if {file.name for file in folder.iterdir()} <= {RUN, LOCK, MANIFEST, PROGRESS}:
        (folder / MANIFEST).unlink(missing_ok=True)
        (folder / RUN).unlink()


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


def _wait(folder: Path, done: Callable[[], bool], patience: float) -> None:
    free_since = said = time.monotonic()
    is_new = True
    while not done():
        time.sleep(PAUSE)
        now = time.monotonic()
        at_work = is_locked(folder / LOCK)
        if at_work:
            free_since, patience = now, min(patience, GRACE)
        elif now - free_since > patience and not done():
            raise TimeoutError(
                f"no main process has been at work in {folder} for {patience:.0f} s: rank 0 ended, "
                f"was lost, or never began, and rank {rank()} waited for it"
            )
        if now - said > REMINDER and (is_new or not at_work):
            state = "is at work" if at_work else "is not at work"
            print(
                f"rank {rank()} waits for rank 0, which {state} in {folder}",
                file=sys.stderr,
                flush=True,
            )
            said, is_new = now, False


def _begun(folder: Path) -> bool:
    """Whether the main process of this run is at work in a stage's folder, or has been."""
    return (folder / RUN).exists() and (is_locked(folder / LOCK) or finished(folder))
