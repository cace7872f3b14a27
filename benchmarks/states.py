"""Plain drafts against drafts on their target's states, at equal rollouts and at equal seconds.

    python benchmarks/states.py RUN [--rollouts 128 512 1376] [--name NAME] [--out FILE]

RUN is the output of a run whose rollouts are made, with rollouts.store_states and store_taps 2,
n/2, n - 3, n; drafts are trained in the precision in which they were. Every row is trained on as
many of its training rollouts, evenly of each set, and measured on all dev rollouts: sum of
min(p, q), and tokens of a round of four, in which a draft on states reads its own from the second
token on. Seconds are the processor's, of making and training the draft; the target's states are
stored. Finished rows and their drafts, for the clock of an evaluation (--models.draft), are kept in
--work: the same command goes on where it ended, and commands of one seed each may run side by side.
"""

from __future__ import annotations

import argparse
import json
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from distill.config import DistilConfig, InitConfig
from distill.distillation import distil
from distill.initial import make_initial
from distill.training import save_model
from distill.watch import HeldOut
from eval.measuring.environment import describe_environment
from specdata.draft_models.states_draft import states_input
from specdata.draft_models.taps import decoder_layers
from specdata.loading import Loading
from specdata.models import load_configs, load_model
from specdata.sampling import SamplingConfig
from specdata.saving import copy_tokenizer
from specdata.storage.dataset import load_stored, of_split, read_manifest
from specdata.storage.files import write_json

PLAIN = {"kind": "target", "layers": 2, "align": True}
STATES = {"kind": "states", "layers": 1}
Row = dict[str, Any]


