"""Models in bfloat16 and float16: distributions are float32, and only rounding moves them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from eval.decoder import DecodeConfig, SpeculativeDecoder
from eval.drafts import DraftTree
from eval.runtime.model import CachedModel
from eval.runtime.sequence import sequence_of
from eval.verifiers.rule import Drawn, Verifier
from specdata.probability import SamplingConfig
from tests.support.families import tiny

HALF = [torch.bfloat16, torch.float16]
CASES = {
    "block": DecodeConfig(verifier="block", length=3),
    "tree": DecodeConfig(verifier="traversal", drafter="tree", widths=(2, 2, 1)),
    "paths": DecodeConfig(verifier="kseq", drafter="paths", paths=2, length=3),
}
PROMPTS = [torch.tensor([2, 3, 7]), torch.tensor([5])]


@pytest.mark.parametrize(
    ("family", "name", "dtype"),
    [
        *(("llama", name, torch.bfloat16) for name in CASES),
        ("opt", "block", torch.float16),
        ("gemma", "tree", torch.bfloat16),
    ],
)
def test_verifiers_get_float32_distributions_without_nan(
    family: str, name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, draft = tiny(family, 2, dtype=dtype), tiny(family, 3, dtype=dtype)
    given: list[tuple[DraftTree, torch.Tensor]] = []
    draw = Verifier.draw

    def recorded(verifier: Verifier, drafted: DraftTree, rows: torch.Tensor, seed: Any) -> Drawn:
        given.append((drafted, rows))
        return draw(verifier, drafted, rows, seed)

    monkeypatch.setattr(Verifier, "draw", recorded)
    decoder = SpeculativeDecoder.from_config(target, draft, CASES[name])
    seeds = [torch.Generator().manual_seed(seed) for seed in range(2)]
    outs = decoder.generate_batch(PROMPTS, max_new_tokens=16, generators=seeds)
    outs += [decoder.generate(PROMPTS[0], max_new_tokens=16, generator=torch.Generator())]
    assert all(1 <= len(out.tokens) <= 16 for out in outs)
    assert any(len(draft) for draft, _ in given)
    for drafted, distributions in given:
        for distribution in (distributions, *([drafted.distributions] if len(drafted) else [])):
            assert distribution.dtype == torch.float32
            assert float((distribution.sum(-1) - 1).abs().max()) < 1e-5


@pytest.mark.parametrize("dtype", HALF, ids=str)
@pytest.mark.parametrize("engine", ["eager", "captured"])
def test_distributions_are_the_softmax_in_float32_of_the_logits_as_run(
    dtype: torch.dtype, engine: Any
) -> None:
    """A softmax in half precision keeps eight bits; these agree to float32's."""
    model = tiny("llama", 2, dtype=dtype)
    cached = CachedModel(model, 40, engine=engine)
    sequence = sequence_of(cached, 0, SamplingConfig(temperature=0.7))
    with torch.inference_mode():
        sequence.append([2, 3], 1).run()
        logits = sequence.append([4, 5, 6], 3).run()
    assert logits.dtype == dtype
    distribution = sequence.distribution(logits)
    exact = (logits.double() / 0.7).softmax(-1)
    torch.testing.assert_close(distribution.double(), exact, rtol=1e-5, atol=1e-9)
    assert float(((logits / 0.7).softmax(-1).double() - exact).abs().max()) > 1e-5
