"""What training pays for a target that brings a head along (MTP), at equal processor seconds.

    python benchmarks/mtp_training.py TARGET [--seconds 150] [--processes 2] [--out FILE]

TARGET is of `benchmarks/mtp_target.py`. It writes rollouts of two domains. On these its head learns
by the recipe of speculators 0.9 (each step reads keys of that step alone; cross-entropy on the
text's tokens; weights .6^k, 1 together) and by ours (keys as while decoding; the overlap with the
target's distribution), and a draft on the target's states learns as ours does. All have the same
batches, AdamW, largest rate and schedule, and one thread. Tokens a call of the target, but that of
the prompt, are counted at K = 3 on held-out prompts of both domains, and of one ("code") that
nothing learnt from here.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from concurrent.futures import ProcessPoolExecutor
from itertools import product
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812
from transformers import TrainerCallback

from distill import distillation
from distill.config import DistilConfig, InitConfig
from distill.initial import make_initial
from eval.decoder import DecodeConfig, SpeculativeDecoder
from eval.measuring.environment import describe_environment
from eval.measuring.intervals import Interval, resamples
from specdata.config import PromptSet
from specdata.draft_models.states_draft import before
from specdata.draft_models.taps import attach
from specdata.lm_head import body_of
from specdata.models import load_model, load_tokenizer
from specdata.prompts.loading import load_prompts
from specdata.sampling import SamplingConfig
from specdata.storage.dataset import load_stored, of_split
from specdata.storage.files import write_json
from specdata.texts import IGNORED

LENGTH, LONGEST = 3, 48
LEARNT, UNSEEN = ("instruct", "maths"), ("code",)
OURS = distillation.Distillation


class Speculators(OURS):
    """The recipe of speculators 0.9."""

    def forward(self, batch: Mapping[str, Tensor], step: int = 0) -> tuple[Tensor, Tensor]:
        """Sum the loss of a batch over its steps."""
        draft: Any = self.head.model
        embedding, taps = draft.get_input_embeddings(), self.teacher.taps(draft, batch)
        ids, labels = embedding.from_start(batch["input_ids"]), batch["labels"]
        assert taps is not None
        x, total = embedding.after_target(ids, before(taps)), torch.zeros(())
        for number in range(1, LENGTH + 1):
            states = body_of(draft)(inputs_embeds=x, use_cache=False)[0][:, :-1]
            labels = labels[:, 1:]
            learnt = labels != IGNORED
            logits = self.head.logits(states[learnt])
            weight = 0.6**number / sum(0.6**each for each in range(1, LENGTH + 1))
            total = total + weight * F.cross_entropy(logits, labels[learnt], reduction="sum")
            x = embedding.after_own(ids[:, number:], states)
        return total, (batch["labels"][:, 1:] != IGNORED).sum()


RECIPES = {
    "untouched": ("mtp", OURS),
    "speculators": ("mtp", Speculators),
    "ours": ("mtp", OURS),
    "states": ("states", OURS),
}


class Clock(TrainerCallback):  # type: ignore[misc]
    """Ends a training after so many processor seconds, over which its rate falls to 0."""

    def __init__(self, seconds: float) -> None:
        self.seconds, self.begun, self.steps = seconds, time.process_time(), 0

    def on_step_begin(self, args: Any, *_: Any, optimizer: Any = None, **__: Any) -> None:
        """Set the rate, which rises over the first twentieth."""
        spent = (time.process_time() - self.begun) / self.seconds
        for group in optimizer.param_groups:
            group["lr"] = args.learning_rate * max(0.0, min(20 * spent, 1 - spent))

    def on_step_end(self, _args: Any, state: Any, control: Any, **__: Any) -> None:
        """Stop."""
        self.steps = state.global_step
        control.should_training_stop = time.process_time() - self.begun > self.seconds


def measured(task: tuple[str, int], given: argparse.Namespace, rollouts: Path) -> dict[str, Any]:
    """Train by one recipe with one seed; tokens and calls by temperature, domain and prompt."""
    (recipe, seed), target = task, load_model(given.target)
    torch.set_num_threads(1)
    (kind, distillation.Distillation), row = RECIPES[recipe], {"recipe": recipe, "seed": seed}  # type: ignore[misc]
    train = of_split(load_stored(rollouts), "train", rollouts)
    with tempfile.TemporaryDirectory() as folder:
        init, made = InitConfig(kind=kind, layers=1), Path(folder, "draft")  # type: ignore[arg-type]
        named = {"target": Path(given.target), "draft": None, "config": init, "seed": seed}
        make_initial(rollouts=train, out=made, **named)  # type: ignore[arg-type]
        draft = load_model(str(made))
        attach(draft, target)
        config = DistilConfig(init=init, epochs=1000, readings=LENGTH, learning_rate=given.rate)
        config = config.model_copy(update={"save_steps": 10**6, "objective": given.objective})
        if recipe != "untouched":
            own = target, draft, train, Path(folder, "work"), config, SamplingConfig()
            trainer = distillation.draft_trainer(*own, seed)
            trainer.add_callback(clock := Clock(given.seconds))
            trainer.train()
            row["steps"] = clock.steps
    tokenizer, found = load_tokenizer(given.target), {}
    for temperature, name in product((0.0, 1.0), (*LEARNT, *UNSEEN)):
        decoding = DecodeConfig(length=LENGTH, temperature=temperature)
        decoder = SpeculativeDecoder.from_config(target, draft.eval(), decoding)
        sets = [PromptSet(name, split="test", count=given.prompts)]
        counts = []
        for number, prompt in enumerate(load_prompts(sets, tokenizer, seed=0).prompts):
            generator = torch.Generator().manual_seed(number)
            made_here = decoder.generate(
                torch.tensor(prompt.ids), max_new_tokens=LONGEST, generator=generator
            )
            drafting = [each.emitted for each in made_here.rounds if each.drafted]
            counts.append([sum(drafting), len(drafting)])
        found[f"{temperature:g} {name}"] = counts
    return row | {"counts": found}


def compared(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Tokens a call, all seeds together, and ours over the others', by temperature and domains."""
    report: dict[str, Any] = {}
    for temperature, (domains, names) in product(
        "01", {"learnt": LEARNT, "unseen": UNSEEN}.items()
    ):
        rates = {}
        for recipe in RECIPES:
            keys = [f"{temperature} {name}" for name in names]
            of = [row["counts"] for row in rows if row["recipe"] == recipe]
            sums = np.concatenate([np.sum([each[key] for each in of], axis=0) for key in keys])
            totals = resamples(len(sums)) @ sums
            rates[recipe] = totals[:, 0] / totals[:, 1]
        report[f"T = {temperature}, {domains}"] = {
            "tokens_per_call": {name: Interval.of(rate).stored() for name, rate in rates.items()},
            "ours_over": {
                name: Interval.of(rates["ours"] / rate - 1).stored()
                for name, rate in rates.items()
                if name != "ours"
            },
        }
    return report


