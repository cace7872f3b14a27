"""A text that a model has read, perhaps with a draft after it, and the forwards that read more.

A `CachedSequence` is a slot of a model's KV cache. Drafted tokens are appended behind the committed
ones; `keep` commits those that were accepted and drops the rest. Targets and plain drafts read all
tokens alike; the other kinds override how they read drafted ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from eval.runtime.layout import TokenLayout, lay_out
from eval.runtime.model import CachedModel, ForwardPart, Outputs
from specdata.drafts.states_network import without_first
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
