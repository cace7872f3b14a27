"""Speculative decoding, of one sequence or of many: any draft, any stopping rule, any verifier.

Each round drafts after the committed tokens, scores the draft in one forward of the target, lets
the verifier choose how much of it is accepted and what follows, and crops both KV caches to the
result. The emitted tokens have the distribution of plain sampling from the target (unless the
verifier is a biased one).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from operator import mul

import torch
from torch import Tensor
from transformers import PreTrainedModel

from eval.assembly import make_drafters
from eval.decode_config import DecodeConfig
from eval.drafting.drafters import Drafter
from eval.drafting.tree_builder import drawn_chain
from eval.drafts import DraftTree
from eval.rounds import Generation, Round
from eval.runtime.batching import run_together
from eval.runtime.budget import CostTable, PlannedDrafts, SharedBudget
from eval.runtime.cuda_graphs import ForwardSizes
from eval.runtime.engines import Engine
from eval.runtime.model import CachedModel
from eval.runtime.model_checks import check_rope, check_trees
from eval.runtime.sequence import CachedSequence, Forward, ForwardCoroutine, drive
from eval.runtime.stopwatch import Stopwatch
from eval.verifiers import Verifier
from eval.verifiers.rule import Drawn
from heads import BaseHead
from heads.probe import check_head, warn_of_other_sampling
from specdata.errors import ConfigError
from specdata.models import end_ids
from specdata.probability import SamplingConfig, draw_one

__all__ = ["DecodeConfig", "Generation", "SpeculativeDecoder"]

NO_DRAFT = drawn_chain([], [], 0)
# Tokens scored of each sequence, and tokens of a prompt, when costs are measured.
SCORED, MEASURED_PROMPT = (1, 2, 3, 5, 9, 17), 16


@dataclass(frozen=True, slots=True)
class Slot:
    """What decodes one sequence at a time: the target's KV cache of it, and a drafter."""

    target: CachedSequence
    drafter: Drafter | None

    def reset(self) -> None:
        """Forget the sequence before."""
        self.target.reset()
        if self.drafter is not None:
            self.drafter.reset()


