"""Speculative decoding, of one text or of many: any draft, any stopping rule, any verifier.

Each round drafts after the committed text, scores the draft in one forward of the target, lets the
verifier choose how much of it stays and what follows, and rewinds both caches to the result. The
emitted text has the distribution of plain sampling from the target (unless the verifier is a biased one).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor
from transformers import PreTrainedModel

from eval.decode_config import DecodeConfig
from eval.drafting.assembly import make_drafters
from eval.drafting.drafters import Drafter
from eval.drafting.tree_builder import chain
from eval.drafts import DraftTree
from eval.rounds import Generation, Round
from eval.runtime.batching import run_together
from eval.runtime.engines import Engine
from eval.runtime.model import CachedModel
from eval.runtime.model_checks import check_ropes, check_trees
from eval.runtime.sequence import CachedSequence, Forward, ForwardCoroutine, drive
from eval.verifiers import Verifier
from eval.verifiers.rule import Drawn
from heads import AcceptanceHead
from specdata.errors import ConfigError
from specdata.models import end_ids
from specdata.probability import SamplingConfig, draw_one

__all__ = ["DecodeConfig", "Generation", "SpeculativeDecoder"]

NOTHING = chain([], [], 0)


@dataclass(slots=True)
class Slot:
    """The caches of one text: the target's, and the drafter's."""

    target: CachedSequence
    drafter: Drafter | None

    def begin(self) -> None:
        """Forget the text before."""
        self.target.reset()
        if self.drafter is not None:
            self.drafter.reset()


class SpeculativeDecoder:
    """Decodes with a target, an optional drafter and a verifier. Not for concurrent use.

    Args:
        target: the target.
        sampling: the distribution that texts are drawn from.
        drafters: makes what proposes tokens for the text in a row of a batch (0 for a single
            text); None is plain decoding.
        drafts: the models behind the drafters.
        verifier: the acceptance rule.
        ends: token ids that end a text.
        tree_attention: score branching drafts in one forward of one row; if not, as a batch of
            paths, which gives the same distributions (an ablation).
    """

    def __init__(
        self,
        target: CachedModel,
        sampling: SamplingConfig,
        drafters: Callable[[int], Drafter] | None,
        verifier: Verifier,
        ends: frozenset[int],
        *,
        drafts: Sequence[CachedModel] = (),
        tree_attention: bool = True,
    ) -> None:
        self._target = target
        self._sampling = sampling
        self._drafters = drafters
        self._drafts = tuple(drafts)
        self._verifier = verifier
        self._ends = ends
        self._tree_attention = tree_attention
        self._slots: list[Slot] = []

    @classmethod
    def from_config(
        cls,
        target: PreTrainedModel,
        draft: PreTrainedModel | Sequence[PreTrainedModel] | None,
        config: DecodeConfig,
        head: AcceptanceHead | None = None,
        *,
        engine: Engine = "eager",
    ) -> SpeculativeDecoder:
        """Build a decoder for transformers models that share a vocabulary.

        Args:
            target: the target.
            draft: the draft; several, if `config.path_drafts` names one for each path.
            config: how to decode.
            head: the acceptance head, for stop="head" (and "cost", if there is one).
            engine: how forwards run: see `eval.runtime.graphs`.

        Raises:
            ConfigError: if the configuration needs a head or more drafts than are given, if the
                head is of another draft, or the engine or the models' attention cannot do what is
                asked.
            CacheNotRewindableError: if a model's cache cannot be cropped.
        """
        vocabulary, ends = target.config.get_text_config().vocab_size, end_ids(target)
        model = CachedModel(target, vocabulary, engine=engine)
        made: tuple[CachedModel, ...] = ()
        drafters = None
        if draft is not None:
            given = tuple(draft) if isinstance(draft, Sequence) else (draft,)
            if head is not None:
                head = head.to(given[0].device)
            capture_hidden = head is not None and config.stop.reads_head
            if head is not None and capture_hidden:
                check_head(head, given[0])
            made = tuple(
                CachedModel(one, vocabulary, engine=engine, capture_hidden=capture_hidden)
                for one in given
            )
            if config.drafter != "chain":
                for one in (target, *given) if config.tree_attention else given:
                    check_trees(one)
            drafters = make_drafters(config, made, head, ends)
        return cls(
            model,
            config.sampling,
            drafters,
            config.make_verifier(),
            ends,
            drafts=made,
            tree_attention=config.tree_attention,
        )

    @torch.inference_mode()
    def generate(
        self, prompt_ids: Tensor, *, max_new_tokens: int, generator: torch.Generator
    ) -> Generation:
        """Continue a prompt.

        Args:
            prompt_ids: (T,) int64, T >= 1.
            max_new_tokens: at least 1; never exceeded, and nothing is drafted beyond it.
            generator: every draw of this call.

        Raises:
            ValueError: for an empty prompt or a budget below 1.
            ConfigError: if drafting would change the target's distribution (`check_ropes`).
        """
        self._renew()
        clock = Stopwatch(self._target.device)
        steps = self._decode(self._slot(0), prompt_ids, max_new_tokens, generator, clock)
        try:
            return drive(steps)
        finally:
            self._forget()

    @torch.inference_mode()
    def generate_batch(
        self,
        prompts: Sequence[Tensor],
        *,
        max_new_tokens: int,
        generators: Sequence[torch.Generator],
        size: int = 8,
        report: Callable[[int], object] = lambda done: None,
    ) -> list[Generation]:
        """Continue many prompts, several at a time; a finished one makes room for the next.

        Each text is decoded as `generate` would with its generator, whatever its neighbours do:
        forwards of one model that are wanted at the same time run as one. Batching changes
        logits by rounding only. Times of single rounds are not known and recorded as 0, and
        `Generation.seconds` is that of the whole call.

        Args:
            prompts: each (T,) int64, T >= 1.
            max_new_tokens: as in `generate`.
            generators: one for each prompt, used for no other.
            size: texts decoded at the same time.
            report: called with 1 when a prompt is done.

        Raises:
            ValueError: as `generate`, or if there is not one generator for each prompt.
        """
        if len(generators) != len(prompts) or len({*map(id, generators)}) < len(generators):
            raise ValueError(
                f"each of {len(prompts)} prompts needs a generator of its own, got "
                f"{len({*map(id, generators)})}"
            )
        if size < 1:
            raise ValueError(f"size must be at least 1, got {size}")
        self._renew()
        begun = time.perf_counter()
        jobs = [
            partial(
                self._decode,
                prompt_ids=prompt,
                max_new_tokens=max_new_tokens,
                generator=generator,
                clock=None,
            )
            for prompt, generator in zip(prompts, generators, strict=True)
        ]
        try:
            slots = [self._slot(row) for row in range(min(size, len(prompts)))]
            outs = run_together(jobs, slots, last=self._target, report=report)
        finally:
            self._forget()
        seconds = time.perf_counter() - begun
        return [replace(out, seconds=seconds) for out in outs]

    @torch.inference_mode()
    def warm_up(self) -> None:
        """Make every graph now that decoding may need (engines other than eager)."""
        self._renew()
        self._target.warm_up([(1, 1), (2, 2)])
        for model in self._drafts:
            model.warm_up([(1, 1), (2, 1)], nodes=(1, 2))

    def _slot(self, row: int) -> Slot:
        """The caches of one text; a drafter keeps what its rule has learnt."""
        while len(self._slots) <= row:
            number = len(self._slots)
            drafter = self._drafters(number) if self._drafters else None
            self._slots.append(Slot(self._target.text(number, self._sampling), drafter))
        return self._slots[row]

    def _renew(self) -> None:
        """Weights may have changed since the last call, in training for example."""
        for model in (self._target, *self._drafts):
            model.renew()

    def _forget(self) -> None:
        """Free the caches: several decoders may share one GPU."""
        for model in (self._target, *self._drafts):
            model.reset()

    def _decode(
        self,
        slot: Slot,
        prompt_ids: Tensor,
        max_new_tokens: int,
        generator: torch.Generator,
        clock: Stopwatch | None,
    ) -> ForwardCoroutine[Generation]:
        """Decode one text, yielding the forwards that it needs."""
        if prompt_ids.ndim != 1 or len(prompt_ids) == 0 or max_new_tokens < 1:
            raise ValueError(
                "prompt_ids must be (T,) with T >= 1 and max_new_tokens >= 1, got shape "
                f"{tuple(prompt_ids.shape)} and {max_new_tokens}"
            )
        begun = time.perf_counter()
        slot.begin()
        text: list[int] = prompt_ids.tolist()
        goal, verifier = len(text) + max_new_tokens, self._verifier
        if slot.drafter is not None or clock is None:
            check_ropes(self._target.model, len(text), goal, alone=clock is not None)
        rounds: list[Round] = []
        ended = False
        while len(text) < goal and not ended:
            emitted, verifier, record = yield from self._round(
                slot, text, goal, verifier, generator, clock
            )
            text += emitted
            rounds.append(record)
            if slot.drafter is not None:
                slot.drafter.observe(record)
            ended = text[-1] in self._ends
        return Generation(
            torch.tensor(text[len(prompt_ids) :]),
            tuple(rounds),
            "eos" if ended else "length",
            time.perf_counter() - begun,
        )

    def _round(
        self,
        slot: Slot,
        text: list[int],
        goal: int,
        verifier: Verifier,
        generator: torch.Generator,
        clock: Stopwatch | None,
    ) -> ForwardCoroutine[tuple[list[int], Verifier, Round]]:
        lap = clock.lap if clock else lambda: 0.0
        lap()
        drafter, forwards, tree = slot.drafter, 0, NOTHING
        if drafter is not None:
            forwards = -drafter.forwards
            # One place of the budget belongs to the token that the verifier adds.
            tree = yield from drafter.propose(text, goal - len(text) - 1, generator)
            if verifier.needs_tail(len(tree)):
                tree = yield from drafter.with_tail(tree, text)
            forwards += drafter.forwards
        draft_seconds = lap()
        logits = yield self._scoring(slot.target, text[slot.target.length :], tree)
        distributions = slot.target.distribution(logits)
        target_seconds = lap()
        if len(tree) or verifier.carries_residual:
            drawn = verifier.draw(tree, distributions, generator)
        else:
            drawn = Drawn([], draw_one(distributions[0], generator), verifier)
        accepted = [tree.token_list[node - 1] for node in drawn.nodes]
        # After an accepted end token nothing follows.
        over = bool(accepted) and accepted[-1] in self._ends
        emitted = accepted if over else [*accepted, drawn.token]
        committed = len(text) + len(accepted)
        if tree.shape == "chain":
            slot.target.crop(committed)
        else:
            slot.target.accept(drawn.nodes)
        if drafter is not None:
            drafter.accept(drawn.nodes, committed)
        record = Round(
            drafted=len(tree),
            depth=depth_of(tree),
            accepted=len(accepted),
            emitted=len(emitted),
            draft_forwards=forwards,
            draft_seconds=draft_seconds,
            target_seconds=target_seconds,
            overhead_seconds=lap(),
        )
        return emitted, drawn.verifier, record

    def _scoring(self, target: CachedSequence, unseen: list[int], tree: DraftTree) -> Forward:
        """The forward that gives the target's logits after the text and every node: (N+1, V)."""
        if tree.shape == "chain":
            return target.append(unseen + tree.token_list, len(tree) + 1)
        parents = [int(parent) for parent in tree.parents.tolist()]
        unrolled = not self._tree_attention
        return target.append_tree(tree.token_list, parents, unseen, unrolled=unrolled)


def check_head(head: AcceptanceHead, draft: PreTrainedModel) -> None:
    """Raise ConfigError unless the head reads states as wide as the draft's output embedding."""
    width = int(draft.get_output_embeddings().weight.shape[-1])
    if head.hidden_size != width:
        raise ConfigError(
            f"the head reads states of width {head.hidden_size}, and this draft has {width}: give "
            "the head that was trained for this draft"
        )


def depth_of(tree: DraftTree) -> int:
    """The deepest position of a draft."""
    if tree.shape == "chain":
        return len(tree)
    depths = [0]
    for parent in tree.parents.tolist():
        depths.append(depths[int(parent)] + 1)
    return max(depths)


class Stopwatch:
    """Seconds between laps; waits for a GPU so that its work is counted where it was asked for."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._last = self._now()

    def _now(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter()

    def lap(self) -> float:
        """Seconds since the last lap."""
        now = self._now()
        seconds, self._last = now - self._last, now
        return seconds
