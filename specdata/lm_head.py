"""Last hidden states, the ones that the output embedding (`lm_head`) reads, and logits from them.

This is the one place that reads a model's last hidden state, in two ways that `check_hidden_states`
compares: `hidden_states` runs the model's body alone, for sequences known beforehand (labels, head
training, replay); `capturing_hidden` sees what reaches the output embedding in any forward, whoever
makes it (decoding).

`LMHead` applies the output embedding to chosen states, a few at a time: no (T, V) tensor is made.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from specdata.cache import cache_argument
from specdata.errors import ConfigError
from specdata.models import known_ids

if TYPE_CHECKING:
    from transformers import Cache, PreTrainedModel

LogitTransform = Callable[[Tensor], Tensor]
"""A model's change of the output embedding's result into logits: (..., V) -> (..., V)."""

# Some transforms are only seen at large logits (a soft cap is the identity at small ones).
LARGE_LOGIT = 100.0


def hidden_states(
    model: PreTrainedModel,
    input_ids: Tensor,
    attention_mask: Tensor | None = None,
    *,
    position_ids: Tensor | None = None,
    cache: Cache | None = None,
    trained: bool = False,
) -> Tensor:
    """(B, T) ids -> (B, T, H) last hidden states, after the model consumed the token there.

    Equal to `output_hidden_states=True`'s last entry, without the logits and the other layers, in
    the model's precision. Ids beyond its vocabulary are replaced (`known_ids`).

    Args:
        model: a causal language model.
        input_ids: (B, T).
        attention_mask: (B, T), 1 at tokens, 0 at padding; or (B, 1, T, T), added to the attention's
            scores. Padding on the right needs none.
        position_ids: (B, T), where tokens stand if not one after the other.
        cache: an empty one, without which transformers takes positions that go back for the
            beginnings of other texts.
        trained: whether a gradient reaches the model, where gradients are enabled.
    """
    # Not every model takes these, so they are passed only where they are given.
    options = {"position_ids": position_ids}
    # Not inference_mode: what is trained on the states must be allowed to keep them.
    with torch.set_grad_enabled(trained and torch.is_grad_enabled()):
        body = body_of(model)
        if cache is not None:
            options[cache_argument(body)] = cache
        states: Tensor = body(
            input_ids=known_ids(input_ids, model),
            attention_mask=attention_mask,
            use_cache=False,
            **{name: value for name, value in options.items() if value is not None},
        )[0]
    # The last layer of a model that is spread over devices lies on another than its ids.
    return states.to(input_ids.device)


def width_of_states(model: PreTrainedModel) -> int:
    """H of a model's last hidden states, by a forward: its configuration need not say it."""
    return hidden_states(model, torch.zeros(1, 1, dtype=torch.long, device=model.device)).shape[-1]


def body_of(model: PreTrainedModel) -> nn.Module:
    """A language model without its output embedding."""
    # Llama 4 calls its body another name than the one by which it says that it goes.
    body: nn.Module = model.base_model if model.base_model is not model else model.model
    return body


@contextmanager
def capturing_hidden(model: PreTrainedModel, capture: Callable[[Tensor], object]) -> Iterator[None]:
    """Pass what the output embedding reads to `capture`, in every forward in the `with` block.

    That is (B, rows, H), of the positions that logits are made of.
    """
    embedding: nn.Module | None = model.get_output_embeddings()
    if embedding is None:
        raise ConfigError(f"{type(model).__name__} has no output embedding; pass a causal LM")

    def before_forward(_module: nn.Module, inputs: tuple[Any, ...]) -> None:
        capture(inputs[0])

    hook = embedding.register_forward_pre_hook(before_forward)
    try:
        yield
    finally:
        hook.remove()


@torch.no_grad()
def check_hidden_states(model: PreTrainedModel) -> None:
    """Make sure that `hidden_states` and `capturing_hidden` read the same states of a model."""
    ids = torch.arange(2, device=model.device).unsqueeze(0)
    captured: list[Tensor] = []
    with capturing_hidden(model, captured.append):
        model(input_ids=ids, use_cache=False)
    states = hidden_states(model, ids)
    seen = captured[0].to(states.device)
    if states.shape != seen.shape or not torch.allclose(states, seen, rtol=1e-2, atol=1e-3):
        raise ConfigError(
            f"{type(model).__name__} changes its hidden state before the output embedding, so a "
            "head trained on the last hidden state would not see it in decoding; use another draft"
        )


