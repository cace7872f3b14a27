"""The frame of every stage: run.json, resume, one main process, library settings."""

from __future__ import annotations

import gc
import os
import re
import shlex
import shutil
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from rich.console import Console

from recipes.config import PipelineConfig, absolute, build
from specdata.errors import (
    USER_ERRORS,
    ConfigError,
    ManifestError,
    TrainingDivergedError,
    without_passwords,
)
from specdata.processes import is_main, local_rank, process_count, rank
from specdata.sources import contents
from specdata.storage.files import (
    MANIFEST,
    PROGRESS,
    digests,
    is_locked,
    locked,
    write_json,
)
from specdata.storage.resume import Settings, read_record
from specdata.terminal import visible

RECIPE_OF = {
    "pair": "make_rollouts",
    "rollouts": "make_rollouts",
    "logits": "make_logits",
    "initial": "train_draft",
    "finetuned": "train_draft",
    "draft": "train_draft",
    "labels": "train_head",
    "head": "train_head",
    "eval": "run_eval",
    "release": "publish",
}
"""Stage -> the recipe that does it, in order: what a stage makes is read by later ones only."""
RUN = "run.json"
# Stands, in what is stored, for the run's own output folder.
OUTPUT = "OUTPUT"
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
# A process that waits holds the lock for a short time to see whether it is free; so it is tried
# again.
RETRIES = 5
KEYS = ("stage", "settings", "inputs", "finished", "wall_seconds", "results", "files")

# Tables of a report need 100 columns; a narrower terminal wraps them, a log file has no width.
console = Console(highlight=False, soft_wrap=True, width=max(100, Console().width))


@dataclass(frozen=True)
class Stage(ABC):
    """One stage of a run: what decides its result, what it reads, writes and refuses, its work.

    A new stage is a class in its recipe's file, its section of the configuration, and its places in
    `RECIPE_OF` and `recipes.pipeline.TRAINING`.

    Attributes:
        name: what it is called in messages; its folder in the run's output.
        sections: keys of the configuration that it reads, its own first.
        is_alone: whether the main process does it, and the others go on.
        is_copy: whether it is made again, and not refused, of other inputs or settings.
        is_answer: whether a run of several recipes shows its results last.
    """

    config: PipelineConfig
    name: ClassVar[str]
    sections: ClassVar[tuple[str, ...]]
    is_alone: ClassVar[bool] = False
    is_copy: ClassVar[bool] = False
    is_answer: ClassVar[bool] = False

    @property
    def section(self) -> Any:
        """The stage's section of the configuration; None if it is left out."""
        return getattr(self.config, self.sections[0])

    @property
    def is_configured(self) -> bool:
        """True if the configuration asks for it."""
        return self.section is not None

    @property
    def recipe(self) -> str:
        """The recipe that does it."""
        return RECIPE_OF[self.name]

    @property
    def folder(self) -> Path:
        """The folder that it writes."""
        return self.config.folder(self.name)

    @abstractmethod
    def stored_settings(self) -> dict[str, Any]:
        """JSON values of everything in the configuration that decides its result."""

    @property
    @abstractmethod
    def inputs(self) -> dict[str, str]:
        """Name -> folder, file or Hub id that is read; fingerprinted."""

    @property
    @abstractmethod
    def size(self) -> str:
        """The files to be written, in words and numbers."""

    def check(self) -> None:
        """Refuse, before anything is made, what cannot be made, for a plan and a run alike.

        Without network, and without torch but for models on this machine. Raises ConfigError.
        """
        return

    @abstractmethod
    def run(self) -> dict[str, Any]:
        """Make it, or go on with it, in every process; results as JSON values, of the main one."""

    def show(self, results: dict[str, Any]) -> None:
        """Print results, of this run or an earlier one, in the main process."""
        return

    def next(self, arguments: Sequence[str]) -> list[str]:
        """What can be done with what it made, one line each; `arguments` are the recipe's own."""
        return []

    @property
    def remedy(self) -> str:
        """The remedy for a folder that was made with other settings."""
        names = list(RECIPE_OF)
        later = names[names.index(self.name) + 1 :] if self.name in names else []
        output = Path(self.config.output)  # which may hold several heads and evaluations
        records = (record for name in later for record in sorted(output.glob(f"{name}*/{RUN}")))
        folders = ", ".join([self.folder.name, *(record.parent.name for record in records)])
        return (
            f"give a new --output, beside which all of this stays, or remove of {output} {folders}"
        )

    def dataset_settings(self, made_of: Mapping[str, Any]) -> Settings:
        """Add what its models hold to its settings; where the models lie may differ."""
        values = {**self.stored_settings(), **made_of}
        return Settings(values, self.remedy, free=("target.name", "draft.name"))

    @property
    def is_made(self) -> bool:
        """True if its folder is complete and was made with these settings.

        Inputs are not looked at: `run_stage` refuses those that changed.
        """
        if not finished(self.folder):
            return False
        try:
            self.check_settings()
        except ManifestError:
            return False
        return True

    def check_folder(self) -> None:
        """Raise ConfigError if its folder is another program's or was made with other settings."""
        if (self.folder / RUN).exists():
            if not self.is_copy:
                self.check_settings()
        # A hidden file may be what a run left that was killed while it wrote run.json.
        elif is_main() and self.folder.is_dir() and any(self.folder.glob("[!.]*")):
            raise ConfigError(
                f"{self.folder} is not empty and holds no {RUN}, so it is not an output folder of "
                "this program: choose another --output, or move it away"
            )

    def check_settings(self) -> None:
        """Raise OtherSettingsError if its folder was made with other settings."""
        requested_settings = portable(self.stored_settings(), self.config.output)
        stored = stage_record(self.folder)["settings"]
        Settings(requested_settings, self.remedy).check(stored, self.folder)


