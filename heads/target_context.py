"""Rows of pure target context: drafted tokens judged after the target's own text.

Y_i is drafted after the prompt and X_<i, which is all that a draft in decoding has read when it
drafts its first token, and, as long as its tokens are accepted, its later ones. Drafted tokens read
the text and themselves, not each other. So the sequence X goes through the draft once, all Y behind
it in the same forward, under a mask that lets each see what it would have been read after, at the
position that it would have had.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from heads.mixing import LabelRow, check_labels
from specdata.errors import ConfigError
from specdata.lm_head import hidden_states
from specdata.models import known_ids
from specdata.sampling import numpy_generator_for
from specdata.states_draft import states_input

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# Relative error of a tree's states that passes as rounding; half precision sums in another order.
ROUNDING = {torch.float32: 1e-4, torch.float64: 1e-6}
HALF_ROUNDING = 5e-2
# Drafts in the simulated rounds have 1 to so many tokens, as the stopping rules' limit allows.
LONGEST_DRAFT = 20


@dataclass(frozen=True, slots=True)
class TargetRow:
    """One text X with the tokens drafted along it, n positions of S each, cut at a maximum length.

    Attributes:
        input_ids: (T,) int64, the prompt and X without its last token.
        first: position of the first drafted tokens, the length of the prompt.
        tokens: (n, S) int64, drafted at positions first to first + n - 1.
        accept: (n, S) float32, min(1, p/q) of each.
        overlap: (n,) float32, sum min(p, q).
        position: (n,) int64, of a token in its draft, in simulated rounds.
        since_rejection: (n,) int64, tokens since the last rejection or the start, in the same.
        counts: whether its labels count; those of a filler do not.
        index: of the row in its dataset, to find what is cached of it.
        draws: which S of the row's draws these are.
    """

    input_ids: Tensor
    first: int
    tokens: Tensor
    accept: Tensor
    overlap: Tensor
    position: Tensor
    since_rejection: Tensor
    counts: bool = True
    index: int = 0
    draws: tuple[int, ...] = (0,)

    def blank(self) -> TargetRow:
        """The same text with labels that do not count."""
        return replace(self, counts=False)


@dataclass(frozen=True, slots=True)
class TargetBatch:
    """Rows padded on the right to the longest, and their N positions in one line, S tokens each.

    Attributes:
        rows: B rows.
        input_ids: (B, T).
        row: (N,) the row of each position.
        column: (N,) where it stands in its row.
        tokens: (N, S).
        accept: (N, S).
        overlap: (N,).
        position: (N,).
        since_rejection: (N,).
        mask: (N,) bool, whether its labels count.
    """

    rows: Sequence[TargetRow]
    input_ids: Tensor
    row: Tensor
    column: Tensor
    tokens: Tensor
    accept: Tensor
    overlap: Tensor
    position: Tensor
    since_rejection: Tensor
    mask: Tensor

    @classmethod
    def of(cls, rows: Sequence[TargetRow]) -> TargetBatch:
        """Pad the texts on the right and line up their positions."""
        sizes = torch.tensor([len(row.tokens) for row in rows])
        row = torch.arange(len(rows)).repeat_interleave(sizes)
        return cls(
            rows=rows,
            input_ids=pad_sequence([each.input_ids for each in rows], batch_first=True),
            row=row,
            column=torch.cat([torch.arange(len(each.tokens)) + each.first for each in rows]),
            tokens=torch.cat([each.tokens for each in rows]),
            accept=torch.cat([each.accept for each in rows]),
            overlap=torch.cat([each.overlap for each in rows]),
            position=torch.cat([each.position for each in rows]),
            since_rejection=torch.cat([each.since_rejection for each in rows]),
            mask=torch.tensor([each.counts for each in rows])[row],
        )

    def to(self, device: torch.device) -> TargetBatch:
        """Return the batch on another device."""
        names = [name for name in self.__slots__ if name != "rows"]
        return replace(self, **{name: getattr(self, name).to(device) for name in names})

    def padded(self) -> tuple[Tensor, Tensor, Tensor]:
        """The drafted tokens as `tree_states` takes them, and where they are found there.

        Returns:
            (B, M) ids, (B, M) positions, and (N, S) places among the M of their row.
        """
        count, draws = self.tokens.shape
        sizes = torch.bincount(self.row, minlength=len(self.rows))
        begin = (sizes.cumsum(0) - sizes)[self.row]
        place = (torch.arange(count, device=self.row.device) - begin)[:, None] * draws
        place = place + torch.arange(draws, device=self.row.device)
        shape = (len(self.rows), int(sizes.max()) * draws)
        ids, positions = (self.tokens.new_zeros(shape) for _ in range(2))
        ids[self.row[:, None], place] = self.tokens
        positions[self.row[:, None], place] = self.column[:, None].expand(-1, draws)
        return ids, positions, place


def target_row(
    row: LabelRow,
    *,
    index: int,
    draws: Sequence[int],
    max_length: int,
    key: tuple[str | int, ...],
) -> TargetRow:
    """Read the drafted tokens of one row.

    Args:
        row: the labels of one completion.
        index: of the row in its dataset.
        draws: which of its draws, from 0.
        max_length: tokens of prompt + completion kept; the rest is cut at the end.
        key: what the simulated rounds depend on beside example_id and sample.

    Raises:
        ValueError: if the row's columns do not fit each other.
    """
    check_labels(row)
    _check_draws(row)
    if not row["prompt_ids"]:
        raise ValueError(
            f"example {row['example_id']!r}, sample {row['sample']}: prompt_ids must hold a token, "
            "as the first one is drafted after it"
        )
    prompt = row["prompt_ids"]
    kept = min(len(row["completion_ids"]), max_length - len(prompt))
    tokens, accept = _all_draws(row)
    overlap = np.asarray(row["overlap"], dtype=np.float32)[:kept]
    generator = numpy_generator_for("rounds", *key, row["example_id"], row["sample"])
    position, since = simulated_rounds(overlap, generator)
    return TargetRow(
        input_ids=torch.tensor([*prompt, *row["completion_ids"][: kept - 1]]),
        first=len(prompt),
        tokens=torch.from_numpy(tokens[:kept, list(draws)]),
        accept=torch.from_numpy(accept[:kept, list(draws)]),
        overlap=torch.from_numpy(overlap),
        position=torch.from_numpy(position),
        since_rejection=torch.from_numpy(since),
        index=index,
        draws=tuple(draws),
    )


def _check_draws(row: LabelRow) -> None:
    """Raise ValueError if the columns that mixing does not read do not fit the others."""
    size, sums = len(row["draft_ids"]), len(row["overlap"])
    ids, labels = len(row.get("more_draft_ids") or ()), len(row.get("more_accept_prob") or ())
    if sums != size or ids != labels or ids % size:
        raise ValueError(
            f"example {row['example_id']!r}, sample {row['sample']}: for {size} draft_ids there "
            f"must be as many values of overlap, and equally many of more_draft_ids and "
            f"more_accept_prob for each, got {sums}, {ids} and {labels}; label the rollouts again"
        )


def draws_of(row: LabelRow) -> int:
    """The number of tokens a position that the labels of a row hold."""
    positions = len(row["draft_ids"])
    more = row.get("more_draft_ids") or ()
    return 1 + len(more) // max(1, positions)


def _all_draws(row: LabelRow) -> tuple[np.ndarray, np.ndarray]:
    """(n, S) int64 tokens and (n, S) float32 labels, the row's own draw first."""
    tokens = np.asarray(row["draft_ids"], dtype=np.int64)[:, None]
    accept = np.asarray(row["accept_prob"], dtype=np.float32)[:, None]
    if (more := draws_of(row) - 1) > 0:
        others = np.asarray(row["more_draft_ids"], dtype=np.int64).reshape(-1, more)
        theirs = np.asarray(row["more_accept_prob"], dtype=np.float32).reshape(-1, more)
        tokens, accept = np.hstack([tokens, others]), np.hstack([accept, theirs])
    return tokens, accept


