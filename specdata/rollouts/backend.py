"""Completions by a transformers model, in batches, each row with its own uniforms.

Why not `generate`: it has one generator for a batch, so a completion would depend on its
neighbours; and its cache is copied whole for every token, which takes most of the time on a CPU.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer

from specdata.models import end_ids, known_ids
from specdata.prepack import prepacked
from specdata.probability import SamplingConfig, inverse_cdf, probabilities, to_vocabulary
from specdata.seeds import generator_for

# The cache is copied when it is full, and when this share of a batch's rows has ended.
GROWTH = 1.5
LEAVE = 0.25


@dataclass(frozen=True, slots=True)
class Request:
    """A prompt to complete.

    Attributes:
        ids: its T token ids.
        key: what, with the run's seed, decides its randomness: (example id, sample[, turn]).
    """

    ids: list[int]
    key: tuple[str | int, ...]


@dataclass(frozen=True, slots=True)
class Completion:
    """What a prompt was completed with.

    Attributes:
        ids: the new token ids only, at least one.
        finish: "eos" if the last id is an end token, else "length".
    """

    ids: list[int]
    finish: Literal["eos", "length"]


class Backend(Protocol):
    """What completes prompts: a model in this process or a server."""

    def complete(self, requests: Sequence[Request]) -> list[Completion]:
        """Return one completion for each request, in their order.

        A completion must not depend on the other requests, except through rounding.
        """


@dataclass(frozen=True, slots=True)
class TransformersBackend:
    """Batches of similar length on the model's device.

    Args:
        model: the target.
        sampling: the sampler of every token.
        max_new_tokens: longest completion, in tokens.
        batch_size: rows decoded together.
        seed: the run's seed.
    """

    model: PreTrainedModel
    sampling: SamplingConfig
    max_new_tokens: int
    batch_size: int
    seed: int

    def complete(self, requests: Sequence[Request]) -> list[Completion]:
        """See `Backend`. The same requests always make the same batches, hence the same bits."""
        order = sorted(range(len(requests)), key=lambda index: len(requests[index].ids))
        completions: dict[int, list[int]] = {}
        with prepacked(self.model):
            for start in range(0, len(order), self.batch_size):
                batch = order[start : start + self.batch_size]
                rows = [requests[index] for index in batch]
                uniforms = torch.stack([self._uniforms(row) for row in rows])
                ids = sample_batch(self.model, [row.ids for row in rows], uniforms, self.sampling)
                completions.update(zip(batch, ids, strict=True))
        ends = end_ids(self.model)
        return [
            Completion(ids, "eos" if ids[-1] in ends else "length")
            for _, ids in sorted(completions.items())
        ]

    def _uniforms(self, request: Request) -> Tensor:
        generator = generator_for(self.seed, "rollout", *request.key)
        return torch.rand(self.max_new_tokens, generator=generator, dtype=torch.float64)


@torch.inference_mode()
def sample_batch(
    model: PreTrainedModel,
    prompts: Sequence[Sequence[int]],
    uniforms: Tensor | Sequence[Tensor],
    sampling: SamplingConfig,
    *,
    ends: Collection[int] | None = None,
    vocabulary: int | None = None,
) -> list[list[int]]:
    """Sample a batch by inverse CDF, so that a row depends on its own uniforms alone.

    Rows that have ended leave the batch, a quarter of it at a time.

    Args:
        model: the language model.
        prompts: B prompts of any lengths (padded on the left here).
        uniforms: B rows in [0, 1), one for each token that may be drawn: at least one a row.
        sampling: the sampler of every token.
        ends: token ids that end a completion (default: the model's own).
        vocabulary: ids from here on are never drawn (default: the model's own vocabulary).

    Returns:
        B completions as token ids; one that ended before its uniforms did has an end token last.
    """
    width = max(map(len, prompts))
    ids = torch.tensor([[0] * (width - len(row)) + list(row) for row in prompts])
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in prompts])
    lengths = torch.tensor([len(row) for row in uniforms]).to(model.device)
    uniforms = pad_sequence(list(uniforms), batch_first=True).to(model.device)
    ids, mask = ids.to(model.device), mask.to(model.device)
    ended_by = torch.tensor(
        sorted(end_ids(model) if ends is None else ends), dtype=torch.long, device=model.device
    )
    positions = (mask.cumsum(dim=1) - 1).clamp(min=0)
    cache = growing_cache(model)
    drawn: list[list[int]] = [[] for _ in prompts]
    rows = list(range(len(prompts)))  # row of the batch -> prompt
    alive = torch.ones(len(rows), dtype=torch.bool, device=model.device)
    for step in range(uniforms.shape[1]):
        logits = model(
            input_ids=known_ids(ids, model),
            attention_mask=mask,
            position_ids=positions,
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        ).logits[:, -1]
        logits = to_vocabulary(logits, vocabulary or logits.shape[-1])
        token = inverse_cdf(probabilities(logits, sampling), uniforms[:, step])
        for row, new, going in zip(rows, token.tolist(), alive.tolist(), strict=True):
            if going:
                drawn[row].append(new)
        alive = alive & ~torch.isin(token, ended_by) & (step + 1 < lengths)
        # Rows that have ended stay where they are: the model may have no position beyond.
        ids, positions = token.unsqueeze(1), positions[:, -1:] + alive.unsqueeze(1)
        mask = torch.cat([mask, torch.ones_like(ids)], dim=1)
        left = int(alive.sum())
        if left == 0:
            break
        if left <= (1 - LEAVE) * len(rows):
            keep = alive.nonzero().squeeze(1)
            cache.batch_select_indices(keep)
            ids, positions, mask, uniforms, lengths, alive = (
                part[keep] for part in (ids, positions, mask, uniforms, lengths, alive)
            )
            rows = [rows[index] for index in keep.tolist()]
    return drawn


def growing_cache(model: PreTrainedModel) -> DynamicCache:
    """A `DynamicCache` whose plain layers reserve memory for the next tokens; others stay."""
    cache = DynamicCache(config=model.config)
    cache.layers = [
        GrowingLayer() if type(layer) is DynamicLayer else layer for layer in cache.layers
    ]
    return cache


class GrowingLayer(DynamicLayer):  # type: ignore[misc]  # transformers is not typed
    """A layer that writes new keys and values into memory it already has.

    `DynamicLayer` concatenates, which copies (and, on a CPU, maps and faults in) all of it for
    every token. `keys` and `values` are views of the part in use.
    """

    def __init__(self) -> None:
        super().__init__()
        self._room: tuple[Tensor, ...] = ()

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Append (B, heads, T, size) and return everything so far."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        begin = self.get_seq_length()
        end = begin + key_states.shape[-2]
        if not self._room or end > self._room[0].shape[-2]:
            self._make_room(begin, int(GROWTH * end) + 1, (key_states, value_states))
        for room, new in zip(self._room, (key_states, value_states), strict=True):
            room[..., begin:end, :] = new
        self.keys, self.values = (room[..., :end, :] for room in self._room)
        return self.keys, self.values

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep the rows of the batch whose indices (n,) are given."""
        if self._room:
            end = self.get_seq_length()
            self._room = tuple(room[indices] for room in self._room)
            self.keys, self.values = (room[..., :end, :] for room in self._room)

    def _make_room(self, used: int, size: int, like: tuple[Tensor, Tensor]) -> None:
        old = (self.keys, self.values)
        self._room = tuple(
            part.new_empty((*part.shape[:-2], size, part.shape[-1])) for part in like
        )
        if used:
            for room, part in zip(self._room, old, strict=True):
                room[..., :used, :] = part