def run_stage(stage: Stage) -> dict[str, Any]:
    """Do a stage once: say so if it is done, continue it if it was interrupted.

    With several processes all of them work, and the main one keeps run.json.
    """
    if stage.is_alone and not is_main():
        return {}
    if not is_main():
        return _run_beside_main(stage)
    entry = _entry_of(stage)
    try:
        stored = None
        if (stage.folder / RUN).exists():
            stored = stage_record(stage.folder)
            for name, source in stage.inputs.items():
                hashes = (  # of the files of a folder of prompts, too
                    each
                    for key, each in stored["inputs"].items()
                    if key == name or key.startswith(f"{name}/")
                )
                check_found(name, source, next(hashes, None), stage.folder)
            entry.check({key: stored[key] for key in entry.values}, stage.folder)
        else:
            stage.check_folder()
        if stored and stored["finished"]:
            check_files(stage.folder)
    except ManifestError:
        if not stage.is_copy or stage_record(stage.folder)["stage"] != stage.name:
            raise
        say(f"{stage.name}: {stage.folder} is of others, or changed; making it again", style="bold")
        with _locked(stage.folder):  # what was made stays until all of the new is there
            shutil.rmtree(stage.folder / PROGRESS, ignore_errors=True)
        stored = None
    if stored and stored["finished"]:
        took = f"{stored['wall_seconds']:.0f} s, {stage.folder}"
        say(f"{stage.name}: already done ({took})", style="green")
        return dict(stored["results"])
    say(f"{stage.name}: {'continuing' if stored else 'starting'} in {stage.folder}", style="bold")
    prepare_libraries()
    from eval.measuring.environment import describe_environment
    from specdata.models import device
    from specdata.products import by_onednn
    from specdata.threads import choosing_threads

    begun = time.perf_counter()
    with _locked(stage.folder):
        where = describe_environment(device=str(device()), dtype=stage.config.models.dtype)
        record = {
            "schema_version": 1,
            **entry.values,
            "finished": False,
            "arguments": sys.argv,
            "config": stage.config.model_dump(mode="json"),
            "seed": stage.config.seed,
            "environment": where.model_dump(mode="json"),
            "processes": process_count(),
            "wall_seconds": None,
            "results": None,
            "files": None,
        }
        write_json(stage.folder / RUN, record)
        try:
            with choosing_threads(stage.folder) as chosen, by_onednn():
                record["results"] = stage.run()
                record["threads"] = {name: each.count for name, each in chosen.items()}
        except USER_ERRORS as error:
            if isinstance(error, TrainingDivergedError):
                error.remedy = stage.remedy  # run.json holds the learning rate, too
            # Nothing was made before a mistake was found: another command may use the folder.
            if {file.name for file in stage.folder.iterdir()} <= {RUN, LOCK, MANIFEST, PROGRESS}:
                (stage.folder / MANIFEST).unlink(missing_ok=True)
                shutil.rmtree(stage.folder / PROGRESS, ignore_errors=True)
                (stage.folder / RUN).unlink()
            raise
        record["wall_seconds"] = time.perf_counter() - begun  # of the session that finished it
        record["finished"] = True
        record["files"] = digests(stage.folder)
        write_json(stage.folder / RUN, record)
    say(f"{stage.name}: done in {record['wall_seconds']:.0f} s", style="green")
    return dict(record["results"])


