"""What other programs on the machine cost: this build beside an earlier one, in turns.

    python benchmarks/busy.py [--base COMMIT] [--repeats 3] [--works REGEX] [--out FILE]

Each work runs in a process of its own, which chooses its number of threads itself, alone and beside
programs that are always busy: decoding and a training step of the demo's pair (`make demo` makes
it) and of a target of SmolLM2-135M's shape in float32, with random weights; and `make demo`'s
pipeline from nothing, alone and both builds at once, each beside the other. The machine must do
nothing else.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

BUSY = "while True: pass"
DEMO = Path("runs/toy").absolute()
SECONDS = {"demo token": 8, "smollm2 token": 12, "demo step": 12, "smollm2 step": 30}
"""Work -> for how long it is done."""
PROGRAMS = {"demo": (0, 2), "smollm2": (0, 1)}
"""Pair -> the numbers of busy programs."""


def main() -> None:
    """Measure, print, and write one JSON file."""
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("--base", default="ed09b47c", help="the earlier build's commit")
    options.add_argument("--repeats", type=int, default=3)
    options.add_argument("--works", default=".", help="which works, a regular expression")
    options.add_argument("--out", type=Path, default=Path("runs/bench/busy.json"))
    options.add_argument("--work", help=argparse.SUPPRESS)
    given = options.parse_args()
    if given.work:
        print(json.dumps(WORKS[given.work.split()[1]](*given.work.split())))
        return
    from eval.measuring.environment import describe_environment
    from specdata.storage.files import write_json

    rows: list[dict[str, Any]] = []
    with earlier(given.base) as base:
        trees = {"base": base, "now": Path.cwd()}
        for work in (each for each in SECONDS if re.search(given.works, each)):
            for programs in PROGRAMS[work.split()[0]]:
                with busy(programs):
                    turns = [
                        {name: measured(tree, work) for name, tree in trees.items()}
                        for _ in range(given.repeats)
                    ]
                rows.append(row(work, programs, turns))
        if re.search(given.works, "demo pipeline"):
            alone = {name: pipeline(tree) for name, tree in trees.items()}
            with ThreadPoolExecutor() as threads:
                together = dict(zip(trees, threads.map(pipeline, trees.values()), strict=True))
            rows.append(row("demo pipeline", 0, [alone]))
            rows.append(row("demo pipeline", 1, [together]))
    where = describe_environment(device="cpu", dtype="float32")
    write_json(
        given.out,
        {"schema_version": 1, "base": given.base, "environment": where.model_dump(), "rows": rows},
    )
    print(f"written: {given.out}")


def row(work: str, programs: int, turns: list[dict[str, float]]) -> dict[str, Any]:
    """Milliseconds of each build: each turn and the median; printed."""
    made: dict[str, Any] = {"work": work, "busy_programs": programs}
    for name in ("base", "now"):
        values = [turn[name] for turn in turns]
        made[name] = {"median_ms": statistics.median(values), "turns_ms": values}
    ratio = statistics.median(turn["base"] / turn["now"] for turn in turns)
    made["times_as_fast"] = ratio
    shown = "   ".join(f"{name} {made[name]['median_ms']:9.2f} ms" for name in ("base", "now"))
    print(f"{work:<15} beside {programs}   {shown}   {ratio:.2f} times as fast", flush=True)
    return made


@contextmanager
def earlier(commit: str) -> Iterator[Path]:
    """A checkout of an earlier commit."""
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder) / "tree"
        subprocess.run(
            ["git", "worktree", "add", "--quiet", "--detach", str(tree), commit], check=True
        )
        try:
            yield tree
        finally:
            subprocess.run(["git", "worktree", "remove", "--force", str(tree)], check=True)


@contextmanager
def busy(count: int) -> Iterator[None]:
    """Programs that are always busy."""
    programs = [subprocess.Popen([sys.executable, "-c", BUSY]) for _ in range(count)]
    try:
        yield
    finally:
        for program in programs:
            program.kill()
            program.wait()


def measured(tree: Path, work: str) -> float:
    """Milliseconds of a unit of work, by the code of a tree."""
    command = [sys.executable, "-W", "ignore", str(Path(__file__).absolute()), "--work", work]
    done = subprocess.run(command, check=True, env=with_code_of(tree), stdout=subprocess.PIPE)
    return float(json.loads(done.stdout.splitlines()[-1]))


def pipeline(tree: Path) -> float:
    """Milliseconds of `make demo`'s pipeline from nothing."""
    with tempfile.TemporaryDirectory() as out:
        given = {"output": out, "models.target": f"{out}/pair/target"}
        given["models.draft"] = f"{out}/pair/draft"
        options = [word for key, value in given.items() for word in (f"--{key}", value)]
        command = [sys.executable, "recipes/pipeline.py", "--config", "recipes/configs/toy.yaml"]
        begun = time.perf_counter()
        subprocess.run([*command, *options], check=True, cwd=tree, env=with_code_of(tree))
        return 1e3 * (time.perf_counter() - begun)


