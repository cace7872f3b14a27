"""A model's logits at chosen positions, a few at a time: no (T, V) tensor is ever made.

The body runs once and gives hidden states (T, H); the output embedding is applied in pieces.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from specdata.models import known_ids

LogitTransform = Callable[[Tensor], Tensor]

# Some distributions are only seen to differ at large logits (a soft cap is the identity at small ones).
LARGE = 100.0


@dataclass(frozen=True, slots=True)
class LMHead:
    """How to get logits from a model's states; made by `readout`.

    Attributes:
        model: the language model.
        embedding: its output embedding, or None: then the states are the logits themselves, and
            memory grows with the length times V.
        logit_transform: what the model does to the embedding's output.
        vocabulary: V, the number of logits.
    """

    model: PreTrainedModel
    embedding: nn.Module | None
    logit_transform: LogitTransform
    vocabulary: int

    def states(self, ids: Tensor) -> Tensor:
        """(B, T) ids, padded on the right -> (B, T, H) states, or logits if nothing is chunked.

        Padding on the right needs no mask: a causal model reads nothing to the right.
        """
        ids = known_ids(ids, self.model)
        if self.embedding is None:
            logits: Tensor = self.model(input_ids=ids, use_cache=False).logits
            return logits
        return _hidden(self.model, ids)

    def logits(self, states: Tensor) -> Tensor:
        """(N, H) states -> (N, V) logits, equal to the model's own."""
        return states if self.embedding is None else self.logit_transform(self.embedding(states))


@torch.inference_mode()
def find_lm_head(model: PreTrainedModel) -> LMHead:
    """Find out how a model makes logits of its last hidden states, by trying.

    Names in configurations do not tell: `logits_scaling` multiplies in one family and divides in
    another. So each known way is compared with the model's own forward, at its logits as they are
    and at large ones. If none agrees, the result is not chunked.
    """
    embedding = model.get_output_embeddings()
    size = model.config.get_text_config().vocab_size
    ids = (torch.arange(8, device=model.device) * 7919 % size).unsqueeze(0)
    vocabulary = model(input_ids=ids, use_cache=False).logits.shape[-1]
    if embedding is not None and _fits(embedding, _hidden(model, ids)):
        for logit_transform in _logit_transforms(model):
            if all(
                _agrees(model, embedding, logit_transform, ids, large) for large in (False, True)
            ):
                return LMHead(model, embedding, logit_transform, vocabulary)
    return LMHead(model, None, _same, vocabulary)


def _hidden(model: PreTrainedModel, ids: Tensor) -> Tensor:
    states: Tensor = model.base_model(input_ids=ids, use_cache=False)[0]
    return states


def _fits(embedding: nn.Module, states: Any) -> bool:
    weight = getattr(embedding, "weight", None)
    return (
        isinstance(states, Tensor) and weight is not None and weight.shape[-1] == states.shape[-1]
    )


def _agrees(
    model: PreTrainedModel,
    embedding: nn.Module,
    logit_transform: LogitTransform,
    ids: Tensor,
    large: bool,
) -> bool:
    """Whether embedding and logit_transform give the model's own logits, as they are or scaled up."""
    states = _hidden(model, ids)
    factor = LARGE / float(embedding(states).float().abs().amax().clamp(min=1e-6)) if large else 1.0
    with _scaled(embedding, factor):
        own = model(input_ids=ids, use_cache=False).logits
        ours = logit_transform(embedding(states))
    if own.shape != ours.shape:
        return False
    accuracy = 1e-2 if own.dtype in (torch.bfloat16, torch.float16) else 1e-4
    own, ours = own.float(), ours.float()
    return bool((own - ours).abs().amax() <= accuracy * own.abs().amax())


@contextmanager
def _scaled(embedding: nn.Module, factor: float) -> Iterator[None]:
    hook = embedding.register_forward_hook(lambda _module, _inputs, output: output * factor)
    try:
        yield
    finally:
        hook.remove()


def _logit_transforms(model: PreTrainedModel) -> Iterator[LogitTransform]:
    """The ways that are known; those with a number take it from the model's configuration."""
    yield _same
    config = model.config.get_text_config()
    for name in ("final_logit_softcapping", "logits_soft_cap"):
        if cap := getattr(config, name, None):
            yield partial(_capped, cap)  # Gemma 2 and later
    for name in ("logit_scale", "logits_scaling", "lm_head_multiplier"):
        if scale := getattr(config, name, None):
            yield partial(_times, scale)  # Cohere, Falcon-H1, HyperCLOVA X
            yield partial(_over, scale)  # Granite


def _same(logits: Tensor) -> Tensor:
    return logits


def _capped(cap: float, logits: Tensor) -> Tensor:
    return torch.tanh(logits / cap) * cap


def _times(scale: float, logits: Tensor) -> Tensor:
    return logits * scale


def _over(scale: float, logits: Tensor) -> Tensor:
    return logits / scale