def rows(counts: list[int], seeds: list[int], ablated: int, layers: int) -> Iterator[Row]:
    """What is trained; all but the first two kinds on `ablated` rollouts."""
    for seed in seeds:
        for count in sorted(counts):
            yield {"name": "plain", "init": PLAIN, "rollouts": count, "seed": seed}
            yield {"name": "states", "init": STATES, "rollouts": count, "seed": seed}
        shared: Row = {"init": STATES, "rollouts": ablated, "seed": seed}
        yield {**shared, "name": "plain, as many seconds", "init": PLAIN, "as": ["states", "plain"]}
        yield {**shared, "name": "states, two layers", "init": {**STATES, "layers": 2}}
        for name, taps in (("final", [layers]), ("three", [2, layers // 2, layers - 3])):
            yield {**shared, "name": f"states, taps {name}", "init": {**STATES, "taps": taps}}
        yield {**shared, "name": "states, layout eagle3", "init": {**STATES, "layout": "eagle3"}}
        dspark = {"kind": "states", "layers": 1, "layout": "dspark", "block": 7}
        faster = {"learning_rate": 1.5e-3}  # docs/drafts-in-blocks.md
        yield {**shared, "name": "states, layout dspark", "init": dspark, "train": faster}
        alone = {"name": "dspark, least squares alone", "train": {"epochs": 0}}
        yield {**shared, **alone, "init": dspark}
        yield {**shared, "name": "plain, depths", "init": PLAIN, "train": {"depths": 4}}
        yield {**shared, "name": "states, least squares alone", "train": {"epochs": 0}}
        yield {**shared, "name": "states, from random weights", "random": True}
        for name, init in (("plain", PLAIN), ("states", STATES)):
            kl = {"objective": "forward_kl"}
            yield {**shared, "name": f"{name}, forward KL", "init": init, "train": kl}


def measured(row: Row, given: argparse.Namespace, work: Path, epochs: float) -> Row:
    """Make, train and measure one draft."""
    run = given.run / "rollouts"
    stored = read_manifest(run)["settings"]
    target, sampling = stored["target"]["name"], SamplingConfig(**stored["sampling"])
    dtype = stored["dtype"]
    rollouts = load_stored(run)
    dev, train = of_split(rollouts, "dev", run), of_split(rollouts, "train", run)
    spread = (index * len(train) // row["rollouts"] for index in range(row["rollouts"]))
    in_order = sorted(range(len(train)), key=train["dataset"].__getitem__)  # evenly of each set
    train = train.select([in_order[place] for place in spread])
    shutil.rmtree(work, ignore_errors=True)
    begun = time.process_time()
    make_initial(
        target=target,
        draft=None,
        rollouts=train,
        out=work / "initial",
        config=InitConfig(**{"vocabulary": given.vocabulary, **row["init"]}),
        seed=row["seed"],
        states_dtype=dtype,
    )
    if row.get("random"):
        at_random(work / "initial", target, row["seed"])
    config = {"epochs": epochs, "precision": dtype}
    config |= {"learning_rate": given.learning_rate, "optimizer": given.optimizer}
    config |= row.get("train", {})
    result = distil(
        target=target,
        draft=work / "initial",
        train=train,
        dev=dev.select([0]),  # measured below, off the clock
        out=work / "draft",
        config=DistilConfig(**config, warp="raw", keep="last", eval_steps=2**24, report_to=[]),
        sampling=sampling,
        seed=row["seed"],
        teacher_load=Loading(dtype=dtype),
    )
    seconds = time.process_time() - begun
    made = {key: row[key] for key in ("name", "rollouts", "seed")}
    made |= {"layout": row["init"].get("layout")}
    made |= {"epochs": round(config["epochs"], 2), "seconds": round(seconds, 1)}
    made |= {"steps": result.steps} | judged(given.run, work / "draft")
    shutil.rmtree(work / "initial")
    return made


def judged(run: Path, draft: Path) -> Row:
    """A draft on all dev rollouts."""
    stored = read_manifest(run / "rollouts")["settings"]
    target, model = stored["target"]["name"], load_model(str(draft))
    dev = of_split(load_stored(run / "rollouts"), "dev", run / "rollouts")
    held_out = HeldOut(
        load_model(target, dtype=stored["dtype"]), dev, SamplingConfig(**stored["sampling"])
    )
    found, made = held_out.measure(model), {"parameters": model.num_parameters()}
    for name, each in {"all": found.overall, **found.sets}.items():
        tokens = each.expected_tokens["token_4"]
        made[name] = {"acceptance": round(each.acceptance, 4), "tokens": round(tokens, 4)}
    return made


def at_random(folder: Path, target: str, seed: int) -> None:
    """Give a draft on states random weights where it has layers and maps."""
    draft = load_model(str(folder))
    torch.manual_seed(seed)
    reads = states_input(draft)
    assert reads is not None
    maps = [reads.token, reads.states, reads.own_token, reads.own_state]
    for module in (*maps, *decoder_layers(draft)[1].modules()):
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=0.02)
    save_model(draft, folder)
    copy_tokenizer(target, folder)


def main() -> None:
    """Train what is not measured yet, and write all figures."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    add = parser.add_argument
    add("run", type=Path, help="output of a run whose rollouts are made")
    add("--rollouts", type=int, nargs="+", default=[128, 512, 1376])
    add("--seeds", type=int, nargs="+", default=[0, 1])
    add("--ablations", type=int, help="rollouts of all but plain and states (default: the most)")
    add("--epochs", type=float, default=3.0)
    add("--learning-rate", type=float, default=1e-3)
    add("--optimizer", choices=["adamw", "muon"], default="adamw")
    add("--vocabulary", type=int, help="tokens that the drafts can propose (default: all)")
    add("--only", nargs="*", help="names of rows (default: all)")
    add("--draft", action="append", default=[], help="NAME=FOLDER, one made elsewhere, to judge")
    add("--name", default="smollm2", help="of the pair in FILE, which keeps other pairs' figures")
    add("--work", type=Path, default=Path("runs/bench/states"))
    add("--out", type=Path, default=Path("runs/bench/states.json"))
    given = parser.parse_args()
    ablations = given.ablations or max(given.rollouts)
    if ablations not in given.rollouts:
        parser.error(f"--ablations must be one of --rollouts, got {ablations}")
    target = read_manifest(given.run / "rollouts")["settings"]["target"]["name"]
    layers = load_configs(target)[0].get_text_config().num_hidden_layers
    figures: list[Row] = []
    for row in rows(given.rollouts, given.seeds, ablations, layers):
        if given.only is not None and row["name"] not in given.only:
            continue
        kept = given.work / f"{row['name']} {row['rollouts']} {row['seed']}.json"
        if not kept.exists():
            epochs = given.epochs
            if row.get("as"):
                like = {
                    each["name"]: each["seconds"]
                    for each in figures
                    if (each["rollouts"], each["seed"]) == (row["rollouts"], row["seed"])
                }
                longer, shorter = row["as"]
                epochs *= like[longer] / like[shorter]
            made = measured(row, given, kept.with_suffix(""), epochs)
            write_json(kept, made)
        figures.append(json.loads(kept.read_text()))
        print(json.dumps(figures[-1]), flush=True)
    for name, _, folder in (each.partition("=") for each in given.draft):
        figures.append({"name": name, **judged(given.run, Path(folder))})
        print(json.dumps(figures[-1]), flush=True)
    taps = InitConfig(kind="states").taps_of(layers)
    about = {"target": target, "taps": taps, "vocabulary": given.vocabulary}
    about |= {"learning_rate": given.learning_rate, "optimizer": given.optimizer}
    dtype = read_manifest(given.run / "rollouts")["settings"]["dtype"]
    environment = describe_environment(device="cpu", dtype=dtype).model_dump()
    pairs = json.loads(given.out.read_text()) if given.out.exists() else {}
    pairs[given.name] = {**about, "environment": environment, "rows": figures}
    write_json(given.out, pairs)


if __name__ == "__main__":
    main()
