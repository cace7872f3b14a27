"""Causal language models that run the forwards of sequences, one at a time or in a batch."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel

from eval.runtime.engines import Engine, engine_on
from eval.runtime.graphs import (
    CaptureError,
    EagerWarning,
    ForwardGraphs,
    named_inputs,
    shared_graphs,
)
from eval.runtime.kv_cache import KVCache
from eval.runtime.layout import Layout, pack, places
from eval.runtime.masks import Sight, seeing
from eval.runtime.recurrent import keeping_states, mixers_of
from eval.runtime.sequence import (
    BlockSequence,
    CachedSequence,
    Forward,
    MaskedSequence,
    RecurrentSequence,
    StatesSequence,
)
from eval.runtime.transformers_models import (
    attending_packed,
    cached_layers,
    can_pack,
    check_forward,
    has_rules,
    takes_masks,
    takes_positions,
    uses_sdpa,
)
from specdata.cache import cache_argument
from specdata.draft_models.depths import depths_of
from specdata.draft_models.draft_vocabulary import draft_vocabulary_ids, narrow_logits
from specdata.draft_models.states_draft import is_in_blocks, states_input, token_embedding
from specdata.draft_models.taps import capturing_taps
from specdata.errors import ConfigError
from specdata.lm_head import capturing_hidden
from specdata.models import known_ids, positions
from specdata.probability import SamplingConfig, probabilities, to_vocabulary

# Forwards of more tokens are prompts, for which a mask would cost more than a graph saves.
LONGEST_GRAPH_FORWARD = 256
# Tokens of a longer text that are read at a time: a mask has a row for each of them.
PIECE = 512


class Outputs(NamedTuple):
    """What a model gives of the tokens of a forward, one dimension of rows before each.

    Args:
        logits: (B, logits_to_keep or more, V') after the last of them.
        hidden: (B, as many, H) what the lm_head read there, if it was captured.
        taps: (B, n, F) at all of them, if they were captured; see `draft_models.taps`.
    """

    logits: Tensor
    hidden: Tensor | None = None
    taps: Tensor | None = None

    def of(self, rows: Any, columns: Any) -> Outputs:
        """Those at some rows and columns, counted among all tokens; of as many logits as tokens."""
        return Outputs(*(None if each is None else each[rows, columns] for each in self))  # type: ignore[arg-type]


class CachedModel:
    """A model and the KV cache of the sequences that it reads.

    Args:
        model: a transformers causal LM, in eval mode.
        vocabulary: V of the logits: the target's.
        capture_hidden: also keep, in `CachedSequence.hidden`, what the lm_head reads (after the
            final norm) at the last token of each forward, for acceptance heads, and give the
            input embeddings of tokens. Always of a draft that reads its own states, too.
        taps: keep these states in `CachedSequence.taps`, for such a draft.
        deepest: the most tokens of a path that it drafts, by default any number. No more masks are
            read than that takes (`draft_models.depths`); with 1 none, as by a target.

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
        check_forward(model)
        layers = cached_layers(model.config)
        self.model: Any = model
        self.vocabulary = vocabulary
        self._has_fewer_ids = model.config.get_text_config().vocab_size < vocabulary
        reads = states_input(model)
        self.reads_states = reads is not None
        self.in_blocks = is_in_blocks(model)
        self._capture_hidden = capture_hidden or (self.reads_states and not self.in_blocks)
        self.depths = min(depths_of(model), deepest) if deepest > 1 else 1
        # Drafted tokens are not read: what they add is known beforehand.
        self._looks_ahead = self.depths > 1 or self.in_blocks
        self._taps = tuple(taps)
        ids = draft_vocabulary_ids(model)
        ids = None if ids is None else ids[ids < vocabulary]
        if ids is not None and torch.equal(ids, torch.arange(vocabulary, device=ids.device)):
            ids = None
        self._vocabulary_ids = ids
        self._embeddings = token_embedding(model)
        # A model looks through its parameters for these each time it is asked.
        self.device: torch.device = model.device
        self._dtype: torch.dtype = model.dtype
        self._engine = engine_on(engine, self.device.type)
        self._graphs: ForwardGraphs | None = None
        self._recurrent = any(layer.states for layer in layers)
        self._mixers = mixers_of(model) if self._recurrent else []
        if self._recurrent and self.depths > 1:
            raise ConfigError(
                f"a draft with recurrent layers ({model.config.model_type}) cannot read masks: "
                "remove depths from its config.json"
            )
        if self._recurrent or any(layer.indexed for layer in layers):
            self._run_eagerly("its recurrent or indexed layers are no part of a graph")
        self.refresh_graphs()
        # Flash attention takes no mask; its causal attention is aligned as ours is.
        self._takes_masks = takes_masks(model)
        # A block has no mask, and from a state on Mamba's mixers read each token by itself.
        self._in_pieces = not (self.in_blocks or any(mixer.stepwise for mixer in self._mixers))
        self.packs = can_pack(model) and not self._looks_ahead
        # Some of its layers make masks of their own, of what they are given here.
        self._has_rules = self._takes_masks and has_rules(model)
        self._cache_argument = cache_argument(model)
        self._takes_positions = takes_positions(model)
        self.positions = positions(model.config)
        # Only SDPA needs no mask for a single token. Of a mask that the model makes for itself, a
        # graph would keep the length.
        self._sdpa = uses_sdpa(model)
        self._sequences: dict[int, CachedSequence] = {}
        self.kv_cache = KVCache(layers)

    def sequence(self, slot: int, sampling: SamplingConfig) -> CachedSequence:
        """An empty sequence in a slot of the cache, in place of an earlier one there."""
        self._sequences[slot] = self._empty_sequence(slot, sampling)
        return self._sequences[slot]

    def _empty_sequence(self, slot: int, sampling: SamplingConfig) -> CachedSequence:
        kind = RecurrentSequence if self._recurrent else CachedSequence
        if self.in_blocks:
            kind = BlockSequence
        elif self.reads_states:
            kind = StatesSequence
        elif self.depths > 1:
            kind = MaskedSequence
        return kind(self, slot, sampling)

    def reset(self) -> None:
        """Forget every sequence and free the cache."""
        self.kv_cache.free()
        for sequence in self._sequences.values():
            sequence.reset()

    def refresh_graphs(self) -> None:
        """Use graphs of the weights as they are now; they may have changed."""
        if self._engine != "eager":
            graphs = shared_graphs(self.model, self._engine, self._taps)
            self._graphs = None if graphs.fails else graphs

    def _run_eagerly(self, reason: str) -> None:
        """Use no graphs, and say so."""
        if self._engine != "eager":
            name = self.model.config.model_type
            warnings.warn(f"{name} runs eagerly: {reason}", EagerWarning, stacklevel=3)
        self._engine, self._graphs = "eager", None

    def warm_up(self, appends: Sequence[tuple[int, int]], nodes: Sequence[int] = ()) -> None:
        """Make the graphs that decoding will need, so that none is made while something is timed.

        `appends` are (tokens, logits to keep) of the forwards that follow a prompt, `nodes` numbers
        of nodes by which a draft tree will be extended.
        """
        if self._graphs is None:
            return
        self._prompted(1)  # shows the sizes of the cache
        self._prompted(max(logits_to_keep for _, logits_to_keep in appends))
        sequence = self._prompted(1)
        for count, logits_to_keep in appends:
            self.run(sequence.append(self._different(count), logits_to_keep))
        if not self._takes_masks or self._looks_ahead:  # the latter reads no nodes
            nodes = ()
        for count in nodes:
            self.run(sequence.append_tree(self._different(count), [0] * count))
            sequence.accept([])
        self.reset()

    def _prompted(self, logits_to_keep: int) -> CachedSequence:
        """A sequence with a prompt of three tokens in the cache, for a warm-up."""
        sequence = self._empty_sequence(0, SamplingConfig())
        self.run(sequence.append(self._different(3), logits_to_keep))
        return sequence

    def _different(self, count: int) -> list[int]:
        """Tokens for a warm-up.

        One token again and again makes states of a size at which half precision rounds several
        times as much as on a text, and graphs are compared with the eager forward here.
        """
        return [(100 + 31 * place) % self.vocabulary for place in range(count)]

    def run(self, forward: Forward) -> Tensor:
        """Run one forward by itself: logits (logits_to_keep, V).

        A long text is read in pieces where it needs a mask. Only a tree behind it would need one:
        the text is read first.
        """
        sequence, asked = forward.sequence, max(forward.logits_to_keep, forward.drafted)
        while self._in_pieces and (early := len(forward.tokens) - asked) >= PIECE:
            rules = self._has_rules or not self._sdpa or not sequence.reads_first
            masked = self._takes_masks and (rules or sequence.in_use > 0)
            if not (masked or forward.parents):
                break
            end = PIECE if masked else early
            self._run_whole(sequence.append(forward.tokens[:end], 1))
            forward = replace(forward, tokens=forward.tokens[end:])
            self.kv_cache.reserve(sequence.slot + 1, sequence.length + len(forward.tokens))
        return self._run_whole(forward)

    def _run_whole(self, forward: Forward) -> Tensor:
        """Run one forward by itself: logits (logits_to_keep, V)."""
        layout = forward.layout()
        if isinstance(forward.sequence, MaskedSequence):
            return self._commit(forward, layout, self._run_masked(forward.sequence, forward))
        run = self._run_unrolled if forward.unrolled else self._run_single
        return self._commit(forward, layout, run(forward, layout))

    def run_all(self, forwards: Sequence[Forward]) -> list[Tensor]:
        """Run one forward of each of several sequences, together where that pays: their logits."""
        joined = [
            index
            for index, forward in enumerate(forwards)
            if self.packs and forward.sequence.in_use and not forward.unrolled
        ]
        if len(joined) < 2:
            return [self.run(forward) for forward in forwards]
        logits = {
            index: self.run(forward)
            for index, forward in enumerate(forwards)
            if index not in joined
        }
        batch = self._run_packed([forwards[index] for index in joined])
        logits |= dict(zip(joined, batch, strict=True))
        return [logits[index] for index in range(len(forwards))]

    def embed(self, ids: Tensor) -> Tensor | None:
        """(..., E) the model's input embeddings of tokens, for heads; None if none reads it."""
        if not self._capture_hidden:
            return None
        ids = ids.to(self.device)
        embedded: Tensor = self._embeddings(
            known_ids(ids, self.model) if self._has_fewer_ids else ids
        )
        return embedded

    def distribution(self, logits: Tensor, sampling: SamplingConfig) -> Tensor:
        """Distributions (..., V) of the model's logits (..., N), warped as what they are."""
        return self.everywhere(probabilities(logits, sampling))

    def everywhere(self, some: Tensor) -> Tensor:
        """(..., N) probabilities of the model's own tokens -> (..., V), 0 at the others."""
        if self._vocabulary_ids is None:
            return some
        every = some.new_zeros(*some.shape[:-1], self.vocabulary)
        return every.index_copy_(-1, self._vocabulary_ids, some)

    def token_ids(self, columns: Tensor) -> Tensor:
        """Ids of the model's own tokens, numbers below N, in the vocabulary."""
        return columns if self._vocabulary_ids is None else self._vocabulary_ids[columns]

    def _commit(self, forward: Forward, layout: Layout, outputs: Outputs) -> Tensor:
        """Commit a forward that has run to its sequence; every forward ends here.

        Its outputs are without rows. Returns logits (logits_to_keep, N), N = V but for a reduced
        vocabulary.
        """
        logits, hidden, taps = outputs
        states = None if hidden is None else hidden[-forward.logits_to_keep :]
        forward.sequence.commit(forward, layout, states, taps)
        size = self.vocabulary if self._vocabulary_ids is None else len(self._vocabulary_ids)
        return to_vocabulary(logits[-forward.logits_to_keep :], size)

    def _inputs(self, forward: Forward) -> Tensor:
        """What the model reads of a forward's tokens: (n,) ids, or (n, H) of a draft on states."""
        ids = torch.tensor(forward.tokens, device=self.device)
        ids = known_ids(ids, self.model) if self._has_fewer_ids else ids
        with self._graphs.maps if self._graphs else nullcontext():
            return forward.sequence.inputs(forward, ids)

    def _run_single(self, forward: Forward, layout: Layout) -> Outputs:
        """Run a forward in one row."""
        count = len(forward.tokens)
        positions = torch.tensor([layout.positions], device=self.device)
        mask: Tensor | None = None
        if layout.visible is not None:
            mask = self._additive(layout.visible)[None, None]
        elif self._takes_masks and not self.in_blocks:  # a block attends to everything
            graph = self._graphs is not None and count <= LONGEST_GRAPH_FORWARD
            needs = (graph and not self._sdpa) if count == 1 else (graph or layout.start > 0)
            if needs or (self._has_rules and (layout.start or count <= PIECE)):
                mask = self._causal_mask(layout.start, count)
        sight: Tensor | Sight | None = mask
        if self._has_rules and mask is not None:
            sight = Sight(mask, positions, layout.key_positions[None].to(self.device))
        inputs, keep = self._inputs(forward)[None], forward.logits_to_keep
        slot, committed = forward.sequence.slot, count - forward.drafted
        if not self._recurrent:
            outputs = self._run_slot(slot, layout.start, inputs, positions, sight, keep)
        else:
            self.kv_cache.place(slice(slot, slot + 1), layout.start, layout.start + count)
            with keeping_states(self._mixers, self.kv_cache.layers, committed, count):
                outputs = self._run_eager(self.kv_cache, inputs, positions, sight, keep)
        return Outputs(*(None if each is None else each[0] for each in outputs))  # type: ignore[arg-type]

    def _run_masked(self, sequence: MaskedSequence, forward: Forward) -> Outputs:
        """Read committed tokens and masks, or give what was read there for drafted tokens."""
        read, masks = sequence.with_masks(forward), sequence.masks
        if read is None:
            return Outputs(*sequence.drafted(forward))
        layout = read.layout()
        at = [min(each, self.positions - 1) for each in layout.positions]  # masks may stand beyond
        outputs = self._run_single(read, replace(layout, positions=at))
        root, (logits, states, _) = sequence.length + len(forward.tokens) - 1, outputs
        ahead, kept = len(logits) - masks, len(logits) - read.logits_to_keep
        sequence.look_ahead(logits[ahead:], None if states is None else states[ahead:], root)
        rows = slice(kept, ahead)
        last = forward.tokens[-forward.logits_to_keep :]
        return Outputs(
            *sequence.behind(last, logits[rows], None if states is None else states[rows])
        )

    def _run_slot(
        self,
        slot: int,
        start: int,
        inputs: Tensor,
        positions: Tensor,
        mask: Tensor | Sight | None,
        logits_to_keep: int,
    ) -> Outputs:
        """Run n tokens of one slot, by a graph if there may be one; inputs and positions (1, n)."""
        end = start + inputs.shape[1]
        if self._graphs is not None and inputs.shape[1] <= LONGEST_GRAPH_FORWARD:
            views = self.kv_cache.views(slot, end)
            if views is not None:
                try:
                    outputs = Outputs(*self._graphs(inputs, positions, mask, views, logits_to_keep))
                except CaptureError as error:
                    self._run_eagerly(str(error))
                else:
                    return outputs if self._capture_hidden else outputs._replace(hidden=None)
        self.kv_cache.place(slice(slot, slot + 1), start, end)
        return self._run_eager(self.kv_cache, inputs, positions, mask, logits_to_keep)

    def _run_eager(
        self,
        cache: KVCache,
        inputs: Tensor,
        positions: Tensor,
        mask: Tensor | Sight | None,
        logits_to_keep: int,
    ) -> Outputs:
        """The model's own forward."""
        hidden: list[Tensor] = []
        taps: list[Tensor] = []
        # Hooked only while it runs: decoders that share a model must not slow each other down.
        capturing = (
            capturing_hidden(self.model, hidden.append) if self._capture_hidden else nullcontext()
        )
        tapping = capturing_taps(self.model, self._taps, taps.append)
        sighted = seeing(self.model, mask) if isinstance(mask, Sight) else nullcontext()
        options: dict[str, Any] = {self._cache_argument: cache}
        if self._takes_positions:
            options["position_ids"] = positions
        if self.in_blocks:
            options["contexts"] = inputs.shape[1] - logits_to_keep
        with narrow_logits(self.model), capturing, tapping, sighted:
            logits = self.model(
                **named_inputs(inputs),
                attention_mask=None if isinstance(mask, Sight) else mask,
                use_cache=True,
                logits_to_keep=logits_to_keep,
                **options,
            ).logits
        return Outputs(
            logits,
            hidden[0].to(logits.device) if hidden else None,
            taps[0].to(logits.device) if taps else None,
        )

    def _additive(self, visible: Tensor) -> Tensor:
        """The additive mask of a boolean one, in the model's type and on its device."""
        dtype = self._dtype
        mask = torch.zeros(visible.shape, dtype=dtype)
        mask.masked_fill_(~visible, torch.finfo(dtype).min)
        return mask.to(self.device)

    def _causal_mask(self, start: int, count: int) -> Tensor:
        """Additive mask (1, 1, count, start + count) of consecutive tokens."""
        dtype = self._dtype
        block = torch.full((count, count), torch.finfo(dtype).min, dtype=dtype).triu(1)
        mask = torch.nn.functional.pad(block, (start, 0))
        return mask[None, None].to(self.device)

    def _run_packed(self, forwards: Sequence[Forward]) -> list[Tensor]:
        """Run forwards of several sequences as one, all their tokens in one row."""
        layouts = [forward.layout() for forward in forwards]
        packing = pack(
            {
                forward.sequence.slot: (forward.tokens, layout)
                for forward, layout in zip(forwards, layouts, strict=True)
            }
        )
        slots = packing.slots.to(self.device)
        self.kv_cache.place(
            slice(0, len(packing.visible)),
            max(layout.start for layout in layouts),
            packing.visible.shape[-1],
            packing.cache_positions.to(self.device),
            slots,
        )
        columns = packing.columns[0].to(self.device)
        mask = self._additive(packing.visible).unsqueeze(1)
        sight: Tensor | Sight = mask
        if self._has_rules:
            slots_of = (forward.sequence.slot for forward in forwards)
            known = places(packing, dict(zip(slots_of, layouts, strict=True)))
            sight = Sight(mask, *(each.to(self.device) for each in known))
        with attending_packed(self.model, slots[0], columns):
            outputs = self._run_eager(
                self.kv_cache,
                torch.cat([self._inputs(forward) for forward in forwards])[None],
                packing.positions.to(self.device),
                sight,
                packing.tokens.shape[1],
            )
        logits = []
        for forward, layout in zip(forwards, layouts, strict=True):
            end = packing.ends[forward.sequence.slot]
            part = outputs.of(0, slice(end - len(forward.tokens), end))
            logits.append(self._commit(forward, layout, part))
        return logits

    def _run_unrolled(self, forward: Forward, layout: Layout) -> Outputs:
        """Score a whole tree as a batch of its paths from the root to each leaf (an ablation)."""
        start, parents = layout.start, forward.parents
        committed, nodes = len(forward.tokens) - len(parents), range(len(parents))
        # A node comes after its ancestors, so the ancestors of a leaf in order are its path.
        ancestors = layout.ancestors.tolist()
        paths = [
            [*range(committed), *(committed + node for node in nodes if ancestors[leaf][node])]
            for leaf in nodes
            if leaf + 1 not in parents
        ]
        width = max(map(len, paths))
        padded = torch.tensor([path + [0] * (width - len(path)) for path in paths])
        positions = torch.arange(start, start + width, device=self.device).expand(len(paths), -1)
        cache = self.kv_cache.repeat_prefix(forward.sequence.slot, start, len(paths))
        cache.place(slice(0, len(paths)), start, start + width)
        mask: Tensor | Sight | None = None
        if start or self._has_rules:
            causal = self._causal_mask(start, width).expand(len(paths), -1, -1, -1)
            keys = torch.arange(start + width, device=self.device)[None]
            mask = Sight(causal, positions, keys) if self._has_rules else causal
        inputs = self._inputs(forward)[padded.to(self.device)]
        outputs = self._run_eager(cache, inputs, positions, mask, width)
        # Each token is read on the first path that has it.
        tokens = range(len(forward.tokens))
        rows = [next(row for row, path in enumerate(paths) if i in path) for i in tokens]
        columns = [position - start for position in layout.positions]
        self.kv_cache.copy_from(cache, rows, layout.positions, forward.sequence.slot, start)
        return outputs.of(rows, columns)
