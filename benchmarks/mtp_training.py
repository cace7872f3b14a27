"""What training pays for a target that brings a head along (MTP), at equal processor seconds.

    python benchmarks/mtp_training.py TARGET [--seconds 60] [--temperature 0] [--out FILE]

TARGET is of `benchmarks/mtp_target.py`. It writes rollouts of two domains, at the temperature at
which it is served. On these its head learns by the recipe of speculators 0.9 (each step reads keys
of that step alone; cross-entropy on the text's tokens; weights .6^k, 1 together) and by ours (keys
as while decoding; the overlap with the target's distribution), and a draft on the target's states
learns as ours does. All have the same batches, optimizer, largest rate and schedule, and one
thread. Trained heads are also averaged with the untouched one (`draft.start_share`). Tokens a call
of the target, but that of the prompt, are counted at K = 3 on held-out prompts of both domains, and
of one ("code") that nothing learnt from here.
"""

from __future__ import annotations

import argparse
import copy
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812
from transformers import TrainerCallback

from distill import distillation
from distill.adapters import averaged
from distill.config import DistilConfig, InitConfig
from distill.initial import make_initial
from eval.decoder import DecodeConfig, SpeculativeDecoder
from eval.measuring.environment import describe_environment
from eval.measuring.intervals import Interval, resamples
from specdata.config import PromptSet
from specdata.drafts.states_network import before
from specdata.drafts.taps import attach
from specdata.lm_head import body_of
from specdata.models import load_configs, load_model, load_tokenizer
from specdata.prompts.loading import load_prompts
from specdata.sampling import SamplingConfig
from specdata.storage.dataset import load_stored, of_split
from specdata.storage.files import write_json
from specdata.texts import IGNORED

LENGTH, LONGEST, RATE = 3, 48, 1e-3
DOMAINS = {"learnt": ("instruct", "maths"), "unseen": ("code",)}
SHARES = {"": 0.0, "_25": 0.25, "_50": 0.5}
"""Of the untouched head, by how a recipe's name ends."""
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
            learnt = labels[:, number:] != IGNORED
            logits = self.head.logits(states[learnt])
            weight = 0.6**number / sum(0.6**each for each in range(1, LENGTH + 1))
            wanted = labels[:, number:][learnt]
            total = total + weight * F.cross_entropy(logits, wanted, reduction="sum")
            x = embedding.after_own(ids[:, number:], states)
        return total, (labels[:, 1:] != IGNORED).sum()


RECIPES: dict[str, tuple[Any, type[OURS]]] = {
    **{"untouched": ("mtp", OURS), "speculators": ("mtp", Speculators)},
    **{"ours": ("mtp", OURS), "states": ("states", OURS)},
}


class Clock(TrainerCallback):  # type: ignore[misc]
    """Ends a training after so many processor seconds, over which its rate rises and falls."""

    def __init__(self, seconds: float) -> None:
        self.seconds, self.begun = seconds, time.process_time()

    def on_step_begin(self, _args: Any, *_: Any, optimizer: Any = None, **__: Any) -> None:
        """Set the rate."""
        spent = (time.process_time() - self.begun) / self.seconds
        for group in optimizer.param_groups:
            group["lr"] = RATE * max(0.0, min(20 * spent, 1 - spent))

    def on_step_end(self, _args: Any, _state: Any, control: Any, **_: Any) -> None:
        """Stop."""
        control.should_training_stop = time.process_time() - self.begun > self.seconds


def measured(recipe: str, seed: int, given: argparse.Namespace, rollouts: Path) -> dict[str, Any]:
    """Train by one recipe with one seed; tokens and calls by share, domain and prompt."""
    target, row = load_model(given.target), {"recipe": recipe, "seed": seed, "steps": 0}
    train = of_split(load_stored(rollouts), "train", rollouts)
    kind, distillation.Distillation = RECIPES[recipe]  # type: ignore[misc]
    init = InitConfig(kind=kind, layers=1)
    sampling = SamplingConfig(temperature=given.temperature)
    with tempfile.TemporaryDirectory() as folder:
        made, named = Path(folder, "draft"), {"draft": None, "config": init, "seed": seed}
        make_initial(target=Path(given.target), rollouts=train, out=made, **named)  # type: ignore[arg-type]
        attach(draft := load_model(str(made)), target)
        begun = copy.deepcopy(draft.state_dict())
        settings = {"readings": LENGTH, "learning_rate": RATE, "objective": "neg_log_overlap"}
        settings |= {"optimizer": "muon", "epochs": 1000, "save_steps": 10**6}
        config = DistilConfig(init=init, **settings)  # type: ignore[arg-type]
        if recipe != "untouched":
            own = target, draft, train, Path(folder, "work"), config, sampling, seed
            trainer = distillation.draft_trainer(*own)
            trainer.add_callback(Clock(given.seconds))
            trainer.train()
            row["steps"] = trainer.state.global_step
    learnt, counts = copy.deepcopy(draft.state_dict()), {}
    for end, share in SHARES.items() if recipe in ("speculators", "ours") else [("", 0.0)]:
        draft.load_state_dict(averaged(learnt, begun, share))
        counts[end] = counted(target, draft, given)
    return row | {"counts": counts}


