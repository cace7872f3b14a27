"""What transformers' models call their cache."""

from __future__ import annotations

from inspect import signature

from torch import nn
from transformers import Cache, PreTrainedModel

from specdata.errors import CacheNotRewindableError

NAMES = ("cache", "past_key_values", "cache_params")
"""Transformers 5.24's name; before it, attention's and that of recurrent states alone."""


def cache_argument(model: nn.Module | type[nn.Module]) -> str:
    """The name by which a model, or a layer's class, takes transformers' cache.

    A wrapper (PEFT) hides the arguments of the model that it passes them on to.
    """
    taker = model
    if not isinstance(model, type):
        taker = next((each for each in model.modules() if isinstance(each, PreTrainedModel)), model)
    parameters = signature(taker.forward).parameters
    if (name := next((name for name in NAMES if name in parameters), None)) is None:
        kind = getattr(getattr(model, "config", None), "model_type", model)
        raise CacheNotRewindableError(
            f"{kind} takes no cache of transformers (its forward has none of the arguments "
            f"{', '.join(NAMES)}), so tokens that were rejected could not be removed from what it "
            "has read; give a model whose forward takes one"
        )
    return name


def counts_tokens(cache: Cache) -> bool:
    """Whether a cache says how many tokens it holds: one of recurrent states alone does not."""
    return any(hasattr(layer, "get_seq_length") for layer in cache.layers)


def reads_rows_alone(model: nn.Module, cache: Cache) -> bool:
    """Whether what a model reads of a text depends on padding, or on the rows beside it.

    Layers of a model's own code choose tokens by place in the cache (blocks of MiniMax M3 and
    DeepSeek V4), and RecurrentGemma's modules keep states that no row can leave.
    """
    brought = (type(layer).__module__.startswith("transformers.models.") for layer in cache.layers)
    return any(brought) or any(hasattr(module, "recurrent_states") for module in model.modules())
