"""Adapters of transformers' decoders and of ours, which docs/conformance says were certified.

draftsmith certify --callable benchmarks.certified:NAME
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from eval.decoder import DecodeConfig, SpeculativeDecoder

Texts = list[Tensor]


def assisted(
    prompts: list[list[int]], max_new_tokens: int, seeds: list[int], target: Any, draft: Any
) -> Texts:
    """Transformers' assisted generation."""
    draft.generation_config.update(
        do_sample=True,
        num_assistant_tokens=3,
        num_assistant_tokens_schedule="constant",
        assistant_confidence_threshold=0.0,
    )
    return _generated(prompts, max_new_tokens, seeds, target, assistant_model=draft)


def lookup(
    prompts: list[list[int]], max_new_tokens: int, seeds: list[int], target: Any, draft: Any
) -> Texts:
    """Transformers' prompt lookup, which has no draft."""
    return _generated(prompts, max_new_tokens, seeds, target, prompt_lookup_num_tokens=3)


def _generated(
    prompts: list[list[int]], new: int, seeds: list[int], target: Any, **more: Any
) -> Texts:
    texts = []
    for prompt, seed in zip(prompts, seeds, strict=True):
        torch.manual_seed(seed)
        ids = torch.tensor([prompt])
        more |= {"attention_mask": torch.ones_like(ids), "do_sample": True, "top_k": 0}
        texts.append(target.generate(ids, max_new_tokens=new, **more)[0, len(prompt) :])
    return texts


def ours(
    prompts: list[list[int]],
    max_new_tokens: int,
    seeds: list[int],
    target: Any,
    draft: Any,
    temperature: float,
) -> Texts:
    """Our decoder, rows packed together."""
    config = DecodeConfig(verifier="block", length=3, temperature=temperature)
    outs = SpeculativeDecoder.from_config(target, draft, config).generate_batch(
        [torch.tensor(prompt) for prompt in prompts],
        max_new_tokens=max_new_tokens,
        generators=[torch.Generator().manual_seed(seed) for seed in seeds],
        size=len(prompts),
    )
    return [out.tokens for out in outs]
