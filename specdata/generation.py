"""What `generate` of transformers is asked for where our decoding is compared with it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

from transformers import GenerationConfig

from specdata.sampling import SamplingConfig


def special_ids(generation: GenerationConfig, **options: Any) -> GenerationConfig:
    """The special ids of a generation configuration and what is asked for, nothing else of it."""
    return GenerationConfig(
        bos_token_id=generation.bos_token_id,
        eos_token_id=generation.eos_token_id,
        pad_token_id=generation.pad_token_id,
        **options,
    )


@contextmanager
def plain_generation(
    model: Any, sampling: SamplingConfig, **options: Any
) -> Iterator[GenerationConfig]:
    """The configuration of a `generate` that samples as we do and applies nothing else.

    transformers fills what a configuration leaves open (penalties, beams, stop strings, a cache)
    from the model's own, and most of it can only be left open: the model has none of its own until
    the end.
    """
    former = model.generation_config
    if sampling.temperature > 0:
        options |= asdict(sampling) | {"min_p": sampling.min_p or None}
    model.generation_config = special_ids(former, do_sample=sampling.temperature > 0, **options)
    try:
        yield model.generation_config
    finally:
        model.generation_config = former
