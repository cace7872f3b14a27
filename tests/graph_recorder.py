"""A recorder of graphs for a CPU: tensor operations, repeated on the tensors they were recorded on.

What a CUDA graph does, as far as results go: addresses and everything that Python decided stay as
they were when it was recorded, and outputs stand in the same place each time. What stops a capture
on a GPU is refused here, too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from eval.runtime.cuda_graphs import Outputs

# Reads of the device, and tensors made of Python's numbers, which a capture does not allow.
REFUSED = ("_local_scalar_dense", "nonzero", "lift_fresh", "is_nonzero", "unique")

Operation = tuple[Any, tuple[Any, ...], dict[str, Any], list[tuple[int, Tensor]]]
"""A function, what it was given, and its results by number, but for those that are part of that."""


class _Operations(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.recorded: list[Operation] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        name = func._schema.name.removeprefix("aten::")
        if name.startswith(REFUSED):
            raise RuntimeError(f"operation not permitted when stream is capturing: {name}")
        out = func(*args, **(kwargs or {}))
        given = {t.untyped_storage().data_ptr() for t in tree_leaves((args, kwargs)) if _is(t)}
        results = [
            (number, leaf)
            for number, leaf in enumerate(tree_leaves(out))
            if _is(leaf) and leaf.untyped_storage().data_ptr() not in given
        ]
        self.recorded.append((func, args, kwargs or {}, results))
        return out


class OperationRecorder:
    """Stands in for `CudaRecorder`.

    Attributes:
        recorded: graphs that were made.
        replayed: times that one was repeated.
    """

    def __init__(self) -> None:
        self.recorded = 0
        self.replayed = 0

    def record(self, run: Callable[[], Outputs]) -> Callable[[], Outputs]:
        """See `Recorder.record`."""
        run()
        with _Operations() as operations:
            outputs = run()
        self.recorded += 1

        def replay() -> Outputs:
            self.replayed += 1
            with torch.inference_mode(False), torch.no_grad():
                for func, args, kwargs, results in operations.recorded:
                    again = func(*args, **kwargs)
                    for number, old in results:
                        old.copy_(again if isinstance(again, Tensor) else again[number])
            return outputs

        return replay


def _is(leaf: Any) -> bool:
    return isinstance(leaf, Tensor)
