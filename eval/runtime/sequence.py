"""A text that a model has read, perhaps with a draft after it, and the forwards that read more.

A `CachedSequence` is a slot of a model's KV cache. Drafted tokens are appended behind the committed
ones; `keep` commits those that were accepted and drops the rest. How a draft reads drafted tokens
is its kind's: by itself, with states of its target, or not at all.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from eval.runtime.layout import TokenLayout, lay_out
from eval.runtime.model import CachedModel, ForwardPart, Outputs
from specdata.draft_kinds.masks import MASK
from specdata.draft_models.states_draft import states_input, without_first
from specdata.probability import SamplingConfig, to_vocabulary

NO_NODES = torch.zeros(0, 0, dtype=torch.bool)


@dataclass(frozen=True, slots=True)
class Forward:
    """Tokens for a model to read after what it has read of a sequence."""

    sequence: CachedSequence
    tokens: list[int]  # n; the last `len(parents)` of them are nodes of a draft tree
    logits_to_keep: int  # logits are needed after this many of the last tokens
    parents: Sequence[int] = ()  # the node that each node follows; 0 is the last committed token
    drafted: int = 0  # of a chain, this many of the last tokens are not committed

    @property
    def committed(self) -> int:
        """How many of the tokens are no nodes."""
        return len(self.tokens) - len(self.parents)

    def part(self, *, alone: bool = False) -> ForwardPart:
        """The tokens laid out, given what the cache holds now. Changes nothing.

        `alone`: no other sequence is read with them.
        """
        sequence, model, count = self.sequence, self.sequence.model, len(self.tokens)
        layout = lay_out(sequence.length, sequence.ancestors, count, self.parents)
        first = 0
        if alone and layout.start and layout.visible is None and not model.traits.has_rules:
            first = int(not sequence.reads_first)
        if not (sequence.reads_first or first):
            visible, start = layout.visible, layout.start
            if visible is None:
                visible = torch.ones(count, start + count, dtype=torch.bool).tril(start)
            layout = replace(layout, visible=without_first(visible))
        ids = model.known(torch.tensor(self.tokens, device=model.device))
        inputs = sequence.inputs(self, ids)
        return ForwardPart(sequence.slot, layout, inputs, self.logits_to_keep, self.drafted, first)

    def run(self) -> Tensor:
        """Run it by itself: logits (logits_to_keep, N), N = V but for a reduced vocabulary."""
        forward, sequence, model = self, self.sequence, self.sequence.model
        together, tree = max(self.logits_to_keep, self.drafted), bool(self.parents)
        first = sequence.reads_first
        while piece := model.piece(
            len(forward.tokens), together, sequence.in_use, reads_first=first, tree=tree
        ):
            sequence.read(sequence.append(forward.tokens[:piece], 1))
            forward = replace(forward, tokens=forward.tokens[piece:])
            model.kv_cache.reserve(sequence.slot + 1, sequence.length + len(forward.tokens))
        return sequence.read(forward)


class CachedSequence:
    """The content of a model's KV cache for one sequence, and for a draft after it.

    The state changes in three places: `commit` when a forward has run, `keep` (by `crop`) when a
    draft was verified, and `reset`. The sampling, which makes distributions of logits, is the same
    for target and draft.
    """

    drops_drafted = False
    """Whether drafted tokens are read in another way than committed ones, and so are always dropped
    when a draft was verified, accepted or not; but not while a residual persists, which is of the
    distributions that its draft was drawn from."""

    def __init__(self, model: CachedModel, slot: int, sampling: SamplingConfig) -> None:
        self.model = model
        self.slot = slot
        self.sampling = sampling
        self.forwards = 0  # of this sequence and of those before it in the slot
        self._target: CachedSequence | None = None
        self.reset()

    def reset(self) -> None:
        """Forget the sequence."""
        self.length = 0  # tokens in the cache, but for nodes of a tree
        self.drafted = 0  # of these, the last so many are of a drafted chain
        self.ancestors = NO_NODES  # (m, m) over the nodes in the cache, as of `TokenLayout`
        # (n, H) what the lm_head read at the last n tokens of which logits were asked for, and
        # (size, F) states inside the model by cache position; None where they are not captured.
        self.states: Tensor | None = None
        self.taps: Tensor | None = None
        # The first tokens, which need not be read again whatever is dropped behind them: those that
        # a recurrent state is kept of, and those that were read as committed ones.
        self._lasting = 0
        self._residual_persists = False
        for states in self.model.kv_cache.recurrent:
            states.forget(self.slot)

    @property
    def reads_first(self) -> bool:
        """Whether later tokens attend to the first one."""
        return True

    @property
    def hidden(self) -> Tensor | None:
        """(H,) of `states`, that of the last token."""
        return None if self.states is None else self.states[-1]

    @property
    def in_use(self) -> int:
        """Cache positions in use, by tokens and by nodes."""
        return self.length + len(self.ancestors)

    def append(self, tokens: list[int], logits_to_keep: int, drafted: int = 0) -> Forward:
        """The forward that appends tokens to a chain. No nodes may be in the cache.

        Logits are needed after `logits_to_keep` of the last ones; `drafted` of them are not
        committed yet.
        """
        return Forward(self, tokens, logits_to_keep, drafted=drafted)

    def append_tree(
        self,
        tokens: list[int],
        parents: Sequence[int],
        uncached: list[int] | None = None,
    ) -> Forward:
        """The forward that appends nodes of a draft tree: logits after each node.

        Parents are the nodes that they follow, 0 being the last committed token. Only if no node is
        in the cache may committed tokens come first that are not in it yet (`uncached`; the logits
        after the last of them come first, too).
        """
        uncached = uncached or []
        logits_to_keep = len(tokens) + bool(uncached)
        return Forward(self, [*uncached, *tokens], logits_to_keep, parents)

    def pieces(self, tokens: list[int]) -> list[list[int]]:
        """Tokens to append, in as many forwards as the model needs."""
        return [tokens]

    def inputs(self, _forward: Forward, ids: Tensor) -> Tensor:
        """(n,) ids or (n, H) vectors: what the model reads of a forward's tokens, (n,) its ids."""
        return ids

    def follow(self, target: CachedSequence) -> None:
        """Read the states of a target's sequence, if the model reads any.

        Without one, as in a warm-up, they count as 0.
        """
        self._target = target

    def reach(self, length: int) -> int:
        """The most tokens that the model can draft after a text of so many.

        None beyond its positions, nor before its target has read the text whose states it reads.
        """
        traits, target = self.model.traits, self._target
        if traits.reads_states and target is not None and target.length == 0:
            return 0
        return max(0, min(traits.positions + 1 - length, traits.longest))

    def set_residual_persists(self, persists: bool) -> None:
        """Read later tokens as the last draft would have, as long as a residual of it persists."""
        self._residual_persists = persists

    def distribution(self, logits: Tensor, sampling: SamplingConfig | None = None) -> Tensor:
        """Distributions (..., V) of logits (..., N), by default under the sequence's sampling."""
        return self.model.distribution(logits, sampling or self.sampling)

    def read(self, forward: Forward) -> Tensor:
        """Run one of its forwards as a whole: logits (logits_to_keep, N)."""
        part = forward.part(alone=True)
        return self.commit(forward, part.layout, self.model.read(part))

    def commit(self, forward: Forward, layout: TokenLayout, outputs: Outputs) -> Tensor:
        """Take account of a forward that has run: its logits (logits_to_keep, N)."""
        logits, self.states, taps = outputs
        if taps is not None:
            end = layout.start + len(taps)
            if self.taps is None or len(self.taps) < end:
                enlarged = taps.new_empty(2 * end, taps.shape[1])
                if self.taps is not None:
                    enlarged[: len(self.taps)] = self.taps
                self.taps = enlarged
            self.taps[layout.start : end] = taps
        self._lasting = self._lasting_after(forward)
        self.forwards += 1
        self.length += forward.committed
        self.drafted += forward.drafted
        self.ancestors = layout.ancestors
        ids = self.model.traits.ids
        return to_vocabulary(logits, self.model.vocabulary if ids is None else len(ids))

    def _lasting_after(self, forward: Forward) -> int:
        """The first tokens that need not be read again, once a forward has run."""
        if forward.drafted == len(forward.tokens):
            return self._lasting
        return self.length + forward.committed - forward.drafted

    def crop(self, length: int) -> None:
        """Keep at most the first `length` tokens, and no nodes.

        A recurrent state cannot drop a token: it goes back to the last one that was kept, and what
        was accepted since is read again (`eval.runtime.recurrent`).
        """
        self.ancestors, self.drafted = NO_NODES, 0
        if self.drops_drafted:
            length = length if self._residual_persists else min(length, self._lasting)
        elif length < self.length and self.model.kv_cache.recurrent:
            length = min(length, self._lasting)
            for states in self.model.kv_cache.recurrent:
                states.go_back(self.slot)
        self.length = min(self.length, length)
        self._lasting = min(self._lasting, self.length)

    def keep(self, nodes: Sequence[int]) -> None:
        """Commit an accepted path of a draft, given from the root down, and drop the rest of it.

        Of a chain those may be accepted that are not in the cache. Raises ValueError if a node of a
        tree is not.
        """
        cached = len(self.ancestors)
        if not cached:
            self.crop(self.length - self.drafted + len(nodes))
            return
        if any(not 0 < node <= cached for node in nodes):
            raise ValueError(f"nodes {list(nodes)} are not all among the {cached} in the cache")
        length = self.length
        if not self.drops_drafted:
            if list(nodes) != list(range(1, len(nodes) + 1)):
                source = [length + node - 1 for node in nodes]
                self.model.kv_cache.move(self.slot, source, length)
                if self.taps is not None:
                    self.taps[length : length + len(source)] = self.taps[source]
            self.length += len(nodes)
        self.crop(self.length)

    def _before(self, forward: Forward) -> list[int]:
        """The cache position of the token before each of a forward's; -1 if there is none."""
        last = self.length + forward.committed - 1
        return [*range(self.length - 1, last), *(last + parent for parent in forward.parents)]


