"""The masks of layers that do not see everything: windows and chunks over token positions.

transformers makes a mask for each kind of layer from a rule over the indices of queries and keys,
which it takes for their positions in the text. A node of a draft tree stands at its depth, not at
its place in the KV cache, and the tokens of a batch are in one row. So while a forward runs, the
rules are asked about token positions, and what they allow is cut to what our own mask allows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, AttentionMaskInterface

from eval.runtime.transformers_models import attention_name


class Sight(NamedTuple):
    """The keys that the n tokens of a forward may see of the T in the cache, of B sequences."""

    mask: Tensor  # (B, 1, n, T) additive: what is committed, and their own ancestors
    queries: Tensor  # (B or 1, n) their positions
    keys: Tensor  # (B or 1, T) positions of the tokens in the cache

    def within(self, rule: Callable[..., Tensor]) -> Tensor:
        """The additive mask cut to what a rule of transformers allows."""
        queries, keys = self.queries[:, None, :, None], self.keys[:, None, None, :]
        first = torch.zeros((), dtype=torch.long, device=keys.device)
        allowed = rule(first, first, queries, keys)
        return self.mask.masked_fill(~allowed, torch.finfo(self.mask.dtype).min)


_SIGHT: ContextVar[Sight | None] = ContextVar("what the tokens of a forward see", default=None)


def _mask(original: Callable[..., Any] | None, **options: Any) -> Any:
    """A mask function of transformers' `AttentionMaskInterface`: `original` outside of `seeing`."""
    sight = _SIGHT.get()
    if sight is None and original is not None:
        return original(**options)
    assert sight is not None
    return sight.within(options["mask_function"])


@contextmanager
def seeing(model: PreTrainedModel, sight: Sight) -> Iterator[None]:
    """Inside, the model, which is given no mask, makes those of its layers within a sight."""
    name = attention_name(model)
    known = ALL_MASK_ATTENTION_FUNCTIONS.get(name)
    if getattr(known, "func", None) is not _mask:
        AttentionMaskInterface.register(name, partial(_mask, known))
    # GPT-Neo's windows are rows and columns of a buffer, the last n rows and the first T columns.
    layers = model.modules() if "local" in getattr(model.config, "attention_layers", ()) else ()
    local = [
        layer
        for layer in layers
        if getattr(layer, "attention_type", None) == "local" and hasattr(layer, "bias")
    ]
    buffers = [layer.bias for layer in local]
    for layer in local:
        window = layer.config.window_size
        allowed = sight.keys[:, None, None, :] > sight.queries[:, None, :, None] - window
        above = allowed.shape[-1] - allowed.shape[-2]
        layer.bias = nn.functional.pad(allowed, (0, 0, above, 0), value=True)
    before = _SIGHT.set(sight)
    try:
        yield
    finally:
        _SIGHT.reset(before)
        for layer, buffer in zip(local, buffers, strict=True):
            layer.bias = buffer
