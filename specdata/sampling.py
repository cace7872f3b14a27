"""Sampling settings, and the seeds of draws; `specdata.probability` makes the laws.

Randomness belongs to an example, not to a process: sharding, batching, the number of workers and a
resume cannot change what is drawn.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from pydantic import ConfigDict, Field

from specdata.errors import ConfigError

if TYPE_CHECKING:
    import numpy as np
    import torch
    from transformers import PreTrainedTokenizerBase

UNAPPLIED: dict[str, Any] = {
    **dict.fromkeys(("repetition_penalty", "encoder_repetition_penalty", "typical_p"), 1.0),
    **dict.fromkeys(("presence_penalty", "frequency_penalty"), 0.0),
    **dict.fromkeys(("epsilon_cutoff", "eta_cutoff"), 0.0),
    **dict.fromkeys(("no_repeat_ngram_size", "encoder_no_repeat_ngram_size", "min_length"), 0),
    **dict.fromkeys(("bad_words_ids", "suppress_tokens", "begin_suppress_tokens")),
    **dict.fromkeys(("force_words_ids", "constraints", "sequence_bias", "watermarking_config")),
    **dict.fromkeys(("forced_bos_token_id", "forced_eos_token_id", "stop_strings", "max_time")),
    **dict.fromkeys(("exponential_decay_length_penalty", "min_new_tokens")),
    **dict.fromkeys(("penalty_alpha", "dola_layers")),
    **dict.fromkeys(("guidance_scale", "top_h", "repeat_penalty"), 1.0),  # the last: llama.cpp's
    **dict.fromkeys(("dry_multiplier", "xtc_probability", "mirostat", "top_n_sigma"), 0),
    "logit_bias": None,
    "num_beams": 1,
    "token_healing": False,
}
"""What changes the texts of `generate` or llama.cpp and is no part of `SamplingConfig`: the neutral
values."""


@dataclass(frozen=True, slots=True)
class SamplingConfig:
    """Both models' way from logits to a distribution: temperature, top-k, top-p, then min-p.

    A standard dataclass rather than a `Config`, because the library constructs it by position,
    `SamplingConfig(1.0, 0, 1.0)`, and uses it as a value: hashed, compared, part of other settings.
    Temperature 0 makes the distribution one-hot at the largest logit. Raises ValueError for a value
    outside its range.
    """

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")

    temperature: Annotated[
        float, Field(description="softmax temperature; 0 takes the likeliest token")
    ] = 1.0
    top_k: Annotated[int, Field(description="keep the k largest logits; 0 keeps all")] = 0
    top_p: Annotated[
        float, Field(description="keep the likeliest tokens of this mass; 1 keeps all")
    ] = 1.0
    min_p: Annotated[
        float, Field(description="drop tokens below this share of the likeliest's; 0 keeps all")
    ] = 0.0

    def __post_init__(self) -> None:
        if not 0.0 <= self.temperature < float("inf"):
            raise ConfigError(f"temperature must be 0 or larger, got {self.temperature}")
        if not 0 <= self.top_k < 2**31:
            raise ConfigError(f"top_k must be 0 (off) or larger, below 2**31, got {self.top_k}")
        if not 0.0 < self.top_p <= 1.0:
            raise ConfigError(f"top_p must lie in (0, 1], got {self.top_p}")
        if not 0.0 <= self.min_p <= 1.0:
            raise ConfigError(f"min_p must lie in [0, 1], got {self.min_p}")

    @property
    def truncates(self) -> bool:
        """Whether tokens can lose their probability at a temperature above 0."""
        return self.top_k != 0 or self.top_p < 1.0 or self.min_p > 0.0


def served_sampling(generation: Mapping[str, Any]) -> dict[str, float]:
    """The `SamplingConfig` keys that a generation_config.json names, by which vLLM then serves.

    vLLM does not read `do_sample`, without which transformers takes the likeliest token.
    """
    named = {each.name: generation.get(each.name) for each in fields(SamplingConfig)}
    asked = {name: value for name, value in named.items() if isinstance(value, int | float)}
    return asked | ({"top_k": 0} if asked.get("top_k", 0) < 0 else {})  # -1 is off, too


def sampling_words(sampling: SamplingConfig, generation: Mapping[str, Any]) -> str:
    """A sentence on where sampling is not what a generation_config.json has servers do, or ""."""
    served = {**asdict(SamplingConfig()), **served_sampling(generation)}
    differ = [
        f"{key} is {value:g} here and {served[key]:g} there"
        for key, value in asdict(sampling).items()
        if value != served[key]
    ]
    if generation.get("do_sample") is False and sampling.temperature > 0:
        differ.append("do_sample is false there, which vLLM does not read")
    return bool(generation and differ) * (
        "sampling is not what the target's generation_config.json has a server do (unless told "
        f"otherwise, vLLM: --generation-config vllm): {', '.join(differ)}."
    )


def unapplied(generation: Mapping[str, Any]) -> dict[str, Any]:
    """The part of a model's generation configuration that changes texts and is not applied here."""
    return {
        name: generation[name]
        for name, neutral in UNAPPLIED.items()
        if generation.get(name) and generation[name] != neutral  # 0, [] and {} are neutral, too
    }


def unapplied_words(generation: Mapping[str, Any]) -> str:
    """A sentence on what `unapplied` finds; "" if it finds nothing."""
    asked = unapplied(generation).items()
    shown = [f"{name} {x}" if isinstance(x, int | float | str) else name for name, x in asked]
    if not shown:
        return ""
    return (
        f"The target's generation_config.json asks for {', '.join(shown)}, which nothing here "
        "applies: all texts and figures are without. A server applies it unless told otherwise "
        "(vLLM: --generation-config vllm)."
    )


def endless_words(generation: Mapping[str, Any], config: Mapping[str, Any]) -> str:
    """A sentence on a model whose config.json alone names an end token, or ""."""
    ends = config.get("eos_token_id")
    if not generation or ends is None or generation.get("eos_token_id") not in (None, []):
        return ""
    return (
        "The target's generation_config.json names no eos_token_id, so no text ends before "
        f"max_new_tokens, here as in transformers; if it is to end at {ends}, as its config.json "
        "says and engines do, write it there, too."
    )


def early_end_words(tokenizer: PreTrainedTokenizerBase, ends: Collection[int]) -> str:
    """A sentence on an end token that the target's tokenizer names and its `ends` lack, or ""."""
    end = tokenizer.eos_token_id
    return (end is not None and end not in ends) * (
        f"The target's tokenizer ends texts with {tokenizer.eos_token} ({end}), which its "
        "generation_config.json does not name among eos_token_id: here as in transformers texts go "
        "on behind it, and in engines they end there. If it is to end them, write it there, too."
    )


def seed_for(seed: int, *key: str | int) -> int:
    """A 63-bit seed for a key such as (example id, sample): the start of a SHA-256 of both."""
    return int.from_bytes(_digest(seed, *key)[:8], "big") >> 1


def generator_for(seed: int, *key: str | int) -> torch.Generator:
    """A CPU generator seeded by `seed_for`."""
    import torch

    return torch.Generator().manual_seed(seed_for(seed, *key))


def numpy_generator_for(*key: str | int) -> np.random.Generator:
    """A numpy generator that depends on the key and on nothing else; the seed is a part of it."""
    import numpy as np

    return np.random.default_rng(int.from_bytes(_digest(*key), "big"))


def _digest(*parts: str | int) -> bytes:
    return hashlib.sha256("\x1f".join(map(str, parts)).encode()).digest()
