"""Models in bfloat16 and float16: distributions are float32, and only rounding moves them."""

from typing import Any

import pytest
import torch

from eval.decoder import DecodeConfig, SpeculativeDecoder
from eval.drafts import DraftTree
from eval.verifiers.rule import Drawn, Verifier
from tests.support.families import tiny

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
