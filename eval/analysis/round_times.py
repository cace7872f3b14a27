"""The times that a round of speculative decoding is made of, and the speeds that they predict."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

import numpy as np
from torch import Tensor
from transformers import PreTrainedModel

from eval.analysis.forms import FORMS
from eval.decoder import DecodeConfig, SpeculativeDecoder
from eval.measuring.records import PromptRecord, record_prompt
from eval.runtime.engines import Engine
from specdata.errors import ConfigError
from specdata.sampling import SamplingConfig, generator_for

TIMED_PROMPTS, TIMED_TOKENS = 2, 32


@dataclass(frozen=True, slots=True)
class RoundSeconds:
    """Seconds, fitted to decodings one prompt at a time; Eq. 5.1 of SpecDec++ with a node's cost.

    Attributes:
        plain: of a token of the target alone.
        round: of a round, a token verification included.
        forward: of a draft's forward.
        node: of a drafted node more in the target's forward.
    """

    plain: float
    round: float
    forward: float
    node: float

    @classmethod
    def of(
        cls,
        plain: Sequence[PromptRecord],
        chains: Sequence[PromptRecord],
        branching: Sequence[PromptRecord],
    ) -> Mapping[bool, RoundSeconds]:
        """Fitted to generations: whether a draft branches -> times; empty if none were timed.

        A target's forward costs by its nodes whatever they are; drafting, and what a round takes
        besides models, cost more where a draft branches. What was not decoded has the other's.
        """
        drafting = (*chains, *branching)
        if not plain or not drafting or not all(r.seconds for r in (*plain, *drafting)):
            return {}
        from scipy.optimize import nnls

        counts = np.array([[r.rounds, r.n_draft] for r in drafting], dtype=np.float64)
        per_round, node = nnls(counts, np.array([r.target_seconds for r in drafting]))[0]
        times = {}
        for branches, records in ((False, chains or branching), (True, branching or chains)):
            total = {
                name: sum(getattr(r, name) for r in records)
                for name in ("rounds", "draft_forwards", "draft_seconds", "overhead_seconds")
            }
            times[branches] = cls(
                plain=sum(r.seconds for r in plain) / sum(r.tokens for r in plain),
                round=per_round + total["overhead_seconds"] / total["rounds"],
                forward=total["draft_seconds"] / max(1, total["draft_forwards"]),
                node=float(node),
            )
        return times

    def speedup(self, tokens: float, forwards: float, nodes: float, extra: float) -> float:
        """Over the target alone, of rounds of these counts; `extra` is of the verification."""
        return (
            tokens * self.plain / (self.round + forwards * self.forward + nodes * self.node + extra)
        )


def measure_times(
    target: PreTrainedModel,
    draft: PreTrainedModel,
    prompts: Sequence[Tensor],
    sampling: SamplingConfig,
    *,
    engine: Engine,
    seed: int,
) -> Mapping[bool, RoundSeconds]:
    """Fitted to a few prompts, decoded one at a time.

    Chains of two lengths and a tree tell a round, a forward of the draft and a node apart.
    """
    kinds = (FORMS["chain of 4"], FORMS["chain of 8"], FORMS["tree 4x2x2"])
    configs = [DecodeConfig(**asdict(sampling)), *(kind.config(sampling) for kind in kinds)]
    records: list[list[PromptRecord]] = []
    for number, config in enumerate(configs):
        records.append([])
        try:
            decoder = SpeculativeDecoder.from_config(
                target, draft if number else None, config, engine=engine
            )
        except ConfigError:  # of longer blocks than the draft has, or of trees
            if not number or (config is configs[-1] and not any(records[1:])):
                raise
            continue
        decoder.warm_up()
        for index, prompt in enumerate([prompts[0], *prompts[:TIMED_PROMPTS]]):
            out = decoder.generate(
                prompt,
                max_new_tokens=TIMED_TOKENS if index else 4,
                generator=generator_for(seed, "times", index),
            )
            if index:  # the first warms up
                records[-1].append(
                    record_prompt(str(index), out.rounds, seconds=out.seconds, finish=out.finish)
                )
    return RoundSeconds.of(records[0], records[1] + records[2], records[3])
