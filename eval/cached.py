"""A causal language model with a key-value cache that can be rewound."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from specdata.errors import CacheNotRewindableError
from specdata.probability import SamplingConfig, probabilities, to_vocabulary


class CachedModel:
    """Feeds one sequence to a model, piece by piece, and returns laws.

    Args:
        model: a transformers causal LM, in eval mode.
        sampling: the warp from logits to laws, the same for target and draft.
        vocabulary: V of the laws: the target's.

    Raises:
        CacheNotRewindableError: if the model's cache cannot drop tokens (sliding windows, states).
    """

    def __init__(self, model: PreTrainedModel, sampling: SamplingConfig, vocabulary: int) -> None:
        self.model: Any = model
        self.forwards = 0
        self.state: Tensor | None = None
        self._sampling = sampling
        self._vocabulary = vocabulary
        self._own = model.config.get_text_config().vocab_size
        self._cache = DynamicCache(config=model.config)
        for layer in self._cache.layers:
            if layer.is_sliding:
                raise CacheNotRewindableError(
                    f"{model.config.model_type} keeps a sliding window, from which rejected tokens "
                    "cannot be removed; speculative decoding needs a cache that can be cropped"
                )

    @property
    def length(self) -> int:
        """Tokens in the cache."""
        return int(self._cache.get_seq_length())

    def reset(self) -> None:
        """Forget the sequence."""
        self._cache = DynamicCache(config=self.model.config)
        self.state = None

    def feed(self, tokens: list[int], rows: int) -> Tensor:
        """Append tokens and return the laws after the last `rows` of them: (rows, V)."""
        # A draft with a smaller matrix reads a stand-in for ids that only the target has: a worse
        # guess follows, never another law of the output.
        known = [token if token < self._own else 0 for token in tokens]
        ids = torch.tensor([known], device=self.model.device)
        self.forwards += 1
        out = self.model(
            input_ids=ids, past_key_values=self._cache, use_cache=True, logits_to_keep=rows
        )
        logits = to_vocabulary(out.logits[0], self._vocabulary)
        return probabilities(logits, self._sampling)

    def rewind(self, length: int) -> None:
        """Keep the first `length` tokens only."""
        surplus = self.length - length
        if surplus > 0:
            self._cache.crop(-surplus)


class WatchedModel(CachedModel):
    """A `CachedModel` that also keeps the state which the last law was computed from.

    `state` is (H,), the input of the output embedding (after the final norm) at the last token
    fed: what a SpecDec++ acceptance head reads.
    """

    def feed(self, tokens: list[int], rows: int) -> Tensor:
        """As `CachedModel.feed`; sets `state`."""
        embedding: torch.nn.Module = self.model.get_output_embeddings()
        # Hooked only while feeding: decoders that share a model must not slow each other down.
        hook = embedding.register_forward_pre_hook(self._keep)
        try:
            return super().feed(tokens, rows)
        finally:
            hook.remove()

    def _keep(self, _module: torch.nn.Module, args: tuple[Tensor, ...]) -> None:
        self.state = args[0][0, -1]
