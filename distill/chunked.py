"""A loss over many positions without their logits: a chunk at a time, gradients in the forward.

The logits of a batch, and what autograd keeps of them, take about `ENTRY_BYTES` for each position
and token of the vocabulary: 8 x 512 positions at V = 152k would be 31 GB. Here a chunk of positions
becomes logits, their loss and its gradients before the next chunk does, and only the gradients with
respect to the states and the output matrix stay, as in Liger's fused losses (Hsu et al. 2024,
arXiv:2410.10989). A loss is a sum over positions, so the value and the gradients are those of all
positions at once, up to the order of the sums.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from specdata.draft_models.draft_vocabulary import ReducedOutput, narrow_logits
from specdata.lm_head import LMHead

T = TypeVar("T")

ChunkLoss = Callable[[Tensor, slice | Tensor], Tensor]
"""(n, V) logits of the draft, and which of all positions they are -> the sum of their losses."""

CHUNK_BYTES = 1 << 30
ENTRY_BYTES = 52  # for a logit of each model, their distributions, a loss and its gradient


def positions_at_once(vocabulary: int) -> int:
    """Positions of a chunk whose logits over so many tokens, and all made of them, fit."""
    return max(1, CHUNK_BYTES // (ENTRY_BYTES * vocabulary))


def chunked_loss(
    states: Tensor,
    head: LMHead,
    loss: ChunkLoss,
    *,
    at_once: int | None = None,
    is_narrow: bool = False,
) -> Tensor:
    """Return the sum of a loss over positions; its gradient reaches the states and the output.

    Under ZeRO-3 and DDP it must be called inside the forward of the engine's module.

    Args:
        states: (n, H) of the draft, or (n, V) logits if `head.embedding` is None.
        head: makes logits of them; called, or if it is a plain linear layer read.
        loss: gives the sum over a chunk; positions must not depend on each other.
        at_once: positions of a chunk (default: as many as fit into `CHUNK_BYTES`).
        is_narrow: the loss takes the logits of the tokens of a reduced vocabulary alone, and
            `head.embedding` is its `draft_models.draft_vocabulary.ReducedOutput`.
    """
    linear = head.embedding
    if is_narrow:
        assert isinstance(linear, ReducedOutput)
        # Not the rows of the matrix: under ZeRO-3 it has none here.
        at_once = at_once or positions_at_once(len(linear.vocabulary_ids))
        if not linear.is_matrix:
            with narrow_logits(head.model):
                return chunked_loss(states, head, loss, at_once=at_once)
    elif type(linear) is not nn.Linear:
        linear = None
    size = at_once or positions_at_once(head.vocabulary)

    def summed(given: Tensor) -> Tensor:
        # Not before: ZeRO-3 has the whole parameters only here.
        trained = [] if head.embedding is None else _trained(head.embedding)
        if isinstance(head.embedding, ReducedOutput):
            given = head.embedding.before(given)
        total: Tensor = _Chunked.apply(given, head, linear, loss, size, *trained)  # type: ignore[no-untyped-call]
        return total

    if head.embedding is None:
        return summed(states)
    # ZeRO-3 has an output matrix at hand in the embedding's forward and backward alone.
    return inside_forward(head.embedding, head.embedding, summed, states)


def inside_forward(
    model: nn.Module, inner: nn.Module, work: Callable[..., T], *inputs: Tensor
) -> T:
    """Do some work as the forward of `inner`, so that an engine around it prepares for it.

    DDP and ZeRO-3 act in the forward of what they wrap (`model`, which may be `inner` itself), and
    the loss calls parts of the model alone. TRL's trainers do the same. The work is done once, with
    the inputs as the engine passes them on.
    """
    own = vars(inner).get("forward")  # an engine may have given it one

    def forward(*given: Tensor) -> T:
        restore()  # the work may call the model
        return work(*given)

    def restore() -> None:
        vars(inner).pop("forward", None)
        if own is not None:
            vars(inner)["forward"] = own

    vars(inner)["forward"] = forward
    try:
        result: T = model(*inputs)
    finally:
        restore()
    return result


class _Chunked(torch.autograd.Function):
    """Computes the gradients with the value, and hands them over in the backward pass."""

    @staticmethod
    def forward(
        ctx: Any,
        states: Tensor,
        head: LMHead,
        linear: nn.Linear | ReducedOutput | None,
        loss: ChunkLoss,
        size: int,
        *trained: nn.Parameter,
    ) -> Tensor:
        if linear is not None:
            total, ctx.gradients = _of_linear(states, head, linear, loss, size)
        else:
            total, ctx.gradients = _by_autograd(states, head, trained, loss, size)
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        gradients, ctx.gradients = ctx.gradients, None  # nothing else may hold them
        of_states, *rest = (each.mul_(grad) for each in gradients)
        return of_states, None, None, None, None, *rest


def _of_linear(
    states: Tensor, head: LMHead, linear: nn.Linear | ReducedOutput, loss: ChunkLoss, size: int
) -> tuple[Tensor, list[Tensor]]:
    """The sum, and its gradients, which are added up in place: one output matrix, not several."""
    total, of_states, trained = _zero(states), torch.zeros_like(states), _trained(linear)
    gradients = [torch.zeros_like(each) for each in trained]
    for chunk in chunks(states, size):
        part = states[chunk]
        logits = nn.functional.linear(part, linear.weight, linear.bias).requires_grad_()
        with torch.enable_grad():
            value = loss(head.logit_transform(logits), chunk)
        (grad,) = torch.autograd.grad(value, logits)
        total += value.detach()
        of_states[chunk] = grad @ linear.weight.to(grad.dtype)
        for parameter, gradient in zip(trained, gradients, strict=True):
            if parameter is not linear.weight:
                gradient += grad.to(gradient.dtype).sum(dim=0)
            elif grad.dtype == gradient.dtype:
                gradient.addmm_(grad.T, part.to(grad.dtype))
            else:  # as under autocast: the product in the precision of the logits
                gradient += grad.T @ part.to(grad.dtype)
    return total, [of_states, *gradients]


def _by_autograd(
    states: Tensor, head: LMHead, trained: Sequence[nn.Parameter], loss: ChunkLoss, size: int
) -> tuple[Tensor, list[Tensor]]:
    """The same, whatever makes the logits."""
    total, of_states = _zero(states), torch.zeros_like(states)
    gradients: list[Tensor] = []
    for chunk in chunks(states, size):
        part = states[chunk].detach().requires_grad_()
        with torch.enable_grad():
            value = loss(_logits(head, part), chunk)
        of_states[chunk], *found = torch.autograd.grad(
            value, [part, *trained], materialize_grads=True
        )
        total += value.detach()
        if not gradients:
            gradients = found
        else:
            torch._foreach_add_(gradients, found)
    return total, [of_states, *gradients]


def _logits(head: LMHead, states: Tensor) -> Tensor:
    """As `head.logits`, inside the embedding's own forward.

    Its hooks are passed by: those of ZeRO-3 exchange weights between processes, and each
    process has its own number of chunks.
    """
    output = head.embedding
    if output is None:
        return states
    if isinstance(output, ReducedOutput):  # what is before the matrix was called once for all
        return head.logit_transform(output.among_all(output.scores(states)))
    return head.logit_transform(output.forward(states))


def chunks(states: Tensor, size: int) -> Iterator[slice]:
    """Slices of all positions; one, which is empty, if there are none."""
    for begin in range(0, max(1, len(states)), size):
        yield slice(begin, begin + size)


def _zero(states: Tensor) -> Tensor:
    return states.new_zeros((), dtype=torch.promote_types(states.dtype, torch.float32))


def _trained(module: nn.Module) -> list[nn.Parameter]:
    """Of a matrix alone, what is before it has its gradients by autograd."""
    parameters = module.parameters(recurse=not isinstance(module, nn.Linear | ReducedOutput))
    return [parameter for parameter in parameters if parameter.requires_grad]
