"""Speed of each stage with one and with two processes, and memory under each launch profile.

    python benchmarks/scale.py [--pair FOLDER] [--repeats 5] [--out runs/bench/scale.json]
        [--stages rollouts labels draft head eval] [--profiles single cpu-2 zero2 zero3 fsdp2 ...]

Speed, of the embedded pair (`--pair`; trained first if it is not there, some minutes): tokens a
second of rollouts, labels, distillation, head training and an evaluation's counts (batches of
`COUNTED` prompts), in processes of one thread each. All of
them are started and work once before anything is timed, and models are loaded before the clock
starts; what starting takes is given, too. Then one process and two take turns (1, 2, 1, 2, ...). A
speed is the median over the repeats with its least and most; the second process's gain is the
median of the ratios of neighbours. Beside the stages with a goal, two runs that know nothing of
each other do all of the work at once: what the machine gives two processes at most. Processor
seconds of all processes tell work that is done twice from waiting. Tokens are those of completions
that were written or labelled, and for trainings those of the rollouts that were learnt from.

Memory, of random weights (`benchmarks/stage_memory.py`, the draft here as large as its target):
what distillation holds in each process under a launch profile, at most, beside what `--plan` says;
with `+parts` the frozen target lies in parts (`draft.shard_teacher`).
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
SCHEMA_VERSION = 1
PAIR = Path("runs/toy/pair")
STAGES = ("rollouts", "labels", "draft", "head", "eval")
PROFILES = ("single", "cpu-2", "cpu-2+parts", "zero2", "zero3", "fsdp2", "fsdp2+parts")
GOALS = {"rollouts": 2.0, "labels": 1.7}
# Prompts of each embedded set, completions' tokens, prompts of a shard, rows decoded together.
SETS, PROMPTS, NEW_TOKENS, SHARD = ("instruct", "maths", "code"), 96, 96, 16
LABELLED = 3  # times that the rollouts are labelled: once takes a few seconds
# Rollouts that a draft or head learns from, passes, and rows of a batch.
LEARNT, EPOCHS, BATCH = 96, 3, 8
# Prompts of each set whose counts are taken, in batches of these, and tokens of their answers.
ASKED, COUNTED, ANSWER = 16, 4, 48
HEAD_EPOCHS = (2, 6)  # the steps of the second less those of the first are timed
# Vocabulary, and sizes of target and draft, whose memory is measured.
EQUAL = (4096, (4, 640, 1792), (4, 640, 1792))
PARTS = "+parts"
# Parts of the memory of distillation that are the student's.
STUDENT = (
    "weights in training",
    "gradients",
    "optimizer",
    "gradient bucket",
    "gathered weights",
)
SMALL = {"ASKED": 8, "PROMPTS": 16, "LABELLED": 1, "LEARNT": 16, "HEAD_EPOCHS": (1, 2)}


# --- what one process does


class Taken:
    """Seconds of the clock and of this process's processor, from when it is made."""

    def __init__(self) -> None:
        self.began = time.perf_counter(), time.process_time()

    def __call__(self) -> dict[str, float]:
        """Those until now."""
        wall, cpu = self.began
        return {"seconds": time.perf_counter() - wall, "cpu": time.process_time() - cpu}


def serve(pair: Path, folder: Path) -> None:
    """Do what each line on stdin asks for, and answer with a line of JSON."""
    begun = time.perf_counter()
    import torch

    from recipes.run import prepare_libraries
    from specdata.processes import join_processes, leave_processes, process_count

    torch.set_num_threads(1)
    prepare_libraries()
    if process_count() > 1:
        join_processes()
    works: dict[str, Callable[..., dict[str, float]]] = {
        "rollouts": rollouts,
        "labels": labels,
        "draft": draft,
        "head": head,
        "eval": counts,
    }
    _answer(startup=time.perf_counter() - begun)
    for line in sys.stdin:
        asked = json.loads(line)
        out = folder / asked["out"]
        _answer(**works[asked["stage"]](pair, folder, out))
    leave_processes()


