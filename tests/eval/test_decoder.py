"""Decoded text has the target's distribution: over several rounds, with every stopping rule."""

import copy

import pytest
import torch
from peft import LoraConfig, get_peft_model

from eval.decoder import DecodeConfig, SpeculativeDecoder
from tests.support.tiny import END, tiny_llama


def test_a_draft_equal_to_the_target_is_always_accepted() -> None:
    target = tiny_llama(0, vocab=40)
    decoder = SpeculativeDecoder.from_config(target, target, DecodeConfig(length=4))
    for seed in range(20):
        generator = torch.Generator().manual_seed(seed)
        out = decoder.generate(torch.tensor([2]), max_new_tokens=25, generator=generator)
        assert all(record.accepted == record.drafted for record in out.rounds)


@pytest.mark.parametrize("budget", [1, 2, 3, 7])
def test_nothing_is_drafted_or_emitted_past_the_budget_or_an_end_token(budget: int) -> None:
    target, draft = tiny_llama(0), tiny_llama(1)
    decoder = SpeculativeDecoder.from_config(target, draft, DecodeConfig(length=5))
    ended = 0
    for seed in range(25):
        generator = torch.Generator().manual_seed(seed)
        # An end token inside the prompt ends nothing.
        out = decoder.generate(torch.tensor([END]), max_new_tokens=budget, generator=generator)
        tokens = out.tokens.tolist()
        assert 1 <= len(tokens) <= budget
        assert END not in tokens[:-1]
        assert (out.finish == "eos") == (tokens[-1] == END)
        assert out.finish == "eos" or len(tokens) == budget
        assert len(tokens) == sum(record.emitted for record in out.rounds)
        ended += out.finish == "eos"
    assert 0 < ended < 25


# PEFT asks transformers by a name that it will drop.
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
@pytest.mark.parametrize("engine", ["eager", "captured"])
def test_a_draft_with_adapters_drafts_from_the_distribution_of_its_merged_weights(
    engine: str,
) -> None:
    target, base = tiny_llama(0, vocab=40), tiny_llama(1, vocab=40)
    torch.manual_seed(3)
    draft = get_peft_model(base, LoraConfig(r=4, init_lora_weights=False)).double().eval()
    merged = copy.deepcopy(draft).merge_and_unload()
    prompt = torch.tensor([2, 5, 7])

    def decode(model: object) -> list[tuple[int, int]]:
        decoder = SpeculativeDecoder.from_config(
            target, model, DecodeConfig(length=4), engine=engine
        )  # type: ignore[arg-type]
        generator = torch.Generator().manual_seed(2)
        out = decoder.generate(prompt, max_new_tokens=40, generator=generator)
        return [(record.drafted, record.accepted) for record in out.rounds]

    assert decode(draft) == decode(merged) != decode(tiny_llama(1, vocab=40))
