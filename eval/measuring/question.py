"""What asking a stopping rule costs a draft: seconds of a drafted token with and without."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch

from eval.drafting.drafters import ChainDrafter
from eval.drafting.stopping import StoppingRule
from eval.drafting.stopping.head import Head
from eval.drafting.stopping.logistic import Logit, Margin
from eval.drafting.stopping.numbers import Numbers
from eval.drafting.stopping.thresholds import Fixed
from eval.runtime.engines import Engine
from eval.runtime.model import CachedModel
from eval.runtime.sequence import drive

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from heads import BaseHead
    from specdata.sampling import SamplingConfig

LENGTH, PROMPT = 8, 60


@torch.inference_mode()
def drafting_seconds(
    draft: PreTrainedModel,
    asked: Mapping[str, tuple[StoppingRule, BaseHead | None]],
    sampling: SamplingConfig,
    *,
    engine: Engine = "captured",
    drafts: int = 50,
) -> dict[str, float]:
    """The median seconds of a drafted token, by the rule that is asked about it.

    Drafts of `LENGTH` tokens: the rules never stop one. So all else is the same and a difference is
    the rule's, with what is captured for its head. Rules take turns. On a CPU time is the thread's
    on a processor, so that what else runs on the machine matters less.

    Args:
        draft: the draft.
        asked: name -> a rule that never stops before `LENGTH`, and its head.
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
        drafter = ChainDrafter(model.sequence(0, sampling), rule.start(head), frozenset())
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
    return {name: statistics.median(values) for name, values in seconds.items()}


def question_seconds(
    draft: PreTrainedModel,
    head: BaseHead,
    sampling: SamplingConfig,
    fitted: Mapping[str, Any],
    engine: Engine = "captured",
) -> tuple[dict[str, float], float]:
    """Seconds of asking each rule that predicts acceptance, and of a step of the draft unasked.

    Args:
        draft: the draft.
        head: of the rule `head`.
        sampling: of the draft's tokens.
        fitted: what rules fit on labels (`eval.analysis.replay.fit_all_rules`).
        engine: of the draft's forwards.
    """
    asked: dict[str, tuple[StoppingRule, BaseHead | None]] = {"": (Fixed(length=LENGTH), None)}
    for kind in (Head, Numbers, Logit, Margin):
        rule = kind(threshold=1.0, limit=LENGTH).with_fit(fitted)
        asked[rule.name] = (rule, head if rule.reads_head else None)
    seconds = drafting_seconds(draft, asked, sampling, engine=engine)
    step = seconds.pop("")
    return {name: max(0.0, value - step) for name, value in seconds.items()}, step
