"""Columns of the two stored tables. Tokens are stored as ids: text does not tokenize back."""

from __future__ import annotations

from typing import TypedDict

import pyarrow as pa

_IDS = pa.list_(pa.int32())
_REALS = pa.list_(pa.float32())


class Rollout(TypedDict):
    """One completion sampled from the target.

    `sample` numbers the completions of a prompt, `turn` the turns of a conversation, both from 0;
    the prompt of a later turn holds the earlier ones with their answers. `finish` is "eos" (the
    last completion id is the end token) or "length".
    """

    example_id: str
    dataset: str
    split: str
    sample: int
    turn: int
    prompt_ids: list[int]
    completion_ids: list[int]
    finish: str


class Label(Rollout):
    """A rollout with what one draft would have proposed at each position; lists are aligned.

    `draft_ids[i]` is Y_i ~ q(. | prompt, X_<i), `accept_prob[i]` is min(1, p(Y_i)/q(Y_i)),
    `log_p` and `log_q` are its log probabilities, `log_q_max` that of the draft's likeliest token,
    `overlap[i]` is sum_x min(p, q).
    """

    draft_ids: list[int]
    accept_prob: list[float]
    log_p: list[float]
    log_q: list[float]
    log_q_max: list[float]
    overlap: list[float]


ROLLOUTS = pa.schema(
    [
        ("example_id", pa.string()),
        ("dataset", pa.string()),
        ("split", pa.string()),
        ("sample", pa.int32()),
        ("turn", pa.int32()),
        ("prompt_ids", _IDS),
        ("completion_ids", _IDS),
        ("finish", pa.string()),
    ]
)
LABELS = pa.schema(
    [
        *ROLLOUTS,
        ("draft_ids", _IDS),
        ("accept_prob", _REALS),
        ("log_p", _REALS),
        ("log_q", _REALS),
        ("log_q_max", _REALS),
        ("overlap", _REALS),
    ]
)
# More columns of labels that can be made again without the target: see specdata.labels.top_logits. The
# first two hold N values a position, one position after the other.
TOP_LOGITS = pa.schema(
    [
        ("top_ids", _IDS),
        ("top_logits", _REALS),
        ("rest_logit", _REALS),
        ("next_logit", _REALS),
    ]
)
