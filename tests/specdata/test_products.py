"""Products by another library."""

import pytest
import torch
from torch import Tensor, nn

from specdata.products import by_onednn


def both(linear: nn.Linear, x: Tensor) -> list[Tensor]:
    """A layer's output and gradients."""
    linear.zero_grad()
    x = x.clone().requires_grad_()
    out = linear(x)
    out.square().sum().backward()
    return [out.detach(), x.grad, *(each.grad.clone() for each in linear.parameters())]


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(("size", "rows"), [(8, 24), (256, 768), (512, 1)])
def test_products_and_gradients_are_the_same_to_rounding_and_after_the_block_bit_for_bit(
    size: int, rows: int, bias: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX512")
    torch.manual_seed(0)
    linear, x = nn.Linear(size, 2 * size, bias=bias), torch.randn(1, rows, size)
    before = both(linear, x)
    with by_onednn(), torch.profiler.profile() as profile:
        inside = both(linear, x)
        with by_onednn():
            pass
        assert all(map(torch.equal, inside, both(linear, x)))
    assert all(
        torch.allclose(a, b, rtol=1e-4, atol=1e-4) for a, b in zip(inside, before, strict=True)
    )
    used = {event.name for event in profile.events()}
    assert ("mkldnn::_linear_pointwise" in used) == (size > 8)
    assert all(map(torch.equal, both(linear, x), before))


def test_scaled_and_broadcast_sums_are_left_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX512")
    a, b = torch.ones(256, 256), torch.ones(256, 256)
    with by_onednn():
        assert torch.equal(torch.addmm(a, a, b, beta=2, alpha=3), torch.full((256, 256), 770.0))
        assert torch.equal(torch.addmm(a[:, :1], a, b), torch.full((256, 256), 257.0))
        assert torch.equal(torch.mm(a.bfloat16(), b.bfloat16()), 256 * a.bfloat16())
        strided = torch.arange(512.0)[::2]
        assert torch.equal(torch.addmm(strided, a, b), strided + 256 * a)
        with pytest.raises(RuntimeError, match="must be a matrix"):
            torch.mm(a[None], b)
