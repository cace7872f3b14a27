"""The part of a sequence that a model has read, and the forwards by which it reads more.

A `CachedSequence` keeps count of one sequence, and perhaps of a draft tree after it. It runs
nothing itself: it makes a `Forward`, and a `CachedModel` runs one of them, or one of each of many
sequences together. So decoding is written once, for one sequence and for batches.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from eval.runtime.layout import Layout, lay_out
from specdata.draft_kinds.masks import MASK
from specdata.draft_models.states_draft import states_input, without_first
from specdata.probability import SamplingConfig

if TYPE_CHECKING:
    from eval.runtime.model import CachedModel

T = TypeVar("T")

NO_NODES = torch.zeros(0, 0, dtype=torch.bool)


@dataclass(frozen=True, slots=True)
class Forward:
    """Tokens for a model to read after what it has read of a sequence.

    Args:
        tokens: n tokens; the last `len(parents)` of them are nodes of a draft tree.
        logits_to_keep: logits are needed after this many of the last tokens.
        parents: the node that each node follows; 0 is the last committed token.
        unrolled: score the whole tree as a batch of its paths, instead of by tree attention.
        drafted: of a chain, this many of the last tokens are not committed.
    """

    sequence: CachedSequence
    tokens: list[int]
    logits_to_keep: int
    parents: Sequence[int] = ()
    unrolled: bool = False
    drafted: int = 0

    @property
    def model(self) -> CachedModel:
        """The model that runs it."""
        return self.sequence.model

    def layout(self) -> Layout:
        """Where the tokens go, given what the cache holds now. Changes nothing."""
        sequence, count = self.sequence, len(self.tokens)
        layout = lay_out(sequence.length, sequence.ancestors, count, self.parents)
        if sequence.reads_first:
            return layout
        visible = layout.visible
        if visible is None:
            visible = torch.ones(count, layout.start + count, dtype=torch.bool).tril(layout.start)
        return replace(layout, visible=without_first(visible))


ForwardCoroutine = Generator[Forward, Tensor, T]
"""A generator that yields the forwards it needs, is sent the logits (logits_to_keep, V) of each,
and returns a T. Whoever drives it decides which forwards run together."""


def drive(coroutine: ForwardCoroutine[T]) -> T:
    """Run a coroutine to its end, each of its forwards by itself."""
    try:
        forward = next(coroutine)
        while True:
            forward = coroutine.send(forward.model.run(forward))
    except StopIteration as stopped:
        result: T = stopped.value
        return result


def run_batch(
    jobs: Sequence[Callable[[int], ForwardCoroutine[T]]],
    size: int,
    *,
    last: CachedModel,
    report: Callable[[int], object] = lambda done: None,
) -> list[T]:
    """Run coroutines side by side; forwards that wait for the same model run as one.

    Args:
        jobs: one for each sequence; called with a slot, it returns the coroutine to run.
        size: jobs that run at a time, in the slots from 0; the next one takes the slot of one that
            ends.
        last: the model whose forwards run only when no other model has any to run. With the target
            here, sequences whose drafts differ in length are still verified together.
        report: called with 1 when a job ends.
    """
    queue = deque(enumerate(jobs))
    # What can go on: job, slot, coroutine, and the logits that it is sent (none to begin with).
    ready: deque[tuple[int, int, ForwardCoroutine[T], Tensor | None]] = deque()
    for slot in range(min(size, len(jobs))):
        number, job = queue.popleft()
        ready.append((number, slot, job(slot), None))
    waiting: dict[int, tuple[int, ForwardCoroutine[T], Forward]] = {}
    results: dict[int, T] = {}
    while ready:
        while ready:
            number, slot, coroutine, logits = ready.popleft()
            try:
                forward = next(coroutine) if logits is None else coroutine.send(logits)
                waiting[number] = slot, coroutine, forward
            except StopIteration as stopped:
                results[number] = stopped.value
                report(1)
                if queue:
                    number, job = queue.popleft()
                    ready.appendleft((number, slot, job(slot), None))
        models = [forward.model for _, _, forward in waiting.values()]
        model = next((model for model in models if model is not last), last)
        served = {n: entry for n, entry in waiting.items() if entry[2].model is model}
        answers = model.run_all([forward for _, _, forward in served.values()]) if served else []
        for (number, (slot, coroutine, _)), logits in zip(served.items(), answers, strict=True):
            del waiting[number]
            ready.append((number, slot, coroutine, logits))
    return [results[number] for number in range(len(jobs))]


class CachedSequence:
    """The content of a model's KV cache for one sequence, and for a draft tree after it.

    The state changes in three places: `commit` when a forward has run, `accept` (with `crop`) when
    a draft was verified, and `reset`.

    Args:
        sampling: how logits become distributions, the same for target and draft.

    Attributes:
        length: committed tokens in the cache.
        ancestors: (m, m) boolean over the m nodes in the cache; see `Layout.ancestors`.
        states: (n, H) what the lm_head read at the last n tokens that were run, of which logits
            were asked for; None before the first forward, and where the model does not capture
            hidden states.
        forwards: forwards so far, of this sequence and of those before it in the slot.
        taps: (size, F) states inside the model by cache position, for drafts that read them; None
            where the model does not capture them.
    """

    def __init__(self, model: CachedModel, slot: int, sampling: SamplingConfig) -> None:
        self.model = model
        self.slot = slot
        self.sampling = sampling
        self.forwards = 0
        self.length = 0
        self.ancestors = NO_NODES
        self.states: Tensor | None = None
        self.taps: Tensor | None = None
        self._target: CachedSequence | None = None

    @property
    def reads_first(self) -> bool:
        """Whether later tokens attend to the first one."""
        return True

    def reset(self) -> None:
        """Forget the sequence."""
        self.length = 0
        self.ancestors = NO_NODES
        self.states = self.taps = None

    @property
    def hidden(self) -> Tensor | None:
        """(H,) of `states`, that of the last token."""
        return None if self.states is None else self.states[-1]

    @property
    def in_use(self) -> int:
        """Cache positions in use, by committed tokens and by nodes."""
        return self.length + len(self.ancestors)

    def append(self, tokens: list[int], logits_to_keep: int, drafted: int = 0) -> Forward:
        """The forward that appends tokens to a chain. No nodes may be in the cache.

        Logits are needed after `logits_to_keep` of the last ones; `drafted` of them are not
        committed yet.
        """
        return Forward(self, tokens, logits_to_keep, drafted=drafted)

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

    def hold(self, persists: bool) -> None:
        """Read later tokens as the last draft would have, as long as a residual of it persists."""

    def append_tree(
        self,
        tokens: list[int],
        parents: Sequence[int],
        uncached: list[int] | None = None,
        *,
        unrolled: bool = False,
    ) -> Forward:
        """The forward that appends nodes of a draft tree: logits after each node.

        Args:
            tokens: n tokens.
            parents: the node that each follows, 0 being the last committed token.
            uncached: committed tokens that are not in the cache yet and come first; only if no
                node is in the cache. The logits after the last of them come first, too.
            unrolled: score the tree as a batch of its paths; only if no node is in the cache.
        """
        uncached = uncached or []
        logits_to_keep = len(tokens) + bool(uncached)
        return Forward(self, [*uncached, *tokens], logits_to_keep, parents, unrolled)

    def distribution(self, logits: Tensor, sampling: SamplingConfig | None = None) -> Tensor:
        """Distributions (..., V) of logits (..., N), by default under the sequence's sampling."""
        return self.model.distribution(logits, sampling or self.sampling)

    def commit(
        self, forward: Forward, layout: Layout, states: Tensor | None, taps: Tensor | None = None
    ) -> None:
        """Take account of a forward of this sequence that has run.

        Of what its layout says it wrote; (n, H) what the lm_head read at the last tokens and (n, F)
        taps of all its tokens, if they were captured.
        """
        if taps is not None:
            end = layout.start + len(taps)
            if self.taps is None or len(self.taps) < end:
                enlarged = taps.new_zeros(2 * end, taps.shape[1])
                if self.taps is not None:
                    enlarged[: len(self.taps)] = self.taps
                self.taps = enlarged
            self.taps[layout.start : end] = taps
        self.forwards += 1
        self.length += len(forward.tokens) - len(forward.parents)
        self.ancestors = layout.ancestors
        self.states = states

    def crop(self, length: int) -> None:
        """Keep at most the first `length` committed tokens, and no nodes."""
        self.ancestors = NO_NODES
        self.length = min(self.length, length)

    def accept(self, nodes: Sequence[int]) -> None:
        """Commit a path of nodes, given from the root down, and drop the other nodes.

        Raises ValueError if a node is not in the cache.
        """
        cached = len(self.ancestors)
        if any(not 0 < node <= cached for node in nodes):
            raise ValueError(f"nodes {list(nodes)} are not all among the {cached} in the cache")
        if list(nodes) != list(range(1, len(nodes) + 1)):
            source = [self.length + node - 1 for node in nodes]
            self.model.kv_cache.move(self.slot, source, self.length)
            if self.taps is not None:
                self.taps[self.length : self.length + len(source)] = self.taps[source]
        self.length += len(nodes)
        self.ancestors = NO_NODES


