"""Traces of labelled rollouts: what a head says of the drafted tokens there, and how they fare."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import datasets
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import DynamicCache, PreTrainedModel

from eval.analysis.traces import recorded_tokens
from eval.drafting.stopping.recorded import Reals, RecordedHead, RecordedTokens, pad
from eval.runtime.masks import Sight, seeing
from eval.runtime.transformers_models import check_trees, has_rules
from heads import BaseHead
from heads.inputs import DraftedTokens
from heads.probe import check_head, warn_of_other_sampling
from heads.rows import logits_of_states, token_embeddings
from specdata.drafts.states_network import states_input
from specdata.lm_head import find_lm_head, hidden_states
from specdata.models import known_ids
from specdata.probability import SamplingConfig, probabilities
from specdata.terminal import progress
from specdata.texts import TextBatch, text_columns, tokens_at_once


@dataclass(frozen=True, slots=True)
class Traces:
    """R recorded rollouts: what rules read of the drafted tokens, and how they fare.

    `accept` is (R, N), the probability min(1, p/q) that a token is accepted.
    """

    tokens: RecordedTokens
    accept: Reals

    @property
    def inside(self) -> NDArray[np.bool_]:
        """(R, N): False in the padding."""
        return self.tokens.inside


def acceptance_traces(
    rows: datasets.Dataset,
    *,
    draft: PreTrainedModel,
    sampling: SamplingConfig,
    head: BaseHead | None = None,
) -> Traces:
    """The traces of labelled rollouts, at least one, with a head's outputs if it is given.

    The draft is the one that made them, `sampling` how its tokens were drawn.
    """
    recorded = None
    if head is not None:
        check_head(draft, head)
        warn_of_other_sampling(head, sampling)
        recorded = record_head(rows, head, draft=draft, sampling=sampling)
    return Traces(recorded_tokens(rows, recorded), pad(rows["accept_prob"]))


def record_head(
    rows: datasets.Dataset, head: BaseHead, *, draft: PreTrainedModel, sampling: SamplingConfig
) -> RecordedHead:
    """The raw logits that a head gives the drafted tokens Y_i of labelled rollouts of its draft.

    Y_i follows the rollout's own tokens X_<i, as in the labels.
    """
    texts = rows.select_columns(["prompt_ids", "completion_ids", "draft_ids"]).to_list()
    # Found out once, not for each batch: it is done by trying.
    to_logits, lm_head = logits_of_states(draft), find_lm_head(draft)
    if head.lag:
        check_trees(draft)
    states_of = _states_after if head.lag else _states_along

    def look(batch: TextBatch) -> Callable[[slice], dict[str, Tensor]]:
        drafted = [
            torch.tensor(texts[example]["draft_ids"], device=draft.device)
            for example in batch.examples
        ]
        before, after = states_of(draft, batch, drafted)
        tokens = torch.cat(drafted)

        def read_chunk(chunk: slice) -> dict[str, Tensor]:
            judged = DraftedTokens(
                tokens=tokens[chunk],
                before=lambda: before[chunk],
                after=lambda: after[chunk],
                distributions=lambda: probabilities(to_logits(before[chunk]), sampling),
                embeddings=lambda: token_embeddings(draft, tokens[chunk]),
            )
            return {"logits": head.logits(judged)}

        return read_chunk

    with progress(len(texts), "held-out rollouts", "rollout") as bar:
        columns_of = text_columns(
            texts,
            look,
            vocabulary=lm_head.vocabulary,
            tokens_at_once=tokens_at_once(lm_head),
            device=draft.device,
            report=bar.update,
        )
    logits = [columns["logits"].tolist() for columns in columns_of]
    return RecordedHead(logits=pad(logits), lag=head.lag, rejection_weight=head.rejection_weight)


def _states_along(
    draft: PreTrainedModel, batch: TextBatch, _drafted: Sequence[Tensor]
) -> tuple[Tensor, Tensor]:
    """The states (N, H) that drafted tokens were drawn from, twice: there is nothing after them."""
    states = hidden_states(draft, batch.input_ids[:, :-1])[batch.is_predicted]
    return states, states


def _states_after(
    draft: PreTrainedModel, batch: TextBatch, drafted: Sequence[Tensor]
) -> tuple[Tensor, Tensor]:
    """The states (N, H) that drafted tokens were drawn from, and those after, in one forward."""
    row, column = batch.is_predicted.nonzero(as_tuple=True)
    lengths = [len(tokens) for tokens in drafted]
    places = pad_sequence(list(torch.split(column + 1, lengths)), batch_first=True)
    tokens = pad_sequence(list(drafted), batch_first=True)
    text, after = tree_states(draft, batch.input_ids[:, :-1], tokens, places)
    is_token = torch.arange(tokens.shape[1]) < torch.tensor(lengths)[:, None]
    return text[row, column], after[is_token.to(after.device)]


def tree_states(
    draft: PreTrainedModel, input_ids: Tensor, tokens: Tensor, positions: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the draft's last hidden states after a text's tokens, and after each drafted token.

    Every drafted token is read as if the text had ended before its position: the text goes through
    the draft once, all of them behind it in the same forward, under a mask. `check_trees`
    tells whether a draft can be run so. No gradient reaches it.

    Args:
        draft: a causal language model that takes a mask with a row for each token.
        input_ids: (B, T) ids of the texts, padded on the right.
        tokens: (B, M) ids of drafted tokens, padded anyhow.
        positions: (B, M) where each stands in its text, from 0; several may stand at one position.

    Returns:
        (B, T, H) states after the texts' tokens, and (B, M, H) after the drafted ones, both in the
        draft's precision.
    """
    batch, length = input_ids.shape
    drafted = tokens.shape[1]
    device = input_ids.device
    text_places = torch.arange(length, device=device)
    allowed = torch.zeros(
        batch, length + drafted, length + drafted, dtype=torch.bool, device=device
    )
    allowed[:, :length, :length] = text_places <= text_places[:, None]
    allowed[:, length:, :length] = text_places < positions[:, :, None]
    allowed[:, length:, length:] = torch.eye(drafted, dtype=torch.bool, device=device)
    mask = torch.zeros(allowed.shape, dtype=draft.dtype, device=device)
    mask.masked_fill_(~allowed, torch.finfo(draft.dtype).min)
    places = torch.cat([text_places.expand(batch, -1), positions], dim=1)
    ids = known_ids(torch.cat([input_ids, tokens], dim=1), draft)
    if (input_embedding := states_input(draft)) is None and has_rules(draft):
        with seeing(draft, Sight(mask[:, None], places, places)):
            empty = DynamicCache(config=draft.config)
            states = hidden_states(draft, ids, position_ids=places, cache=empty)
    elif input_embedding is None:
        states = hidden_states(draft, ids, mask[:, None], position_ids=places)
    else:
        with torch.no_grad():
            text, chosen = ids[:, :length], ids[:, length:]
            last = (positions - 1).clamp(min=0, max=length - 1)
            x = input_embedding(text)
            # Drafted tokens come after the draft's own states, which the text's forward gives.
            of_text = draft.base_model(inputs_embeds=x, use_cache=False)[0]
            before = of_text.gather(1, last[..., None].expand(-1, -1, of_text.shape[-1]))
            states = draft.base_model(
                inputs_embeds=torch.cat([x, input_embedding.after_own(chosen, before)], dim=1),
                attention_mask=mask[:, None],
                position_ids=places,
                use_cache=False,
            )[0]
    return states[:, :length], states[:, length:]