def counted(target: Any, draft: Any, given: argparse.Namespace) -> dict[str, list[list[int]]]:
    """Tokens and calls of each held-out prompt, by domain."""
    found: dict[str, list[list[int]]] = {}
    tokenizer = load_tokenizer(given.target)
    decoding = DecodeConfig(length=LENGTH, temperature=given.temperature)
    decoder = SpeculativeDecoder.from_config(target, draft.eval(), decoding)
    for name in sum(DOMAINS.values(), ()):
        sets = [PromptSet(name, split="test", count=given.prompts)]
        found[name] = []
        for number, prompt in enumerate(load_prompts(sets, tokenizer, seed=0).prompts):
            text, generator = torch.tensor(prompt.ids), torch.Generator().manual_seed(number)
            made = decoder.generate(text, max_new_tokens=LONGEST, generator=generator)
            emitted = [each.emitted for each in made.rounds if each.drafted]
            found[name].append([sum(emitted), len(emitted)])
    return found


def compared(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Tokens a call, all seeds together, and ours over the others', by domains."""
    report: dict[str, Any] = {}
    for domains, names in DOMAINS.items():
        rates = {}
        for recipe, end in product(RECIPES, SHARES):
            of = [row["counts"].get(end) for row in rows if row["recipe"] == recipe]
            if None not in of:
                sums = np.concatenate([np.sum([each[key] for each in of], axis=0) for key in names])
                totals = resamples(len(sums)) @ sums
                rates[recipe + end] = totals[:, 0] / totals[:, 1]
        found = report[domains] = {}
        for recipe, rate in rates.items():
            found[recipe] = {"tokens_per_call": Interval.of(rate).stored()}
            for ours in (f"ours{end}" for end in SHARES):
                found[recipe][f"{ours}_over_it"] = Interval.of(rates[ours] / rate - 1).stored()
    return report


def main() -> None:
    """Write rollouts, train, compare, and write one JSON file."""
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("target")
    options.add_argument("--seconds", type=float, default=60)
    options.add_argument("--temperature", type=float, default=0.0)
    options.add_argument("--rollouts", type=int, default=2560, help="of each domain")
    options.add_argument("--prompts", type=int, default=32, help="of each domain")
    options.add_argument("--out", type=Path, default=Path("runs/bench/mtp_training.json"))
    given, rows = options.parse_args(), []
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as run:
        command = [sys.executable, "recipes/make_rollouts.py", "--toy", "null", "--draft", "null"]
        command += ["--head", "null", "--output", run, "--models.target", given.target]
        command += ["--models.draft", given.target]  # which nobody asks
        command += ["--sampling.temperature", str(given.temperature)]
        last = load_configs(given.target)[0].get_text_config().num_hidden_layers
        command += ["--rollouts.store_taps", str(InitConfig(kind="states").taps_of(last))]
        each = "{{name: {}, split: train, count: {}}}"
        sets = ", ".join(each.format(name, given.rollouts) for name in DOMAINS["learnt"])
        subprocess.run([*command, "--rollouts.sets", f"[{sets}]"], check=True)
        for seed, recipe in [(0, "untouched"), *product((0, 1), [*RECIPES][1:])]:
            rows.append(measured(recipe, seed, given, Path(run, "rollouts")))
    report = {"schema_version": 2, "compared": compared(rows), "rows": rows}
    report |= {"seconds": given.seconds, "temperature": given.temperature}
    report |= {"rollouts": given.rollouts, "rate": RATE}
    where = describe_environment(device="cpu", dtype="float32").model_dump()
    write_json(given.out, report | {"environment": where})
    print(f"written: {given.out}")


if __name__ == "__main__":
    main()
