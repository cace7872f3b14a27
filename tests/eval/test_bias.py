"""The measured bias of verifiers that are not lossless, against exact enumeration."""

from functools import partial

import pytest
import torch
from torch import Tensor

from eval.decoder import DecodeConfig, SpeculativeDecoder
from eval.drafts import DraftTree
from eval.measuring.experiment import measure_bias
from eval.verifiers import VERIFIERS
from specdata.probability import probabilities
from tests.support.tiny import tiny_llama


def exact_emitted(verifier: object, p: Tensor, q: Tensor) -> Tensor:
    """The emitted token's distribution from whole verdicts, one for each token of the draft."""
    emitted = torch.zeros_like(p)
    for token, chance in enumerate(q.tolist()):
        if chance == 0.0:
            continue
        tree = DraftTree.chain(torch.tensor([token]), q.unsqueeze(0))
        verdict = verifier(tree, p.expand(2, -1))  # type: ignore[operator]
        emitted += chance * verdict.stop[0] * verdict.bonus[0]
        emitted[token] += chance * verdict.stop[1]
    return emitted


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_the_bias_of_a_generation_is_that_of_its_own_positions(temperature: float) -> None:
    """Against forwards of every prefix by itself and whole verdicts."""
    target, draft = tiny_llama(0, vocab=40), tiny_llama(1, vocab=40)
    biased = {"verifier": "biased_uno", "verifier_args": {"epsilon": 0.1}, "length": 3}
    config = DecodeConfig(**biased, temperature=temperature)
    verifier, prompt = config.make_verifier(), torch.tensor([2, 3])
    bias_at = partial(VERIFIERS["biased_uno"].bias_at, epsilon=0.1)
    decoder = SpeculativeDecoder.from_config(target, draft, config)
    variations = 0.0
    for seed in range(6):
        generator = torch.Generator().manual_seed(seed)
        out = decoder.generate(prompt, max_new_tokens=12, generator=generator)
        expected = 0.0
        at_drafted = [place < r.drafted for r in out.rounds for place in range(r.emitted)]
        for index, drafted in enumerate(at_drafted):
            ids = torch.cat([prompt, out.tokens[:index]]).unsqueeze(0)
            logits = (model(input_ids=ids).logits[0, -1].detach() for model in (target, draft))
            p, q = (probabilities(each, config.sampling) for each in logits)
            if drafted:
                expected += float((exact_emitted(verifier, p, q) - p).abs().sum()) / 2
        measured = measure_bias(target, draft, bias_at, config.sampling, prompt.tolist(), out)
        assert measured == pytest.approx(expected, abs=1e-5)
        variations += expected
    assert variations > 0.5, "there must be a bias to find"