def simulated_rounds(
    overlap: np.ndarray, generator: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """Where tokens along a text stand in their drafts, as if it were decoded.

    Each draft has 1 to `LONGEST_DRAFT` tokens, all equally likely. A drafted token is rejected with
    probability 1 - overlap; the next draft begins after the target's token there, or after the one
    that the target adds to a draft of which all was accepted.

    Args:
        overlap: (n,) sum min(p, q) at each position.
        generator: for lengths and rejections.

    Returns:
        (n,) int64 positions in the draft from 0 (where the target adds a token: the draft's
        length), and (n,) int64 tokens since the last rejection, or since the start.
    """
    size = len(overlap)
    lengths = generator.integers(1, LONGEST_DRAFT + 1, size).tolist()
    rejected = (generator.random(size) >= overlap).tolist()
    positions, sinces = np.zeros(size, np.int64), np.zeros(size, np.int64)
    position, since, length = 0, 0, LONGEST_DRAFT
    for index in range(size):
        if position == 0:
            length = lengths[index]
        positions[index], sinces[index] = position, since
        is_added = position == length
        if rejected[index] and not is_added:
            position, since = 0, 0
        else:
            position, since = 0 if is_added else position + 1, since + 1
    return positions, sinces


def tree_states(
    draft: PreTrainedModel, input_ids: Tensor, tokens: Tensor, positions: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the draft's last hidden states after a text's tokens, and after each drafted token.

    Every drafted token is read as if the text had ended before its position. `check_tree_states`
    tells whether a draft can be run so. No gradient reaches it.

    Args:
        draft: a causal language model that takes a mask with a row for each token.
        input_ids: (B, T) ids of the texts, padded on the right.
        tokens: (B, M) ids of drafted tokens, padded anyhow.
        positions: (B, M) where each stands in its text, from 0: it has read the text before that.
            Several tokens may stand at one position.

    Returns:
        (B, T, H) states after the texts' tokens, and (B, M, H) after the drafted ones, both in the
        draft's precision.
    """
    batch, length = input_ids.shape
    drafted = tokens.shape[1]
    device = input_ids.device
    at = torch.arange(length, device=device)
    allowed = torch.zeros(
        batch, length + drafted, length + drafted, dtype=torch.bool, device=device
    )
    allowed[:, :length, :length] = at <= at[:, None]
    allowed[:, length:, :length] = at < positions[:, :, None]
    allowed[:, length:, length:] = torch.eye(drafted, dtype=torch.bool, device=device)
    mask = torch.zeros(allowed.shape, dtype=draft.dtype, device=device)
    mask.masked_fill_(~allowed, torch.finfo(draft.dtype).min)
    places = torch.cat([at.expand(batch, -1), positions], dim=1)
    ids = known_ids(torch.cat([input_ids, tokens], dim=1), draft)
    if (reads := states_input(draft)) is None:
        states = hidden_states(draft, ids, mask[:, None], position_ids=places)
    else:  # the drafted tokens come after the draft's own states, which the text's forward gives
        with torch.no_grad():
            x = reads(ids[:, :length])
            along = draft.base_model(inputs_embeds=x, use_cache=False)[0]
            index = (positions - 1).clamp(min=0, max=length - 1)[..., None]
            before = along.gather(1, index.expand(-1, -1, along.shape[-1]))
            x = torch.cat([x, reads.after_own(ids[:, length:], before)], dim=1)
            states = draft.base_model(
                inputs_embeds=x,
                attention_mask=mask[:, None],
                position_ids=places,
                use_cache=False,
            )[0]
    return states[:, :length], states[:, length:]


@torch.no_grad()
def check_tree_states(draft: PreTrainedModel, longest: int) -> None:
    """Make sure that a draft's states in a tree are those of separate forwards.

    It is found out by trying, at full length: a window that slides is seen only where it ends.

    Args:
        draft: a causal language model.
        longest: tokens of the longest text that it will read so.

    Raises:
        ConfigError: if it takes no such mask or no positions, or reads otherwise under one.
    """
    if states_input(draft) is not None:
        return  # made of layers that take such masks
    size = draft.config.get_text_config().vocab_size
    ids = (torch.arange(longest, device=draft.device) * 7919 % size).unsqueeze(0)
    positions = torch.tensor([[longest - 1, longest // 2]], device=draft.device)
    tokens = torch.tensor([[1 % size, 2 % size]], device=draft.device)
    try:
        _, after = tree_states(draft, ids, tokens, positions)
    except (TypeError, ValueError, RuntimeError, IndexError) as error:
        raise _no_tree(draft, f"{type(error).__name__}: {error}") from error
    bound = ROUNDING.get(draft.dtype, HALF_ROUNDING)
    for index, position in enumerate(positions[0].tolist()):
        alone = torch.cat([ids[:, :position], tokens[:, index : index + 1]], dim=1)
        expected = hidden_states(draft, alone)[0, -1].double()
        error_norm = torch.linalg.vector_norm(after[0, index].double() - expected)
        if not error_norm <= bound * torch.linalg.vector_norm(expected):
            raise _no_tree(
                draft, f"other states after {position + 1} tokens than in a forward of its own"
            )


def _no_tree(draft: PreTrainedModel, reason: str) -> ConfigError:
    return ConfigError(
        f"{type(draft).__name__} cannot read drafted tokens beside a text in one forward "
        f"({reason}), so a head cannot learn from its states after them: leave `consumed` out of "
        "head.decision_points, as in [before, drawn], or use another draft"
    )