def main() -> None:
    """Write rollouts, train, compare, and write one JSON file."""
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("target")
    options.add_argument("--seconds", type=float, default=150)
    options.add_argument("--rate", type=float, default=5e-4)
    options.add_argument("--objective", default="neg_log_overlap")
    options.add_argument("--rollouts", type=int, default=320, help="of each domain")
    options.add_argument("--prompts", type=int, default=16, help="of each domain")
    options.add_argument("--processes", type=int, default=1)
    options.add_argument("--out", type=Path, default=Path("runs/bench/mtp_training.json"))
    given = options.parse_args()
    with tempfile.TemporaryDirectory() as run:
        each = "{{name: {}, split: train, count: {}}}"
        sets = ", ".join(each.format(name, given.rollouts) for name in LEARNT)
        command = [sys.executable, "recipes/make_rollouts.py", "--toy", "null", "--draft", "null"]
        command += ["--head", "null", "--output", run, "--models.target", given.target]
        command += ["--models.draft", given.target]  # which nobody asks
        subprocess.run([*command, "--rollouts.sets", f"[{sets}]"], check=True)
        tasks = [("untouched", 0), *product([*RECIPES][1:], (0, 1))]
        with ProcessPoolExecutor(given.processes, get_context("spawn")) as pool:
            same = [given] * len(tasks), [Path(run, "rollouts")] * len(tasks)
            rows = []
            for row in pool.map(measured, tasks, *same):
                rows.append(row)
                print(row, flush=True)
    report = {"schema_version": 1, "seconds": given.seconds, "rate": given.rate}
    report |= {"objective": given.objective, "rollouts": given.rollouts, "compared": compared(rows)}
    where = describe_environment(device="cpu", dtype="float32").model_dump()
    write_json(given.out, report | {"rows": rows, "environment": where})
    for name, figures in report["compared"].items():
        for recipe, found in figures["tokens_per_call"].items():
            over = figures["ours_over"].get(recipe, {"value": 0})["value"]
            print(f"{name}: {recipe} {found['value']:.2f} tokens a call; ours {100 * over:+.1f} %")
    print(f"written: {given.out}")


if __name__ == "__main__":
    main()
