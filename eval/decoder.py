"""Speculative decoding of one sequence: any draft, any stopping rule, any verifier.

Each round drafts after the committed text, scores the draft in one forward of the target, lets the
verifier choose how much of it stays and what follows, and rewinds both caches to the result. The
emitted text has the law of plain sampling from the target (unless the verifier is a biased one).
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from transformers import PreTrainedModel

from eval.cached import CachedModel, WatchedModel
from eval.decode_config import DecodeConfig
from eval.drafters import Drafter, chain
from eval.drafts import DraftTree
from eval.metrics import Round
from eval.verifiers import Verifier
from eval.verifiers.rule import Drawn
from heads import AcceptanceHead
from specdata.models import end_ids
from specdata.probability import draw

__all__ = ["DecodeConfig", "Generation", "SpeculativeDecoder"]


@dataclass(frozen=True, slots=True)
class Generation:
    """One decoded text.

    Args:
        tokens: (n,) new tokens; n <= max_new_tokens; the last is an end token if finish == "eos".
        rounds: one record a forward of the target.
        finish: why it ended.
        seconds: wall time of the call.
    """

    tokens: Tensor
    rounds: tuple[Round, ...]
    finish: Literal["eos", "length"]
    seconds: float


class SpeculativeDecoder:
    """Decodes with a target, an optional drafter and a verifier. Not for concurrent use.

    Args:
        target: the target.
        drafter: what proposes tokens; None is plain decoding.
        verifier: the acceptance rule.
        ends: token ids that end a text.
    """

    def __init__(
        self,
        target: CachedModel,
        drafter: Drafter | None,
        verifier: Verifier,
        ends: frozenset[int],
    ) -> None:
        self._target = target
        self._drafter = drafter
        self._verifier = verifier
        self._ends = ends

    @classmethod
    def from_config(
        cls,
        target: PreTrainedModel,
        draft: PreTrainedModel | None,
        config: DecodeConfig,
        head: AcceptanceHead | None = None,
    ) -> SpeculativeDecoder:
        """Build a decoder for transformers models that share a vocabulary.

        Raises:
            ConfigError: if the configuration needs a head and none is given.
            CacheNotRewindableError: if a model's cache cannot be cropped.
        """
        vocabulary, ends = target.config.get_text_config().vocab_size, end_ids(target)
        drafter = None
        if draft is not None:
            if head is not None:
                head = head.to(draft.device)
            kind = WatchedModel if config.reads_states(head) else CachedModel
            drafter = config.make_drafter(kind(draft, config.sampling, vocabulary), head, ends)
        model = CachedModel(target, config.sampling, vocabulary)
        return cls(model, drafter, config.make_verifier(), ends)

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
        """
        if prompt_ids.ndim != 1 or len(prompt_ids) == 0 or max_new_tokens < 1:
            raise ValueError(
                "prompt_ids must be (T,) with T >= 1 and max_new_tokens >= 1, got shape "
                f"{tuple(prompt_ids.shape)} and {max_new_tokens}"
            )
        begun = time.perf_counter()
        self._forget()
        text: list[int] = prompt_ids.tolist()
        goal, verifier = len(text) + max_new_tokens, self._verifier
        rounds: list[Round] = []
        ended = False
        while len(text) < goal and not ended:
            emitted, verifier, record = self._round(text, goal, verifier, generator)
            text += emitted
            rounds.append(record)
            ended = text[-1] in self._ends
        seconds = time.perf_counter() - begun
        self._forget()
        return Generation(
            torch.tensor(text[len(prompt_ids) :]),
            tuple(rounds),
            "eos" if ended else "length",
            seconds,
        )

    def _forget(self) -> None:
        """Free the caches: several decoders may share one GPU."""
        self._target.reset()
        if self._drafter is not None:
            self._drafter.model.reset()

    def _round(
        self, text: list[int], goal: int, verifier: Verifier, generator: torch.Generator
    ) -> tuple[list[int], Verifier, Round]:
        clock = Stopwatch(self._target.model.device)
        forwards, tree = 0, chain([], [], 0)
        if self._drafter is not None:
            forwards = -self._drafter.model.forwards
            # One place of the budget belongs to the token that the verifier adds.
            tree = self._drafter.propose(text, goal - len(text) - 1, generator)
            if verifier.needs_tail(len(tree)):
                tree = self._drafter.with_tail(tree, text)
            forwards += self._drafter.model.forwards
        draft_seconds = clock.lap()
        laws = self._score(text[self._target.length :], tree)
        target_seconds = clock.lap()
        if len(tree) or verifier.carries:
            drawn = verifier.draw(tree, laws, generator)
        else:
            drawn = Drawn([], int(draw(laws[0], generator)), verifier)
        accepted = [tree.token_list[node - 1] for node in drawn.nodes]
        # After an accepted end token nothing follows.
        over = bool(accepted) and accepted[-1] in self._ends
        emitted = accepted if over else [*accepted, drawn.token]
        committed = len(text) + len(accepted)
        if tree.shape == "chain":
            self._target.rewind(committed)
        else:
            self._target.keep(drawn.nodes)
        if self._drafter is not None:
            self._drafter.settle(drawn.nodes, committed)
        record = Round(
            drafted=len(tree),
            depth=depth_of(tree),
            accepted=len(accepted),
            emitted=len(emitted),
            draft_forwards=forwards,
            draft_seconds=draft_seconds,
            target_seconds=target_seconds,
            overhead_seconds=clock.lap(),
        )
        return emitted, drawn.verifier, record

    def _score(self, unseen: list[int], tree: DraftTree) -> Tensor:
        """The target's laws after the text and after every node: (N+1, V)."""
        if tree.shape == "chain":
            return self._target.feed(unseen + tree.token_list, rows=len(tree) + 1)
        parents = [int(parent) for parent in tree.parents.tolist()]
        return self._target.law(self._target.grow(tree.token_list, parents, unseen))


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
