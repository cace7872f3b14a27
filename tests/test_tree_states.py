"""A draft's states after drafted tokens, all in one forward, are those of separate forwards."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from transformers import LlamaForCausalLM

from eval.analysis.traces import check_tree_states, tree_states
from specdata.errors import ConfigError
from specdata.lm_head import hidden_states
from tests.drive_head import tiny_draft
from tests.families import FAMILIES, WINDOWED, tiny

TEXTS = [[3, 14, 15, 9, 26, 5], [35, 8, 9]]
# Two tokens at each position but the first, which has nothing before it.
POSITIONS = [[1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6], [1, 1, 2, 2, 3, 3, 1, 1, 1, 1, 1, 1]]


def batch() -> tuple[Tensor, Tensor, Tensor]:
    longest = max(map(len, TEXTS))
    ids = torch.tensor([text + [0] * (longest - len(text)) for text in TEXTS])
    positions = torch.tensor(POSITIONS)
    tokens = torch.randint(1, 20, positions.shape, generator=torch.Generator().manual_seed(0))
    return ids, tokens, positions


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_states_of_one_forward_are_those_of_separate_forwards_to_a_millionth(
    attention: str,
) -> None:
    draft: LlamaForCausalLM = tiny_draft().eval()
    draft.set_attn_implementation(attention)
    ids, tokens, positions = batch()
    texts, after = tree_states(draft, ids, tokens, positions)
    for row, text in enumerate(TEXTS):
        alone = hidden_states(draft, torch.tensor([text]))[0]
        torch.testing.assert_close(texts[row, : len(text)], alone, rtol=0.0, atol=1e-6)
        for index, position in enumerate(POSITIONS[row]):
            known = [*text[:position], int(tokens[row, index])]
            expected = hidden_states(draft, torch.tensor([known]))[0, -1]
            torch.testing.assert_close(after[row, index], expected, rtol=0.0, atol=1e-6)


@pytest.mark.parametrize("family", [*FAMILIES, *WINDOWED])
def test_every_family_can_be_read_so(family: str) -> None:
    draft = tiny(family, 0).eval()
    check_tree_states(draft, 12)
    ids, tokens, positions = batch()
    ids, tokens = ids % 12, tokens % 12
    _, after = tree_states(draft, ids, tokens, positions)
    known = torch.cat([ids[0, :4], tokens[0, 6:7]]).unsqueeze(0)
    expected = hidden_states(draft, known)[0, -1]
    torch.testing.assert_close(after[0, 6], expected, rtol=1e-4, atol=1e-5)


def test_a_draft_of_recurrent_layers_is_refused() -> None:
    with pytest.raises(ConfigError, match="cannot read drafted tokens beside a text"):
        check_tree_states(tiny("mamba", 0).eval(), 24)


def test_half_precision_passes_as_rounding() -> None:
    check_tree_states(tiny_draft().bfloat16().eval(), 100)
