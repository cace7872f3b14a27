"""No rank waits for a collective that another does not call, from a training's begin to its end.

In tests/support/fake_world.py three ranks of 512 train a head, or of 4 a draft, measure it, store
it, are interrupted by a signal to one of them, go on, and end. Some minutes: ten trainings.
"""

import re
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import PartialState

from distill import objective
from distill.config import InitConfig
from distill.drafts import dspark
from distill.initial import make_initial
from distill.watch import HeldOut
from specdata import interruption
from specdata.interruption import Interrupted, stopping_on_signals
from specdata.sampling import SamplingConfig
from tests.support.drive_head import drive
from tests.support.fake_world import in_fake_world
from tests.support.head_training import IMMEDIATE
from tests.support.random_pair import texts_of
from tests.support.trainings import QUICK, changed, distilled, tuned
from tests.support.two_processes import ENGINES, ON_CPU

# Of an epoch's last batch some ranks have no row, and a draft's last step has fewer batches. It
# also writes texts, not as many on every rank, where ZeRO-3 does not divide it.
HEAD = changed(IMMEDIATE, epochs=1, micro_batch_size=2, save_steps=1)
LAYOUTS = ("eagle3", "dspark")
DRAFT = changed(QUICK, batch_size=5, accumulation=2, epochs=1, eval_steps=2, save_steps=1)


def head(pair: Path, out: Path, engine: str) -> None:
    drive(out / "model", HEAD, rows=34, draws=2)


def draft(pair: Path, out: Path, engine: str) -> None:
    config = DRAFT if engine == "ZeRO-3" else changed(DRAFT, on_policy=0.4)
    distilled(pair, out / "model", config, rows=17)


def tuned_draft(pair: Path, out: Path, engine: str) -> None:
    """As the stages of `train-draft` do in one process, one after the other."""
    tuned(pair, out / "tuned", {"finetune": {"epochs": 0.06}})
    PartialState().wait_for_everyone()
    distilled(pair, out / "model", DRAFT, rows=17, draft=out / "tuned")


def on_states(pair: Path, out: Path, engine: str, *, layout: Any) -> None:
    """Of blocks and logits few are made at a time, so ranks have one part or two."""
    dspark.BLOCKS, objective.LOGITS_BYTES = 12, 1 << 15
    init = InitConfig(kind="states", layers=1, layout=layout)
    initial, rows = out / "on-states", texts_of(pair, 17, seed=1)
    made_of = {"target": pair / "target", "draft": None, "rollouts": rows}
    make_initial(**made_of, out=initial, config=init, seed=0)
    distilled(pair, out / "model", DRAFT, SamplingConfig(top_k=20), rows=17, draft=initial)


WORKS = {"head": (head, "model/checkpoints"), "draft": (draft, "model.training")}
WORKS |= {name: (partial(on_states, layout=name), "model.training") for name in LAYOUTS}
WORKS |= {"tuned draft": (tuned_draft, "model.training")}


def interrupted_and_continued(kind: str, *given: Any) -> None:
    with suppress(Interrupted), stopping_on_signals():
        WORKS[kind][0](*given)
        raise AssertionError("it was not interrupted")
    WORKS[kind][0](*given)


CASES = [("head", engine, 3 if engine == "ZeRO-3" else 512) for engine in ENGINES]
CASES += [("draft", engine, 4) for engine in ENGINES]
CASES += [(name, "ZeRO-3", 4) for name in ("tuned draft", *LAYOUTS)]


@pytest.mark.exhaustive
@pytest.mark.parametrize(("kind", "engine", "world"), CASES)
def test_ranks_call_the_same_collectives_through_an_interruption_and_to_the_end(
    pair: Path, tmp_path: Path, server: ForkServerContext, kind: str, engine: str, world: int
) -> None:
    given = (interrupted_and_continued, kind, pair, tmp_path, engine)
    checkpoints = tmp_path / WORKS[kind][1]
    wrong = in_fake_world(server, world, *given, interrupted=checkpoints, **ENGINES[engine])
    assert not wrong, wrong
    assert (tmp_path / "model" / "model.safetensors").is_file()


def measured_together_by_main() -> None:
    measure = HeldOut.measure

    def together(*given: Any, **settings: Any) -> Any:  # called where is_main_process
        torch.distributed.all_reduce(torch.zeros(7))
        return measure(*given, **settings)

    HeldOut.measure = together  # type: ignore[method-assign]


def stopped_alone() -> None:
    interruption.largest_of_all = lambda value: value


# What is planted, in which training, and what is said of it.
FAULTS: dict[str, tuple[Callable[[], None], str, str]] = {
    "measures": (measured_together_by_main, "draft", r"allreduce_\(.*\[7\]\), rank 1 nothing"),
    "stops": (stopped_alone, "head", "barrier"),
}


def with_fault(fault: str, pair: Path, out: Path) -> None:
    plant, kind, _ = FAULTS[fault]
    plant()
    interrupted_and_continued(kind, pair, out, "DDP")


@pytest.mark.exhaustive
@pytest.mark.parametrize("fault", FAULTS)
def test_a_collective_that_not_all_call_alike_is_found(
    pair: Path, tmp_path: Path, server: ForkServerContext, fault: str
) -> None:
    _, kind, said = FAULTS[fault]
    given = (with_fault, fault, pair, tmp_path)
    checkpoints = tmp_path / WORKS[kind][1]
    wrong = in_fake_world(server, 3, *given, interrupted=checkpoints, patience=15, **ON_CPU)
    assert re.search(said, wrong), wrong
