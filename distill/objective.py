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
from specdata.drafts.draft_vocabulary import ReducedOutput, narrow_logits
from specdata.lm_head import LMHead, LogitTransform, find_lm_head, unchanged

Columns = Mapping[str, Tensor]
"""What a loss knows of n positions beside the draft's logits, (n, ...) each."""
ChunkLoss = Callable[[Tensor, Columns], Tensor]
"""(n, V) logits of the draft, and the columns there -> the sum of the positions' losses."""

CHUNK_BYTES = 1 << 30
ENTRY_BYTES = 108
"""On a GPU: for a logit of each model, their distributions, a loss and its gradient. This is twice
what is alive at once (107 with tvd++), because an allocator leaves gaps."""
LOGITS_BYTES, CACHED_LOGITS = 1 << 26, 1 << 19
"""On a CPU: a chunk's logits, enough rows for products at full speed, and how many of them the loss
takes at once: all that it makes of so few stays in the processor's cache."""


def positions_at_once(
    vocabulary: int, device: torch.device, entry_bytes: int = ENTRY_BYTES
) -> tuple[int, int]:
    """Positions of a chunk, and of what a loss takes of it at once, over so many tokens."""
    if device.type == "cpu":
        return max(1, LOGITS_BYTES // (4 * vocabulary)), max(1, CACHED_LOGITS // vocabulary)
    fitting = max(1, CHUNK_BYTES // (entry_bytes * vocabulary))
    return fitting, fitting


class ChunkedLoss(nn.Module):
    """The sum of a loss over positions; its gradient reaches the states and the output embedding.

    A module, because engines prepare weights for a module's forward and backward: the trainer tells
    ZeRO-3 that this one takes those of the output embedding. The head makes logits of states, a
    chunk at a time, and the loss sums over some of them, which must not depend on each other:
    `at_once`, by default as many as `positions_at_once` says, if each logit takes `entry_bytes`
    with all that is made of it. If it `is_narrow`, the loss takes the logits of a reduced
    vocabulary's tokens alone. What it reads is made `once` of the columns of a chunk's positions.
    """

    def __init__(
        self,
        head: LMHead,
        loss: ChunkLoss,
        *,
        once: Callable[[Columns], Columns] = dict,
        at_once: int | None = None,
        entry_bytes: int = ENTRY_BYTES,
        is_narrow: bool = False,
    ) -> None:
        super().__init__()
        self.head, self.loss, self.once, self.is_narrow = head, loss, once, is_narrow
        output, self.width = head.embedding, head.vocabulary
        self.is_matrix = type(output) is nn.Linear
        if isinstance(output, ReducedOutput):
            self.is_matrix = output.is_matrix
            self.width = len(output.vocabulary_ids) if is_narrow else self.width
        self.at_once, self.entry_bytes = at_once, entry_bytes

    def forward(self, states: Tensor, columns: Columns, rows: Columns | None = None) -> Tensor:
        """The sum, of (n, H) states of the draft, or (n, V) logits if `head.embedding` is None.

        State i is read at position i of the `columns`, or at `rows["position"][i]`, increasing, if
        several are read at one. The other `rows`, (n, ...), are further columns of states.
        """
        output = self.head.embedding
        trained = [] if output is None else _trained(output)
        if isinstance(output, ReducedOutput):
            states = output.before(states)
        rows = rows or {"position": torch.arange(len(states), device=states.device)}
        with narrow_logits(self.head.model) if self.is_narrow else nullcontext():
            total: Tensor = _Chunked.apply(states, self, columns, rows, *trained)  # type: ignore[no-untyped-call]
        return total

    def sizes(self, device: torch.device) -> tuple[int, int]:
        """States of a chunk, and of those that the loss takes at once."""
        chunk, piece = positions_at_once(self.width, device, self.entry_bytes)
        return self.at_once or chunk, min(self.at_once or piece, piece)

    def compare(
        self,
        logits: Tensor,
        finish: LogitTransform,
        gradients: Tensor,
        columns: Columns,
        rows: Columns,
    ) -> Tensor:
        """Sum the loss of a chunk's logits, once finished, and set their `gradients`.

        These may lie where the logits do.
        """
        total, position = _zero(logits), rows["position"]
        first, last = (int(position[0]), int(position[-1]) + 1) if len(position) else (0, 0)
        shared = self.once(_part(columns, slice(first, last)))
        for piece in chunks(logits, self.sizes(logits.device)[1]):
            leaf, of_rows = logits[piece].detach().requires_grad_(), _part(rows, piece)
            rows_read = of_rows["position"] - first
            here = {name: each.index_select(0, rows_read) for name, each in shared.items()}
            with torch.enable_grad():
                value = self.loss(finish(leaf), {**here, **of_rows})
            (gradients[piece],) = torch.autograd.grad(value, leaf)
            total += value.detach()
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
        ctx: Any,
        states: Tensor,
        chunked: ChunkedLoss,
        columns: Columns,
        rows: Columns,
        *trained: nn.Parameter,
    ) -> Tensor:
        of = _of_matrix if chunked.is_matrix else _by_autograd
        total, ctx.gradients = of(states, chunked, columns, rows, trained)
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        gradients, ctx.gradients = ctx.gradients, None  # nothing else may hold them
        of_states, *rest = (each.mul_(grad) for each in gradients)
        return of_states, None, None, None, *rest


def _of_matrix(
    states: Tensor,
    chunked: ChunkedLoss,
    columns: Columns,
    rows: Columns,
    trained: Sequence[nn.Parameter],
) -> tuple[Tensor, list[Tensor]]:
    """The sum, and its gradients, which are added up in place: one output matrix, not several."""
    linear: Any = chunked.head.embedding
    total, of_states = _zero(states), torch.zeros_like(states)
    gradients = [torch.zeros_like(each) for each in trained]

    def finish(logits: Tensor) -> Tensor:
        among = linear.among_all(logits) if isinstance(linear, ReducedOutput) else logits
        return chunked.head.logit_transform(among)

    for chunk in chunks(states, chunked.sizes(states.device)[0]):
        part = states[chunk]
        logits = nn.functional.linear(part, linear.weight, linear.bias)
        total += chunked.compare(logits, finish, logits, columns, _part(rows, chunk))
        grad = logits  # which they have become
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
    states: Tensor,
    chunked: ChunkedLoss,
    columns: Columns,
    rows: Columns,
    trained: Sequence[nn.Parameter],
) -> tuple[Tensor, list[Tensor]]:
    """The sum and its gradients, whatever makes the logits."""
    total, of_states = _zero(states), torch.zeros_like(states)
    gradients: list[Tensor] = []
    for chunk in chunks(states, chunked.sizes(states.device)[0]):
        part = states[chunk].detach().requires_grad_()
        with torch.enable_grad():
            logits = _logits(chunked.head, part)
        grad = torch.empty_like(logits)
        total += chunked.compare(logits, unchanged, grad, columns, _part(rows, chunk))
        of_states[chunk], *found = torch.autograd.grad(
            logits, [part, *trained], grad, materialize_grads=True
        )
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
