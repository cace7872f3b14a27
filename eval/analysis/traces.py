"""What stopping rules would have read along labelled rollouts, and how the drafted tokens fare."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache, partial
from typing import Any

import datasets
import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import DynamicCache, PreTrainedModel

from eval.analysis.expectation import Traces
from eval.drafting.stopping.recorded import BOUND, Reals, RecordedHead, RecordedTokens, pad
from heads import BaseHead
from heads.inputs import FEATURES, DraftedTokens, HeadInputs, Moment, logits_of_states
from heads.probe import check_head, warn_of_other_sampling
from heads.target_context import simulated_rounds
from heads.tree import check_tree_states, tree_states
from specdata.errors import ConfigError
from specdata.labels.labeller import tokens_at_once
from specdata.lm_head import LMHead, find_lm_head, hidden_states
from specdata.models import known_ids
from specdata.probability import SamplingConfig, entropy, probabilities
from specdata.sampling import numpy_generator_for
from specdata.terminal import progress

NUMBERS = ("log_q_second", "entropy", "log_mass_above")
"""Columns of labels that earlier versions did not write; the draft is run for those."""
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
        draft: the draft that made them. Without it a head is not recorded, nor are those numbers
            of `NUMBERS` that the labels lack.
        sampling: how its tokens were drawn; needed with a draft.
        head: an acceptance head of this draft, whose outputs are recorded.

    Raises:
        ConfigError: if the head is of another draft.
    """
    numbers = {name: rows[name] for name in NUMBERS if name in rows.column_names}
    recorded = None
    if draft is not None:
        assert sampling is not None
        if len(numbers) < len(NUMBERS):
            numbers = _numbers(find_lm_head(draft), rows, sampling)
        if head is not None:
            check_head(draft, head)
            warn_of_other_sampling(head, sampling)
            (recorded,) = record_heads(rows, [head], draft=draft, sampling=sampling)
    log_q_max = pad(rows["log_q_max"])
    tokens = RecordedTokens(
        lengths=np.array([len(row) for row in rows["draft_ids"]], dtype=np.int64),
        q=np.exp(pad(rows["log_q"])),
        q_max=np.exp(log_q_max).clip(max=1.0),
        entropy=_padded(numbers, "entropy"),
        margin=_difference(log_q_max, _padded(numbers, "log_q_second")),
        log_mass_above=_bounded(_padded(numbers, "log_mass_above")),
        head=recorded,
    )
    overlap = pad(rows["overlap"]) if "overlap" in rows.column_names else None
    return Traces(tokens, pad(rows["accept_prob"]), overlap)


def _padded(numbers: dict[str, Any], name: str) -> Reals | None:
    return pad(numbers[name]) if name in numbers else None


def _difference(largest: Reals, second: Reals | None) -> Reals | None:
    return None if second is None else (largest - second).clip(0.0, BOUND)


def _bounded(logarithms: Reals | None) -> Reals | None:
    return None if logarithms is None else logarithms.clip(-BOUND, 0.0)


def _numbers(
    lm_head: LMHead, rows: datasets.Dataset, sampling: SamplingConfig
) -> dict[str, list[list[float]]]:
    """What labels of this version hold in `NUMBERS`, made again: name -> rows of values."""
    made: dict[str, list[list[float]]] = {name: [[]] * len(rows) for name in NUMBERS}
    for indices, batch in batches_by_length(rows, tokens_at_once(lm_head)):
        for index, values in zip(indices, _batch_numbers(lm_head, batch, sampling), strict=True):
            for name in NUMBERS:
                made[name][index] = values[name]
    return made


@torch.inference_mode()
def _batch_numbers(
    lm_head: LMHead, rows: Sequence[Row], sampling: SamplingConfig
) -> Iterator[dict[str, list[float]]]:
    known = [torch.tensor((row["prompt_ids"] + row["completion_ids"])[:-1]) for row in rows]
    states = lm_head.states(pad_sequence(known, batch_first=True).to(lm_head.model.device))
    for row, own in zip(rows, states, strict=True):
        first, n = len(row["prompt_ids"]) - 1, len(row["completion_ids"])
        drafted = torch.tensor(row["draft_ids"], device=own.device)
        mine, pieces = own[first : first + n], []
        for start in range(0, n, POSITIONS):
            here = slice(start, start + POSITIONS)
            q = probabilities(lm_head.logits(mine[here]), sampling)
            pieces.append(numbers_of(q, drafted[here]))
        yield {name: torch.cat([piece[name] for piece in pieces]).tolist() for name in NUMBERS}


def numbers_of(q: Tensor, tokens: Tensor) -> dict[str, Tensor]:
    """The values of the label columns `NUMBERS`, (...), for tokens (...) drawn from q (..., V)."""
    at = q.gather(-1, tokens.unsqueeze(-1))
    return {
        "log_q_second": q.topk(2, dim=-1).values[..., 1].log(),
        "entropy": entropy(q),
        "log_mass_above": q.masked_fill(q <= at, 0.0).sum(dim=-1).log(),
    }


