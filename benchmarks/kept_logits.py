"""What is lost when a draft learns from N stored logits a position instead of its target's all.

    python benchmarks/kept_logits.py [--run runs/toy] [--kept 16 64 256] [--distil 64]
                                     [--out runs/bench/kept_logits.json]

On the embedded pair (V = 2048) along its held-out rollouts at temperature 1, where the other tokens
count as one: for every loss and N, the mean of the plain loss and of the bucketed one, and the
cosine between their gradients with respect to the draft's logits; the acceptance as measured from
N logits, which is an upper bound, beside the true one; and, with --distil N, two whole
distillations with the run's own settings, one beside the target and one from N logits, each
measured with the target.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from embedded import make_demo
from torch import Tensor
from transformers import PreTrainedModel

from distill.config import DistilConfig
from distill.distillation import distil
from distill.losses import LOSSES, bucketed
from distill.watch import HeldOut
from eval.measuring.environment import describe_environment
from specdata.labels.top_logits import KeptLogits, top_logits
from specdata.lm_head import find_lm_head
from specdata.logits.make import ModelLogits
from specdata.models import load_model
from specdata.sampling import SamplingConfig
from specdata.storage.dataset import load_stored, of_split
from specdata.storage.files import write_json

SCHEMA_VERSION = 1
PLAIN = SamplingConfig()
ROWS = 48  # rollouts whose positions the losses are compared at


@torch.no_grad()
def logits_along(model: PreTrainedModel, rows: Dataset) -> Tensor:
    """(n, V) logits at the completion positions of rollouts."""
    found = []
    for row in rows:
        ids = torch.tensor([row["prompt_ids"] + row["completion_ids"]])
        found.append(model(ids).logits[0, len(row["prompt_ids"]) - 1 : -1].float())
    return torch.cat(found)


def of_losses(p_logits: Tensor, q_logits: Tensor, count: int) -> list[dict[str, Any]]:
    """Each loss on all logits and on `count` of them with one bucket for the rest."""
    kept = {
        name: values.view(len(p_logits), -1) for name, values in top_logits(p_logits, count).items()
    }
    ones, records = torch.ones(len(p_logits)), []
    for name, loss in LOSSES.items():
        values, gradients = [], []
        for is_bucketed in (False, True):
            draft = q_logits.clone().requires_grad_()
            pair = bucketed(draft, kept) if is_bucketed else (draft, p_logits)
            value = loss(*pair, ones)
            gradients.append(torch.autograd.grad(value, draft)[0].flatten())
            values.append(float(value.detach()))
        cosine = float(torch.cosine_similarity(*gradients, dim=0))
        records.append(
            {
                "objective": name,
                "kept": count,
                "plain": values[0],
                "bucketed": values[1],
                "gap": values[0] - values[1],
                "gradient_cosine": cosine,
            }
        )
    return records


def kept_rows(target: PreTrainedModel, rows: Dataset, count: int) -> Dataset:
    """Rollouts as stage logits stores them."""
    return Dataset.from_list(ModelLogits(find_lm_head(target), count)(rows.to_list()))  # type: ignore[arg-type]


def distilled(
    run: Path, target: PreTrainedModel, train: Dataset, dev: Dataset, counts: list[int], epochs: int
) -> list[dict[str, Any]]:
    """Drafts that learnt beside the target (None) and from so many logits, judged by the target."""
    config = DistilConfig(epochs=epochs, learning_rate=2e-3, report_to=[])
    judge, records = HeldOut(target, dev, PLAIN), []
    for count in (None, *counts):
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder) / "draft"
            rows = [
                each if count is None else kept_rows(target, each, count) for each in (train, dev)
            ]
            result = distil(
                target=run / "pair" / "target",
                draft=run / "pair" / "draft",
                train=rows[0],
                dev=rows[1],
                out=out,
                config=config,
                sampling=PLAIN,
                seed=0,
                kept=None if count is None else KeptLogits(count, target.config.vocab_size),
            )
            figures = judge.measure(load_model(str(out))).overall
        records.append(
            {
                "kept": count,
                "steps": result.steps,
                "before": result.acceptance_before,
                "as_measured": result.acceptance_after,
                "acceptance": figures.acceptance,
                "expected_tokens": figures.expected_tokens,
            }
        )
    return records


def main() -> None:
    """Print and store the figures."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--run", type=Path, default=Path("runs/toy"), help="with pair and rollouts")
    parser.add_argument("--kept", type=int, nargs="+", default=[16, 64, 256], help="N")
    parser.add_argument("--distil", type=int, nargs="*", default=[], help="N of distillations")
    parser.add_argument("--epochs", type=int, default=3, help="of these")
    parser.add_argument("--rollouts", type=int, help="of the training rollouts (default: all)")
    parser.add_argument("--out", type=Path, default=Path("runs/bench/kept_logits.json"))
    options = parser.parse_args()
    if not (options.run / "rollouts" / "run.json").is_file():
        make_demo("make_rollouts")
    target = load_model(str(options.run / "pair" / "target"))
    draft = load_model(str(options.run / "pair" / "draft"))
    source = options.run / "rollouts"
    train, dev = (of_split(load_stored(source), split, source) for split in ("train", "dev"))
    if options.rollouts:
        train = train.shuffle(seed=0).select(range(min(options.rollouts, len(train))))
    few = dev.shuffle(seed=0).select(range(min(ROWS, len(dev))))
    p_logits, q_logits = (logits_along(model, few) for model in (target, draft))
    losses = [record for count in options.kept for record in of_losses(p_logits, q_logits, count)]
    true = HeldOut(target, few, PLAIN).measure(draft).overall.acceptance
    acceptances = []
    for count in options.kept:
        known = KeptLogits(count, p_logits.shape[-1]).distributions(PLAIN, bound=True)
        found = HeldOut(known, kept_rows(target, few, count), PLAIN).measure(draft).overall
        mass = float(p_logits.softmax(-1).topk(count).values.sum(-1).mean())
        acceptances.append({"kept": count, "bound": found.acceptance, "true": true, "mass": mass})
    print(f"{len(p_logits)} positions, V = {p_logits.shape[-1]}")
    for each in acceptances:
        print(
            f"N = {each['kept']:<4} hold {each['mass']:.4f} of p; acceptance "
            f"<= {each['bound']:.4f} (true {each['true']:.4f})"
        )
    for each in losses:
        print(
            f"N = {each['kept']:<4} {each['objective']:<16} {each['bucketed']:.4f} of "
            f"{each['plain']:.4f}, gap {each['gap']:.4f}, cosine {each['gradient_cosine']:.4f}"
        )
    drafts = (
        distilled(options.run, target, train, dev, options.distil, options.epochs)
        if options.distil
        else []
    )
    for each in drafts:
        how = "beside the target" if each["kept"] is None else f"from {each['kept']} logits"
        print(
            f"{how:<18} acceptance {each['before']:.4f} -> {each['as_measured']:.4f} as measured, "
            f"{each['acceptance']:.4f} by the target"
        )
    environment = describe_environment(device="cpu", dtype="float32").model_dump()
    figures = {"losses": losses, "acceptances": acceptances, "drafts": drafts}
    options.out.parent.mkdir(parents=True, exist_ok=True)
    write_json(
        options.out,
        {"schema_version": SCHEMA_VERSION, "environment": environment, **figures},
    )


if __name__ == "__main__":
    main()
