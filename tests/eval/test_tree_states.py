"""A draft's states after drafted tokens, all in one forward, are those of separate forwards."""

import pytest
import torch
from torch import Tensor

from benchmarks.papers.traces import tree_states
from eval.runtime.transformers_models import check_trees
from specdata.lm_head import hidden_states
from tests.support.families import FAMILIES, WINDOWED, tiny
from tests.support.states_draft import pair, state_after

TEXTS = [[3, 14, 15, 9, 26, 5], [35, 8, 9]]
# Two tokens at each position but the first, which has nothing before it.
POSITIONS = [[1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6], [1, 1, 2, 2, 3, 3, 1, 1, 1, 1, 1, 1]]


def batch() -> tuple[Tensor, Tensor, Tensor]:
    longest = max(map(len, TEXTS))
    ids = torch.tensor([text + [0] * (longest - len(text)) for text in TEXTS])
    positions = torch.tensor(POSITIONS)
    tokens = torch.randint(1, 20, positions.shape, generator=torch.Generator().manual_seed(0))
    return ids, tokens, positions


@pytest.mark.parametrize(
    ("family", "attention"), [("llama", "eager"), *((f, "sdpa") for f in (*FAMILIES, *WINDOWED))]
)
def test_states_of_one_forward_are_those_of_separate_forwards(family: str, attention: str) -> None:
    draft = tiny(family, 0, attention=attention).eval()
    most = 1e-5 if family == "gpt_neo" else 1e-6  # whose attention is in float32
    check_trees(draft)
    ids, tokens, positions = batch()
    texts, after = tree_states(draft, ids, tokens, positions)
    for row, text in enumerate(TEXTS):
        alone = hidden_states(draft, torch.tensor([text]))[0]
        torch.testing.assert_close(texts[row, : len(text)], alone, rtol=0.0, atol=most)
        for index, position in enumerate(POSITIONS[row]):
            known = [*text[:position], int(tokens[row, index])]
            expected = hidden_states(draft, torch.tensor([known]))[0, -1]
            torch.testing.assert_close(after[row, index], expected, rtol=0.0, atol=most)


def test_a_token_drafted_along_a_text_is_read_with_the_drafts_own_state() -> None:
    _, draft = pair(40)
    ids = torch.tensor([[2, 9, 31, 4, 17]])
    check_trees(draft)
    tokens, places = torch.tensor([[7, 30]]), torch.tensor([[3, 5]])
    along, after = tree_states(draft, ids, tokens, places)
    text = ids[0].tolist()
    for at in range(5):
        torch.testing.assert_close(along[0, at], state_after(draft, text[: at + 1], []))
    for index, place in enumerate((3, 5)):
        expected = state_after(draft, text[:place], tokens[0, index : index + 1].tolist())
        torch.testing.assert_close(after[0, index], expected)
