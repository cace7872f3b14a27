"""Texts that the draft writes while it trains, in place of some of the target's.

A draft that only ever reads the target's texts is not trained on what it reads while decoding: its
own tokens, a block of them after a text of the target's. So at each optimizer step a share of the
rows of the batch carries text that the draft, as it is at that step, has just written: whole
completions of the prompt (GKD, Agarwal et al. 2023, arXiv:2306.13649; DistillSpec, Zhou et al.
2023, arXiv:2310.08461), or blocks, as decoding drafts them. Tokens are constants: no gradient goes
through their choice.

What is drawn for a row depends on (seed, step, index of the row in the step) and on nothing else.
So nothing has to be stored for a killed run to go on, and any number of processes and any split of
a step into batches draws with the same uniforms. The tokens are then equal, too, unless rounding in
a batch of another shape moves a cumulative probability past a uniform.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from accelerate import Accelerator
from torch import Tensor
from transformers import PreTrainedModel

from distill.batches import collate
from distill.config import OnPolicyConfig
from specdata.processes import is_fsdp
from specdata.rollouts.backend import sample_batch
from specdata.sampling import SamplingConfig, generator_for
from specdata.texts import IGNORED, Row

# Measured on the embedded pair at share .5: with 4, expected tokens a round rise (by .013 for token
# verification at K = 4, interval .004 to .022). With 1 nothing is gained: the drafted tokens are
# few beside the target's that a cut leaves out.
CUTS = 4
"""Blocks of a rollout, each after another part of it, which is read again."""
ROWS_AT_ONCE = 64
"""Rows that the draft writes together: their cache is what generation needs memory for."""


@dataclass(frozen=True, slots=True)
class DraftTexts:
    """Which rows of a step carry the draft's text, and what it writes there.

    Attributes:
        config: the share of rows, and what is written.
        sampling: the sampler of serving.
        seed: the run's seed.
        ends: token ids that end a completion, the target's.
        vocabulary: V of the target; the draft draws no other id.
        longest: tokens of a row: no longer one is made.
        batch_size: rows of a batch, over all processes.
        pad_id: fills up the batches.
        cuts: blocks of a rollout.
    """

    config: OnPolicyConfig
    sampling: SamplingConfig
    seed: int
    ends: frozenset[int]
    vocabulary: int
    longest: int
    batch_size: int
    pad_id: int
    cuts: int = CUTS

    def into(
        self, batches: Sequence[dict[str, Tensor]], draft: PreTrainedModel, step: int
    ) -> list[dict[str, Tensor]]:
        """The batches of a step (this process's share of them) with the draft's text in its rows.

        Args:
            batches: as `distill.batches.collate` makes them.
            draft: as in `write`.
            step: optimizer steps taken before.
        """
        rows = [row for batch in batches for row in rows_of(batch)]
        indices = [
            place * self.batch_size + index
            for place, batch in enumerate(batches)
            for index in batch["rows"].tolist()
        ]
        written = iter(self.write(draft, rows, indices, step))
        filled = []
        for batch in batches:
            texts = [(index, text) for index in batch["rows"] for text in next(written)]
            new = collate(self.pad_id)([text for _, text in texts])
            new["rows"] = torch.stack([texts[at][0] for at in new["rows"].tolist()])
            filled.append({name: new[name].to(batch[name].device) for name in batch})
        return filled

    def carries(self, step: int, index: int) -> bool:
        """True if row `index` of a step carries the draft's text.

        Systematic sampling, one uniform a step: each row is as likely as the share says, and of n
        rows it is always floor(n share) or ceil(n share).
        """
        offset = torch.rand((), generator=self._generator(step), dtype=torch.float64).item()
        share = self.config.share
        return math.floor((index + 1) * share + offset) > math.floor(index * share + offset)

    def write(
        self, draft: PreTrainedModel, rows: Sequence[Row], indices: Sequence[int], step: int
    ) -> list[list[Row]]:
        """Rows for the place of each row: the row itself, or rows with the draft's text.

        A completion is at most as long as the rollout's and may end earlier, by an end token. A
        block follows a part of the target's completion that is drawn anew at every step, so that
        each of its tokens is equally likely to be the first that the block stands in for; it has
        `length` tokens, fewer if it ends or the context does. Of several blocks the one after the
        longest part keeps the completion tokens before it as such; the others have theirs in the
        prompt, where no loss is taken, so that none counts twice.

        The loss is taken where a row's completion tokens are predicted. At a block's tokens those
        are the distributions q that verification compares: each after the target's text and the
        drafted tokens before. After the last one decoding reads the target only.

        Args:
            draft: any mode; it writes in eval mode, without gradients, and keeps its mode.
            rows: with `prompt_ids` and `completion_ids`. One without a completion stays as it is.
            indices: of the rows in the step, over all its batches and processes.
            step: optimizer steps taken before.
        """
        prompts: list[list[int]] = []
        uniforms: list[Tensor] = []
        places: list[list[tuple[int, int]]] = []  # (tokens of the completion kept, text) of a row
        for row, index in zip(rows, indices, strict=True):
            cuts: list[tuple[int, int]] = []
            places.append(cuts)
            if not row["completion_ids"] or not self.carries(step, index):
                continue
            for cut, length, drawn in self._blocks(row, self._generator(step, index)):
                if length > 0:
                    cuts.append((cut, len(prompts)))
                    prompts.append(row["prompt_ids"] + row["completion_ids"][:cut])
                    uniforms.append(drawn[:length])
        texts = self._texts(draft, prompts, uniforms)
        return [
            _with_blocks(row, [(cut, texts[text]) for cut, text in cuts])
            for row, cuts in zip(rows, places, strict=True)
        ]

    def _blocks(self, row: Row, generator: torch.Generator) -> list[tuple[int, int, Tensor]]:
        """For each text: completion tokens before it, tokens at most, and a uniform for each."""
        prompt, completion = len(row["prompt_ids"]), len(row["completion_ids"])

        def uniforms(count: int) -> Tensor:
            return torch.rand(count, generator=generator, dtype=torch.float64)

        if self.config.text == "completions":
            return [(0, min(completion, self.longest - prompt), uniforms(completion))]
        cuts = (uniforms(self.cuts) * completion).long().tolist()
        return [
            (
                cut,
                min(self.config.length, self.longest - prompt - cut),
                uniforms(self.config.length),
            )
            for cut in sorted(cuts, reverse=True)
        ]

    def _texts(
        self, draft: PreTrainedModel, prompts: list[list[int]], uniforms: list[Tensor]
    ) -> list[list[int]]:
        """The draft's texts after each prompt; prompts of like length are batched."""
        order = sorted(range(len(prompts)), key=lambda at: (len(prompts[at]), at))
        texts: dict[int, list[int]] = {}
        training = draft.training
        draft.eval()
        try:
            for start in range(0, len(order), ROWS_AT_ONCE):
                batch = order[start : start + ROWS_AT_ONCE]
                written = sample_batch(
                    draft,
                    [prompts[at] for at in batch],
                    [uniforms[at] for at in batch],
                    self.sampling,
                    ends=self.ends,
                    vocabulary=self.vocabulary,
                )
                texts.update(zip(batch, written, strict=True))
        finally:
            draft.train(training)
        return [texts[at] for at in range(len(prompts))]

    def _generator(self, *key: int) -> torch.Generator:
        return generator_for(self.seed, "on-policy", *key)


def copy_to_write(draft: PreTrainedModel, accelerator: Accelerator) -> PreTrainedModel | None:
    """A copy of a draft whose weights ZeRO-3 or FSDP2 is about to split; None elsewhere.

    A draft in parts gathers them at each forward, on all processes together; but one process may
    have more to write than another.
    """
    plugin = accelerator.state.deepspeed_plugin
    is_split = is_fsdp() or (plugin is not None and plugin.zero_stage == 3)
    return copy.deepcopy(draft) if is_split else None


def whole_draft(draft: PreTrainedModel, duplicate: PreTrainedModel | None) -> PreTrainedModel:
    """The draft as it is now, which a process may call as often as it likes.

    All processes must call this together.

    Args:
        draft: the draft in training, out of its engine's wrapper.
        duplicate: what `copy_to_write` made of it before.
    """
    if duplicate is None:
        return draft
    weights = list(draft.parameters())
    if is_fsdp():
        with torch.no_grad():
            for old, new in zip(duplicate.parameters(), weights, strict=True):
                old.copy_(new.full_tensor())
        return duplicate
    import deepspeed

    with deepspeed.zero.GatheredParameters(weights), torch.no_grad():
        for old, new in zip(duplicate.parameters(), weights, strict=True):
            old.copy_(new)
    return duplicate


def rows_of(batch: Mapping[str, Tensor]) -> list[Row]:
    """The rows that were collated to a batch (B, T): labels tell completions from prompts."""
    rows: list[Row] = []
    lengths = batch["attention_mask"].sum(dim=1).tolist()
    for ids, labels, length, example in zip(
        batch["input_ids"].tolist(),
        batch["labels"].tolist(),
        lengths,
        batch["examples"].tolist(),
        strict=True,
    ):
        prompt = sum(label == IGNORED for label in labels[:length])
        row = {"prompt_ids": ids[:prompt], "completion_ids": ids[prompt:length]}
        rows.append(row if example < 0 else {**row, "example": example})
    return rows


def _with_blocks(row: Row, blocks: Sequence[tuple[int, list[int]]]) -> list[Row]:
    """Rows with the texts that follow so many tokens of a row's completion, the most first."""
    prompt, completion = row["prompt_ids"], row["completion_ids"]
    if not blocks:
        return [row]
    (cut, text), *others = blocks
    return [
        {"prompt_ids": prompt, "completion_ids": completion[:cut] + text},
        *(
            {"prompt_ids": prompt + completion[:before], "completion_ids": block}
            for before, block in others
        ),
    ]
