"""Speculative decoding of one sequence: any draft, any stopping rule, any verifier.

Each round drafts after the committed text, scores the draft in one forward of the target, lets the
verifier choose how much of it stays and what follows, and rewinds both caches to the result. The
emitted text has the law of plain sampling from the target (unless the verifier is a biased one).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor
from transformers import PreTrainedModel

from eval import stopping
from eval.cached import CachedModel, WatchedModel
from eval.drafters import ChainDrafter, Drafter, chain
from eval.metrics import Round
from eval.verifiers import VERIFIERS, Verifier
from heads import AcceptanceHead
from specdata.errors import ConfigError
from specdata.models import end_ids
from specdata.probability import SamplingConfig

Stop = Literal["fixed", "confidence", "entropy", "cumulative", "head"]


@dataclass(frozen=True, slots=True)
class DecodeConfig:
    """One way of decoding.

    Args:
        verifier: a name in `VERIFIERS`.
        verifier_args: the verifier's parameters.
        drafter: "chain": one path.
        length: tokens drafted a round with stop="fixed".
        stop: when to end a draft.
        threshold: of the stopping rule, in its own unit.
        limit: most tokens drafted a round with any other stopping rule.
        temperature: see `SamplingConfig`.
        top_k: see `SamplingConfig`.
        top_p: see `SamplingConfig`.

    Raises:
        ConfigError: for unknown names and for combinations that cannot work.
    """

    verifier: str = "token"
    verifier_args: Mapping[str, Any] = field(default_factory=dict)
    drafter: Literal["chain"] = "chain"
    length: int = 4
    stop: Stop = "fixed"
    threshold: float = 0.7
    limit: int = 20
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0

    def __post_init__(self) -> None:
        if self.verifier not in VERIFIERS:
            raise ConfigError(
                f"unknown verifier {self.verifier!r}; choose from {', '.join(VERIFIERS)}"
            )
        if self.drafter != "chain":
            raise ConfigError(f"unknown drafter {self.drafter!r}; choose from chain")
        takes = self.make_verifier().takes
        if "chain" not in takes:
            raise ConfigError(
                f"verifier {self.verifier!r} takes {', '.join(takes)}; the drafter gives a chain"
            )
        if self.length < 1 or self.limit < 1:
            raise ConfigError(
                f"length and limit must be 1 or larger, got {self.length} and {self.limit}"
            )
        if self.stop not in RULES:
            raise ConfigError(f"unknown stop {self.stop!r}; choose from {', '.join(RULES)}")

    @property
    def sampling(self) -> SamplingConfig:
        """The law of both models."""
        return SamplingConfig(self.temperature, self.top_k, self.top_p)

    def make_verifier(self) -> Verifier:
        """Build the verifier with its parameters."""
        return VERIFIERS[self.verifier].make(**self.verifier_args)

    def make_rule(self, head: AcceptanceHead | None) -> stopping.StoppingRule:
        """Build the stopping rule."""
        return RULES[self.stop](self, head)


def _head_rule(config: DecodeConfig, head: AcceptanceHead | None) -> stopping.StoppingRule:
    if head is None:
        raise ConfigError("stop='head' needs an acceptance head: pass head=...")
    return stopping.predicted_rejection(head, config.threshold, limit=config.limit)


RULES: Mapping[str, Callable[[DecodeConfig, AcceptanceHead | None], stopping.StoppingRule]] = {
    "fixed": lambda config, head: stopping.fixed(config.length),
    "confidence": lambda config, head: stopping.confidence(config.threshold, limit=config.limit),
    "entropy": lambda config, head: stopping.entropy_above(config.threshold, limit=config.limit),
    "cumulative": lambda config, head: stopping.cumulative(config.threshold, limit=config.limit),
    "head": _head_rule,
}


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
            rule = config.make_rule(head)
            kind = WatchedModel if config.stop == "head" else CachedModel
            drafter = ChainDrafter(kind(draft, config.sampling, vocabulary), rule, ends)
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
        self._target.reset()
        if self._drafter is not None:
            self._drafter.model.reset()
        text: list[int] = prompt_ids.tolist()
        goal, verifier = len(text) + max_new_tokens, self._verifier
        rounds: list[Round] = []
        ended = False
        while len(text) < goal and not ended:
            emitted, verifier, record = self._round(text, goal, verifier, generator)
            text += emitted
            rounds.append(record)
            ended = text[-1] in self._ends
        return Generation(
            torch.tensor(text[len(prompt_ids) :]),
            tuple(rounds),
            "eos" if ended else "length",
            time.perf_counter() - begun,
        )

    def _round(
        self, text: list[int], goal: int, verifier: Verifier, generator: torch.Generator
    ) -> tuple[list[int], Verifier, Round]:
        clock = Stopwatch(self._target.model.device)
        forwards = 0
        tree = chain([], [])
        if self._drafter is not None:
            forwards = -self._drafter.model.forwards
            # One place of the budget belongs to the token that the verifier adds.
            tree = self._drafter.propose(text, goal - len(text) - 1, generator)
            forwards += self._drafter.model.forwards
        draft_seconds = clock.lap()
        unseen = text[self._target.length :] + tree.token_list
        laws = self._target.feed(unseen, rows=len(tree) + 1)
        target_seconds = clock.lap()
        drawn = verifier.draw(tree, laws, generator)
        accepted = [tree.token_list[node - 1] for node in drawn.nodes]
        # After an accepted end token nothing follows.
        over = bool(accepted) and accepted[-1] in self._ends
        emitted = accepted if over else [*accepted, drawn.token]
        committed = len(text) + len(accepted)
        self._target.rewind(committed)
        if self._drafter is not None:
            self._drafter.model.rewind(committed)
        record = Round(
            drafted=len(tree),
            depth=len(tree),
            accepted=len(accepted),
            emitted=len(emitted),
            draft_forwards=forwards,
            draft_seconds=draft_seconds,
            target_seconds=target_seconds,
            overhead_seconds=clock.lap(),
        )
        return emitted, drawn.verifier, record


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
