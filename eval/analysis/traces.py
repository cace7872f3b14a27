"""Traces of labelled rollouts: what stopping rules read there, and how the drafted tokens fare."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import datasets
import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import DynamicCache, PreTrainedModel

from eval.analysis.expectation import Traces
from eval.analysis.tree_states import check_tree_states, tree_states
from eval.drafting.stopping.recorded import RecordedHead, RecordedTokens, pad
from heads import BaseHead
from heads.inputs import DraftedTokens, logits_of_states, token_embeddings
from heads.probe import check_head, warn_of_other_sampling
from specdata.errors import ConfigError
from specdata.lm_head import find_lm_head, hidden_states
from specdata.probability import SamplingConfig, probabilities
from specdata.terminal import progress
from specdata.texts import tokens_at_once

POSITIONS = 512
"""Distributions that are held at once."""

Row = dict[str, Any]


def acceptance_traces(
    rows: datasets.Dataset,
    *,
    draft: PreTrainedModel | None = None,
    sampling: SamplingConfig | None = None,
    head: BaseHead | None = None,
) -> Traces:
    """The traces of labelled rollouts.

    Args:
        rows: labels, at least one.
        draft: the draft that made them; needed with a head.
        sampling: how its tokens were drawn; likewise.
        head: an acceptance head of this draft, whose outputs are recorded.

    Raises:
        ConfigError: if the head is of another draft.
    """
    recorded = None
    if head is not None:
        assert draft is not None
        assert sampling is not None
        check_head(draft, head)
        warn_of_other_sampling(head, sampling)
        recorded = record_head(rows, head, draft=draft, sampling=sampling)
    tokens = RecordedTokens(
        lengths=np.array([len(row) for row in rows["draft_ids"]], dtype=np.int64),
        q=np.exp(pad(rows["log_q"])),
        q_max=np.exp(pad(rows["log_q_max"])).clip(max=1.0),
        entropy=pad(rows["entropy"]),
        head=recorded,
    )
    return Traces(tokens, pad(rows["accept_prob"]))


@torch.inference_mode()
def record_head(
    rows: datasets.Dataset, head: BaseHead, *, draft: PreTrainedModel, sampling: SamplingConfig
) -> RecordedHead:
    """The raw logits that a head gives the drafted tokens Y_i of labelled rollouts.

    Y_i follows the rollout's own tokens X_<i, as in the labels.

    Args:
        rows: labels, at least one.
        head: an acceptance head of this draft.
        draft: the draft that made the labels.
        sampling: how its tokens are drawn.
    """
    logits: list[list[float]] = [[0.0]] * len(rows)
    # Found out once, not for each batch: it is done by trying.
    to_logits, lm_head = logits_of_states(draft), find_lm_head(draft)
    states_of = _states_along
    if head.lag:
        lengths = (len(row["prompt_ids"]) + len(row["completion_ids"]) for row in rows)
        states_of = _states_in_batches
        try:
            check_tree_states(draft, max(lengths))
        except ConfigError:
            states_of = _states_one_by_one

    def distributions(states: Tensor) -> Tensor:
        return probabilities(to_logits(states), sampling)

    for indices, batch in batches_by_length(rows, tokens_at_once(lm_head)):
        before, after = (torch.cat(states) for states in states_of(draft, batch))
        pieces = _drafted(draft, batch, before, after, distributions)
        found = torch.cat([head.logits(piece) for piece in pieces])
        sizes = [len(row["draft_ids"]) for row in batch]
        for index, of_row in zip(indices, torch.split(found, sizes), strict=True):
            logits[index] = of_row.tolist()
    return RecordedHead(logits=pad(logits), lag=head.lag, rejection_weight=head.rejection_weight)


def _drafted(
    draft: PreTrainedModel,
    rows: Sequence[Row],
    before: Tensor,
    after: Tensor,
    distributions: Callable[[Tensor], Tensor],
) -> Iterator[DraftedTokens]:
    """The drafted tokens of rows, some at a time; states are (N, H) for all in one line."""
    device = draft.device
    tokens = torch.tensor([token for row in rows for token in row["draft_ids"]], device=device)

    def piece(here: slice) -> DraftedTokens:
        return DraftedTokens(
            tokens=tokens[here],
            before=lambda: before[here],
            after=lambda: after[here],
            distributions=lambda: distributions(before[here]),
            embeddings=lambda: token_embeddings(draft, tokens[here]),
        )

    for start in range(0, len(tokens), POSITIONS):
        yield piece(slice(start, start + POSITIONS))


def _states_along(draft: PreTrainedModel, rows: Sequence[Row]) -> tuple[list[Tensor], list[Tensor]]:
    """Of each row the states (n, H) that its drafted tokens were drawn from; and nothing more."""
    texts = [torch.tensor((row["prompt_ids"] + row["completion_ids"])[:-1]) for row in rows]
    along = hidden_states(draft, pad_sequence(texts, batch_first=True).to(draft.device))
    first = [len(row["prompt_ids"]) - 1 for row in rows]
    before = [
        along[b, at : at + len(row["draft_ids"])]
        for b, (at, row) in enumerate(zip(first, rows, strict=True))
    ]
    return before, before


def _states_in_batches(
    draft: PreTrainedModel, rows: Sequence[Row]
) -> tuple[list[Tensor], list[Tensor]]:
    """Of each row the states (n, H) that its drafted tokens were drawn from, and those after.

    One forward of text and drafted tokens.
    """
    texts = [torch.tensor((row["prompt_ids"] + row["completion_ids"])[:-1]) for row in rows]
    drafted = [torch.tensor(row["draft_ids"]) for row in rows]
    places = [torch.arange(len(row["draft_ids"])) + len(row["prompt_ids"]) for row in rows]
    ids, tokens, positions = (
        pad_sequence(each, batch_first=True).to(draft.device) for each in (texts, drafted, places)
    )
    along, after = tree_states(draft, ids, tokens, positions)
    return (
        [along[b, at - 1] for b, at in enumerate(places)],
        [after[b, : len(at)] for b, at in enumerate(places)],
    )


def _states_one_by_one(
    draft: PreTrainedModel, rows: Sequence[Row]
) -> tuple[list[Tensor], list[Tensor]]:
    """The same for drafts that cannot be run so: one forward for each drafted token."""
    before, after = list[Tensor](), list[Tensor]()
    for row in rows:
        first, last = len(row["prompt_ids"]), len(row["completion_ids"]) - 1
        ids = torch.tensor([row["prompt_ids"] + row["completion_ids"][:last]], device=draft.device)
        cache = DynamicCache()  # of all tokens, also where a window slides
        before.append(hidden_states(draft, ids, past_key_values=cache)[0, first - 1 :])
        drafted = torch.tensor([row["draft_ids"]], device=draft.device)
        states = []
        # From the end, so that cropping the cache is all there is between two positions.
        for position in reversed(range(drafted.shape[1])):
            if (surplus := cache.get_seq_length() - first - position) > 0:
                cache.crop(-surplus)
            token = drafted[:, position : position + 1]
            states.append(hidden_states(draft, token, past_key_values=cache)[0])
        after.append(torch.cat(states[::-1]))
    return before, after


def batches_by_length(
    rows: datasets.Dataset, tokens_at_once: int
) -> Iterator[tuple[list[int], list[Row]]]:
    """Indices and rows of batches of like length, longest first, while a bar counts the rows."""
    lengths = [
        len(prompt) + len(rest)
        for prompt, rest in zip(rows["prompt_ids"], rows["completion_ids"], strict=True)
    ]
    order = sorted(range(len(rows)), key=lambda index: -lengths[index])
    with progress(len(rows), "held-out rollouts", "rollout") as bar:
        while order:
            count = max(1, tokens_at_once // lengths[order[0]])
            indices, order = order[:count], order[count:]
            yield indices, [rows[index] for index in indices]
            bar.update(len(indices))