def _answer(**values: float) -> None:
    print(f"answer {json.dumps(values)}", flush=True)


def rollouts(pair: Path, _folder: Path, out: Path) -> dict[str, float]:
    """Complete the embedded prompts."""
    from specdata.models import load_model, load_tokenizer
    from specdata.prompts.config import PromptSet
    from specdata.prompts.loading import load_prompts
    from specdata.rollouts.backend import TransformersBackend
    from specdata.rollouts.config import RolloutConfig
    from specdata.rollouts.make import make_rollouts
    from specdata.sampling import SamplingConfig
    from specdata.storage.manifest import read_manifest
    from specdata.storage.resume import Settings

    sets = [PromptSet(name, split="train", count=PROMPTS) for name in SETS]
    target = load_model(str(pair / "target"))
    prompts = load_prompts(sets, load_tokenizer(str(pair / "target")), seed=0).prompts
    backend = TransformersBackend(target, SamplingConfig(), NEW_TOKENS, SHARD, seed=0)
    config = RolloutConfig(sets=sets, shard_size=SHARD, max_new_tokens=NEW_TOKENS)
    taken = Taken()
    make_rollouts(backend, prompts, out, config, settings=Settings({}), report=lambda _rows: None)
    return {**taken(), "tokens": read_manifest(out)["counts"]["tokens"]}


def labels(pair: Path, folder: Path, out: Path) -> dict[str, float]:
    """Label the rollouts that were made first, several times over."""
    from datasets import concatenate_datasets

    from specdata.labels.config import LabelsConfig
    from specdata.labels.make import make_labels
    from specdata.models import load_model
    from specdata.sampling import SamplingConfig
    from specdata.storage.dataset import load_stored
    from specdata.storage.manifest import read_manifest
    from specdata.storage.resume import Settings

    stored = load_stored(folder / "rollouts-0")
    rows = concatenate_datasets(
        [
            stored.remove_columns("sample").add_column("sample", [sample] * len(stored))
            for sample in range(LABELLED)
        ]
    ).cast(stored.features)
    target, draft = (load_model(str(pair / name)) for name in ("target", "draft"))
    taken = Taken()
    make_labels(
        target,
        draft,
        rows,
        out,
        LabelsConfig(),
        sampling=SamplingConfig(),
        seed=0,
        settings=Settings({}),
        report=lambda _rows: None,
    )
    return {**taken(), "tokens": read_manifest(out)["counts"]["tokens"]}


def draft(pair: Path, folder: Path, out: Path) -> dict[str, float]:
    """Distil the draft on some of the rollouts: from the first step to the last."""
    from transformers import TrainerCallback

    from distill.config import DistilConfig
    from distill.trainer import draft_trainer
    from specdata.models import load_model
    from specdata.sampling import SamplingConfig
    from specdata.storage.dataset import load_stored

    class Clock(TrainerCallback):  # type: ignore[misc]
        """What all steps take."""

        def on_train_begin(self, *_: Any, **__: Any) -> None:
            self.taken = Taken()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            self.found = self.taken()

    train = load_stored(folder / "rollouts-0").select(range(LEARNT))
    clock = Clock()
    trainer = draft_trainer(
        load_model(str(pair / "target")),
        load_model(str(pair / "draft")),
        train,
        out,
        DistilConfig(epochs=EPOCHS, batch_size=BATCH, report_to=[], save_steps=10**6),
        SamplingConfig(),
        seed=0,
    )
    from transformers import PrinterCallback

    trainer.remove_callback(PrinterCallback)
    trainer.add_callback(clock)
    trainer.train()
    tokens = EPOCHS * sum(map(len, train["completion_ids"]))
    return {**clock.found, "tokens": tokens}


