"""Fast rollouts and labels change none of them, and progress moves within a shard."""

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, nn

from specdata import prepack
from specdata.prepack import packed, prepacked
from specdata.probability import SamplingConfig, inverse_cdf, nucleus, probabilities
from specdata.rollouts import backend
from specdata.rollouts.backend import sample_batch
from tests.support.tiny import tiny_llama

PLAIN = SamplingConfig()


def sorted_nucleus(probs: Tensor, top_p: float) -> Tensor:
    """`nucleus` by its definition: the whole vocabulary sorted."""
    ordered, index = probs.sort(dim=-1, descending=True, stable=True)
    outside = ordered.cumsum(dim=-1) - ordered >= top_p
    probs = probs.masked_fill(torch.zeros_like(outside).scatter_(-1, index, outside), 0.0)
    return probs / probs.sum(dim=-1, keepdim=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("size", [3, 40, 9000])
def test_the_nucleus_is_bit_for_bit_that_of_a_sorted_vocabulary(
    dtype: torch.dtype, size: int
) -> None:
    generator = torch.Generator().manual_seed(0)
    for scale in (0.0, 0.5, 3.0, 12.0):
        logits = scale * torch.randn(5, size, generator=generator, dtype=dtype)
        for tied in (logits, (2 * logits).round() / 2):
            chances = tied.softmax(dim=-1)
            for top_p in (0.05, 0.5, 0.9, 0.999, 1 - 1e-6, 1.0):
                assert torch.equal(nucleus(chances, top_p), sorted_nucleus(chances, top_p))
        part = chances.topk(size // 2).values  # rows that miss mass, as after top-k
        for mass in (0.9000001, 0.9001, 0.95):
            kept = mass * part / part.sum(dim=-1, keepdim=True)
            assert torch.equal(nucleus(kept, 0.9), sorted_nucleus(kept, 0.9))


def reference(
    model: nn.Module, prompt: Sequence[int], uniforms: Tensor, sampling: SamplingConfig, end: int
) -> list[int]:
    """A completion by the definition: no cache, no batch, no padding."""
    ids = list(prompt)
    for uniform in uniforms:
        with torch.inference_mode():
            logits = model(input_ids=torch.tensor([ids]), use_cache=False).logits[:, -1]
        ids.append(int(inverse_cdf(probabilities(logits, sampling), uniform.unsqueeze(0))))
        if ids[-1] == end:
            break
    return ids[len(prompt) :]


@pytest.mark.parametrize("shared", [0, 12], ids=["unlike", "one beginning"])
@pytest.mark.parametrize("at_once", [1, 40, 1024])
def test_tokens_are_the_reference_samplers_however_prompts_are_read(
    shared: int, at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backend, "PROMPT_TOKENS", {"cpu": at_once})
    model = tiny_llama(4, vocab=40, layers=2)
    same = [3 + n % 7 for n in range(shared)]
    asked = [[*same, *((2 + 5 * n + i) % 40 for i in range(1 + n % 6))] for n in range(10)]
    generator = torch.Generator().manual_seed(1)
    uniforms = torch.rand(10, 12, generator=generator, dtype=torch.float64)
    warped = (SamplingConfig(temperature=each, top_p=0.8) for each in (0.0, 0.5))
    for sampling in (PLAIN, *warped):
        rows = sample_batch(model, asked, uniforms, sampling, ends=[7])
        expected = [
            reference(model, prompt, row, sampling, 7)
            for prompt, row in zip(asked, uniforms, strict=True)
        ]
        assert rows == expected


HALF, FULL = "quantized::linear_dynamic_fp16", "mkldnn::_linear_pointwise"


@pytest.mark.parametrize(
    ("dtype", "factor", "library"),
    [
        (torch.float32, 1, HALF),
        (torch.float32, 2**-16 + 2**-19, HALF),
        (torch.float32, 2**17, FULL),  # beyond half precision
        (torch.float32, 2.0**66, FULL),  # its squares beyond float32
        (torch.float32, 2.0**-80, FULL),  # and below it
        (torch.float32, 1 + 2**-11, FULL),  # between its numbers
        (torch.bfloat16, 1, FULL),
    ],
    ids=str,
)
def test_packed_layers_give_what_plain_ones_give_and_are_put_back(
    dtype: torch.dtype, factor: float, library: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of small integers every sum is exact in float32, so in any order the same.

    In bfloat16 only where the processor multiplies it; elsewhere nothing changes. Half precision is
    read where it holds the weights, with AVX-512 and of a wide matrix for few rows.
    """
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX512")
    monkeypatch.setattr(prepack, "WIDE", 300)
    torch.manual_seed(0)
    biases = nn.Linear(300, 200), nn.Linear(300, 600)
    model = nn.ModuleList([*biases, nn.Linear(300, 500, bias=False)]).to(dtype)
    for weight in model.parameters():
        weight.data = torch.randint(-4, 5, weight.shape).to(dtype) * factor
    biases[0].bias.data = biases[1].bias[::3].detach()  # strided, which oneDNN does not ask about
    x = torch.randint(-4, 5, (7, 300)).to(dtype)
    supported = dtype == torch.float32 or torch.ops.mkldnn._is_mkldnn_bf16_supported()
    if torch.backends.quantized.engine not in ("x86", "fbgemm"):
        library = FULL  # on other processors
    with torch.inference_mode():
        plain = [layer(x) for layer in model]
        if supported:
            copies = [packed(layer.weight, layer.bias, few_rows=True) for layer in model]
            assert [operator.name() for operator, _ in copies] == [library] * 3
            assert all(map(torch.equal, (f(x, *behind) for f, behind in copies), plain))
        with prepacked(model):
            forwards = [layer.__dict__.get("forward") for layer in model]
            used = [each.args[1][0].name() for each in forwards if each]
            assert used == [library, FULL, FULL] * supported  # two of them are wide
            assert all(map(torch.equal, (layer(x) for layer in model), plain))
        assert not any("forward" in layer.__dict__ for layer in model)
        assert all(map(torch.equal, (layer(x) for layer in model), plain))