@dataclass(frozen=True, slots=True)
class LMHead:
    """The way from a model's states to its logits; made by `find_lm_head`.

    Without an `embedding` the states are the logits themselves, and memory grows with length times
    V.
    """

    model: PreTrainedModel
    embedding: nn.Module | None
    logit_transform: LogitTransform
    vocabulary: int

    def states(
        self, ids: Tensor, attention_mask: Tensor | None = None, *, trained: bool = False
    ) -> Tensor:
        """(B, T) ids -> (B, T, H) `hidden_states`, or logits if `embedding` is None."""
        if self.embedding is not None:
            return hidden_states(self.model, ids, attention_mask, trained=trained)
        ids = known_ids(ids, self.model)
        logits: Tensor = self.model(
            input_ids=ids, attention_mask=attention_mask, use_cache=False
        ).logits
        return logits

    def logits(self, states: Tensor) -> Tensor:
        """(..., H) states -> (..., V) logits, equal to the model's own."""
        if self.embedding is None:
            return states
        return self.logit_transform(self.embedding(states).to(states.device))


@torch.inference_mode()
def find_lm_head(model: PreTrainedModel) -> LMHead:
    """Find out how a model makes logits of its last hidden states, by trying.

    Names in configurations do not tell: `logits_scaling` multiplies in one family and divides in
    another. So each known way is compared with the model's own forward, at its logits as they are
    and at large ones. If none agrees, `embedding` is None and logits are the model's own.
    """
    embedding = model.get_output_embeddings()
    size = model.config.get_text_config().vocab_size
    ids = (torch.arange(8, device=model.device) * 7919 % size).unsqueeze(0)
    vocabulary = model(input_ids=ids, use_cache=False).logits.shape[-1]
    if getattr(embedding, "weight", None) is not None:
        states = hidden_states(model, ids)
        width = getattr(embedding, "in_features", embedding.weight.shape[-1])
        if isinstance(states, Tensor) and width == states.shape[-1]:
            for logit_transform in _logit_transforms(model):
                if all(
                    _agrees(model, embedding, logit_transform, ids, large)
                    for large in (False, True)
                ):
                    return LMHead(model, embedding, logit_transform, vocabulary)
    return LMHead(model, None, unchanged, vocabulary)


def _agrees(
    model: PreTrainedModel,
    embedding: nn.Module,
    logit_transform: LogitTransform,
    ids: Tensor,
    large: bool,
) -> bool:
    """True if embedding and transform give the model's own logits, as they are or scaled up."""
    states = hidden_states(model, ids)
    bare = _finite(embedding(states).float())
    factor = LARGE_LOGIT / float(bare.abs().amax().clamp(min=1e-6)) if large else 1.0
    hook = embedding.register_forward_hook(lambda _module, _inputs, output: output * factor)
    try:
        logits = model(input_ids=ids, use_cache=False).logits
        remade = logit_transform(embedding(states)).to(logits.device)
    finally:
        hook.remove()
    if logits.shape != remade.shape or not torch.equal(logits.isneginf(), remade.isneginf()):
        return False
    accuracy = 1e-2 if logits.dtype in (torch.bfloat16, torch.float16) else 1e-4
    logits, remade = _finite(logits.float()), _finite(remade.float())
    return bool((logits - remade).abs().amax() <= accuracy * logits.abs().amax())


def _finite(logits: Tensor) -> Tensor:
    """Logits with 0 where they are -inf, as at tokens that a reduced vocabulary leaves out."""
    return logits.masked_fill(logits.isneginf(), 0.0)


def _logit_transforms(model: PreTrainedModel) -> Iterator[LogitTransform]:
    """The ways that are known; those with a number take it from the model's configuration."""
    yield unchanged
    config = model.config.get_text_config()
    for name in ("final_logit_softcapping", "logits_soft_cap"):
        if cap := getattr(config, name, None):
            yield partial(_capped, cap)  # Gemma 2 and later
    for name in ("logit_scale", "logits_scaling", "lm_head_multiplier"):
        if scale := getattr(config, name, None):
            yield partial(torch.mul, other=scale)  # Cohere, Falcon-H1, HyperCLOVA X
            yield partial(torch.div, other=scale)  # Granite


def unchanged(logits: Tensor) -> Tensor:
    """Give back (..., V) logits, of which nothing is to be made."""
    return logits


def _capped(cap: float, logits: Tensor) -> Tensor:
    return torch.tanh(logits / cap) * cap