class StatesSequence(CachedSequence):
    """A sequence of a draft that reads its target's states (`draft_models.states_draft`).

    A token is read with the target's states at the token before it, or, where the target has not
    read that one yet, with the draft's own; without a target, as in a warm-up, its states count as
    0.
    """

    drops_drafted = True

    def __init__(self, model: CachedModel, slot: int, sampling: SamplingConfig) -> None:
        embedding = states_input(model.model)
        assert embedding is not None
        self._embedding = embedding
        super().__init__(model, slot, sampling)

    @property
    def reads_first(self) -> bool:
        """Whether later tokens attend to the first one; in some layouts of engines none does."""
        return self._embedding.reads_first

    def reset(self) -> None:
        """Forget the sequence."""
        super().reset()
        self._draft_states: dict[int, Tensor] = {}  # by cache position, of the draft in progress

    def pieces(self, tokens: list[int]) -> list[list[int]]:
        """Tokens to append: each after its predecessor's own state in a forward of its own."""
        count = max(0, self._read_by_target() + 1 - self.length)
        return [piece for piece in (tokens[:count], *([each] for each in tokens[count:])) if piece]

    def inputs(self, forward: Forward, ids: Tensor) -> Tensor:
        """(n, H) what the draft reads of a forward's tokens, (n,) ids of its own vocabulary."""
        embedding = self._embedding
        before, read = self._before(forward), self._read_by_target()
        after_target = [place for place in before if place < read]  # they come first
        parts: list[Tensor] = []
        ids = embedding.from_start(ids, before[0] + 1)
        with self.model.embedding():
            if after_target:
                states = embedding.weight.new_zeros(len(after_target), embedding.read_width)
                if self._target is not None and self._target.taps is not None:
                    begin = after_target[0] < 0  # nothing stands before the first token
                    states[begin:] = self._target.taps[after_target[begin:]]
                parts.append(embedding.after_target(ids[: len(after_target)], states))
            if len(after_target) < len(before):
                states = torch.stack([self._draft_states[at] for at in before[len(after_target) :]])
                parts.append(embedding.after_own(ids[len(after_target) :], states))
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _read_by_target(self) -> int:
        """Tokens of the sequence whose target states are known, and may be read."""
        if self._residual_persists:
            return self._lasting - 1
        return sys.maxsize if self._target is None else self._target.length

    def commit(self, forward: Forward, layout: TokenLayout, outputs: Outputs) -> Tensor:
        """Take account of a forward that has run, and keep the draft's states."""
        if (states := outputs.hidden) is not None:
            end = layout.start + len(forward.tokens)
            self._draft_states |= dict(zip(range(end - len(states), end), states, strict=True))
        return super().commit(forward, layout, outputs)

    def _lasting_after(self, forward: Forward) -> int:
        if self._lasting < self.length:
            return self._lasting
        known = self._read_by_target()  # those that are read with the target's states come first
        return self.length + sum(at < known for at in self._before(forward)[: forward.committed])

    def crop(self, length: int) -> None:
        """Keep at most the first `length` tokens, of those read with the target's states."""
        super().crop(length)
        if not self._residual_persists:
            self._draft_states = {}


