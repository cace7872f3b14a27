"""A causal language model with a KV cache, which reads tokens of one sequence or of several."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel

from eval.runtime.engines import Engine, engine_on
from eval.runtime.graphs import (
    CaptureError,
    EagerWarning,
    ForwardGraphs,
    Map,
    run_model,
    shared_graphs,
)
from eval.runtime.kv_cache import KVCache, Places
from eval.runtime.layout import TokenLayout, pack, positions_of
from eval.runtime.masks import Sight
from eval.runtime.recurrent import keeping_states
from eval.runtime.transformers_models import Traits, attending_packed, takes_graphs
from specdata.drafts.states_network import token_embedding
from specdata.models import known_ids
from specdata.probability import SamplingConfig, probabilities

# Forwards of more tokens are prompts, for which a mask would cost more than a graph saves.
LONGEST_GRAPH_FORWARD = 256
# Tokens of a longer text that are read at a time: a mask has a row for each of them.
PIECE = 512


@dataclass(frozen=True, slots=True)
class ForwardPart:
    """The n tokens of one sequence in a forward."""

    slot: int  # of the KV cache
    layout: TokenLayout  # where they go, behind what the slot holds
    inputs: Tensor  # (n,) ids, or (n, H) what stands for them
    logits_to_keep: int  # logits are needed after this many of the last ones
    drafted: int = 0  # of a chain, this many of the last ones are not committed
    first: int = 0  # they attend to cache positions from this on, as far as themselves


class Outputs(NamedTuple):
    """The outputs of a model for the tokens of a forward, one dimension of rows before each."""

    logits: Tensor  # (B, logits_to_keep or more, V') after the last of them
    hidden: Tensor | None = None  # (B, as many, H) what the lm_head read there, if captured
    taps: Tensor | None = None  # (B, n, F) at all of them, if captured; see `specdata.drafts.taps`

    def of(self, columns: slice, keep: int) -> Outputs:
        """Those at some columns of a single row, of which logits after the last `keep` alone.

        Columns are counted among all tokens, of which there must be as many logits.
        """
        logits, hidden, taps = (None if each is None else each[0, columns] for each in self)
        assert logits is not None
        return Outputs(logits[-keep:], None if hidden is None else hidden[-keep:], taps)


class CachedModel:
    """A model and the KV cache of the sequences that it reads.

    Args:
        model: a transformers causal LM, in eval mode.
        vocabulary: V of the logits: the target's.
        capture_hidden: also give what the lm_head reads (after the final norm) where logits are
            asked for, and the input embeddings of tokens, for acceptance heads. Always of a draft
            that reads its own states, too.
        taps: give these states of all tokens, for such a draft.
        deepest: the most tokens of a path that it drafts, by default any number. No more masks are
            read than that takes (`specdata.drafts.depths`); with 1 none, as by a target.

    Raises:
        CacheNotRewindableError: if tokens cannot be dropped from the model's cache.
        ConfigError: if its forward takes no positions, or the engine cannot run it.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        vocabulary: int,
        *,
        engine: Engine = "eager",
        capture_hidden: bool = False,
        taps: Sequence[int] = (),
        deepest: int = sys.maxsize,
    ) -> None:
        self.model: Any = model
        self.traits = traits = Traits.of(model, vocabulary, deepest)
        self.vocabulary, self.device = vocabulary, traits.device
        self.kv_cache = KVCache(traits.layers)
        self._embeddings = token_embedding(model)
        self._capture_hidden = capture_hidden or (traits.reads_states and not traits.in_blocks)
        self._taps = tuple(taps)
        self._engine = engine_on(engine, self.device.type)
        self.graphs: ForwardGraphs | None = None
        if not takes_graphs(model):
            self._run_eagerly("its recurrent or indexed layers are no part of a graph")
        self.refresh_graphs()

    def refresh_graphs(self) -> None:
        """Use graphs of the weights as they are now; they may have changed."""
        if self._engine != "eager":
            graphs = shared_graphs(self.model, self._engine, self._taps)
            self.graphs = None if graphs.fails else graphs

    def mapped(self, way: Map, ids: Tensor, states: Tensor) -> Tensor:
        """(n, H) what a draft makes of (n,) tokens and (n, F) states, by a graph if it may."""
        if self.graphs is not None:
            try:
                return self.graphs.mapped(way, ids, states)
            except CaptureError as error:
                self._run_eagerly(str(error))
        return way(ids, states)

    def _run_eagerly(self, reason: str) -> None:
        """Use no graphs, and say so."""
        if self._engine != "eager":
            name = self.model.config.model_type
            warnings.warn(f"{name} runs eagerly: {reason}", EagerWarning, stacklevel=3)
        self._engine, self.graphs = "eager", None

    def piece(
        self, count: int, together: int, in_use: int, *, reads_first: bool, tree: bool
    ) -> int:
        """How many of the first of `count` tokens are to be read before the others; 0: none.

        A long text is read in pieces where it needs a mask. Only a tree behind it would need one:
        the text is read first. A first token that the others do not attend to is read by itself.
        The last `together` of the tokens must be read in one forward.
        """
        early, traits = count - together, self.traits
        # Draft and target together should not need more memory than the target does alone.
        piece = PIECE if reads_first else -(-PIECE // 4)
        if early < piece or not traits.in_pieces:
            return 0
        if not (reads_first or in_use):
            return 1
        if traits.takes_masks and (traits.has_rules or not traits.uses_sdpa or in_use > 0):
            return piece
        return early if tree else 0

    def read(self, part: ForwardPart) -> Outputs:
        """Run a forward over tokens of one sequence."""
        layout, traits, count = part.layout, self.traits, len(part.inputs)
        start = layout.start - part.first
        positions = torch.tensor([layout.positions], device=self.device)
        mask: Tensor | None = None
        if layout.visible is not None:
            mask = self._additive(layout.visible)[None, None]
        elif traits.takes_masks and not traits.in_blocks:
            graph = self.graphs is not None and count <= LONGEST_GRAPH_FORWARD
            needs = (graph and not traits.uses_sdpa) if count == 1 else (graph or start > 0)
            if needs or (traits.has_rules and (start or count <= PIECE)):
                mask = self._causal_mask(start, count)
        sight: Tensor | Sight | None = mask
        if traits.has_rules and mask is not None:
            sight = Sight(mask, positions, layout.key_positions[None].to(self.device))
        inputs, keep = part.inputs[None], part.logits_to_keep
        slots, end = slice(part.slot, part.slot + 1), layout.start + count
        outputs = None
        if count <= LONGEST_GRAPH_FORWARD:
            outputs = self._run_graph(slots, end, inputs, positions, sight, keep, first=part.first)
        if outputs is None:
            self.kv_cache.place(slots, layout.start, end, first=part.first)
            layers, committed = self.kv_cache.layers, count - part.drafted
            with keeping_states(traits.mixers, layers, committed, count):
                outputs = self._run_eager(self.kv_cache, inputs, positions, sight, keep)
        return outputs.of(slice(None), keep)

    def read_packed(self, parts: Sequence[ForwardPart]) -> list[Outputs]:
        """Run one forward over tokens of several sequences, all in one row."""
        layouts = {part.slot: part.layout for part in parts}
        packing = pack(layouts)
        count, _, end = packing.visible.shape
        slots = slice(packing.first, packing.first + count)
        mask = self._additive(packing.visible).unsqueeze(1)
        sight: Tensor | Sight = mask
        if self.traits.has_rules:
            known = positions_of(packing, layouts)
            sight = Sight(mask, *(each.to(self.device) for each in known))
        inputs = torch.cat([part.inputs for part in parts])[None]
        positions, keep = packing.positions.to(self.device), inputs.shape[1]
        places = tuple(each.to(self.device) for each in packing.places)
        row = self._run_graph(slots, end, inputs, positions, sight, keep, places)
        if row is None:
            start = max(part.layout.start for part in parts)
            self.kv_cache.place(slots, start, end, places)
            with attending_packed(self.model, *places[:2]):
                row = self._run_eager(self.kv_cache, inputs, positions, sight, keep)
        ends = [packing.ends[part.slot] for part in parts]
        return [
            row.of(slice(end - len(part.inputs), end), part.logits_to_keep)
            for end, part in zip(ends, parts, strict=True)
        ]

    def embed(self, ids: Tensor) -> Tensor | None:
        """(..., E) the model's input embeddings of tokens, for heads; None if none reads it."""
        if not self._capture_hidden:
            return None
        embedded: Tensor = self._embeddings(self.known(ids.to(self.device)))
        return embedded

    def known(self, ids: Tensor) -> Tensor:
        """Ids that the model knows: in place of others, one of its own."""
        return known_ids(ids, self.model) if self.traits.has_fewer_ids else ids

    def distribution(self, logits: Tensor, sampling: SamplingConfig) -> Tensor:
        """Distributions (..., V) of the model's logits (..., N), warped as what they are."""
        return self.everywhere(probabilities(logits, sampling))

    def everywhere(self, some: Tensor) -> Tensor:
        """(..., N) probabilities of the model's own tokens -> (..., V), 0 at the others."""
        if self.traits.ids is None:
            return some
        every = some.new_zeros(*some.shape[:-1], self.vocabulary)
        return every.index_copy_(-1, self.traits.ids, some)

    def token_ids(self, columns: Tensor) -> Tensor:
        """Ids of the model's own tokens, numbers below N, in the vocabulary."""
        return columns if self.traits.ids is None else self.traits.ids[columns]

    def _run_graph(
        self,
        slots: slice,
        end: int,
        inputs: Tensor,
        positions: Tensor,
        mask: Tensor | Sight | None,
        logits_to_keep: int,
        places: Places = (),
        first: int = 0,
    ) -> Outputs | None:
        """Run a row of tokens by a graph, if there may be one; see `ForwardGraphs`."""
        views = None if self.graphs is None else self.kv_cache.views(slots, first, end)
        if self.graphs is None or views is None:
            return None
        try:
            outputs = Outputs(*self.graphs(inputs, positions, mask, views, logits_to_keep, places))
        except CaptureError as error:
            self._run_eagerly(str(error))
            return None
        return outputs if self._capture_hidden else outputs._replace(hidden=None)

    def _run_eager(
        self,
        cache: KVCache,
        inputs: Tensor,
        positions: Tensor,
        mask: Tensor | Sight | None,
        logits_to_keep: int,
    ) -> Outputs:
        """The model's own forward."""
        options: dict[str, Any] = {self.traits.cache_argument: cache}
        if self.traits.takes_positions:
            options["position_ids"] = positions
        if self.traits.in_blocks:
            options["contexts"] = inputs.shape[1] - logits_to_keep
        logits, hidden, taps = run_model(
            self.model, inputs, mask, logits_to_keep, self._taps, self._capture_hidden, **options
        )
        return Outputs(
            logits,
            hidden[0].to(logits.device) if hidden else None,
            taps[0].to(logits.device) if taps else None,
        )

    def _additive(self, visible: Tensor) -> Tensor:
        """The additive mask of a boolean one, in the model's type and on its device."""
        dtype = self.traits.dtype
        mask = torch.zeros(visible.shape, dtype=dtype)
        mask.masked_fill_(~visible, torch.finfo(dtype).min)
        return mask.to(self.device)

    def _causal_mask(self, start: int, count: int) -> Tensor:
        """Additive mask (1, 1, count, start + count) of consecutive tokens."""
        dtype = self.traits.dtype
        block = torch.full((count, count), torch.finfo(dtype).min, dtype=dtype).triu(1)
        mask = torch.nn.functional.pad(block, (start, 0))
        return mask[None, None].to(self.device)
