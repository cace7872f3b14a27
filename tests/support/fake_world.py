"""Three ranks of a world in which no other process is: torch's fake backend, made to answer.

Ranks 0, 1 and the last of N are processes; the fake backend of each has it believe in the others,
and sends nothing. Every collective is held against what the three ask at the same place, operation,
types and shapes, and then answered from what they said: reduced over the three through gloo; where
all are gathered, those who are not there say what the last rank says. So one that waits for what
another does not call is found at once, in a world of any size.
"""

import os
import pickle
import signal
import traceback
from collections.abc import Sequence
from datetime import timedelta
from importlib import import_module
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import _create_work_from_future
from torch.testing._internal.distributed import fake_pg
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from specdata.processes import process_count, rank
from tests.support.two_processes import Work, start_group

GATHERED = ("allgather_", "_allgather_base_", "allgather_into_tensor_coalesced_")
SCATTERED = ("_reduce_scatter_base_", "reduce_scatter_tensor_coalesced_")
REDUCED = ("allreduce_", "allreduce_coalesced_", "reduce_")


def in_fake_world(
    server: ForkServerContext,
    world: int,
    work: Work,
    *arguments: Any,
    interrupted: Path | None = None,
    patience: int = 90,
    **environment: str,
) -> str:
    """Have three ranks do the same work; what went wrong, in the first of them where it did.

    The last rank is sent SIGTERM once there is a checkpoint in the folder `interrupted`. Within
    `patience` seconds all must have come to a collective that one of them calls.
    """
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    waits = timedelta(seconds=patience)
    given = (as_one_of_three, store.port, waits, interrupted, work, *arguments)
    running = start_group(server, world, *given, ranks=(0, 1, world - 1), **environment)
    while running:
        for process in running:
            process.join(timeout=0.1)
        for ended in [each for each in running if each.exitcode is not None]:
            running.remove(ended)
            if ended.exitcode:
                for other in running:
                    other.kill()
                said = store.check(["wrong"])
                return store.get("wrong").decode() if said else f"status {ended.exitcode}"
    return ""


def as_one_of_three(
    port: int, waits: timedelta, interrupted: Path | None, work: Work, *arguments: Any
) -> None:
    store = dist.TCPStore("127.0.0.1", port, timeout=waits)
    # DeepSpeed's operator for inference looks for every process of the machine.
    import_module("deepspeed.comm.torch").build_shm_op = lambda: None  # type: ignore[attr-defined]
    try:
        with Collectives(store, interrupted) as collectives:
            work(*arguments)
            collectives.ask("nothing more")
    except BaseException:  # noqa: BLE001 - whatever it is, it ends the process
        store.compare_set("wrong", "", traceback.format_exc())
        os._exit(1)


class Collectives(TorchDispatchMode):
    """What this rank asks of the others, held against what they ask of it, and the answers."""

    def __init__(self, store: dist.Store, interrupted: Path | None) -> None:
        super().__init__()
        assert fake_pg  # imported, it is a backend
        self.store, self.interrupted, self.asked = store, interrupted, 0
        self.world = process_count()
        self.there = (0, 1, self.world - 1)
        joined = dist.PrefixStore("fake", store)
        dist.init_process_group("fake", store=joined, rank=rank(), world_size=self.world)
        joined, place = dist.PrefixStore("there", store), self.there.index(rank())
        gloo = dist.ProcessGroupGloo(joined, place, 3, store.timeout)
        self.group = dist.ProcessGroup(joined, place, 3)
        self.group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, gloo)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        outcome = func(*args, **(kwargs or {}))
        if func.namespace == "c10d":
            with torch.no_grad():
                self.answer(func.overloadpacket.__name__, args)
        if func is torch.ops.c10d.allreduce_.default:  # DDP asks the work for what became of it
            future: Any = torch.futures.Future()
            future.set_result(outcome[0])
            outcome = outcome[0], _create_work_from_future(future).boxed()
        return outcome

    def ask(self, call: str, said: Sequence[Tensor] = ()) -> dict[int, Sequence[Tensor]]:
        """What each of the three says at this place, where all must call the same."""
        self.store.set(f"{self.asked}/{rank()}", pickle.dumps((call, said)))
        heard = {}
        for other in self.there:
            try:
                said_there = self.store.get(f"{self.asked}/{other}")
            except dist.DistStoreError:
                said_there = pickle.dumps(("nothing", ()))
            theirs, heard[other] = pickle.loads(said_there)  # noqa: S301 - our own
            if theirs != call:
                raise RuntimeError(
                    f"collective {self.asked}: rank {rank()} calls {call}, rank {other} {theirs}"
                )
        self.asked += 1
        is_last, checkpoints = rank() == self.there[-1], "checkpoint-*/complete.json"
        if is_last and self.interrupted and [*self.interrupted.glob(checkpoints)]:
            self.interrupted = None
            os.kill(os.getpid(), signal.SIGTERM)
        return heard

    def answer(self, name: str, args: tuple[Any, ...]) -> None:
        """Fill a collective's results with what the three have said."""
        results = tree_leaves(args[0])
        said = tree_leaves(args[1]) if name in GATHERED + SCATTERED else results
        shapes = [f"{str(each.dtype).removeprefix('torch.')}{list(each.shape)}" for each in said]
        roots = [str(each) for each in args if type(each) is int]
        is_heard = name == "broadcast_" or name in GATHERED
        heard = self.ask(f"{name}({', '.join(shapes + roots)})", said if is_heard else ())
        if name == "broadcast_":
            for mine, theirs in zip(results, heard[args[2]], strict=True):
                mine.copy_(theirs)
        elif name in GATHERED:
            parts = [each.view(-1).chunk(self.world) for each in results]
            for number, slots in enumerate([results] if name == "allgather_" else parts):
                for other, slot in enumerate(slots):
                    theirs = heard.get(other, heard[self.there[-1]])
                    slot.copy_(theirs[number].view_as(slot))
        elif name in SCATTERED:
            for mine, each in zip(results, said, strict=True):
                mine.copy_(self.reduced(each.clone(), args[3]).chunk(self.world)[rank()])
        elif name in REDUCED:
            for each in results:
                self.reduced(each, args[2])
        else:
            assert name == "barrier", f"what does {name} answer?"

    def reduced(self, tensor: Tensor, operation: Any) -> Tensor:
        """The tensor, reduced over the three."""
        given = ([tensor], self.group.boxed(), operation, None, False)
        dist.Work.unbox(torch.ops.c10d.allreduce_(*given)[1]).wait()
        return tensor