class RecurrentSequence(CachedSequence):
    """A sequence of a model with recurrent layers, whose states cannot drop a token.

    When a token is dropped, the states go back to those after the last committed token of the last
    forward that read any, and what was accepted since is read again (`eval.runtime.recurrent`).
    """

    def __init__(self, model: CachedModel, slot: int, sampling: SamplingConfig) -> None:
        super().__init__(model, slot, sampling)
        self._kept = 0  # tokens whose states are kept

    def reset(self) -> None:
        """Forget the sequence."""
        super().reset()
        self._kept = 0
        for states in self.model.kv_cache.recurrent:
            states.forget(self.slot)

    def commit(
        self, forward: Forward, layout: Layout, states: Tensor | None, taps: Tensor | None = None
    ) -> None:
        """Take account of a forward that has run."""
        super().commit(forward, layout, states, taps)
        if forward.drafted < len(forward.tokens):
            self._kept = self.length - forward.drafted

    def crop(self, length: int) -> None:
        """Keep at most the first `length` tokens, or those whose states are kept."""
        if length < self.length:
            super().crop(min(length, self._kept))
            for states in self.model.kv_cache.recurrent:
                states.go_back(self.slot)


class RereadSequence(CachedSequence):
    """A sequence of a draft that reads drafted tokens in another way than committed ones.

    Drafted tokens are dropped when a draft was verified, accepted or not, and are read again; but
    not while a residual persists, which is of the distributions that its draft was drawn from.
    """

    def __init__(self, model: CachedModel, slot: int, sampling: SamplingConfig) -> None:
        super().__init__(model, slot, sampling)
        self._read = 0  # tokens that were read as committed ones
        self._is_held = False

    def reset(self) -> None:
        """Forget the sequence."""
        super().reset()
        self._read, self._is_held = 0, False

    def hold(self, persists: bool) -> None:
        """Read later tokens as the last draft would have, as long as a residual of it persists."""
        self._is_held = persists

    def crop(self, length: int) -> None:
        """Keep at most the first `length` tokens, of those that were read as committed ones."""
        if self._is_held:
            super().crop(length)
            return
        super().crop(min(length, self._read))
        self._read = self.length

    def accept(self, nodes: Sequence[int]) -> None:
        """Drop all nodes: those that were accepted are read again."""
        self.crop(self.length)

    def _before(self, forward: Forward) -> list[int]:
        """The cache position of the token before each of a forward's; -1 if there is none."""
        last = self.length + len(forward.tokens) - len(forward.parents) - 1
        return [*range(self.length - 1, last), *(last + parent for parent in forward.parents)]


