"""A causal language model with a key-value cache that can be rewound, along a text or a tree."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from specdata.errors import CacheNotRewindableError
from specdata.models import known_ids
from specdata.probability import SamplingConfig, probabilities, to_vocabulary


class CachedModel:
    """Feeds one sequence to a model, piece by piece, and returns laws.

    After a committed text the cache may hold nodes of one draft tree, which `keep` reduces to the
    accepted path. Nodes are numbered from 1 in the order they are fed; 0 is the text's last token.

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
        self._padded = model.config.get_text_config().vocab_size < vocabulary
        self.reset()
        for layer in self._cache.layers:
            if layer.is_sliding or not layer.is_croppable:
                raise CacheNotRewindableError(
                    f"{model.config.model_type} keeps a cache from which rejected tokens cannot be "
                    "removed (a sliding window, for example); speculative decoding needs one that "
                    "can be cropped"
                )

    @property
    def length(self) -> int:
        """Tokens of the text in the cache."""
        return int(self._cache.get_seq_length()) - len(self._depths)

    def reset(self) -> None:
        """Forget the sequence."""
        self._cache = DynamicCache(config=self.model.config)
        self._depths: list[int] = []  # of the nodes in the cache
        self._ancestors = torch.zeros(0, 0, dtype=torch.bool)
        self.state = None

    def feed(self, tokens: list[int], rows: int) -> Tensor:
        """Append tokens to the text; return the laws after the last `rows` of them: (rows, V)."""
        return self.law(self._forward(tokens, rows))

    def feed_logits(self, tokens: list[int]) -> Tensor:
        """Append tokens to the text; return the logits after the last of them: (1, V)."""
        return self._forward(tokens, 1)

    def law(self, logits: Tensor, sampling: SamplingConfig | None = None) -> Tensor:
        """Laws (..., V) of logits, by default under the model's own sampler."""
        return probabilities(logits, sampling or self._sampling)

    def grow(self, tokens: list[int], parents: list[int], text: list[int] | None = None) -> Tensor:
        """Append nodes of a draft tree, each of which sees the text and its own ancestors only.

        Tree attention (Miao et al. 2023, SpecInfer; Yang et al. 2024, MCSD): one forward with a
        four-dimensional mask, and the depth of a node as its position.

        Args:
            tokens: n tokens.
            parents: the node that each follows: 0 for the text's last token.
            text: tokens of the text that come first, if the tree is fed at once.

        Returns:
            Logits after the nodes, (n, V); with `text`, after its last token too, (n + 1, V).
        """
        text = text or []
        old = len(self._depths)
        base = self.length + len(text)
        for parent in parents:
            self._depths.append(1 + (self._depths[parent - 1] if parent else 0))
        self._ancestors = _extended(self._ancestors, parents)
        sees = torch.zeros(len(text) + len(tokens), base + len(self._depths), dtype=torch.bool)
        for row in range(len(text)):
            sees[row, : base - len(text) + row + 1] = True
        sees[len(text) :, :base] = True
        sees[len(text) :, base:] = self._ancestors[old:]
        positions = [base - len(text) + row for row in range(len(text))]
        positions += [base - 1 + depth for depth in self._depths[old:]]
        device, dtype = self.model.device, self.model.dtype
        hidden = torch.zeros(sees.shape, dtype=dtype).masked_fill(~sees, torch.finfo(dtype).min)
        return self._forward(
            [*text, *tokens],
            len(tokens) + bool(text),
            attention_mask=hidden[None, None].to(device),
            position_ids=torch.tensor([positions], device=device),
        )

    def rewind(self, length: int) -> None:
        """Keep the first `length` tokens of the text, and no nodes."""
        self.keep([])
        self._drop(self.length - length)

    def keep(self, nodes: list[int]) -> None:
        """Make a path of nodes from the root part of the text and drop the others.

        Nodes that were never fed (the last level of a draft) may be named; they are left out.
        """
        count, base = len(self._depths), self.length
        present = [node for node in nodes if node <= count]
        self._depths, self._ancestors = [], torch.zeros(0, 0, dtype=torch.bool)
        if present != list(range(1, len(present) + 1)):
            index = torch.tensor([base + node - 1 for node in present], device=self.model.device)
            for layer in self._cache.layers:
                for states in (layer.keys, layer.values):
                    # Right of the text, moved together; what is left over is cropped below.
                    states[..., base : base + len(present), :] = states[..., index, :]
        self._drop(count - len(present))

    def _drop(self, surplus: int) -> None:
        if surplus > 0:
            self._cache.crop(-surplus)

    def _forward(self, tokens: list[int], rows: int, **places: Tensor) -> Tensor:
        self.forwards += 1
        ids = torch.tensor([tokens], device=self.model.device)
        out = self.model(
            input_ids=known_ids(ids, self.model) if self._padded else ids,
            past_key_values=self._cache,
            use_cache=True,
            logits_to_keep=rows,
            **places,
        )
        return to_vocabulary(out.logits[0], self._vocabulary)


class WatchedModel(CachedModel):
    """A `CachedModel` that also keeps the state which the last law was computed from.

    `state` is (H,), the input of the output embedding (after the final norm) at the last token
    fed: what a SpecDec++ acceptance head reads.
    """

    def feed(self, tokens: list[int], rows: int) -> Tensor:
        """As `CachedModel.feed`; sets `state`."""
        embedding: torch.nn.Module = self.model.get_output_embeddings()
        # Hooked only while feeding: decoders that share a model must not slow each other down.
        hook = embedding.register_forward_pre_hook(self._keep_state)
        try:
            return super().feed(tokens, rows)
        finally:
            hook.remove()

    def _keep_state(self, _module: torch.nn.Module, args: tuple[Tensor, ...]) -> None:
        self.state = args[0][0, -1]


def _extended(ancestors: Tensor, parents: list[int]) -> Tensor:
    """Ancestor-or-self matrix (n, n) with a row and a column for each further node."""
    old = len(ancestors)
    whole = torch.eye(old + len(parents), dtype=torch.bool)
    whole[:old, :old] = ancestors
    for index, parent in enumerate(parents):
        if parent:
            whole[old + index] |= whole[parent - 1]
    return whole
