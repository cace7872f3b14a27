"""Sizes of what stages write, in words and numbers."""

from __future__ import annotations

from collections.abc import Sequence

from recipes.config import PipelineConfig
from specdata.config import PromptSet
from specdata.prompts.catalogue import EMBEDDED
from specdata.prompts.reading import is_remote, raw_prompts

# Bytes a stored token takes at most: an id; an id and a number for a further draw or top logit.
# A prompt's own ids come on top.
ROLLOUT_TOKEN, PAIR = 4, 8


def in_bytes(count: float) -> str:
    """A number of bytes with its unit."""
    for limit, unit in ((10**9, "GB"), (10**6, "MB"), (10**3, "KB")):
        if count >= limit:
            return f"about {count / limit:.1f} {unit}"
    return f"{count:.0f} bytes"


def prompt_count(sets: Sequence[PromptSet], seed: int) -> int | None:
    """Prompts that are read of sets, files counted; None if one on the Hub is read whole."""
    counts = [
        dataset.count
        if dataset.name in EMBEDDED or is_remote(dataset)
        else sum(1 for _ in raw_prompts(dataset, seed, has_template=True))
        for dataset in sets
    ]
    return sum(counts) if all(counts) else None


def rows_size(config: PipelineConfig, token_bytes: int, share: float = 1.0) -> str:
    """The size on the disk of rollouts, or of what has as many rows, at so many bytes a token.

    Of split train, of a `share` of them.
    """
    rollouts = config.rollouts
    most = rollouts.samples * rollouts.max_new_tokens  # tokens of a prompt's completions
    train = [each for each in rollouts.sets if each.split == "train"]
    others = [each for each in rollouts.sets if each.split != "train"]
    learnt, rest = (prompt_count(some, config.seed) for some in (train, others))
    if learnt is None or rest is None:
        return f"at most {most:,} tokens a prompt, {in_bytes(most * token_bytes)}"
    prompts = round(share * learnt) + rest
    return (
        f"{rollouts.samples * prompts:,} completions, at most {most * prompts:,} tokens, "
        f"{in_bytes(most * prompts * token_bytes)}"
    )