class MaskedSequence(CachedSequence):
    """A sequence of a draft that proposes several tokens after one forward (`draft_models.depths`).

    It reads committed tokens, and masks behind them. Drafted ones are not read, in chains and in
    trees: their cache positions hold nothing. Deeper than the masks, the last one is repeated.
    """

    drops_drafted = True

    def __init__(self, model: CachedModel, slot: int, sampling: SamplingConfig) -> None:
        super().__init__(model, slot, sampling)
        self.masks = model.traits.depths - 1
        # Of each mask: logits, and what the lm_head read if it is captured.
        self._ahead: tuple[Tensor, Tensor | None]
        self._depths: dict[int, int] = {}  # by cache position, of tokens from the last read one on

    def _is_drafted(self, forward: Forward) -> bool:
        """Whether a forward's tokens are drafted ones; `crop` and `pieces` keep the kinds apart."""
        return self._residual_persists or forward.committed == forward.drafted

    @property
    def mask(self) -> int:
        """The token that it reads for those that are not known yet."""
        mask: int = getattr(self.model.model.config, MASK)
        return mask

    def read(self, forward: Forward) -> Tensor:
        """Read committed tokens and masks, or give what was read there for drafted tokens."""
        tokens, keep = forward.tokens, forward.logits_to_keep
        if self._is_drafted(forward):
            layout = lay_out(self.length, self.ancestors, len(tokens), forward.parents)
            places = range(self.in_use, self.in_use + len(tokens))
            for place, parent in zip(places, self._before(forward), strict=True):
                self._depths[place] = self._depths[parent] + 1
            masks = [min(self._depths[place], self.masks) - 1 for place in places]
            logits, states = self._ahead
            logits = torch.stack([logits[mask] for mask in masks])  # faster than logits[masks]
            states = None if states is None else states[masks]
            self.forwards -= 1  # it reads no token
        else:
            assert forward.drafted + len(forward.parents) == 0
            part = Forward(self, tokens + [self.mask] * self.masks, keep + self.masks).part()
            # Masks may stand beyond the last position.
            at = [min(each, self.model.traits.positions - 1) for each in part.layout.positions]
            layout = lay_out(self.length, self.ancestors, len(tokens), ())
            logits, states, _ = self.model.read(
                replace(part, layout=replace(part.layout, positions=at))
            )
            self._depths = {self.length + len(tokens) - 1: 0}
            self._ahead = logits[keep:], None if states is None else states[keep:]
            logits, states = logits[:keep], None if states is None else states[:keep]
        outputs = self.after(tokens[-len(logits) :], logits, states)
        return self.commit(forward, layout, outputs)

    def after(self, _tokens: list[int], logits: Tensor, states: Tensor | None) -> Outputs:
        """Logits and states behind these tokens, of what was read there."""
        return Outputs(logits, states)

    def _lasting_after(self, forward: Forward) -> int:
        if self._lasting < self.length or self._is_drafted(forward):
            return self._lasting
        return self.length + len(forward.tokens)