class StatesSequence(RereadSequence):
    """A sequence of a draft that reads its target's states (`draft_models.states_draft`).

    A token is read with the target's states at the token before it, or, where the target has not
    read that one yet, with the draft's own; without a target, as in a warm-up, its states count as
    0.
    """

    def __init__(self, model: CachedModel, slot: int, sampling: SamplingConfig) -> None:
        super().__init__(model, slot, sampling)
        self._draft_states: dict[int, Tensor] = {}  # by cache position, of the draft in progress
        embedding = states_input(model.model)
        assert embedding is not None
        self._embedding = embedding

    @property
    def reads_first(self) -> bool:
        """Whether later tokens attend to the first one; in some layouts of engines none does."""
        return self._embedding.reads_first

    def reset(self) -> None:
        """Forget the sequence."""
        super().reset()
        self._draft_states = {}

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
        if after_target:
            states = embedding.weight.new_zeros(len(after_target), embedding.states.in_features)
            if self._target is not None and self._target.taps is not None:
                begin = after_target[0] < 0  # nothing stands before the first token
                states[begin:] = self._target.taps[after_target[begin:]]
            parts.append(embedding.after_target(ids[: len(after_target)], states))
        if len(after_target) < len(before):
            own_states = [self._draft_states[place] for place in before[len(after_target) :]]
            parts.append(embedding.after_own(ids[len(after_target) :], torch.stack(own_states)))
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _read_by_target(self) -> int:
        """Tokens of the sequence whose target states are known, and may be read."""
        if self._is_held:
            return self._read - 1
        return sys.maxsize if self._target is None else self._target.length

    def commit(
        self, forward: Forward, layout: Layout, states: Tensor | None, taps: Tensor | None = None
    ) -> None:
        """Take account of a forward that has run, and keep the draft's states."""
        committed, known = len(forward.tokens) - len(forward.parents), self._read_by_target()
        if self._read == self.length:  # those that are read with the target's states come first
            self._read += sum(place < known for place in self._before(forward)[:committed])
        if states is not None:
            end = layout.start + len(forward.tokens)
            self._draft_states |= dict(zip(range(end - len(states), end), states, strict=True))
        super().commit(forward, layout, states, taps)

    def crop(self, length: int) -> None:
        """Keep at most the first `length` tokens, of those read with the target's states."""
        super().crop(length)
        if not self._is_held:
            self._draft_states = {}


