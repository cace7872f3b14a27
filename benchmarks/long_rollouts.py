"""Acceptance far into a text, of drafts that learnt on long rollouts and on short ones.

    python benchmarks/long_rollouts.py [--out FILE]

The demo's target (`make demo`) learns to read 8,192 tokens, and never to end. It writes two sets of
rollouts with equally many tokens, long and short ones. Drafts of two kinds begin as layers of the
target and learn from either set, with equally many tokens a step; then each decodes behind held-out
long texts that are cut at several lengths.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer, Trainer, default_data_collator

from distill.toy import save_tokenizer, token_blocks
from distill.training import Schedule, save_model, train_resumably, training_arguments
from eval.decoder import DecodeConfig, SpeculativeDecoder
from specdata.draft_models.taps import attach
from specdata.models import load_model
from specdata.storage.dataset import load_stored
from specdata.toy.corpus import corpus

TARGET = Path("runs/toy/pair/target")
POSITIONS, STEPS = 8_192, 24
LENGTHS = {"long": 8_000, "short": 500}
"""Tokens of a completion."""
TOKENS, EPOCHS = 192_000, 4
"""Of either set's completions, for training; and passes over them."""
KINDS = {
    "plain": "{kind: target, layers: 1}",
    "eagle3": "{kind: states, layers: 1, layout: eagle3}",
}
HELD_OUT, CUTS, NEW = 12, (250, 500, 1_000, 2_000, 4_000, 7_900), 64
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


def run(recipe: str, folder: Path, target: Path, *options: str) -> None:
    """Run a recipe with the demo's configuration."""
    given = ["--config", "recipes/configs/toy.yaml", "--toy", "null", "--head", "null"]
    given += ["--output", str(folder), "--models", f"{{target: {target}}}", *options]
    subprocess.run([sys.executable, f"recipes/{recipe}.py", *given], check=True)


def rollouts(folder: Path, target: Path, length: int) -> None:
    """Write rollouts for training, and the held-out ones, of one length."""
    counts = {"train": TOKENS // length // 3, "dev": HELD_OUT // 3}
    sets = [
        {"name": name, "split": split, "count": count}
        for name in ("instruct", "maths", "code")
        for split, count in counts.items()
    ]
    options = ["--rollouts.sets", json.dumps(sets), "--rollouts.max_new_tokens", str(length)]
    options += ["--rollouts.batch_size", str(36 if length > 500 else 128)]
    options += ["--rollouts.store_states", "false", "--draft.init", KINDS["plain"]]
    run("make_rollouts", folder, target, *options)


def train(folder: Path, target: Path, length: int, init: str) -> None:
    """Distil a draft; a step has as many tokens whatever their rollouts' length."""
    options = ["--draft.init", init, "--draft.epochs", str(EPOCHS), "--draft.eval_steps", "1000"]
    options += ["--draft.batch_size", str(LENGTHS["long"] // length), "--draft.warmup_ratio", "0.1"]
    run("train_draft", folder, target, *options)


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
    options.add_argument("--out", type=Path, default=Path("runs/bench/long-rollouts.json"))
    given = options.parse_args()
    os.environ.setdefault("PYTHONPATH", str(Path.cwd()))
    target = given.work / "target"
    make_target(target)
    rows: list[dict[str, Any]] = []
    for name, length in LENGTHS.items():
        rollouts(given.work / name, target, length)
    stored = load_stored(given.work / "long/rollouts").filter(lambda row: row["split"] == "dev")
    texts = [torch.tensor([*row["prompt_ids"], *row["completion_ids"]]) for row in stored]
    for kind, init in KINDS.items():
        for name, length in LENGTHS.items():
            folder = given.work / f"{kind}-{name}"
            folder.mkdir(exist_ok=True)
            if not (folder / "rollouts").exists():
                (folder / "rollouts").symlink_to((given.work / name / "rollouts").absolute())
            train(folder, target, length, init)
            model = load_model(str(target))
            draft = load_model(str(folder / "draft/model"))
            if kind != "plain":
                attach(draft, model)
            rows += [
                {"draft": kind, "rollouts": length, **row} for row in measured(model, draft, texts)
            ]
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