class BlockSequence(MaskedSequence):
    """A sequence of a draft that drafts in blocks.

    Of committed tokens it reads the target's states, but of the last one, the anchor, which is read
    again as long as the target has not read it. What a drafted token adds is a bias of the logits.
    """

    def __init__(self, model: CachedModel, slot: int, sampling: SamplingConfig) -> None:
        super().__init__(model, slot, sampling)
        self._embedding: Any = states_input(model.model)
        self._output = model.model.get_output_embeddings()

    @property
    def mask(self) -> int:
        """The target's token that the draft was trained with."""
        mask: int = self._embedding.blocks.mask
        return mask

    def inputs(self, forward: Forward, ids: Tensor) -> Tensor:
        """(n, F + H) what the draft reads of contexts and a block, (n,) ids."""
        contexts = len(forward.tokens) - self.masks - 1
        if self._target is not None and self._target.taps is not None:
            taps = self._target.taps[self.length : self.length + contexts]
        else:
            taps = self._embedding.scale.new_zeros(contexts, len(self._embedding.scale))
        with self.model.embedding():
            x: Tensor = self._embedding.unread(taps, ids[contexts:])
        return x

    def after(self, tokens: list[int], logits: Tensor, states: Tensor | None) -> Outputs:
        """Logits and states of slots behind these tokens, of which the bias alone is computed."""
        markov = self._embedding.markov.weight[tokens]
        if states is not None:
            states = torch.cat([states, markov], dim=-1)
        return Outputs(logits + self._output.bias_by(markov), states)

    def _lasting_after(self, forward: Forward) -> int:
        return super()._lasting_after(forward) - (not self._is_drafted(forward))  # the anchor