class MaskedSequence(RereadSequence):
    """A sequence of a draft that proposes several tokens after one forward (`draft_models.depths`).

    It reads committed tokens, and masks behind them. Drafted ones are not read, in chains and in
    trees: their cache positions hold nothing. Deeper than the masks, the last one is repeated.
    """

    def __init__(self, model: CachedModel, slot: int, sampling: SamplingConfig) -> None:
        super().__init__(model, slot, sampling)
        self.masks = model.depths - 1
        # Of each mask: logits, and what the lm_head read if it is captured.
        self._ahead: tuple[Tensor, Tensor | None]
        self._depths: dict[int, int] = {}  # by cache position, of tokens from the last read one on

    def _is_drafted(self, forward: Forward) -> bool:
        """Whether a forward's tokens are drafted ones; `crop` and `pieces` keep the kinds apart."""
        return self._is_held or len(forward.tokens) == len(forward.parents) + forward.drafted

    @property
    def mask(self) -> int:
        """The token that it reads for those that are not known yet."""
        mask: int = getattr(self.model.model.config, MASK)
        return mask

    def with_masks(self, forward: Forward) -> Forward | None:
        """The forward that reads a forward's tokens and the masks; None if it reads no token."""
        if self._is_drafted(forward):
            return None
        assert forward.drafted + len(forward.parents) == 0
        tokens = forward.tokens + [self.mask] * self.masks
        return Forward(self, tokens, forward.logits_to_keep + self.masks)

    def look_ahead(self, logits: Tensor, states: Tensor | None, root: int) -> None:
        """Draft from what a forward gave at the masks behind the token at `root`: (D - 1, ...)."""
        self._ahead, self._depths = (logits, states), {root: 0}

    def drafted(self, forward: Forward) -> tuple[Tensor, Tensor | None]:
        """Logits and states of a forward's tokens, which are not read."""
        places = range(self.in_use, self.in_use + len(forward.tokens))
        for place, parent in zip(places, self._before(forward), strict=True):
            self._depths[place] = self._depths[parent] + 1
        masks = [min(self._depths[place], self.masks) - 1 for place in places]
        logits, states = self._ahead
        logits = torch.stack([logits[mask] for mask in masks])  # faster than logits[masks]
        return self.behind(forward.tokens, logits, None if states is None else states[masks])

    def behind(
        self, _tokens: list[int], logits: Tensor, states: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """Logits and states behind these tokens, of what was read there."""
        return logits, states

    def commit(
        self, forward: Forward, layout: Layout, states: Tensor | None, taps: Tensor | None = None
    ) -> None:
        """Take account of a forward that has run; those that read no token are not counted."""
        is_drafted = self._is_drafted(forward)
        if not is_drafted and self._read == self.length:
            self._read += len(forward.tokens)
        super().commit(forward, layout, states, taps)
        self.forwards -= is_drafted


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
        x: Tensor = self._embedding.unread(taps, ids[contexts:])
        return x

    def behind(
        self, tokens: list[int], logits: Tensor, states: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """Logits and states of slots behind these tokens, of which the bias alone is computed."""
        markov = self._embedding.markov.weight[tokens]
        if states is not None:
            states = torch.cat([states, markov], dim=-1)
        return logits + self._output.bias_by(markov), states

    def commit(
        self, forward: Forward, layout: Layout, states: Tensor | None, taps: Tensor | None = None
    ) -> None:
        """Take account of a forward that has run, whose last token was an anchor."""
        is_drafted, read = self._is_drafted(forward), self._read
        super().commit(forward, layout, states, taps)
        if not is_drafted:
            self._read = read + len(forward.tokens) - 1