@torch.inference_mode()
def record_heads(
    rows: datasets.Dataset,
    heads: Sequence[BaseHead],
    *,
    draft: PreTrainedModel,
    sampling: SamplingConfig,
) -> list[RecordedHead]:
    """The raw logits that heads give the drafted tokens Y_i of labelled rollouts.

    Y_i follows the rollout's own tokens X_<i, as in the labels. The draft runs once for all heads.

    Args:
        rows: labels, at least one.
        heads: acceptance heads of this draft.
        draft: the draft that made the labels.
        sampling: how its tokens are drawn.
    """
    logits = [{moment: [[0.0]] * len(rows) for moment in head.moments} for head in heads]
    # Found out once, not for each batch: it is done by trying.
    to_logits, lm_head = logits_of_states(draft), find_lm_head(draft)
    states_of = _states_along(draft, heads, rows)
    # What any head reads is computed once, when all of it is known.
    reads = tuple(dict.fromkeys(name for head in heads for name in head.reads))
    latest = max(moment for head in heads for moment in head.moments)

    def distributions(states: Tensor) -> Tensor:
        return probabilities(to_logits(states), sampling)

    for indices, batch in batches_by_length(rows, tokens_at_once(lm_head)):
        before, after = (torch.cat(states) for states in states_of(batch))
        pieces = [
            HeadInputs.of(reads, piece, latest).features
            for piece in _drafted(draft, batch, before, after, distributions)
        ]
        sizes = [len(row["draft_ids"]) for row in batch]
        for head, own in zip(heads, logits, strict=True):
            for moment, values in own.items():
                found = torch.cat([head.logits(_of(head, moment, each)) for each in pieces])
                for index, mine in zip(indices, torch.split(found, sizes), strict=True):
                    values[index] = mine.tolist()
    return [
        RecordedHead(
            **{moment.name.lower(): pad(values) for moment, values in own.items()},
            rejection_weight=head.rejection_weight,
        )
        for head, own in zip(heads, logits, strict=True)
    ]


def _of(head: BaseHead, moment: Moment, features: Mapping[str, Tensor]) -> HeadInputs:
    """What one head reads at one moment, of what all of them read at the latest."""
    names = [name for name in head.reads if FEATURES[name].moment <= moment]
    return HeadInputs({name: features[name] for name in names}, moment)


def _drafted(
    draft: PreTrainedModel,
    rows: Sequence[Row],
    before: Tensor,
    after: Tensor,
    distributions: Callable[[Tensor], Tensor],
) -> Iterator[DraftedTokens]:
    """The drafted tokens of rows, some at a time; states are (N, H) for all in one line."""
    device, embedding = draft.device, draft.get_input_embeddings()
    tokens = torch.tensor([token for row in rows for token in row["draft_ids"]], device=device)

    @cache
    def rounds() -> list[Tensor]:
        pairs = zip(*(_rounds(row) for row in rows), strict=True)
        return [torch.cat(each).to(device) for each in pairs]

    def piece(here: slice) -> DraftedTokens:
        return DraftedTokens(
            tokens=tokens[here],
            before=lambda: before[here],
            after=lambda: after[here],
            distributions=lambda: distributions(before[here]),
            embeddings=lambda: embedding(known_ids(tokens[here], draft)),
            position=lambda: rounds()[0][here],
            since_rejection=lambda: rounds()[1][here],
        )

    for start in range(0, len(tokens), POSITIONS):
        yield piece(slice(start, start + POSITIONS))


def _rounds(row: Row) -> tuple[Tensor, Tensor]:
    """Where a rollout's tokens stand in their drafts, in the rounds that heads are judged on.

    What a rule would really draft depends on the head, so a head that reads this is replayed
    approximately.
    """
    generator = numpy_generator_for("rounds", "dev", row["example_id"], row["sample"])
    position, since = simulated_rounds(np.array(row["overlap"]), generator)
    return torch.from_numpy(position), torch.from_numpy(since)


StatesOf = Callable[[Sequence[Row]], tuple[list[Tensor], list[Tensor]]]
"""Rows -> of each, the states (n, H) that its drafted tokens were drawn from, and those after."""


def _states_along(
    draft: PreTrainedModel, heads: Sequence[BaseHead], rows: datasets.Dataset
) -> StatesOf:
    """One forward of text and drafted tokens, if the draft can be run so; else one for each.

    Heads that judge no consumed token need the text alone.
    """
    if all(Moment.CONSUMED not in head.moments for head in heads):
        return partial(_states_before, draft)
    lengths = (
        len(prompt) + len(rest)
        for prompt, rest in zip(rows["prompt_ids"], rows["completion_ids"], strict=True)
    )
    try:
        check_tree_states(draft, max(lengths))
    except ConfigError:
        return partial(_states_one_by_one, draft)
    return partial(_states_together, draft)


def _states_before(
    draft: PreTrainedModel, rows: Sequence[Row]
) -> tuple[list[Tensor], list[Tensor]]:
    texts = [torch.tensor((row["prompt_ids"] + row["completion_ids"])[:-1]) for row in rows]
    states = hidden_states(draft, pad_sequence(texts, batch_first=True).to(draft.device))
    before = [
        own[len(row["prompt_ids"]) - 1 :][: len(row["draft_ids"])]
        for own, row in zip(states, rows, strict=True)
    ]
    return before, before  # the second is never read


def _states_together(
    draft: PreTrainedModel, rows: Sequence[Row]
) -> tuple[list[Tensor], list[Tensor]]:
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