def head(pair: Path, folder: Path, out: Path) -> dict[str, float]:
    """Train a head for few and for more passes: the difference is of steps alone."""
    from heads.config import HeadConfig
    from heads.train import train_head
    from specdata.models import load_model
    from specdata.storage.dataset import load_stored

    rows = load_stored(folder / "labels-0")
    train, dev = rows.select(range(LEARNT)), rows.select(range(LEARNT, LEARNT + 4))
    model, found = load_model(str(pair / "draft")), []
    for epochs in HEAD_EPOCHS:
        config = HeadConfig.model_validate({"kind": "immediate", "epochs": epochs})
        taken = Taken()
        train_head(draft=model, train=train, dev=dev, out=out / str(epochs), config=config, seed=0)
        found.append(taken())
    passes = HEAD_EPOCHS[1] - HEAD_EPOCHS[0]
    tokens = passes * sum(map(len, train["completion_ids"]))
    few, more = found
    return {**{name: more[name] - few[name] for name in more}, "tokens": tokens}


def counts(pair: Path, _folder: Path, out: Path) -> dict[str, float]:
    """Take the counts of drafts of four tokens and of none."""
    from eval.measuring.environment import describe_environment
    from eval.measuring.experiment import Artefacts, measure_prompts, stored_results
    from eval.measuring.methods import EvalConfig
    from specdata.models import load_model, load_tokenizer
    from specdata.prompts.config import PromptSet
    from specdata.prompts.loading import load_prompts
    from specdata.sampling import SamplingConfig

    names = {"target": "target", "draft": "draft", "head": None}
    target, draft = (load_model(str(pair / name)) for name in ("target", "draft"))
    sets = [PromptSet(name, split="test", count=ASKED) for name in SETS]
    methods = [{"name": "plain", "decoder": "plain"}, {"name": "K=4", "length": 4}]
    config = EvalConfig.model_validate(
        {"sets": sets, "methods": methods, "batch": COUNTED, "max_new_tokens": ANSWER}
    )
    prompts = load_prompts(sets, load_tokenizer(str(pair / "target")), seed=0).prompts
    environment = describe_environment(device="cpu", dtype="float32", batch_size=COUNTED)
    taken = Taken()
    measure_prompts(
        Artefacts(target, draft, None, names),
        prompts,
        out,
        config,
        sampling=SamplingConfig(),
        seed=0,
        environment=environment,
        report=lambda _generations: None,
    )
    done = taken()
    found = stored_results(
        names, prompts, out, config, sampling=SamplingConfig(), seed=0, environment=environment
    )
    assert found is not None
    return {**done, "tokens": sum(run.tokens for run in found.runs)}


# --- those who ask


class Processes:
    """Processes that wait for work, `count` of them in one group."""

    def __init__(self, count: int, pair: Path, folder: Path, small: bool) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        command = [sys.executable, __file__, "--serve", str(folder), "--pair", str(pair)]
        alone = {"RANK": "0", "WORLD_SIZE": "1"}
        group = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(count)}
        self.workers = [
            subprocess.Popen(
                [*command, *(["--small"] if small else [])],
                env={
                    **os.environ,
                    "OMP_NUM_THREADS": "1",
                    **({**group, "RANK": str(n), "LOCAL_RANK": str(n)} if count > 1 else alone),
                },
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE if small else subprocess.DEVNULL,
                text=True,
            )
            for n in range(count)
        ]
        self.count = count

    def answers(self) -> list[dict[str, float]]:
        """What each process says next."""
        found = []
        for worker in self.workers:
            assert worker.stdout is not None
            line = next((each for each in worker.stdout if each.startswith("answer ")), None)
            if line is None:
                said = worker.stderr.read()[-2000:] if worker.stderr else ""
                raise SystemExit(f"error: a process ended with status {worker.wait()}. {said}")
            found.append(json.loads(line.removeprefix("answer ")))
        return found

    def ask(self, stage: str, out: str) -> None:
        """Have all begin a stage together."""
        for worker in self.workers:
            assert worker.stdin is not None
            worker.stdin.write(json.dumps({"stage": stage, "out": out}) + "\n")
            worker.stdin.flush()

    def done(self) -> dict[str, float]:
        """Of what they were asked: seconds of the slowest, processor seconds of all."""
        found = self.answers()
        return {
            "seconds": max(each["seconds"] for each in found),
            "cpu": sum(each["cpu"] for each in found),
            "tokens": found[0]["tokens"],
        }

    def end(self) -> None:
        """Close what they read, which ends them."""
        for worker in self.workers:
            assert worker.stdin is not None
            worker.stdin.close()
        for worker in self.workers:
            worker.wait()


