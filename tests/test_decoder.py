"""Decoded text has the target's distribution: over several rounds, with every stopping rule."""

from __future__ import annotations

import copy

import pytest
import torch
from peft import LoraConfig, get_peft_model

from eval.decoder import DecodeConfig, SpeculativeDecoder
from heads import AcceptanceHead
from specdata.errors import ConfigError
from tests.tiny import END, tiny_llama

PROMPT = [2, 3]


def head(width: int = 16) -> AcceptanceHead:
    torch.manual_seed(5)
    made = AcceptanceHead(hidden_size=width, depth=1).eval()
    # A random head hardly varies; this one stops after one to four tokens.
    torch.nn.init.normal_(made.output.weight, std=2.0)
    return made


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
        room = budget
        for record in out.rounds:
            assert record.drafted <= room - 1
            room -= record.emitted
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


def test_impossible_configurations_are_refused_before_any_model_is_needed() -> None:
    with pytest.raises(ConfigError, match="unknown verifier 'tokn'"):
        DecodeConfig(verifier="tokn")
    with pytest.raises(ConfigError, match="unknown stop"):
        DecodeConfig(stop="never")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"length: must be greater than or equal to 1 \(got 0\)"):
        DecodeConfig(length=0)
    with pytest.raises(ConfigError, match=r"top_p must lie in \(0, 1\], got 2"):
        DecodeConfig(top_p=2.0)
    with pytest.raises(ConfigError, match="temperature must be 0 or larger, got -1"):
        DecodeConfig("rrs", drafter="paths", paths=2, path_temperatures=(1.0, -1.0))
    with pytest.raises(ConfigError, match="needs an acceptance head"):
        SpeculativeDecoder.from_config(tiny_llama(0), tiny_llama(1), DecodeConfig(stop="head"))


def test_a_head_of_another_draft_is_refused_before_decoding() -> None:
    with pytest.raises(ConfigError, match="width 32, and this draft has 16"):
        SpeculativeDecoder.from_config(
            tiny_llama(0), tiny_llama(1), DecodeConfig(stop="head"), head(32)
        )


def test_an_empty_prompt_or_budget_is_refused() -> None:
    decoder = SpeculativeDecoder.from_config(tiny_llama(0), None, DecodeConfig())
    for prompt, budget in ((torch.tensor([], dtype=torch.long), 4), (torch.tensor([2]), 0)):
        with pytest.raises(ValueError, match="T >= 1"):
            decoder.generate(prompt, max_new_tokens=budget, generator=torch.Generator())
