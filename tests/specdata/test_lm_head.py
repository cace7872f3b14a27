"""Last hidden states, read in two ways that agree, and logits made of them in pieces."""

import pytest
import torch

from specdata.lm_head import capturing_hidden, check_hidden_states, find_lm_head, hidden_states
from tests.support.drive_head import tiny_draft
from tests.support.families import FAMILIES, tiny
from tests.support.tiny import Capped, tiny_llama

V = 97
NAMES = [*FAMILIES, "gemma2", "cohere", "phi"]  # logits with a soft cap, multiplied, with a bias


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_logits_in_pieces_are_the_models_own_for_padded_rows(name: str, dtype: torch.dtype) -> None:
    model = tiny(name, 0, vocab=V, dtype=dtype)
    with torch.no_grad():
        model.get_output_embeddings().weight.mul_(30)  # a soft cap is nothing at small logits
    reader = find_lm_head(model)
    assert reader.embedding is not None
    assert reader.vocabulary == V
    ids = torch.randint(0, V, (3, 11), generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        own = model(input_ids=ids).logits
        states = reader.states(torch.nn.functional.pad(ids, (0, 5)))[:, :11].flatten(0, 1)
        pieces = torch.cat([reader.logits(states[start : start + 4]) for start in range(0, 33, 4)])
    accuracy = 1e-5 if dtype == torch.float32 else 2e-2
    assert states.shape[-1] != V
    assert float((pieces - own.flatten(0, 1)).abs().amax()) <= accuracy * float(own.abs().amax())


def test_a_model_whose_logits_cannot_be_made_in_pieces_gives_its_own() -> None:
    plain = tiny_llama(0, vocab=40).float()
    model = Capped(plain.config).eval()
    model.load_state_dict(plain.state_dict())
    ids = torch.tensor([[2, 3, 4]])
    reader = find_lm_head(model)
    assert find_lm_head(plain).embedding is not None
    assert reader.embedding is None
    with torch.inference_mode():
        assert torch.equal(reader.logits(reader.states(ids)), model(input_ids=ids).logits)


# --- hidden states


def test_a_draft_that_changes_its_state_before_the_output_embedding_is_refused() -> None:
    draft = tiny_draft().eval()
    draft.lm_head = torch.nn.Sequential(torch.nn.Linear(32, 32), draft.lm_head)
    draft.get_output_embeddings = lambda: draft.lm_head[1]
    with pytest.raises(ValueError, match="changes its hidden state"):
        check_hidden_states(draft)


@pytest.mark.parametrize("name", NAMES)
def test_both_ways_to_the_last_hidden_state_agree_with_that_of_transformers(name: str) -> None:
    model = tiny(name, 0, vocab=V, dtype=torch.float32)
    check_hidden_states(model)
    ids = torch.randint(3, V, (2, 7), generator=torch.Generator().manual_seed(0))
    captured: list[torch.Tensor] = []
    with torch.no_grad(), capturing_hidden(model, captured.append):
        whole = model(input_ids=ids, output_hidden_states=True)
    states = hidden_states(model, ids)
    assert not states.requires_grad
    torch.testing.assert_close(states, captured[0])
    if name != "opt, projected":  # which projects its states after the last that it names
        torch.testing.assert_close(states, whole.hidden_states[-1])
    model(input_ids=ids)
    assert len(captured) == 1  # the hook is gone
