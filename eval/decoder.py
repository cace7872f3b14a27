"""Speculative decoding, of one sequence or of many: any draft, any stopping rule, any verifier.

Each round drafts after the committed tokens, scores the draft in one forward of the target, lets
the verifier choose how much of it is accepted and what follows, and crops both KV caches to the
result (`SpeculativeDecoder._decode`). The emitted tokens have the distribution of plain sampling
from the target (unless the verifier is a biased one).
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor
from transformers import PreTrainedModel

from eval.decode_config import DecodeConfig
from eval.drafting.drafters import BranchingDrafter, ChainDrafter, Drafter, drawn_chain
from eval.drafting.dynamic_tree import DynamicTreeDrafter
from eval.drafting.lookup import LookupDrafter
from eval.rounds import Generation, Round
from eval.runtime.batches import ForwardCoroutine, drive, run_batch
from eval.runtime.engines import Engine
from eval.runtime.feeding import sequence_of, warm_up
from eval.runtime.feeding.plain import CachedSequence
from eval.runtime.model import CachedModel
from eval.runtime.transformers_models import check_rope, check_trees
from eval.verifiers.rule import Drawn, Verifier
from heads import BaseHead
from heads.probe import check_head, warn_of_other_sampling
from specdata.drafts.depths import most_tokens
from specdata.drafts.states_network import reads_states
from specdata.drafts.taps import attach
from specdata.errors import ConfigError, NotFiniteError
from specdata.models import check_ids, end_ids
from specdata.probability import SamplingConfig, draw_one
from specdata.threads import Threads

__all__ = ["DecodeConfig", "Generation", "SpeculativeDecoder"]

Emitted = Callable[[Sequence[int], int], object]
"""Told the tokens that a round emits, and how many of them, the first, were drafted."""
WARM_UP = 8
"""Rounds of a decoder in which graphs are made, before numbers of threads are compared."""


class SpeculativeDecoder:
    """Decodes with a target, perhaps drafts, and a verifier. Not for concurrent use.

    Args:
        draft: None is plain decoding, but for lookups.
        head: the acceptance head of the stopping rule, on the draft's device.
        verifier: in place of the configuration's own.
    """

    def __init__(
        self,
        target: CachedModel,
        draft: CachedModel | None,
        config: DecodeConfig,
        head: BaseHead | None = None,
        verifier: Verifier | None = None,
    ) -> None:
        self._target, self._draft = target, draft
        self._config, self._head = config, head
        self._verifier = verifier or config.make_verifier()
        self._end_tokens = end_ids(target.model.generation_config)
        # Distributions of both models meet where the draft is.
        self._verified_on = draft.device if draft else target.device
        # What decodes one sequence at a time: the target's KV cache of it, and a drafter.
        self._slots: list[tuple[CachedSequence, Drafter | None]] = []
        self._threads = Threads(target.device, warm_up=WARM_UP)

    @classmethod
    def from_config(
        cls,
        target: PreTrainedModel,
        draft: PreTrainedModel | None,
        config: DecodeConfig,
        head: BaseHead | None = None,
        *,
        engine: Engine = "eager",
        verifier: Verifier | None = None,
    ) -> SpeculativeDecoder:
        """Build a decoder for transformers models that share a vocabulary.

        Without a draft it is plain decoding, or lookups. The acceptance head serves stop="head"
        (and "cost"): the module itself is moved to the draft's device, as `head.to` does. How
        forwards run is in `eval.runtime.graphs`. A verifier takes the place of the configuration's
        own.

        Raises:
            ConfigError: if the configuration needs a head and none is given, if the head is of
                another draft, or the engine or the models' attention cannot do what is asked.
            CacheNotRewindableError: if a model's cache cannot be cropped.

        Warns:
            OtherSamplingWarning: if the head was trained for another sampler.
        """
        vocabulary = target.config.get_text_config().vocab_size
        verifier = verifier or config.make_verifier()
        if config.drafter == "lookup":
            draft = None
        taps, cached_draft = list[int](), None
        if draft is not None:
            if reads_states(draft.config):
                taps = attach(draft, target)  # it reads this target from here on
            config.check_block(most_tokens(draft))
            if config.stop.needs_head and head is None:
                raise ConfigError(
                    f"stop={config.stop.name!r} needs an acceptance head: pass head=..."
                )
            if head is not None:
                head = head.to(draft.device)
                if config.stop.reads_head:
                    check_head(draft, head)
                    warn_of_other_sampling(head, config.sampling)
            if config.drafter != "chain":
                for model in (target, draft):
                    check_trees(model)
            cached_draft = CachedModel(
                draft,
                vocabulary,
                engine=engine,
                capture_hidden=head is not None and config.stop.reads_head,
                # A residual that persists is of tokens after those of its round, too.
                deepest=sys.maxsize if verifier.residual_persists else config.deepest,
            )
        cached_target = CachedModel(target, vocabulary, engine=engine, taps=taps, deepest=1)
        return cls(cached_target, cached_draft, config, head, verifier)

    @property
    def _models(self) -> list[CachedModel]:
        return [self._target, *([self._draft] if self._draft else [])]

    @torch.inference_mode()
    def generate(
        self,
        prompt_ids: Tensor,
        *,
        max_new_tokens: int,
        generator: torch.Generator,
        report: Emitted = lambda tokens, accepted: None,
    ) -> Generation:
        """Continue a prompt (T,) int64, T >= 1, by at most `max_new_tokens` >= 1.

        Nothing is drafted beyond them. The generator makes every draw of this call. `report` is
        called after each round.

        Raises:
            ValueError: for an empty prompt or a budget below 1.
            ConfigError: for ids that the target has no row for, or a sequence whose distribution
                would depend on how it is read (`check_rope`).
            NotFiniteError: naming the model, if a distribution is needed that has none.
        """
        self._refresh_graphs()
        try:
            return drive(self._decode(0, prompt_ids, max_new_tokens, generator, report, alone=True))
        finally:
            self._threads.end()
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
        rounding only. Times of single rounds are not known and recorded as 0, and
        `Generation.seconds` is that of the whole call.

        Each prompt (T,) has a generator that no other has. `size` sequences are decoded at the same
        time; `report` is called with 1 when one is done.
        """
        if len(generators) != len(prompts) or len({*map(id, generators)}) < len(generators):
            raise ValueError(
                f"each of {len(prompts)} prompts needs a generator of its own, got "
                f"{len({*map(id, generators)})}"
            )
        if size < 1:
            raise ValueError(f"size must be at least 1, got {size}")
        self._refresh_graphs()
        begun = time.perf_counter()
        jobs = [
            partial(
                self._decode,
                prompt_ids=prompt,
                max_new_tokens=max_new_tokens,
                generator=generator,
                alone=False,
            )
            for prompt, generator in zip(prompts, generators, strict=True)
        ]
        for model in self._models:
            model.kv_cache.expect(min(size, len(prompts)))
        try:
            generations = run_batch(jobs, size, last=self._target, report=report)
        finally:
            self._free_caches()
        seconds = time.perf_counter() - begun
        return [replace(generation, seconds=seconds) for generation in generations]

    @torch.inference_mode()
    def warm_up(self) -> None:
        """Make every graph now that decoding may need (engines other than eager)."""
        self._refresh_graphs()
        warm_up(self._target, [(1, 1), (2, 2)])
        if self._draft:
            warm_up(self._draft, [(1, 1), (2, 1)], nodes=(1, 2))

    def _decode(
        self,
        slot: int,
        prompt_ids: Tensor,
        max_new_tokens: int,
        generator: torch.Generator,
        report: Emitted = lambda tokens, accepted: None,
        *,
        alone: bool,
    ) -> ForwardCoroutine[Generation]:
        """Decode one sequence, yielding the forwards that it needs.

        `alone` says whether forwards serve this sequence only, so that they can be timed.
        """
        if prompt_ids.ndim != 1 or len(prompt_ids) == 0 or max_new_tokens < 1:
            raise ValueError(
                "prompt_ids must be (T,) with T >= 1 and max_new_tokens >= 1, got shape "
                f"{tuple(prompt_ids.shape)} and {max_new_tokens}"
            )
        begun = time.perf_counter()
        target, drafter = self._slot(slot)
        committed: list[int] = prompt_ids.tolist()  # T, and every token emitted since
        check_ids(self._target.vocabulary, min(committed), max(committed))
        max_length, verifier = len(committed) + max_new_tokens, self._verifier
        check_rope(self._target.model, max_length)
        rounds: list[Round] = []
        ended = False
        while len(committed) < max_length and not ended:
            if alone:
                self._threads.begin(is_unit=bool(rounds))  # the first reads the prompt
            started = self._now() if alone else 0.0

            # 1. Draft a tree of N nodes. One token of the budget is for the verifier to add, and
            # nothing is drafted where the draft cannot read the tokens before.
            tree, draft_forwards = drawn_chain([], [], 0), 0
            if drafter is not None:
                before = drafter.forwards
                most = min(max_length - 1 - len(committed), drafter.reach(len(committed)))
                with _naming(self._draft):
                    tree = yield from drafter.propose(committed, most, generator)
                if isinstance(drafter, ChainDrafter) and verifier.needs_tail(len(tree)):
                    tree = yield from drafter.with_tail(tree, committed)
                draft_forwards = drafter.forwards - before
            drafted = self._now() if alone else 0.0

            # 2. Score it in one forward: distributions after the last token and after every node.
            uncached = committed[target.length :]  # T at first, later the last one or two
            if tree.shape == "chain":
                logits = yield target.append(
                    uncached + tree.token_list, len(tree) + 1, drafted=len(tree)
                )  # (N+1, V)
            else:
                logits = yield target.append_tree(
                    tree.token_list, tree.parent_list, uncached
                )  # (N+1, V)
            distributions = target.distribution(logits).to(self._verified_on)  # (N+1, V)
            scored = self._now() if alone else 0.0

            # 3. Verify: draw where the accepted path ends, and the token after it.
            with _naming(self._target):
                if len(tree) or verifier.residual_persists:
                    drawn = verifier.draw(tree, distributions, generator)
                else:
                    drawn = Drawn([], draw_one(distributions[0], generator), verifier)
            verifier = drawn.verifier  # of the next round: a residual may persist in it
            accepted = [tree.token_list[node - 1] for node in drawn.nodes]

            # 4. Commit, and crop both caches. Nothing follows an accepted end token.
            ended = bool(accepted) and accepted[-1] in self._end_tokens
            emitted = accepted if ended else [*accepted, drawn.token]
            target.keep(drawn.nodes)
            if drafter is not None:
                drafter.set_residual_persists(bool(verifier.residuals))
                drafter.accept(drawn.nodes)
            committed += emitted
            ended = committed[-1] in self._end_tokens

            record = Round(
                drafted=len(tree),
                depth=tree.depth,
                accepted=len(accepted),
                emitted=len(emitted),
                draft_forwards=draft_forwards,
                draft_seconds=drafted - started,
                target_seconds=scored - drafted,
                overhead_seconds=self._now() - scored if alone else 0.0,
            )
            rounds.append(record)
            if drafter is not None:
                drafter.observe(record)
            self._threads.end()
            report(emitted, len(accepted))
        return Generation(
            torch.tensor(committed[len(prompt_ids) :]),
            tuple(rounds),
            "eos" if ended else "length",
            time.perf_counter() - begun,
        )

    def _slot(self, number: int) -> tuple[CachedSequence, Drafter | None]:
        """An empty sequence of the target and a drafter, whose rule keeps what it has measured."""
        while len(self._slots) <= number:
            new = len(self._slots)
            sequence = sequence_of(self._target, new, self._config.sampling)
            new_drafter = self._drafter(new, self._draft) if self._draft else None
            if lookup := self._config.lookup:
                vocabulary, match = self._target.vocabulary, self._config.match
                new_drafter = LookupDrafter(
                    lookup, match, vocabulary, self._verified_on, self._end_tokens, new_drafter
                )
            if new_drafter is not None:
                new_drafter.follow(sequence)
            self._slots.append((sequence, new_drafter))
        target, drafter = self._slots[number]
        target.reset()
        if drafter is not None:
            drafter.reset()
        return target, drafter

    def _drafter(self, slot: int, draft: CachedModel) -> Drafter:
        """The drafter of a slot, its row in a batch, with its stopping rule."""
        config, ends = self._config, self._end_tokens
        # Chosen siblings are ranked by the draft's own distribution, which has more than one token.
        sampling = SamplingConfig() if config.chooses else config.sampling
        sequence = sequence_of(draft, slot, sampling)
        if config.drafter == "chain":
            return ChainDrafter(sequence, config.stop.start(self._head), ends)
        if config.drafter == "dynamic_tree":
            nodes, depth, gain = config.nodes, config.depth, config.gain
            return DynamicTreeDrafter(sequence, nodes, depth, gain, ends)
        if config.drafter == "tree":
            how = "chosen" if config.chooses else config.how
            return BranchingDrafter(sequence, config.widths, how, ends)
        samplings = [replace(sampling, temperature=each) for each in config.path_temperatures]
        widths = (config.paths, *[1] * (config.stop.longest - 1))
        return BranchingDrafter(sequence, widths, "iid", ends, shape="paths", samplings=samplings)

    def _now(self) -> float:
        """Seconds, once what was asked of a GPU is done: it counts where it was asked for."""
        if self._target.device.type == "cuda":
            torch.cuda.synchronize(self._target.device)
        return time.perf_counter()

    def _refresh_graphs(self) -> None:
        """Weights may have changed since the last call, in training for example."""
        for model in self._models:
            model.refresh_graphs()

    def _free_caches(self) -> None:
        """Forget all sequences and free their memory: several decoders may share one GPU."""
        for target, drafter in self._slots:
            target.reset()
            if drafter is not None:
                drafter.reset()
        for model in self._models:
            model.kv_cache.free()


@contextmanager
def _naming(model: CachedModel | None) -> Iterator[None]:
    """Name the model that is drawn from in the block, if its logits are not finite."""
    try:
        yield
    except NotFiniteError as error:
        raise NotFiniteError(model.model.config.name_or_path if model else "") from error
