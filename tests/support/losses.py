"""What several files of tests use of `test_losses`."""

import torch
from torch import Tensor

from distill.losses import Loss


def random_logits(*shape: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return 2 * torch.randn(*shape, generator=generator, dtype=torch.float64)


def gradient(loss: Loss, draft: Tensor, target: Tensor) -> Tensor:
    draft = draft.clone().requires_grad_()
    (result,) = torch.autograd.grad(loss(draft, target, torch.ones(draft.shape[:-1])), draft)
    return result
