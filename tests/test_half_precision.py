"""Models in bfloat16 and float16: distributions are float32, and only rounding moves them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from eval.decoder import DecodeConfig, SpeculativeDecoder, make_drafters
from eval.drafts import DraftTree
from eval.runtime.model import CachedModel
from eval.verifiers import Verifier
from eval.verifiers.rule import Drawn
from specdata.probability import SamplingConfig, probabilities
from tests.families import tiny
from tests.tiny import END

HALF = [torch.bfloat16, torch.float16]
CASES = {
    "chain": DecodeConfig(length=3),
    "block": DecodeConfig(verifier="block", length=3),
    "tree": DecodeConfig(verifier="traversal", drafter="tree", widths=(2, 2, 1)),
    "tree as a batch": DecodeConfig(
        verifier="traversal", drafter="tree", widths=(2, 2, 1), tree_attention=False
    ),
    "paths": DecodeConfig(verifier="kseq", drafter="paths", paths=2, length=3),
}
PROMPTS = [torch.tensor([2, 3, 7]), torch.tensor([5])]


class Recording:
    """A verifier that records what it is given and does what another does."""

    def __init__(self, inner: Verifier, given: list[tuple[DraftTree, torch.Tensor]]) -> None:
        self.inner, self.given = inner, given

    def draw(
        self, draft: DraftTree, distributions: torch.Tensor, generator: torch.Generator
    ) -> Drawn:
        self.given.append((draft, distributions))
        return replace(self.inner.draw(draft, distributions, generator), verifier=self)  # type: ignore[arg-type]

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


def recording_decoder(
    target: Any, draft: Any, config: DecodeConfig, engine: Any = "eager"
) -> tuple[SpeculativeDecoder, list[tuple[DraftTree, torch.Tensor]]]:
    given: list[tuple[DraftTree, torch.Tensor]] = []
    models = [CachedModel(model, 40, engine=engine) for model in (target, draft)]
    decoder = SpeculativeDecoder(
        models[0],
        config.sampling,
        make_drafters(config, models[1:], None, frozenset({END})),
        Recording(config.make_verifier(), given),  # type: ignore[arg-type]
        frozenset({END}),
        drafts=models[1:],
        tree_attention=config.tree_attention,
    )
    return decoder, given


@pytest.mark.parametrize(
    ("family", "name", "dtype"),
    [
        *(("llama", name, torch.bfloat16) for name in CASES),
        ("llama", "tree", torch.float16),
        ("opt", "chain", torch.float16),
        ("gemma", "tree as a batch", torch.bfloat16),
    ],
)
def test_verifiers_get_float32_distributions_without_nan(
    family: str, name: str, dtype: torch.dtype
) -> None:
    target, draft = tiny(family, 2, dtype=dtype), tiny(family, 3, dtype=dtype)
    decoder, given = recording_decoder(target, draft, CASES[name])
    for seed, prompt in enumerate(PROMPTS):
        generator = torch.Generator().manual_seed(seed)
        out = decoder.generate(prompt, max_new_tokens=16, generator=generator)
        assert 1 <= len(out.tokens) <= 16
    batch = decoder.generate_batch(
        PROMPTS,
        max_new_tokens=16,
        generators=[torch.Generator().manual_seed(seed) for seed in range(2)],
    )
    assert all(1 <= len(out.tokens) <= 16 for out in batch)
    assert any(len(draft) for draft, _ in given)
    for drafted, distributions in given:
        for distribution in (
            (distributions, drafted.distributions) if len(drafted) else (distributions,)
        ):
            assert distribution.dtype == torch.float32
            torch.testing.assert_close(
                distribution.sum(-1), torch.ones(distribution.shape[:-1]), rtol=0, atol=1e-5
            )


@pytest.mark.parametrize("dtype", HALF, ids=str)
@pytest.mark.parametrize("engine", ["eager", "captured"])
def test_distributions_are_the_softmax_in_float32_of_the_logits_as_run(
    dtype: torch.dtype, engine: Any
) -> None:
    """A softmax in half precision keeps eight bits; these agree to float32's."""
    model = tiny("llama", 2, dtype=dtype)
    cached = CachedModel(model, 40, engine=engine)
    sequence = cached.sequence(0, SamplingConfig(temperature=0.7))
    with torch.inference_mode():
        cached.run(sequence.append([2, 3], 1))
        logits = cached.run(sequence.append([4, 5, 6], 3))
    assert logits.dtype == dtype
    distribution = sequence.distribution(logits)
    exact = (logits.double() / 0.7).softmax(-1)
    torch.testing.assert_close(distribution.double(), exact, rtol=1e-5, atol=1e-9)
    assert float(((logits / 0.7).softmax(-1).double() - exact).abs().max()) > 1e-5