def _run_beside_main(stage: Stage) -> dict[str, Any]:
    """Take part in a stage whose inputs the main process alone reads and judges."""
    stage.check_folder()
    if stage.is_made:
        return dict(stage_record(stage.folder)["results"])
    prepare_libraries()
    # Until the main process has accepted inputs and folder, and is seen at work there: run.json
    # alone may be that of an earlier run.
    wait_for(
        stage.folder,
        PATIENCE,
        lambda at: (at / RUN).exists() and (is_locked(at / LOCK) or finished(at)),
    )
    from specdata.products import by_onednn

    with by_onednn():
        results = stage.run()
    wait_for(stage.folder, GRACE)  # the next stage looks for what the main process writes last
    return results


def prepare_libraries() -> None:
    """Choose this process's GPU and quieten the libraries, before anything is computed."""
    gc.disable()  # it would look through all that imports make, again and again, and all stays
    import datasets
    import torch
    import transformers.modeling_utils
    from huggingface_hub.utils.tqdm import disable_progress_bars
    from transformers.integrations.deepspeed import unset_hf_deepspeed_config

    if not gc.get_freeze_count():  # nothing was computed yet
        gc.freeze()
    gc.enable()
    # A training under ZeRO-3 in this process leaves it behind, and every model that is loaded
    # afterwards would be split, too.
    unset_hf_deepspeed_config()
    if torch.cuda.is_available():
        # Before any model is loaded: each process has a GPU of its own, if there are enough.
        torch.cuda.set_device(local_rank() % torch.cuda.device_count())
        gc.collect()  # a training that is done, whose parts name one another
        torch.cuda.empty_cache()
    else:
        # DeepSpeed guesses the same, with a warning.
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    datasets.disable_progress_bars()
    if not sys.stderr.isatty():  # bars of downloads, which are drawn over and over
        disable_progress_bars()


def finished(folder: Path) -> bool:
    """True if a stage's folder is complete."""
    return (folder / RUN).is_file() and bool(stage_record(folder)["finished"])


def check_files(folder: Path) -> None:
    """Raise ManifestError if a stage's finished folder no longer holds what the stage made."""
    now, record = digests(folder), stage_record(folder)
    for name, digest in record["files"].items():
        if now.get(name) != digest:
            what = "has other contents than when it was made" if name in now else "is missing"
            recipe = RECIPE_OF[record["stage"]]
            raise ManifestError(
                f"{folder / name} {what}: restore it, or remove {folder} and run "
                f"recipes/{recipe}.py with the same options (draftsmith "
                f"{recipe.replace('_', '-')}), which makes it again"
            )


def stage_record(folder: Path) -> dict[str, Any]:
    """The run.json of a stage's folder, paths in the run's output as `portable` gives them."""
    record = read_record(folder / RUN, KEYS, f"choose another --output, or remove {folder}")
    config = record.get("config")
    was = config.get("output") if isinstance(config, Mapping) else None
    if not isinstance(was, str):
        return record
    return {**record, **{key: portable(record[key], was) for key in ("settings", "inputs")}}


def stored_config(folder: Path) -> PipelineConfig:
    """The configuration of a stage's folder, with paths as they are called from here.

    Those in the run's output follow it. Other relative ones that are not here are looked for in
    the folder that the run was started in, as far as its output's name tells which that was.
    """
    tree = stage_record(folder)["config"]
    output, run = tree["output"], absolute(folder.parent)
    tree = {**portable(tree, output, str(folder.parent)), "output": str(folder.parent)}
    tail = Path(os.path.normpath(output)).parts
    if Path(output).is_absolute() or run.parts[-len(tail) :] != tail:
        return build(tree)
    begun = run.parents[len(tail) - 1]

    def found(name: str) -> str:
        there = begun / name
        return str(there) if there.exists() and not Path(name).exists() else name

    def walk(values: Any, keys: Collection[str]) -> Any:
        if isinstance(values, list):
            return [walk(each, keys) for each in values]
        if not isinstance(values, Mapping):
            return values
        return {
            key: found(value) if key in keys and isinstance(value, str) else walk(value, keys)
            for key, value in values.items()
        }

    names = {"models": ("target", "draft"), "rollouts": ("name",), "eval": ()}
    read = {key: walk(tree[key], keys) for key, keys in names.items()}
    read["eval"]["sets"] = walk(tree["eval"]["sets"], ("name",))
    return build({**tree, **read})