def with_code_of(tree: Path) -> dict[str, str]:
    """The environment of a process that imports the code of a tree and has no number of threads."""
    chosen = {"OMP_NUM_THREADS", "MKL_NUM_THREADS"}
    inherited = {name: value for name, value in os.environ.items() if name not in chosen}
    return {**inherited, "PYTHONPATH": str(tree), "HF_HUB_OFFLINE": "1"}


def models(pair: str) -> tuple[Any, Any]:
    """Target and draft."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from specdata.models import load_model

    if pair == "demo":
        return load_model(str(DEMO / "pair/target")), load_model(str(DEMO / "draft/model"))
    torch.manual_seed(0)
    sizes = {"vocab_size": 49152, "hidden_size": 576, "intermediate_size": 1536}
    heads = {"num_attention_heads": 9, "num_key_value_heads": 3, "tie_word_embeddings": True}
    made = [LlamaForCausalLM(LlamaConfig(**sizes, **heads, num_hidden_layers=n)) for n in (30, 2)]
    return made[0].eval(), made[1].eval()


def token(pair: str, work: str) -> float:
    """Milliseconds a token: of the pair's drafts of four, or of the larger target alone."""
    import torch

    from eval.decoder import DecodeConfig, SpeculativeDecoder

    target, draft = models(pair)
    config = DecodeConfig(verifier="block", length=4)
    is_demo = pair == "demo"
    decoder = SpeculativeDecoder.from_config(
        target, draft if is_demo else None, config, engine="captured"
    )
    prompt, times = torch.arange(5, 65), []
    ends = time.perf_counter() + SECONDS[f"{pair} {work}"]
    for seed in range(10_000):
        begun = time.perf_counter()
        draws = torch.Generator().manual_seed(seed)
        out = decoder.generate(prompt, max_new_tokens=64 if is_demo else 24, generator=draws)
        seconds = [r.draft_seconds + r.target_seconds + r.overhead_seconds for r in out.rounds[1:]]
        emitted = sum(each.emitted for each in out.rounds[1:])
        if seed > 1 and emitted:  # graphs were made in the first
            times.append(1e3 * sum(seconds) / emitted)
        if times and begun > ends:
            break
    return statistics.median(times)


def step(pair: str, work: str) -> float:
    """Milliseconds of a step of distillation."""
    import torch
    from datasets import Dataset
    from transformers import TrainerCallback

    from distill.config import DistilConfig
    from distill.distillation import draft_trainer
    from distill.training import train_resumably
    from specdata.probability import SamplingConfig

    class Clock(TrainerCallback):  # type: ignore[misc]
        times: list[float]

        def on_train_begin(self, *_: Any, **__: Any) -> None:
            self.times, self.ends = [], time.perf_counter() + SECONDS[f"{pair} {work}"]

        def on_step_begin(self, *_: Any, **__: Any) -> None:
            self.begun = time.perf_counter()

        def on_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            self.times.append(1e3 * (time.perf_counter() - self.begun))
            enough = len(self.times) > 4 and time.perf_counter() > self.ends
            control.should_training_stop = enough

    target, draft = models(pair)
    draw = torch.Generator().manual_seed(0)
    ids = torch.randint(5, 2000, (4000, 120), generator=draw).tolist()
    rows = Dataset.from_list([{"prompt_ids": r[:40], "completion_ids": r[40:]} for r in ids])
    config = DistilConfig(epochs=1, batch_size=8 if pair == "demo" else 2, save_steps=100_000)
    with tempfile.TemporaryDirectory() as folder:
        trainer = draft_trainer(target, draft, rows, Path(folder), config, SamplingConfig(), seed=0)
        trainer.add_callback(clock := Clock())
        train_resumably(trainer, Path(folder), label="step")
    return statistics.median(clock.times[len(clock.times) // 2 :])


WORKS = {"token": token, "step": step}

if __name__ == "__main__":
    main()