def speeds(pair: Path, stages: Sequence[str], repeats: int, small: bool) -> dict[str, Any]:
    """Tokens a second of each stage with one and with two processes, in turns."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        groups = [Processes(count, pair, folder, small) for count in (1, 2)]
        other = Processes(1, pair, folder, small)
        startup = [max(each["startup"] for each in group.answers()) for group in groups]
        other.answers()
        # What later stages read is made by one process, and by this the first work is done.
        for stage in ("rollouts", "labels"):
            groups[0].ask(stage, f"{stage}-0")
            groups[0].done()
        found: dict[str, Any] = {"startup_seconds": startup}
        for stage in stages:
            rates: dict[int, list[float]] = {1: [], 2: []}
            cpu: dict[int, list[float]] = {1: [], 2: []}
            separate: list[float] = []
            for repeat in range(repeats + 1):
                for group in groups:
                    group.ask(stage, f"{stage}-{group.count}-{repeat + 1}")
                    done = group.done()
                    if repeat:  # the first is slow
                        rates[group.count].append(done["tokens"] / done["seconds"])
                        cpu[group.count].append(done["cpu"])
                if stage in GOALS:
                    both = {"a": groups[0], "b": other}
                    for name, group in both.items():
                        group.ask(stage, f"{stage}-{name}-{repeat + 1}")
                    ended = [group.done() for group in both.values()]
                    if repeat:
                        separate.append(sum(each["tokens"] / each["seconds"] for each in ended))
            found[stage] = {
                "tokens": done["tokens"],
                **scaled(rates),
                **({"separate": gain(rates[1], separate)} if separate else {}),
                **{f"cpu_seconds_{count}": spread(each) for count, each in cpu.items()},
            }
            print(line(stage, found[stage]), flush=True)
        for group in (*groups, other):
            group.end()
    return found


def scaled(rates: Mapping[int, Sequence[float]]) -> dict[str, Any]:
    """Medians and ranges of speeds, and the gain of the second process."""
    return {
        **{f"processes_{count}": spread(each) for count, each in rates.items()},
        "gain": gain(rates[1], rates[2]),
    }


def gain(ones: Sequence[float], others: Sequence[float]) -> dict[str, float]:
    """The ratios of neighbours."""
    return spread([other / one for one, other in zip(ones, others, strict=True)])


def spread(values: Sequence[float]) -> dict[str, float]:
    """The median of some values, their least and most."""
    return {"median": statistics.median(values), "low": min(values), "high": max(values)}


def line(stage: str, found: Mapping[str, Any]) -> str:
    """What is printed of a stage's speeds."""
    one, two, more = (found[name] for name in ("processes_1", "processes_2", "gain"))
    cpu = " and ".join(f"{found[f'cpu_seconds_{count}']['median']:.1f}" for count in (1, 2))
    goal = GOALS.get(stage)
    verdict = (
        "" if goal is None else f"; goal {goal}: {'met' if more['median'] >= goal else 'MISSED'}"
    )
    if apart := found.get("separate"):
        verdict += (
            f"; two separate runs at once {apart['median']:.2f}x "
            f"({apart['low']:.2f} to {apart['high']:.2f})"
        )
    return (
        f"{stage:<8} {one['median']:8.0f} tokens/s with 1 process "
        f"({one['low']:.0f} to {one['high']:.0f}), {two['median']:8.0f} with 2 "
        f"({two['low']:.0f} to {two['high']:.0f}): {more['median']:.2f}x "
        f"({more['low']:.2f} to {more['high']:.2f}); processor seconds {cpu}{verdict}"
    )


