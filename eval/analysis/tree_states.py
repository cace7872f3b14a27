"""A draft's states after drafted tokens, all read beside the text that they were drawn along.

Drafted tokens read the text and themselves, not each other, so the text goes through the draft
once, all of them behind it in the same forward, under a mask that lets each see what it would have
been read after, at the position that it would have had. SpecDec++'s head is replayed on them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor
from transformers import DynamicCache

from eval.runtime.masks import Sight, seeing
from eval.runtime.transformers_models import has_rules
from specdata.errors import ConfigError
from specdata.lm_head import hidden_states
from specdata.models import known_ids
from specdata.states_draft import states_input

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# Relative error of a tree's states that passes as rounding; half precision sums in another order.
ROUNDING = {torch.float32: 1e-4, torch.float64: 1e-6}
HALF_ROUNDING = 5e-2


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
    if (reads := states_input(draft)) is None and has_rules(draft):
        with seeing(draft, Sight(mask[:, None], places, places)):
            empty = DynamicCache(config=draft.config)
            states = hidden_states(draft, ids, position_ids=places, cache=empty)
    elif reads is None:
        states = hidden_states(draft, ids, mask[:, None], position_ids=places)
    else:
        with torch.no_grad():
            text, chosen = ids[:, :length], ids[:, length:]
            last = (positions - 1).clamp(min=0, max=length - 1)
            x = reads(text)
            # Drafted tokens come after the draft's own states, which the text's forward gives.
            along = draft.base_model(inputs_embeds=x, use_cache=False)[0]
            own = along.gather(1, last[..., None].expand(-1, -1, along.shape[-1]))
            states = draft.base_model(
                inputs_embeds=torch.cat([x, reads.after_own(chosen, own)], dim=1),
                attention_mask=mask[:, None],
                position_ids=places,
                use_cache=False,
            )[0]
    return states[:, :length], states[:, length:]


@torch.no_grad()
def check_tree_states(draft: PreTrainedModel, longest: int) -> None:
    """Make sure that a draft's states in a tree are those of separate forwards.

    It is found out by trying, at full length, the tokens of the longest text: what a window hides
    is seen only beyond it.
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
        f"{type(draft).__name__} cannot read drafted tokens beside a text in one forward ({reason})"
    )
