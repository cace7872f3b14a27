"""Products of float32 matrices by oneDNN, where torch's own choice of a library is slow.

torch has MKL multiply them. On an AMD EPYC with AVX-512 oneDNN, which is in torch as well, is much
faster, for many rows and for few (docs/evidence/growth.md has what that makes of a step).
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from specdata.prepack import has_avx512, multiplies

# Being called from Python takes longer than it saves with fewer multiplications than this, unless
# there are so many weights that they do not stay in a cache.
SMALLEST_PRODUCT = 1 << 21
LARGE_MATRIX = 1 << 18


@contextmanager
def by_onednn() -> Iterator[None]:
    """Multiply float32 matrices by oneDNN in the block, for gradients, too, in all threads.

    Results are equal up to rounding. Without AVX-512 nothing changes. No other thread may be
    multiplying where the block begins or ends: kernels are exchanged, which torch does not guard.
    """
    if not (has_avx512() and multiplies(torch.device("cpu"), torch.float32)):
        yield
        return
    library: Any = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # that kernels are replaced
        library.impl("mm", _mm, "CPU")
        library.impl("addmm", _addmm, "CPU")
    try:
        yield
    finally:
        library._destroy()


def _mm(a: Tensor, b: Tensor) -> Tensor:
    """(n, k) and (k, m) -> (n, m)."""
    if _is_large(a, b):
        return _product(a, b, None)
    product: Tensor = torch.ops.aten.mm.out(a, b, out=a.new_empty(a.shape[0], b.shape[1]))
    return product


def _addmm(bias: Tensor, a: Tensor, b: Tensor, *, beta: Any = 1, alpha: Any = 1) -> Tensor:
    """(n, k) and (k, m) -> (n, m), and to each row (m,) a bias."""
    alike = bias.shape == b.shape[1:] and bias.dtype == b.dtype
    if _is_large(a, b) and alike and beta == alpha == 1:
        return _product(a, b, bias.contiguous())  # as in `packed`
    out = a.new_empty(a.shape[0], b.shape[1])
    product: Tensor = torch.ops.aten.addmm.out(bias, a, b, beta=beta, alpha=alpha, out=out)
    return product


def _is_large(a: Tensor, b: Tensor) -> bool:
    # What does not fit is torch's to refuse.
    fits = a.dim() == b.dim() == 2 and a.shape[1] == b.shape[0] and a.dtype == b.dtype
    if not fits or a.dtype != torch.float32 or not a.numel():
        return False
    return a.numel() * b.shape[1] >= SMALLEST_PRODUCT or b.numel() >= LARGE_MATRIX


def _product(a: Tensor, b: Tensor, bias: Tensor | None) -> Tensor:
    # As a linear layer, whose weight may lie by rows or by columns.
    product: Tensor = torch.ops.mkldnn._linear_pointwise(a, b.t(), bias, "none", [], "")
    return product
