"""What asking a stopping rule costs a draft: seconds of a drafted token with and without."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from eval.drafting.drafters import ChainDrafter
from eval.drafting.stopping import ActiveRule, DraftedToken, StoppingRule
from eval.drafting.stopping.thresholds import Fixed
from eval.measuring.intervals import Interval
from eval.runtime.engines import Engine
from eval.runtime.model import CachedModel
from eval.runtime.sequence import drive

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from heads import BaseHead
    from specdata.sampling import SamplingConfig

LENGTH, PROMPT = 8, 60


class _Unheeded(ActiveRule):
    """Asks a rule, and drafts on whatever it answers."""

    def __init__(self, asked: ActiveRule) -> None:
        super().__init__(LENGTH, asked.reads)
        self.asked = asked

    def begin(self) -> None:
        self.asked.begin()

    def should_stop(self, drafted: DraftedToken) -> bool:
        self.asked.should_stop(drafted)
        return False


@torch.inference_mode()
def drafting_seconds(
    draft: PreTrainedModel,
    asked: Mapping[str, tuple[StoppingRule, BaseHead | None]],
    sampling: SamplingConfig,
    *,
    engine: Engine = "captured",
    drafts: int = 50,
) -> dict[str, list[float]]:
    """Seconds of a drafted token in each turn, by the rule that is asked about it.

    Drafts of `LENGTH` tokens, whatever the rules say. So all else is the same and a difference is
    the rule's, with what is captured for its head. Rules take turns. On a CPU time is the thread's
    on a processor, so that what else runs on the machine matters less.

    Args:
        draft: the draft.
        asked: name -> a rule and its head.
        sampling: of the draft's tokens.
        engine: of the draft's forwards.
        drafts: of each rule.
    """
    vocabulary = draft.config.get_text_config().vocab_size
    clock = time.thread_time if draft.device.type == "cpu" else time.perf_counter
    compared: dict[str, Callable[[], float]] = {}
    for name, (rule, head) in asked.items():
        model = CachedModel(draft, vocabulary, engine=engine, capture_hidden=head is not None)
        model.warm_up([(1, 1), (2, 1)])
        generator = torch.Generator().manual_seed(0)
        unheeded = _Unheeded(rule.start(head))
        drafter = ChainDrafter(model.sequence(0, sampling), unheeded, frozenset())
        committed = torch.randint(0, vocabulary, (PROMPT,), generator=generator).tolist()

        def once(
            drafter: ChainDrafter = drafter,
            committed: list[int] = committed,
            generator: torch.Generator = generator,
        ) -> float:
            begun = clock()
            drafted = len(drive(drafter.propose(committed, LENGTH, generator)))
            seconds = clock() - begun
            drafter.accept([], PROMPT - 1)  # the last one gives the first distribution
            return seconds / max(1, drafted)

        once()  # reads the prompt
        compared[name] = once
    seconds: dict[str, list[float]] = {name: [] for name in compared}
    for _ in range(drafts):
        for name, drafting in compared.items():
            seconds[name].append(drafting())
    return seconds


def price(asked: Sequence[float], unasked: Sequence[float]) -> Interval:
    """What asking takes: the median difference of turns, and its interval by ranks.

    An interval that holds 0 is noise: then the price is only known to lie between 0 and the noise,
    and half of that is its value.

    Args:
        asked: seconds of each turn with the question.
        unasked: of the same turns without it.
    """
    differences = np.sort(np.subtract(asked, unasked))
    middle, half = len(differences) // 2, math.ceil(0.98 * math.sqrt(len(differences)))
    low, high = (float(differences[place]) for place in (middle - half, middle + half))
    if low > 0.0:
        return Interval(float(np.median(differences)), low, high)
    noise = max(-low, high)
    return Interval(noise / 2, 0.0, noise)


def question_seconds(
    draft: PreTrainedModel,
    head: BaseHead,
    sampling: SamplingConfig,
    rules: Iterable[StoppingRule],
    engine: Engine = "captured",
) -> tuple[dict[str, Interval], float]:
    """Seconds of asking each rule that looks at tokens, and of a step of the draft unasked.

    Args:
        draft: the draft.
        head: of the rules that read one.
        sampling: of the draft's tokens.
        rules: at any setting; of those with one `title` the last is timed.
        engine: of the draft's forwards.
    """
    asked: dict[str, tuple[StoppingRule, BaseHead | None]] = {"": (Fixed(), None)}
    looking = [rule for rule in rules if rule.adaptive]
    asked |= {rule.title: (rule, head if rule.reads_head else None) for rule in looking}
    seconds = drafting_seconds(draft, asked, sampling, engine=engine)
    unasked = seconds.pop("")
    prices = {name: price(turns, unasked) for name, turns in seconds.items()}
    return prices, float(np.median(unasked))