def memory(profiles: Sequence[str]) -> list[dict[str, Any]]:
    """The most that distillation holds in each process, under each profile."""
    import stage_memory

    records = []
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / "run"
        stage_memory.measure(folder, ["rollouts"], EQUAL)
        for profile in profiles:
            for size in ("large", "tiny"):
                for made in (folder / size / "run").glob("draft*"):
                    shutil.rmtree(made)
            records += [
                {"profile": profile, **each}
                for each in stage_memory.cases(
                    folder,
                    "draft",
                    launcher=launcher(profile.removesuffix(PARTS)),
                    shard_teacher=profile.endswith(PARTS),
                )
            ]
            mine = [each for each in records if each["profile"] == profile]
            print(memory_line(profile, mine), flush=True)
    return records


def memory_line(profile: str, records: Sequence[Mapping[str, Any]]) -> str:
    """What is printed of the memory of distillation under a profile."""
    most = max(each["peak_mib"] for each in records)
    planned = max(each["planned_mib"] for each in records)
    parts: Mapping[str, float] = records[0]["parts_mib"]
    student = sum(size for name, size in parts.items() if name in STUDENT)
    return (
        f"{profile:<11} {len(records)} x {most:5.0f} MiB at most, {planned:5.0f} as planned: "
        f"teacher {parts['target']:.0f}, student {student:.0f}, all else "
        f"{planned - parts['target'] - student:.0f}"
    )


def lines(report: Mapping[str, Any]) -> list[str]:
    """What a report says, as it was printed when it was made."""
    speed, records = report["speed"], report["memory"]
    profiles = dict.fromkeys(each["profile"] for each in records)
    return [
        *(line(stage, speed[stage]) for stage in STAGES if stage in speed),
        *(
            memory_line(profile, [each for each in records if each["profile"] == profile])
            for profile in profiles
        ),
    ]


def launcher(profile: str) -> list[str]:
    """The command that a program's own arguments follow."""
    if profile == "single":
        return [sys.executable]
    return [
        *(sys.executable, "-m", "accelerate.commands.launch"),
        *("--config_file", str(ROOT / "launch" / f"{profile}.yaml")),
        *("--num_processes", "2"),
    ]


def main() -> None:
    """Measure, print, and write one JSON file."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--pair", type=Path, default=PAIR)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--stages", nargs="*", choices=STAGES, default=STAGES)
    parser.add_argument("--profiles", nargs="*", choices=PROFILES, default=PROFILES)
    parser.add_argument("--small", action="store_true", help="little of each, to try it")
    parser.add_argument("--out", type=Path, default=Path("runs/bench/scale.json"))
    parser.add_argument("--show", type=Path, help="print what a file of --out says, and stop")
    parser.add_argument("--serve", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.show:
        print("\n".join(lines(json.loads(options.show.read_text("utf-8")))))
        return
    if options.small:
        globals().update(SMALL)
    if options.serve:
        serve(options.pair, options.serve)
        return
    from eval.measuring.environment import describe_environment
    from specdata.storage.files import write_json

    if not (options.pair / "draft").is_dir():
        make_pair(options.pair)
    begun = time.perf_counter()
    found = speeds(options.pair, options.stages, options.repeats, options.small)
    records = memory(options.profiles) if options.profiles else []
    environment = describe_environment(device="cpu", dtype="float32")
    write_json(
        options.out,
        {
            "schema_version": SCHEMA_VERSION,
            "environment": environment.model_dump(),
            "threads": 1,
            "repeats": options.repeats,
            "goals": GOALS,
            "speed": found,
            "memory": records,
            "seconds": time.perf_counter() - begun,
        },
    )
    print(f"written: {options.out}, after {time.perf_counter() - begun:.0f} s")


def make_pair(folder: Path) -> None:
    """Train the embedded pair."""
    from distill.config import ToyPairConfig
    from distill.toy import train_toy_pair

    print("the embedded pair is not there: training it (some minutes)", file=sys.stderr)
    train_toy_pair(folder, ToyPairConfig(), seed=0)


if __name__ == "__main__":
    main()
