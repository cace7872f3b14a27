"""A target whose layers two processes share: a run's rollouts and labels, its logits and texts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from eval.decode_config import DecodeConfig
from eval.decoder import SpeculativeDecoder
from recipes import make_rollouts, train_head
from recipes.config import parse
from specdata.models import load_model
from specdata.processes import is_main, leave_processes
from specdata.storage.files import write_json

IDS = [2, 9, 5, 17, 30, 4]
CHAIN = DecodeConfig(verifier="block", stop="fixed", length=3)
TREE = DecodeConfig(verifier="traversal", drafter="tree", widths=(2, 2))


def seen(target: Any, draft: Any) -> dict[str, Any]:
    """The target's logits, and what it decodes with a draft: by a chain, a tree, and in a batch."""
    with torch.inference_mode():
        found = {"logits": target(input_ids=torch.tensor([IDS])).logits[0].tolist()}
    for name, config in (("chain", CHAIN), ("tree", TREE)):
        decoder = SpeculativeDecoder.from_config(target, draft, config)
        seed = torch.Generator().manual_seed(0)
        out = decoder.generate(torch.tensor(IDS), max_new_tokens=24, generator=seed)
        found[name] = out.tokens.tolist()
    decoder = SpeculativeDecoder.from_config(target, draft, CHAIN)
    prompts = [torch.tensor(IDS[: 2 + index]) for index in range(3)]
    seeds = [torch.Generator().manual_seed(index) for index in range(3)]
    outs = decoder.generate_batch(prompts, max_new_tokens=16, generators=seeds, size=3)
    return found | {"batch": [out.tokens.tolist() for out in outs]}


def main(arguments: list[str], out: Path) -> None:
    """Make the run, then write what the main process sees of the models."""
    config = parse(arguments).config
    make_rollouts.RECIPE.main(config)
    train_head.RECIPE.main(config)
    target = load_model(config.models.target, load=config.models.loading("target"))
    assert config.models.draft is not None
    found = seen(target, load_model(config.models.draft))
    weights = sum(weight.to_local().numel() for weight in _divided(target))
    whole = sum(weight.numel() for weight in _divided(target))
    if is_main():
        write_json(out, found | {"share": weights / whole})
    leave_processes()


def _divided(model: Any) -> list[Any]:
    return [weight for weight in model.parameters() if hasattr(weight, "to_local")]