def check_found(name: str, source: str, stored: str | None, made: Path) -> None:
    """Raise ConfigError if a source is not here of which a stage's folder stored the contents."""
    if stored and re.fullmatch(r"[0-9a-f]{16}", stored) and not Path(source).exists():
        raise ConfigError(
            f"{name.partition(' ')[0]} {source}: no such file or folder is found from here "
            f"({Path.cwd()}), so it was not compared with what {made} was made of: work in the "
            "folder that the run was started in, mend the path, or restore what is gone"
        )


def command_line(folder: Path) -> str:
    """The command line that began a stage, without passwords; "" if it is not known."""
    if not (folder / RUN).is_file():
        return ""
    program, *given = map(without_passwords, stage_record(folder)["arguments"])
    return shlex.join([Path(program).name, *given])


def portable(values: Any, output: str, place: str = OUTPUT) -> Any:
    """JSON values whose paths in the run's output are written relative to it: OUTPUT/...

    Or in another `place`, where the run lies now.

    So a run can be moved, or its output named in another way, and is still the same run. Keys are
    changed, too ("path draft PATH").
    """
    root = absolute(output)
    if Path.cwd().is_relative_to(root):
        return values  # there, every name would be a path in the output

    def text(value: str) -> str:
        kind, path = re.fullmatch(r"(path draft |prompts |)(.*)", value, re.DOTALL).groups()  # type: ignore[union-attr]
        whole = absolute(path)
        is_inside = whole != root and whole.is_relative_to(root)
        return f"{kind}{place}/{whole.relative_to(root)}" if is_inside else value

    def walk(value: Any) -> Any:
        if isinstance(value, Mapping):
            return {text(key): walk(item) for key, item in value.items()}
        if isinstance(value, list):
            return [walk(item) for item in value]
        return text(value) if isinstance(value, str) else value

    return walk(values)


def wait_for(folder: Path, patience: float, done: Callable[[Path], bool] = finished) -> None:
    """Wait until the main process has finished a stage that it has begun.

    Not a barrier of the process group: such a stage may outlast its time limit. If the main
    process fails, the launcher of its machine ends the others there; on other machines they see
    that the folder's lock is free.

    Args:
        folder: of the stage.
        patience: seconds that the lock may be free before the stage is finished.
        done: whether it is, or has come as far as is waited for.
    """
    free_since = time.monotonic()
    while not done(folder):
        time.sleep(PAUSE)
        now = time.monotonic()
        if is_locked(folder / LOCK):
            free_since, patience = now, min(patience, GRACE)
        elif now - free_since > patience and not done(folder):
            raise TimeoutError(
                f"no main process has been at work in {folder} for {patience:.0f} s: rank 0 ended, "
                f"was lost, or never began, and rank {rank()} waited for it"
            )


def say(text: str, style: str = "") -> None:
    """Print a line, in the main process only.

    Args:
        text: taken as it is, but for control characters, which are spelt out.
        style: of the whole line, in rich's words.
    """
    if is_main():
        console.print(visible(text), style=style, markup=False, emoji=False)


def _entry_of(stage: Stage) -> Settings:
    """The entry of a stage in run.json, compared on resume; refuses inputs that are not made."""
    config, output = stage.config, Path(stage.config.output)
    for name, source in stage.inputs.items():
        if not config.holds(source):
            continue
        maker = Path(output, *absolute(source).relative_to(absolute(output)).parts[:1])
        is_begun = (maker / RUN).exists()
        if is_begun and finished(maker):
            check_files(maker)
        elif is_begun or not Path(source).exists():
            # head-2 is made by the recipe of head
            recipe = next(
                (RECIPE_OF[each] for each in RECIPE_OF if maker.name.startswith(each)), None
            )
            if recipe is not None:
                what = "missing or unfinished:"
                if not output.exists():
                    what = f"not found from here ({Path.cwd()}): work in the folder that the run "
                    what += "was started in, give its path with --output, or"
                raise ConfigError(
                    f"{maker} is {what} run recipes/{recipe}.py first "
                    f"(draftsmith {recipe.replace('_', '-')})"
                )
        if not Path(source).exists():
            raise ConfigError(
                f"{stage.name} reads {name} from {source}, which is not there: run the stage that "
                "makes it; if that says it is already done, remove its folder and run it again"
            )
    inputs = {name: contents(source) for name, source in stage.inputs.items()}
    values = {"settings": stage.stored_settings(), "inputs": inputs}
    return Settings({"stage": stage.name, **portable(values, config.output)}, stage.remedy)


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
        with locked(folder / LOCK, wait=False) as mine:
            if mine:
                yield
                return
        time.sleep(PAUSE / RETRIES)
    raise ConfigError(f"another process is working in {folder}: wait for it")
