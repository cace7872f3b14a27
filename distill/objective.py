"""From a batch to its loss: the module that the Trainer, DDP and ZeRO wrap, and its loss in chunks.

The logits of a batch, and what autograd keeps of them, take about `ENTRY_BYTES` for each position
and token of the vocabulary: 8 x 512 positions at V = 152k would be 67 GB. Here a chunk of positions
becomes logits, their loss and its gradients before the next chunk does, and only the gradients with
respect to the states and the output matrix stay, as in Liger's fused losses (Hsu et al. 2024,
arXiv:2410.10989). A loss is a sum over positions, so the value and the gradients are those of all
positions at once, up to the order of the sums.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from transformers import PreTrainedModel

from distill.adapters import base_of
from specdata.draft_models.draft_vocabulary import ReducedOutput, narrow_logits
from specdata.lm_head import LMHead, find_lm_head

Columns = Mapping[str, Tensor]
"""What a loss knows of n positions beside the draft's logits, (n, ...) each."""
ChunkLoss = Callable[[Tensor, Columns], Tensor]
"""(n, V) logits of the draft, and the columns there -> the sum of the positions' losses."""

CHUNK_BYTES = 1 << 30
ENTRY_BYTES = 108
"""For a logit of each model, their distributions, a loss and its gradient. This is twice what is
alive at once, because a CPU's allocator leaves gaps (`keep_freed_memory`; 107 with tvd++)."""


def positions_at_once(vocabulary: int, entry_bytes: int = ENTRY_BYTES) -> int:
    """Positions of a chunk whose logits over so many tokens, and all made of them, fit."""
    return max(1, CHUNK_BYTES // (entry_bytes * vocabulary))


class ChunkedLoss(nn.Module):
    """The sum of a loss over positions; its gradient reaches the states and the output embedding.

    A module, because engines prepare weights for a module's forward and backward: the trainer tells
    ZeRO-3 that this one takes those of the output embedding. The head makes logits of states, and
    the loss sums over a chunk, whose positions must not depend on each other: `at_once` of them
    (default: as many as fit into `CHUNK_BYTES`), if each logit takes `entry_bytes` with all that is
    made of it. If it `is_narrow`, the loss takes the logits of a reduced vocabulary's tokens alone.
    """

    def __init__(
        self,
        head: LMHead,
        loss: ChunkLoss,
        *,
        at_once: int | None = None,
        entry_bytes: int = ENTRY_BYTES,
        is_narrow: bool = False,
    ) -> None:
        super().__init__()
        self.head, self.loss, self.is_narrow = head, loss, is_narrow
        output, width = head.embedding, head.vocabulary
        self.is_matrix = type(output) is nn.Linear
        if is_narrow:
            assert isinstance(output, ReducedOutput)
            self.is_matrix, width = output.is_matrix, len(output.vocabulary_ids)
        self.at_once = at_once or positions_at_once(width, entry_bytes)

    def forward(self, states: Tensor, columns: Columns) -> Tensor:
        """The sum, of (n, H) states of the draft, or (n, V) logits if `head.embedding` is None."""
        output = self.head.embedding
        trained = [] if output is None else _trained(output)
        if isinstance(output, ReducedOutput):
            states = output.before(states)
        with narrow_logits(self.head.model) if self.is_narrow else nullcontext():
            total: Tensor = _Chunked.apply(states, self, columns, *trained)  # type: ignore[no-untyped-call]
        return total


class Objective(nn.Module):
    """A draft, which is trained, and its loss.

    Its forward gives the sum of the loss over the learnt tokens of a batch, which a gradient
    reaches, and their number. The `step` decides what may differ from step to step.
    """

    chunked: ChunkedLoss  # sums the loss of the draft's states

    def __init__(self, draft: PreTrainedModel) -> None:
        super().__init__()
        self.draft = draft.eval()
        self.head = find_lm_head(base_of(draft))
        self.config = draft.config  # engines and reports ask for it

    def forward(self, batch: Mapping[str, Tensor], step: int = 0) -> tuple[Tensor, Tensor]:
        """Sum the loss of a batch with (B, T) `input_ids` and `labels`, and count its tokens."""
        raise NotImplementedError


class _Chunked(torch.autograd.Function):
    """Computes the gradients with the value, and hands them over in the backward pass."""

    @staticmethod
    def forward(
        ctx: Any, states: Tensor, chunked: ChunkedLoss, columns: Columns, *trained: nn.Parameter
    ) -> Tensor:
        of = _of_matrix if chunked.is_matrix else _by_autograd
        total, ctx.gradients = of(states, chunked, columns, trained)
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        gradients, ctx.gradients = ctx.gradients, None  # nothing else may hold them
        of_states, *rest = (each.mul_(grad) for each in gradients)
        return of_states, None, None, *rest


def _of_matrix(
    states: Tensor, chunked: ChunkedLoss, columns: Columns, trained: Sequence[nn.Parameter]
) -> tuple[Tensor, list[Tensor]]:
    """The sum, and its gradients, which are added up in place: one output matrix, not several."""
    linear: Any = chunked.head.embedding
    total, of_states = _zero(states), torch.zeros_like(states)
    gradients = [torch.zeros_like(each) for each in trained]
    for chunk in chunks(states, chunked.at_once):
        part = states[chunk]
        logits = nn.functional.linear(part, linear.weight, linear.bias).requires_grad_()
        with torch.enable_grad():
            value = chunked.loss(chunked.head.logit_transform(logits), _part(columns, chunk))
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
    states: Tensor, chunked: ChunkedLoss, columns: Columns, trained: Sequence[nn.Parameter]
) -> tuple[Tensor, list[Tensor]]:
    """The sum and its gradients, whatever makes the logits."""
    total, of_states = _zero(states), torch.zeros_like(states)
    gradients: list[Tensor] = []
    for chunk in chunks(states, chunked.at_once):
        part = states[chunk].detach().requires_grad_()
        with torch.enable_grad():
            value = chunked.loss(_logits(chunked.head, part), _part(columns, chunk))
        of_states[chunk], *found = torch.autograd.grad(
            value, [part, *trained], materialize_grads=True
        )
        total += value.detach()
        if not gradients:
            gradients = found
        else:
            torch._foreach_add_(gradients, found)
    return total, [of_states, *gradients]


def _part(columns: Columns, chunk: slice) -> Columns:
    return {name: rows[chunk] for name, rows in columns.items()}


def _logits(head: LMHead, states: Tensor) -> Tensor:
    """The logits that `head.logits` gives, by the embedding's own forward.

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
    """The trained parameters; of a matrix alone, as autograd knows what is before it."""
    parameters = module.parameters(recurse=not isinstance(module, nn.Linear | ReducedOutput))
    return [parameter for parameter in parameters if parameter.requires_grad]