@pytest.mark.parametrize("dtype", HALF, ids=str)
@pytest.mark.parametrize("family", ["llama", "gpt_neox", "qwen3"])
def test_distributions_move_by_no_more_than_the_logits_do(family: str, dtype: torch.dtype) -> None:
    """Softmax: if no logit moves by more than d, the total variation is at most tanh(d / 2).

    Distributions of verification against those of plain, one-token decoding of the same sequence.
    """
    model = tiny(family, 2, dtype=dtype)
    cached = CachedModel(model, 40)
    tokens = [9, 4, 22, 31, 6, 17]
    alone, together = (cached.sequence(row, SamplingConfig()) for row in range(2))
    with torch.inference_mode():
        cached.run(alone.append([2, 3], 1))
        cached.run(together.append([2, 3], 1))
        single = torch.cat([cached.run(alone.append([token], 1)) for token in tokens]).float()
        block = cached.run(together.append(tokens, len(tokens))).float()
    moved = (single - block).abs().amax(-1).double()
    plain, verified = (
        probabilities(logits, SamplingConfig()).double() for logits in (single, block)
    )
    total_variation = (plain - verified).abs().sum(-1) / 2
    assert bool((total_variation <= (moved / 2).tanh() + 1e-6).all())
    # Rounding, not another context: a mask or position that were wrong would move logits by far.
    scale = single.abs().max()
    assert float(moved.max()) < 32 * torch.finfo(dtype).eps * float(scale)


@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_masks_hide_with_the_smallest_number_of_the_models_type(dtype: torch.dtype) -> None:
    """-inf would make nan of a row that sees nothing; float32's smallest is -inf in float16."""
    model = tiny("llama", 2, dtype=dtype)
    masks: list[torch.Tensor] = []
    hook = model.model.layers[0].self_attn.register_forward_pre_hook(
        lambda _module, _args, kwargs: masks.append(kwargs["attention_mask"]), with_kwargs=True
    )
    cached = CachedModel(model, 40)
    sequence = cached.sequence(0, SamplingConfig())
    with torch.inference_mode():
        cached.run(sequence.append([2, 3], 1))
        rows = cached.run(sequence.append_tree([4, 5, 6], [0, 0, 1], [7]))
    hook.remove()
    assert masks[-1].dtype == dtype
    assert set(masks[-1].unique().tolist()) == {0.0, torch.finfo(dtype).min}
    assert bool(rows.isfinite().all())


@pytest.mark.parametrize("dtype", HALF, ids=str)
@pytest.mark.parametrize("name", ["chain", "tree"])
def test_tokens_in_half_precision_are_drawn_from_their_own_distributions(
    name: str, dtype: torch.dtype
) -> None:
    """Each emitted token has a probability above 0 in the distribution that the verifier got."""
    target, draft = tiny("llama", 2, dtype=dtype), tiny("llama", 3, dtype=dtype)
    config = CASES[name].replace(top_k=3)
    decoder, given = recording_decoder(target, draft, config)
    for seed in range(4):
        given.clear()
        out = decoder.generate(
            PROMPTS[0], max_new_tokens=12, generator=torch.Generator().manual_seed(seed)
        )
        tokens = out.tokens.tolist()
        for (drafted, distributions), record in zip(given, out.rounds, strict=False):
            node = 0
            for token in tokens[: record.emitted]:
                assert float(distributions[node, token]) > 0
                children = [
                    child + 1
                    for child, parent in enumerate(drafted.parents.tolist())
                    if parent == node and drafted.token_list[child] == token
                ]
                node = children[0] if children else node
            tokens = tokens[record.emitted :]