def sequence_of(model: CachedModel, slot: int, sampling: SamplingConfig) -> CachedSequence:
    """An empty sequence in a slot of a model's cache."""
    traits = model.traits
    kind = MaskedSequence if traits.depths > 1 else CachedSequence
    if traits.in_blocks:
        kind = BlockSequence
    elif traits.reads_states:
        kind = StatesSequence
    return kind(model, slot, sampling)


def warm_up(
    model: CachedModel, appends: Sequence[tuple[int, int]], nodes: Sequence[int] = ()
) -> None:
    """Make the graphs that decoding will need, so that none is made while something is timed.

    `appends` are (tokens, logits to keep) of the forwards that follow a prompt, `nodes` numbers of
    nodes by which a draft tree will be extended.
    """
    if model.graphs is None:
        return

    def different(count: int) -> list[int]:
        # One token again and again makes states of a size at which half precision rounds several
        # times as much as on a text, and graphs are compared with the eager forward here.
        return [(100 + 31 * place) % model.vocabulary for place in range(count)]

    def prompted(logits_to_keep: int) -> CachedSequence:
        sequence = sequence_of(model, 0, SamplingConfig())
        sequence.append(different(3), logits_to_keep).run()
        return sequence

    prompted(1)  # shows the sizes of the cache
    prompted(max(logits_to_keep for _, logits_to_keep in appends))
    sequence = prompted(1)
    for count, logits_to_keep in appends:
        sequence.append(different(count), logits_to_keep).run()
    if model.traits.takes_masks and not model.traits.looks_ahead:  # the latter reads no nodes
        for count in nodes:
            sequence.append_tree(different(count), [0] * count).run()
            sequence.keep([])
    model.kv_cache.free()
