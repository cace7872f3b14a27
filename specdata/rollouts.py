"""Stage 1a: completions sampled from the target, in batches, each row with its own seed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import DynamicCache, PreTrainedModel

from specdata.errors import at_least_one
from specdata.models import end_ids
from specdata.probability import SamplingConfig, inverse_cdf, probabilities
from specdata.prompts import Prompt, PromptSet
from specdata.schema import ROLLOUTS, Rollout
from specdata.seeds import generator_for
from specdata.tables import fill_table


@dataclass(frozen=True, slots=True)
class RolloutConfig:
    """Which prompts are completed, and how far."""

    sets: list[PromptSet] = field(metadata={"help": "prompt sets to complete"})
    max_new_tokens: int = field(default=128, metadata={"help": "longest completion, in tokens"})
    shard_size: int = field(
        default=64, metadata={"help": "prompts decoded together and stored in one shard"}
    )

    def __post_init__(self) -> None:
        at_least_one(self, "rollouts", "max_new_tokens", "shard_size")


def make_rollouts(
    model: PreTrainedModel,
    prompts: Sequence[Prompt],
    folder: Path,
    config: RolloutConfig,
    *,
    sampling: SamplingConfig,
    seed: int,
    settings: Mapping[str, Any],
    report: Callable[[int], object],
) -> int:
    """Complete every prompt and store the table; see `fill_table` for resume and errors.

    Prompts are grouped by length so that little of a batch is padding.

    Args:
        model: the target.
        prompts: what to complete.
        folder: the table's folder.
        config: sizes.
        sampling: the law completions are drawn from.
        seed: the run's seed; a row's own seed is made of it, the prompt's id and the sample number.
        settings: what identifies the run, stored in the manifest.
        report: called with the number of rows done.

    Returns:
        Number of completions.
    """
    ordered = sorted(prompts, key=lambda prompt: (len(prompt.ids), prompt.example_id))
    groups = [
        ordered[start : start + config.shard_size]
        for start in range(0, len(ordered), config.shard_size)
    ]
    shards = [
        partial(_complete, model, group, sampling, config.max_new_tokens, seed) for group in groups
    ]
    return fill_table(folder, ROLLOUTS, settings, shards, report)


def _complete(
    model: PreTrainedModel,
    group: Sequence[Prompt],
    sampling: SamplingConfig,
    max_new_tokens: int,
    seed: int,
) -> list[Rollout]:
    uniforms = torch.stack(
        [
            torch.rand(
                max_new_tokens,
                generator=generator_for(seed, "rollout", prompt.example_id, 0),
                dtype=torch.float64,
            )
            for prompt in group
        ]
    )
    completions = sample_batch(model, [prompt.ids for prompt in group], uniforms, sampling)
    ends = end_ids(model)
    return [
        Rollout(
            example_id=prompt.example_id,
            dataset=prompt.dataset,
            split=prompt.split,
            sample=0,
            prompt_ids=prompt.ids,
            completion_ids=ids,
            finish="eos" if ids[-1] in ends else "length",
        )
        for prompt, ids in zip(group, completions, strict=True)
    ]


@torch.inference_mode()
def sample_batch(
    model: PreTrainedModel,
    prompts: Sequence[Sequence[int]],
    uniforms: torch.Tensor,
    sampling: SamplingConfig,
) -> list[list[int]]:
    """Sample a batch by inverse CDF, so that a row depends on its own uniforms alone.

    Args:
        model: the language model.
        prompts: B prompts of any lengths (padded on the left here).
        uniforms: (B, max_new_tokens) in [0, 1).
        sampling: the law.

    Returns:
        B completions; one that ends does so with its end token.
    """
    width = max(map(len, prompts))
    ids = torch.tensor([[0] * (width - len(row)) + list(row) for row in prompts])
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in prompts])
    ids, mask, uniforms = ids.to(model.device), mask.to(model.device), uniforms.to(model.device)
    ends = torch.tensor(sorted(end_ids(model)), device=model.device)
    positions = (mask.cumsum(dim=1) - 1).clamp(min=0)
    cache, drawn = DynamicCache(config=model.config), []
    alive = torch.ones(len(prompts), dtype=torch.bool, device=model.device)
    for step in range(uniforms.shape[1]):
        logits = model(
            input_ids=ids,
            attention_mask=mask,
            position_ids=positions,
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        ).logits[:, -1]
        token = inverse_cdf(probabilities(logits, sampling), uniforms[:, step])
        drawn.append(torch.where(alive, token, -1))
        alive = alive & ~torch.isin(token, ends)
        if not bool(alive.any()):
            break
        ids, positions = token.unsqueeze(1), positions[:, -1:] + 1
        mask = torch.cat([mask, torch.ones_like(ids)], dim=1)
    table = torch.stack(drawn, dim=1).tolist()
    return [[token for token in row if token >= 0] for row in table]
