"""Acceptance far into a text, of drafts that learnt on long texts and on short ones.

    python benchmarks/long_rollouts.py [--out FILE]

The demo's target (`make demo`) learns to read 8,192 tokens, and never to end. Drafts of two kinds
begin as a layer of the target and learn what it says of text of its kind, in pieces of 8,192 tokens
or of 512, with equally many tokens a step and in all. Then each decodes behind long held-out texts
that are cut at several lengths. Sampled texts would be nearer to use, and take hours here.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer, Trainer, default_data_collator

from distill.toy import save_tokenizer, token_blocks
from distill.training import Schedule, save_model, train_resumably, training_arguments
from eval.decoder import DecodeConfig, SpeculativeDecoder
from recipes.config import parse
from recipes.make_rollouts import Rollouts
from recipes.run import run_stage
from specdata.draft_models.taps import attach
from specdata.models import load_model
from specdata.storage.dataset import fill_dataset
from specdata.storage.resume import Settings
from specdata.storage.schema import ROLLOUTS
from specdata.toy.corpus import corpus

TARGET = Path("runs/toy/pair/target")
POSITIONS, STEPS = 8_192, 24
PROMPT, LENGTHS = 64, (8_192, 512)
"""Tokens that are read only, and all tokens, of a text that is learnt."""
TEXTS, EPOCHS = 24, 2
"""Long texts to learn from, and passes over them."""
KINDS = {
    "plain": "{kind: target, layers: 1}",
    "eagle3": "{kind: states, layers: 1, layout: eagle3}",
}
HELD_OUT, CUTS, NEW = 10, (250, 500, 2_000, 4_000, 8_000), 64
"""Texts, where they are cut, and tokens that are decoded behind each cut."""
CONFIG = DecodeConfig(verifier="block", length=4)


def make_target(folder: Path) -> None:
    """Go on with the demo's target on long blocks of its own text."""
    if folder.exists():
        return
    tokenizer = AutoTokenizer.from_pretrained(TARGET, trust_remote_code=False)
    model = AutoModelForCausalLM.from_pretrained(TARGET, trust_remote_code=False)
    for config in (model.config, model.generation_config):
        config.eos_token_id = tokenizer.pad_token_id
    model.config.max_position_embeddings = POSITIONS + 256
    texts = corpus(seed=1, examples_per_family=2_000, library_characters=1_000_000)
    work = folder.with_name("target.training")
    schedule = Schedule(
        steps=STEPS, batch_size=1, learning_rate=1e-3, warmup_ratio=0.1, save_steps=8
    )
    trainer = Trainer(
        model=model,
        args=training_arguments(work, schedule, seed=0),
        train_dataset=token_blocks(texts, tokenizer, POSITIONS),
        data_collator=default_data_collator,
    )
    train_resumably(trainer, work, label="training the target")
    save_model(model, folder)
    save_tokenizer(tokenizer, folder)


def blocks(target: Path, seed: int, length: int) -> list[list[int]]:
    """Pieces of text of the kind that the target has learnt."""
    tokenizer = AutoTokenizer.from_pretrained(target, trust_remote_code=False)
    texts = corpus(seed=seed, examples_per_family=2_000, library_characters=1_000_000)
    return list(token_blocks(texts, tokenizer, length)["input_ids"])


def store(config: Any, texts: list[list[int]]) -> None:
    """Store texts as the rollouts of a run; every eighth is held out."""

    def row(number: int, ids: list[int]) -> dict[str, Any]:
        return {
            "example_id": f"{number:016x}",
            "dataset": "maths",
            "split": "train" if number % 8 else "dev",
            "sample": 0,
            "turn": 0,
            "finish": "length",
            "prompt_ids": ids[:PROMPT],
            "completion_ids": ids[PROMPT:],
        }

    def run(self: Any) -> dict[str, Any]:
        rows = [row(number, ids) for number, ids in enumerate(texts)]
        settings = Settings({"sampling": asdict(config.sampling)})
        fill_dataset(self.folder, ROLLOUTS, settings, [lambda: rows], lambda _: None)
        return {"acceptance": {}}

    run_stage(type("Stored", (Rollouts,), {"run": run})(config))


def train(folder: Path, target: Path, texts: list[list[int]], init: str) -> Path:
    """Distil a draft on texts; a step has as many tokens whatever their length."""
    batch = max(LENGTHS) // len(texts[0])
    given = ["--config", "recipes/configs/toy.yaml", "--toy", "null", "--head", "null"]
    given += ["--output", str(folder), "--models", f"{{target: {target}}}", "--draft.init", init]
    given += ["--draft.epochs", str(EPOCHS), "--draft.eval_steps", "1000"]
    given += ["--draft.batch_size", str(batch), "--rollouts.store_states", "false"]
    store(parse(given).config, texts)
    subprocess.run([sys.executable, "recipes/train_draft.py", *given], check=True)
    return folder / "draft/model"


def measured(target: Any, draft: Any, texts: list[torch.Tensor]) -> list[dict[str, float]]:
    """Tokens a round, and the share of drafted tokens that is accepted, behind each cut."""
    decoder = SpeculativeDecoder.from_config(target, draft, CONFIG)
    rows = []
    for cut in CUTS:
        rounds = []
        for number, text in enumerate(tqdm(texts, f"{cut} tokens")):
            draw = torch.Generator().manual_seed(number)
            rounds += decoder.generate(text[:cut], max_new_tokens=NEW, generator=draw).rounds
        rows.append(
            {
                "context": cut,
                "rounds": len(rounds),
                "block_efficiency": sum(each.emitted for each in rounds) / len(rounds),
                "acceptance_rate": sum(each.accepted for each in rounds)
                / sum(each.drafted for each in rounds),
            }
        )
    return rows


def main() -> None:
    """Train, measure, print, and write one JSON file."""
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("--work", type=Path, default=Path("runs/long"))
    options.add_argument("--kinds", nargs="+", choices=KINDS, default=[*KINDS])
    options.add_argument("--out", type=Path, default=Path("runs/bench/long-rollouts.json"))
    given = options.parse_args()
    os.environ.setdefault("PYTHONPATH", str(Path.cwd()))
    target = given.work / "target"
    make_target(target)
    learnt = blocks(target, 2, max(LENGTHS))[:TEXTS]
    held_out = [torch.tensor(ids) for ids in blocks(target, 3, max(LENGTHS))[:HELD_OUT]]
    rows: list[dict[str, Any]] = []
    for kind in given.kinds:
        for length in LENGTHS:
            starts = range(0, max(LENGTHS), length)
            pieces = [ids[start : start + length] for start in starts for ids in learnt]
            model = load_model(str(target))
            draft = load_model(
                str(train(given.work / f"{kind}-{length}", target, pieces, KINDS[kind]))
            )
            if kind != "plain":
                attach(draft, model)
            found = measured(model, draft, held_out)
            rows += [{"draft": kind, "learnt_length": length, **row} for row in found]
    for row in rows:
        print(row)
    commit = ["git", "describe", "--always", "--dirty"]
    now = subprocess.run(commit, check=True, capture_output=True, text=True).stdout.strip()
    given.out.parent.mkdir(parents=True, exist_ok=True)
    given.out.write_text(
        json.dumps({"schema_version": 1, "commit": now, "rows": rows}, indent=2) + "\n"
    )


if __name__ == "__main__":
    main()
