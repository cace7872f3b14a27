"""Completions by a transformers model, in batches, each row with its own uniforms.

Why not `generate`: it has one generator for a batch, so a completion would depend on its
neighbours; and its cache is copied whole for every token, which takes most of the time on a CPU.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Literal, Protocol

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer

from specdata.cache import cache_argument, counts_tokens, reads_rows_alone
from specdata.config import checked_taps
from specdata.drafts.taps import capturing_taps, decoder_layers
from specdata.errors import NotFiniteError
from specdata.lm_head import capturing_hidden
from specdata.models import check_ids, end_ids, known_ids
from specdata.prepack import prepacked
from specdata.probability import NO_TOKEN, SamplingConfig, drawn_tokens, to_vocabulary
from specdata.sampling import generator_for
from specdata.target_states import check_keepable
from specdata.threads import threads_of

# The cache is copied when it is full, and when this share of a batch's rows has ended.
GROWTH = 1.5
LEAVE = 0.25
# Tokens of the prompts that are read together, padding included, and how many that all begin with
# are worth a forward of their own.
PROMPT_TOKENS = {"cpu": 1024, "cuda": 16384}
FEWEST_SHARED = 8
Report = Callable[[int], object]
"""Told how many completions have ended since it was last called."""


@dataclass(frozen=True, slots=True)
class Request:
    """A prompt to complete: its T token ids.

    The key decides its randomness, with the run's seed: (example id, sample[, turn]).
    """

    ids: list[int]
    key: tuple[str | int, ...]


@dataclass(frozen=True, slots=True)
class Completion:
    """The completion of a prompt.

    Attributes:
        ids: the new token ids only, at least one.
        finish: "eos" if the last id is an end token, else "length".
        states: (C, H) last hidden states that the tokens were drawn from, if they were asked for.
        taps: numbers of taps, and these at every token that was read, (P + C - 1, F), if asked for.
    """

    ids: list[int]
    finish: Literal["eos", "length"]
    states: Tensor | None = None
    taps: tuple[list[int], Tensor] | None = None


class Backend(Protocol):
    """A completer of prompts: a model in this process or a server."""

    def complete(
        self, requests: Sequence[Request], report: Report = lambda ended: None
    ) -> list[Completion]:
        """One completion a request, in order, independent of other requests but for rounding."""


@dataclass(slots=True)
class TransformersBackend:
    """Batches of similar length on the model's device, whose weights stay as they are.

    Raises ConfigError with `store_states` for a model whose states do not make its logits, and for
    taps (`specdata.drafts.taps`) that it does not have.
    """

    model: PreTrainedModel
    sampling: SamplingConfig
    max_new_tokens: int
    batch_size: int
    seed: int
    store_states: bool = False
    store_taps: Sequence[int] = ()
    _by_copies: prepacked = field(init=False)

    def __post_init__(self) -> None:
        """Find out now rather than after hours of sampling."""
        if self.store_states:
            check_keepable(self.model)
        if self.store_taps:
            checked_taps(self.store_taps, len(decoder_layers(self.model)[1]))
        self._by_copies = prepacked(self.model)

    def complete(
        self, requests: Sequence[Request], report: Report = lambda ended: None
    ) -> list[Completion]:
        """Complete in batches; the same requests always make the same ones, hence the same bits."""
        vocabulary = self.model.config.get_text_config().vocab_size
        for each in requests:
            check_ids(vocabulary, min(each.ids), max(each.ids))
        order = sorted(range(len(requests)), key=lambda index: len(requests[index].ids))
        ends, completions = end_ids(self.model.generation_config), dict[int, Completion]()
        with self._by_copies:
            for start in range(0, len(order), self.batch_size):
                batch = order[start : start + self.batch_size]
                rows = [requests[index] for index in batch]
                generators = (generator_for(self.seed, "rollout", *row.key) for row in rows)
                uniforms = [
                    torch.rand(self.max_new_tokens, generator=each, dtype=torch.float64)
                    for each in generators
                ]
                states: list[list[Tensor]] = [[] for _ in rows]
                taps: list[list[Tensor]] = [[] for _ in rows]
                drawn = sample_batch(
                    self.model,
                    [row.ids for row in rows],
                    uniforms,
                    self.sampling,
                    states=states if self.store_states else None,
                    taps=(self.store_taps, taps) if self.store_taps else None,
                    report=report,
                )
                for row, (index, ids) in enumerate(zip(batch, drawn, strict=True)):
                    completions[index] = Completion(
                        ids,
                        "eos" if ids[-1] in ends else "length",
                        torch.stack(states[row]) if self.store_states else None,
                        ([*self.store_taps], torch.cat(taps[row])) if self.store_taps else None,
                    )
        return [completions[index] for index in range(len(requests))]


@torch.inference_mode()
def sample_batch(
    model: PreTrainedModel,
    prompts: Sequence[Sequence[int]],
    uniforms: Sequence[Tensor],
    sampling: SamplingConfig,
    *,
    ends: Collection[int] | None = None,
    vocabulary: int | None = None,
    states: list[list[Tensor]] | None = None,
    taps: tuple[Sequence[int], list[list[Tensor]]] | None = None,
    report: Report = lambda ended: None,
) -> list[list[int]]:
    """Sample a batch by inverse CDF, so that a row depends on its own uniforms alone.

    Rows that have ended leave the batch, a quarter of it at a time. Prompts go one by one where
    padding, or another row, would change what a row reads. Returns B completions as token ids; one
    that ended before its uniforms did has an end token last.

    Args:
        model: the language model.
        prompts: B prompts of any lengths (padded on the left here).
        uniforms: B rows in [0, 1), one for each token that may be drawn: at least one a row.
        sampling: the sampler of every token.
        ends: token ids that end a completion (default: the model's own).
        vocabulary: ids from here on are never drawn (default: the model's own vocabulary).
        states: B lists, to which the (H,) last hidden state of each drawn token is added, on the
            CPU.
        taps: which (`specdata.drafts.taps`), and B lists, to which those of the prompt (P, F) and
            of each token that is read after it (1, F) are added, on the CPU.
        report: called after each token of the batch.
    """
    cache = growing_cache(model)
    if len(prompts) > 1 and reads_rows_alone(model, cache):
        return [
            sample_batch(
                model,
                [prompt],
                uniforms[row : row + 1],
                sampling,
                ends=ends,
                vocabulary=vocabulary,
                states=states and [states[row]],
                taps=taps and (taps[0], [taps[1][row]]),
                report=report,
            )[0]
            for row, prompt in enumerate(prompts)
        ]
    limits = [len(row) for row in uniforms]
    lengths = torch.tensor(limits).to(model.device)
    drawn_by = pad_sequence(list(uniforms), batch_first=True).to(model.device)
    ends = end_ids(model.generation_config) if ends is None else ends
    ended_by = torch.tensor(sorted(ends), dtype=torch.long, device=model.device)
    seen: list[Tensor] = []
    tapped: list[Tensor] = []
    tap_ids, taps_of = taps or ((), [])
    with (
        nullcontext() if states is None else capturing_hidden(model, seen.append),
        capturing_taps(model, tap_ids, tapped.append),
    ):
        threads = threads_of("rollouts", model.device)
        threads.begin(is_unit=False)
        logits, mask = read_prompts(model, prompts, cache)
        threads.end()
        for row_taps, prompt in zip(taps_of, _of_prompts(tapped, prompts), strict=bool(taps_of)):
            row_taps.append(prompt)
        positions = mask.sum(dim=1, keepdim=True) - 1
        drawn: list[list[int]] = [[] for _ in prompts]
        rows = list(range(len(prompts)))  # row of the batch -> prompt
        alive = torch.ones(len(rows), dtype=torch.bool, device=model.device)
        for step in threads.units(range(drawn_by.shape[1])):
            logits = to_vocabulary(logits, vocabulary or logits.shape[-1])
            token = drawn_tokens(logits, sampling, drawn_by[:, step])
            going = {row for row, is_alive in zip(rows, alive.tolist(), strict=True) if is_alive}
            for row, new in zip(rows, token.tolist(), strict=True):
                if new == NO_TOKEN:
                    raise NotFiniteError(model.config.name_or_path)
                if row in going:
                    drawn[row].append(new)
            if states is not None:
                # What all prompts begin with was read first, by itself; the rows come after it.
                read = torch.cat([each[:, -1] for each in seen])[-len(rows) :].cpu()
                seen.clear()
                for row, state in zip(rows, read, strict=True):
                    if row in going:
                        states[row].append(state)
            alive = alive & ~torch.isin(token, ended_by) & (step + 1 < lengths)
            left = int(alive.sum())
            report(len(going) - left)
            if left == 0:
                break
            # Rows that have ended stay where they are: the model may have no position beyond.
            ids, positions = token.unsqueeze(1), positions + alive.unsqueeze(1)
            mask = torch.cat([mask, torch.ones_like(ids)], dim=1)
            if left <= (1 - LEAVE) * len(rows):
                keep = alive.nonzero().squeeze(1)
                cache.reorder_cache(keep)
                ids, positions, mask, drawn_by, lengths, alive = (
                    part[keep] for part in (ids, positions, mask, drawn_by, lengths, alive)
                )
                rows = [rows[index] for index in keep.tolist()]
            logits = _forward(model, ids, mask, positions, cache)
            if taps_of:
                for row, is_read, read in zip(
                    rows, alive.tolist(), tapped.pop().cpu(), strict=True
                ):
                    if is_read:
                        taps_of[row].append(read)
    return drawn


def _of_prompts(tapped: list[Tensor], prompts: Sequence[Sequence[int]]) -> Iterator[Tensor]:
    """(P, F) taps of each prompt, of the forwards of `read_prompts`, which are forgotten."""
    shared: list[Tensor] = []
    if sum(map(len, tapped)) > len(prompts):
        shared = [tapped.pop(0)[0].cpu()]  # what all begin with
    rows = [row for each in tapped for row in each.cpu()]
    tapped.clear()
    before = len(shared[0]) if shared else 0
    for row, prompt in zip(rows, prompts, strict=False):
        yield torch.cat([*shared, row[len(row) - (len(prompt) - before) :]])


def read_prompts(
    model: PreTrainedModel, prompts: Sequence[Sequence[int]], cache: DynamicCache
) -> tuple[Tensor, Tensor]:
    """Fill an empty cache of `growing_cache` with B prompts, and return what follows them.

    What all prompts begin with, as chat templates do, is read once, and the rest a few prompts at a
    time, so that those of like length, which should stand together, are padded little. Models with
    other layers than plain ones in their cache read everything at once. Returns logits after each
    prompt (B, V), and a mask (B, length), 1 where the cache holds a token and 0 at padding.
    """
    plain = all(type(layer) is GrowingLayer for layer in cache.layers)
    shared = _shared_length(prompts) if plain else 0
    beginning = growing_cache(model)
    if shared:
        ids = torch.tensor([prompts[0][:shared]], device=model.device)
        mask = torch.ones_like(ids)
        _forward(model, ids, mask, mask.cumsum(dim=1) - 1, beginning)
    rest = [list(prompt[shared:]) for prompt in prompts]
    width = max(map(len, rest))
    most = PROMPT_TOKENS.get(model.device.type, PROMPT_TOKENS["cpu"])
    at_once = max(1, most // width) if plain else len(rest)
    logits: list[Tensor] = []
    masks: list[Tensor] = []
    parts: list[tuple[DynamicCache, int]] = []  # with what each is padded to the widest
    for start in range(0, len(rest), at_once):
        rows = [torch.tensor(row) for row in rest[start : start + at_once]]
        ones = [torch.ones_like(row) for row in rows]
        ids, mask = (
            pad_sequence(each, batch_first=True, padding_side="left").to(model.device)
            for each in (rows, ones)
        )
        longest, mask = ids.shape[1], nn.functional.pad(mask, (shared, 0), value=1)
        positions = (mask.cumsum(dim=1) - 1).clamp(min=0)[:, shared:]
        part = cache if at_once >= len(rest) else growing_cache(model)
        if shared:
            for layer, begun in zip(part.layers, beginning.layers, strict=True):
                like = (len(rows), -1, -1, -1)
                layer.update(begun.keys.expand(like), begun.values.expand(like))
        logits.append(_forward(model, ids, mask, positions, part))
        masks.append(_padded(mask.unsqueeze(-1), shared, width - longest).squeeze(-1))
        if part is not cache:
            parts.append((part, width - longest))
    for index, layer in enumerate(cache.layers if parts else ()):
        pieces = [(part.layers[index], padding) for part, padding in parts]
        keys = torch.cat([_padded(piece.keys, shared, padding) for piece, padding in pieces])
        values = torch.cat([_padded(piece.values, shared, padding) for piece, padding in pieces])
        layer.update(keys, values)
        for part, _ in parts:  # no more than one layer is held twice
            part.layers[index] = DynamicLayer()
    return torch.cat(logits), torch.cat(masks)


def _shared_length(prompts: Sequence[Sequence[int]]) -> int:
    """The number of tokens all prompts begin with, at least one token left to each; 0 for few."""
    first, last = min(map(list, prompts)), max(map(list, prompts))  # all others lie between them
    most = min(map(len, prompts)) - 1
    unlike = (place for place in range(most) if first[place] != last[place])
    shared = next(unlike, most) if len(prompts) > 1 else 0
    return shared if shared >= FEWEST_SHARED else 0


def _padded(part: Tensor, shared: int, padding: int) -> Tensor:
    """(..., n, size) with zeros after the first `shared` of n: (..., n + padding, size)."""
    if not padding:
        return part
    zeros = part.new_zeros(*part.shape[:-2], padding, part.shape[-1])
    return torch.cat([part[..., :shared, :], zeros, part[..., shared:, :]], dim=-2)


def _forward(
    model: PreTrainedModel, ids: Tensor, mask: Tensor, positions: Tensor, cache: DynamicCache
) -> Tensor:
    """Logits (B, V) after the last of the new tokens (B, n), which the cache then holds."""
    if not counts_tokens(cache):  # recurrent states alone: no token before can be hidden
        mask = mask[:, -ids.shape[1] :]
    logits: Tensor = model(
        input_ids=known_ids(ids, model),
        attention_mask=mask,
        position_ids=positions,
        use_cache=True,
        logits_to_keep=1,
        **{cache_argument(model): cache},
    ).logits[:, -1]
    return logits


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

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Keep the rows of the batch whose indices (n,) are given."""
        if self._room:
            end = self.get_seq_length()
            self._room = tuple(room[beam_idx.to(room.device)] for room in self._room)
            self.keys, self.values = (room[..., :end, :] for room in self._room)

    def _make_room(self, used: int, size: int, like: tuple[Tensor, Tensor]) -> None:
        old = (self.keys, self.values)
        self._room = tuple(
            part.new_empty((*part.shape[:-2], size, part.shape[-1])) for part in like
        )
        if used:
            for room, part in zip(self._room, old, strict=True):
                room[..., :used, :] = part
