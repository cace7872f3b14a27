"""What a model cannot read is met before its forward: positions of drafts, ids without a row."""

from typing import Any

import pytest
import torch

from eval.decoder import DecodeConfig, SpeculativeDecoder
from eval.measuring.assisted import assisted_generate
from specdata.drafts.states_network import states_input
from specdata.errors import ConfigError
from specdata.probability import SamplingConfig
from specdata.rollouts.backend import Request, TransformersBackend
from tests.support.block_draft import block_draft
from tests.support.families import tiny
from tests.support.tiny import tiny_llama

PROMPT, NEW, READ = list(range(2, 22)), 40, 32
GREEDY = SamplingConfig(temperature=0.0)


def pair(kind: str) -> tuple[Any, Any]:
    """A target, and a draft whose config.json has fewer positions than a text has tokens."""
    target = tiny_llama(0, vocab=40, layers=3)
    target.generation_config.eos_token_id = None
    if kind == "gpt2":
        return target, tiny("gpt2", 1, n_positions=READ, n_embd=16)
    draft: Any = tiny_llama(2, vocab=40)
    draft.config.max_position_embeddings = READ
    if kind == "blocks":
        draft = block_draft(target, size=4)
        draft.config.max_position_embeddings = READ
    if kind == "masks":
        draft.config.depths, draft.config.pard_token = 3, 39
    return target, draft


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        ("gpt2", {"stop": "confidence", "threshold": 0.05}),
        ("gpt2", {"verifier": "rrs_wor", "drafter": "tree", "widths": (2, 2, 1)}),
        ("gpt2", {"verifier": "naive", "drafter": "dynamic_tree", "nodes": 4, "depth": 3}),
        ("masks", {"verifier": "block", "length": 4}),
        ("blocks", {"verifier": "greedy_block", "length": 4}),
        ("blocks", {"stop": "confidence", "threshold": 0.05}),
    ],
)
def test_a_draft_proposes_while_it_has_positions_and_decoding_goes_on_without_it(
    kind: str, settings: dict[str, Any]
) -> None:
    target, draft = pair(kind)
    config = DecodeConfig(**settings, temperature=0.0)
    decoder = SpeculativeDecoder.from_config(target, draft, config)
    # The last prompt is longer than what the draft reads.
    prompts = [torch.tensor(PROMPT), torch.tensor(PROMPT[:3]), torch.tensor(2 * PROMPT)]
    draws = [torch.Generator().manual_seed(n) for n in range(3)]
    together = decoder.generate_batch(prompts, max_new_tokens=NEW, generators=draws)
    alone = SpeculativeDecoder.from_config(target, None, DecodeConfig(temperature=0.0))
    for prompt, batched in zip(prompts, together, strict=True):
        out = decoder.generate(prompt, max_new_tokens=NEW, generator=torch.Generator())
        plain = alone.generate(prompt, max_new_tokens=NEW, generator=torch.Generator())
        assert out.tokens.tolist() == batched.tokens.tolist() == plain.tokens.tolist()
        length = len(prompt)
        for number, each in enumerate(out.rounds):
            is_first = number == 0 and states_input(draft) is not None
            left = min(READ + 1 - length, len(prompt) + NEW - 1 - length)
            assert (each.drafted > 0) == (left > 0 and not is_first)
            assert each.depth <= max(0, left)
            length += each.emitted


@pytest.mark.parametrize("prompt", [PROMPT, 2 * PROMPT])
def test_the_assisted_baseline_goes_on_without_its_draft(prompt: list[int]) -> None:
    target, draft = (each.float() for each in pair("gpt2"))
    text, settings = torch.tensor(prompt), {"length": 4, "max_new_tokens": NEW, "seed": 0}
    made = assisted_generate(target, draft, text, sampling=GREEDY, **settings)
    plain = assisted_generate(target, None, text, sampling=GREEDY, **settings)
    assert made.tokens.tolist() == plain.tokens.tolist()
    assert sum(each.emitted for each in made.rounds) == NEW
    assert any(each.drafted for each in made.rounds) == (len(prompt) < READ)


@pytest.mark.parametrize("wrong", [40, -1])
def test_ids_that_a_target_has_no_row_for_are_refused_with_both_numbers(wrong: int) -> None:
    target, draft = pair("gpt2")
    prompt = [3, wrong, 5]
    decoder = SpeculativeDecoder.from_config(target, draft, DecodeConfig())
    backend = TransformersBackend(target, SamplingConfig(), 4, 2, seed=0)
    said = f"from 0 to 39.* a text has {min(prompt)} to {max(prompt)}"
    with pytest.raises(ConfigError, match=said):
        decoder.generate(torch.tensor(prompt), max_new_tokens=4, generator=torch.Generator())
    with pytest.raises(ConfigError, match=said):
        backend.complete([Request(prompt, ("id", 0))])