class SpeculativeDecoder:
    """Decodes with a target, an optional drafter and a verifier. Not for concurrent use.

    Args:
        target: the target.
        sampling: the target distribution: how the target's logits become distributions.
        make_drafter: makes the drafter of a slot of a batch (0 for a single sequence); None is
            plain decoding.
        verifier: the acceptance rule.
        end_tokens: token ids that end a sequence.
        drafts: the models behind the drafters.
        tree_attention: score branching drafts in one forward of one row; if not, as a batch of
            paths, which gives the same distributions (an ablation).
        budget: decides on the bids of drafters that make any.
        endless: the same decoder without end tokens, to measure costs with, if none are given.
    """

    def __init__(
        self,
        target: CachedModel,
        sampling: SamplingConfig,
        make_drafter: Callable[[int], Drafter] | None,
        verifier: Verifier,
        end_tokens: frozenset[int],
        *,
        drafts: Sequence[CachedModel] = (),
        tree_attention: bool = True,
        budget: SharedBudget | None = None,
        endless: SpeculativeDecoder | None = None,
    ) -> None:
        self._target = target
        self._sampling = sampling
        self._make_drafter = make_drafter
        self._drafts = tuple(drafts)
        self._verifier = verifier
        self._end_tokens = end_tokens
        self._tree_attention = tree_attention
        self._budget = budget
        self._endless = endless
        # Of the forwards of the target and of a draft, for `warm_up` on a GPU.
        self._sizes = ForwardSizes((1,)), ForwardSizes((1, 2))
        self._slots: list[Slot] = []

    @classmethod
    def from_config(
        cls,
        target: PreTrainedModel,
        draft: PreTrainedModel | Sequence[PreTrainedModel] | None,
        config: DecodeConfig,
        head: BaseHead | None = None,
        *,
        engine: Engine = "eager",
        costs: CostTable | None = None,
    ) -> SpeculativeDecoder:
        """Build a decoder for transformers models that share a vocabulary.

        Args:
            target: the target.
            draft: the draft; several, if `config.path_drafts` names one for each path; None is
                plain decoding.
            config: how to decode.
            head: the acceptance head, for stop="head" (and "cost", if there is one). The module
                itself is moved to the draft's device, as `head.to` does.
            engine: how forwards run: see `eval.runtime.graphs`.
            costs: with budget="shared", what forwards take, so that generators alone decide what
                is decoded; None measures it when it is first needed (`measure_costs`).

        Raises:
            ConfigError: if the configuration needs a head or more drafts than are given, if the
                head is of another draft, or the engine or the models' attention cannot do what is
                asked.
            CacheNotRewindableError: if a model's cache cannot be cropped.

        Warns:
            OtherSamplingWarning: if the head was trained for another sampler.
        """
        vocabulary, end_tokens = target.config.get_text_config().vocab_size, end_ids(target)
        cached_target = CachedModel(target, vocabulary, engine=engine)
        cached_drafts: tuple[CachedModel, ...] = ()
        if draft is not None:
            drafts = tuple(draft) if isinstance(draft, Sequence) else (draft,)
            if head is not None:
                head = head.to(drafts[0].device)
            capture_hidden = head is not None and config.stop.reads_head
            if head is not None and capture_hidden:
                check_head(drafts[0], head)
                warn_of_other_sampling(head, config.sampling)
            cached_drafts = tuple(
                CachedModel(model, vocabulary, engine=engine, capture_hidden=capture_hidden)
                for model in drafts
            )
            if config.drafter != "chain":
                for model in (target, *drafts) if config.tree_attention else drafts:
                    check_trees(model)
        verifier = config.make_verifier()
        budget = None
        if config.budget == "shared" and draft is not None:
            budget = SharedBudget(costs, packed=cached_target.packs)

        def decoder(ends: frozenset[int], endless: SpeculativeDecoder | None) -> SpeculativeDecoder:
            made = cls(
                cached_target,
                config.sampling,
                make_drafters(config, cached_drafts, head, ends, budget) if cached_drafts else None,
                verifier,
                ends,
                drafts=cached_drafts,
                tree_attention=config.tree_attention,
                budget=budget,
                endless=endless,
            )
            if cached_drafts:
                made._sizes = _forward_sizes(config)
            return made

        return decoder(end_tokens, decoder(frozenset(), None) if budget else None)

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
            ConfigError: if drafting would change the target's distribution (`check_rope`).
        """
        self._refresh_graphs()
        stopwatch = Stopwatch(self._target.device)
        scheduler = self._scheduler(1)
        slot = self._slot(0)
        decode = partial(
            self._decode,
            prompt_ids=prompt_ids,
            max_new_tokens=max_new_tokens,
            generator=generator,
            stopwatch=stopwatch,
        )
        try:
            if scheduler is None:
                return drive(decode(slot))
            return run_together([decode], [slot], last=self._target, scheduler=scheduler)[0]
        finally:
            self._free_caches()

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

        Each sequence is decoded as `generate` would with its generator, whatever runs beside it:
        forwards of one model that wait at the same time run as one. Batching changes logits by
        rounding only. With a shared budget, drafts are as long as pays beside those of the other
        sequences; tokens then differ, and their joint distribution does not. Times of single rounds
        are not known and recorded as 0, and `Generation.seconds` is that of the whole call.

        Args:
            prompts: each (T,) int64, T >= 1.
            max_new_tokens: as in `generate`.
            generators: one for each prompt, used for no other.
            size: sequences decoded at the same time.
            report: called with 1 when a prompt is done.

        Returns:
            A generation for each prompt, in their order.

        Raises:
            ValueError: as `generate`, or if there is not one generator for each prompt.
            ConfigError: as `generate`.
        """
        if len(generators) != len(prompts) or len({*map(id, generators)}) < len(generators):
            raise ValueError(
                f"each of {len(prompts)} prompts needs a generator of its own, got "
                f"{len({*map(id, generators)})}"
            )
        if size < 1:
            raise ValueError(f"size must be at least 1, got {size}")
        self._refresh_graphs()
        scheduler = self._scheduler(min(size, len(prompts)) or 1)
        begun = time.perf_counter()
        jobs = [
            partial(
                self._decode,
                prompt_ids=prompt,
                max_new_tokens=max_new_tokens,
                generator=generator,
                stopwatch=None,
            )
            for prompt, generator in zip(prompts, generators, strict=True)
        ]
        try:
            slots = [self._slot(number) for number in range(min(size, len(prompts)))]
            generations = run_together(
                jobs, slots, last=self._target, report=report, scheduler=scheduler
            )
        finally:
            self._free_caches()
        seconds = time.perf_counter() - begun
        return [replace(generation, seconds=seconds) for generation in generations]

    @torch.inference_mode()
    def warm_up(self, length: int = 512) -> None:
        """Make every graph now that decoding may need (engines other than eager).

        Args:
            length: tokens of the longest sequence, its prompt included. Only CUDA graphs depend on
                it: those of longer sequences are made when they are needed.
        """
        self._refresh_graphs()
        self._target.warm_up([(1, 1), (2, 2)])
        self._target.prepare(self._sizes[0], length)
        for model in self._drafts:
            model.warm_up([(1, 1), (2, 1)], nodes=(1, 2))
            model.prepare(self._sizes[1], length)

    @torch.inference_mode()
    def measure_costs(self, size: int) -> CostTable:
        """Measure what forwards take beside each other on this machine, for a shared budget.

        Decodes random prompts of batches of 1, 2, 4, ... and `size` sequences, in seconds for a
        small model, with drafts of lengths that are laid down; the times are those of the decoder
        itself, drawing, estimates and verification included. Pass the table to `from_config` to
        decode the same again.

        Args:
            size: the largest batch, at least 1.

        Raises:
            ConfigError: if the decoder shares no budget.
        """
        endless, budget = self._endless, self._budget
        if endless is None or budget is None:
            raise ConfigError('there are costs to measure only with budget="shared" and a draft')
        self._refresh_graphs()
        sizes = sorted({size, *(2**power for power in range(size.bit_length()))})
        # On a CPU, what other processes take from this one is left out.
        clock = time.thread_time if self._target.device.type == "cpu" else time.perf_counter
        planned = PlannedDrafts(SCORED, clock)
        tokens = min(planned.most_tokens, self._positions - MEASURED_PROMPT)
        generator = torch.Generator().manual_seed(0)
        vocabulary = self._target.model.get_input_embeddings().num_embeddings
        for sequences in sizes:
            planned.begin(sequences)
            prompts = torch.randint(vocabulary, (sequences, MEASURED_PROMPT), generator=generator)
            jobs = [
                partial(
                    endless._decode,
                    prompt_ids=prompt,
                    max_new_tokens=tokens,
                    generator=generator,
                    stopwatch=None,
                )
                for prompt in prompts
            ]
            slots = [endless._slot(number) for number in range(sequences)]
            try:
                run_together(jobs, slots, last=self._target, scheduler=planned)
            finally:
                self._free_caches()
        # These slots' sequences have taken the places of ours.
        self._slots.clear()
        budget.measured = planned.table()
        return budget.measured

    @property
    def _positions(self) -> int:
        """Most tokens of a sequence that all models can read."""
        configs = [m.model.config.get_text_config() for m in (self._target, *self._drafts)]
        return min(getattr(each, "max_position_embeddings", None) or 2**30 for each in configs)

    @property
    def costs(self) -> CostTable | None:
        """What forwards cost a shared budget; None without one, or before it is known."""
        return self._budget.costs if self._budget else None

    def _scheduler(self, size: int) -> SharedBudget | None:
        """The shared budget, if there is one, with costs and without a memory."""
        if self._budget is None:
            return None
        if self._budget.needs_costs(size):
            self.measure_costs(size)
        self._budget.restart()
        return self._budget

    def _slot(self, number: int) -> Slot:
        """A slot, made when it is first used. Its drafter keeps what its rule has measured."""
        while len(self._slots) <= number:
            new = len(self._slots)
            drafter = self._make_drafter(new) if self._make_drafter else None
            self._slots.append(Slot(self._target.sequence(new, self._sampling), drafter))
        return self._slots[number]

    def _refresh_graphs(self) -> None:
        """Weights may have changed since the last call, in training for example."""
        for model in (self._target, *self._drafts):
            model.refresh_graphs()

    def _free_caches(self) -> None:
        """Forget all sequences and free their memory: several decoders may share one GPU."""
        for model in (self._target, *self._drafts):
            model.reset()

    def _decode(
        self,
        slot: Slot,
        prompt_ids: Tensor,
        max_new_tokens: int,
        generator: torch.Generator,
        stopwatch: Stopwatch | None,
    ) -> ForwardCoroutine[Generation]:
        """Decode one sequence, yielding the forwards that it needs."""
        if prompt_ids.ndim != 1 or len(prompt_ids) == 0 or max_new_tokens < 1:
            raise ValueError(
                "prompt_ids must be (T,) with T >= 1 and max_new_tokens >= 1, got shape "
                f"{tuple(prompt_ids.shape)} and {max_new_tokens}"
            )
        begun = time.perf_counter()
        slot.reset()
        committed: list[int] = prompt_ids.tolist()
        max_length, verifier = len(committed) + max_new_tokens, self._verifier
        if slot.drafter is not None or stopwatch is None:
            alone = stopwatch is not None
            check_rope(self._target.model, len(committed), max_length, alone=alone)
        rounds: list[Round] = []
        ended = False
        while len(committed) < max_length and not ended:
            emitted, verifier, record = yield from self._round(
                slot, committed, max_length, verifier, generator, stopwatch
            )
            committed += emitted
            rounds.append(record)
            if slot.drafter is not None:
                slot.drafter.observe(record)
            ended = committed[-1] in self._end_tokens
        return Generation(
            torch.tensor(committed[len(prompt_ids) :]),
            tuple(rounds),
            "eos" if ended else "length",
            time.perf_counter() - begun,
        )

    def _round(
        self,
        slot: Slot,
        committed: list[int],
        max_length: int,
        verifier: Verifier,
        generator: torch.Generator,
        stopwatch: Stopwatch | None,
    ) -> ForwardCoroutine[tuple[list[int], Verifier, Round]]:
        """One round: the emitted tokens, the verifier of the next round, and the record."""
        lap = stopwatch.lap if stopwatch else lambda: 0.0
        lap()
        drafter, draft_forwards, tree = slot.drafter, 0, NO_DRAFT
        if drafter is not None:
            before = drafter.forwards
            # One token of the budget is for the verifier to add.
            tree = yield from drafter.propose(committed, max_length - len(committed) - 1, generator)
            if verifier.needs_tail(len(tree)):
                tree = yield from drafter.with_tail(tree, committed)
            draft_forwards = drafter.forwards - before
        draft_seconds = lap()
        logits = yield self._scoring(slot.target, committed[slot.target.length :], tree)
        distributions = slot.target.distribution(logits)
        target_seconds = lap()
        if len(tree) or verifier.carries_residual:
            drawn = verifier.draw(tree, distributions, generator)
        else:
            drawn = Drawn([], draw_one(distributions[0], generator), verifier)
        accepted = [tree.token_list[node - 1] for node in drawn.nodes]
        # Nothing follows an accepted end token.
        ended = bool(accepted) and accepted[-1] in self._end_tokens
        emitted = accepted if ended else [*accepted, drawn.token]
        length = len(committed) + len(accepted)
        if tree.shape == "chain":
            slot.target.crop(length)
        else:
            slot.target.accept(drawn.nodes)
        if drafter is not None:
            drafter.accept(drawn.nodes, length)
        record = Round(
            drafted=len(tree),
            depth=tree.depth,
            accepted=len(accepted),
            emitted=len(emitted),
            draft_forwards=draft_forwards,
            draft_seconds=draft_seconds,
            target_seconds=target_seconds,
            overhead_seconds=lap(),
            tokens=tuple(tree.token_list),
        )
        return emitted, drawn.verifier, record

    def _scoring(self, target: CachedSequence, uncached: list[int], tree: DraftTree) -> Forward:
        """The forward for the target's logits after the committed tokens and every node (N+1, V).

        Args:
            target: the target's sequence.
            uncached: committed tokens that are not in its cache yet.
            tree: the draft.
        """
        if tree.shape == "chain":
            return target.append(uncached + tree.token_list, len(tree) + 1)
        unrolled = not self._tree_attention
        return target.append_tree(tree.token_list, tree.parent_list, uncached, unrolled=unrolled)


def _forward_sizes(config: DecodeConfig) -> tuple[ForwardSizes, ForwardSizes]:
    """Tokens of the forwards of the target and of a draft, where a draft can have any of them.

    Where end tokens make a tree smaller than its widths, its forwards are not among these.
    """
    # After a round the draft reads the last token, or also the one before it.
    read = (1, 2)
    if config.drafter == "chain":
        return ForwardSizes(range(1, config.stop.longest + 2)), ForwardSizes(read)
    if config.drafter == "dynamic_tree":
        nodes = range(1, config.nodes + 2)
        return ForwardSizes((1,), nodes), ForwardSizes(read, nodes)
    widths = config.widths or (config.paths, *[1] * (config.stop.longest - 1))
    levels = list(accumulate(widths, mul))
    scored = [1 + nodes for nodes in accumulate(levels)]
    return ForwardSizes((1,), scored), ForwardSizes(read, levels[:-1])
