"""Columns of the stored datasets: rollouts, logits and labels.

Tokens are stored as ids, because the tokens of a decoded text may be others.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NotRequired, TypedDict, get_type_hints

import pyarrow as pa


class Rollout(TypedDict):
    """One completion sampled from the target.

    Attributes:
        sample: which of the prompt's completions, from 0.
        turn: which turn of a conversation, from 0; the prompt of a later one holds the earlier ones
            with their answers.
        finish: "eos" (the last completion id is an end token) or "length".
        target_states: (C, H) last hidden states that the completion was drawn from, if asked for,
            as `specdata.target_states` writes them.
        taps, target_taps: numbers of taps (`specdata.drafts.taps`), and these at every token that
            the target read, (P + C - 1, F), if asked for.
    """

    example_id: str
    dataset: str
    split: str
    sample: int
    turn: int
    prompt_ids: list[int]
    completion_ids: list[int]
    finish: str
    target_states: NotRequired[bytes]
    taps: NotRequired[list[int]]
    target_taps: NotRequired[bytes]


class Label(Rollout):
    """A rollout with what one draft would have proposed at each position of the completion X.

    SpecDec++ (Huang et al., arXiv:2405.19715), section 4.1. Every list has one value a completion
    token; probabilities are those of the sampler that tokens are served with, logarithms natural.

    Attributes:
        draft_ids: Y_i, drawn from q(. | prompt, X_<i).
        accept_prob: min(1, p(Y_i) / q(Y_i)).
        log_p, log_q: of Y_i; log p is -inf where the target never emits it.
        log_q_max: max_x log q(x).
        overlap: sum_x min(p(x), q(x)), the acceptance averaged over Y_i.
        entropy: of q, in nats; 0 where q gives everything to one token.
        more_draft_ids, more_accept_prob: of labels with S > 1 draws, the same of S - 1 more tokens
            at each position, one position after the other; empty in rows that are not trained on.
    """

    draft_ids: list[int]
    accept_prob: list[float]
    log_p: list[float]
    log_q: list[float]
    log_q_max: list[float]
    overlap: list[float]
    entropy: list[float]
    more_draft_ids: NotRequired[list[int]]
    more_accept_prob: NotRequired[list[float]]


class LogitRow(Rollout):
    """A rollout with the target's largest logits at each position of its completion.

    Those of a server are log probabilities, which are logits up to a constant. N values of the
    first two a completion token, one of the others.

    Attributes:
        top_ids: ids of the N largest, in falling order, equal ones by id.
        rest_logit: log of the sum of exp over all other tokens; -inf if there are none.
        next_logit: the largest of the others; -inf if there are none.
        text_logit: of the completion's own token.
    """

    top_ids: list[int]
    top_logits: list[float]
    rest_logit: list[float]
    next_logit: list[float]
    text_logit: list[float]


_ARROW = {
    str: pa.string(),
    int: pa.int32(),
    list[int]: pa.list_(pa.int32()),
    list[float]: pa.list_(pa.float32()),
    bytes: pa.large_binary(),
}


def _columns(row: type, *, more_than: Sequence[str] = (), of: Sequence[str] = ()) -> pa.Schema:
    """The columns of a row type: those named, or all `more_than` those of another."""
    types = get_type_hints(row)
    names = of or [name for name in types if name not in more_than]
    return pa.schema([(name, _ARROW[types[name]]) for name in names])


# One more column of rollouts whose states are stored.
TARGET_STATES = _columns(Rollout, of=["target_states"])
# Two more of rollouts whose taps are stored.
TARGET_TAPS = _columns(Rollout, of=["taps", "target_taps"])
_OPTIONAL = (*TARGET_STATES.names, *TARGET_TAPS.names)
ROLLOUTS = _columns(Rollout, more_than=_OPTIONAL)
# Two more of labels with S > 1 draws.
MORE_DRAWS = _columns(Label, of=["more_draft_ids", "more_accept_prob"])
LABELS = _columns(Label, more_than=(*_OPTIONAL, *MORE_DRAWS.names))
# More columns of rollouts with top logits: see specdata.top_logits.
# The first two hold N values a position, one position after the other.
TOP_LOGITS = _columns(LogitRow, more_than=(*ROLLOUTS.names, *_OPTIONAL))
LOGITS = pa.schema([*ROLLOUTS, *TOP_LOGITS])
