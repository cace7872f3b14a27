"""Every training of a draft, killed and continued, ends in the weights of an uninterrupted one.

Bit for bit, on the CPU. A process is stopped right after a checkpoint, by SIGTERM and SIGKILL.
"""

import json
import os
import signal
import time
from collections.abc import Callable, Iterable
from datetime import timedelta
from functools import partial
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

import pytest

from distill.config import DistilConfig, InitConfig
from distill.initial import make_initial
from distill.watch import HeldOut
from specdata import processes
from specdata.errors import ManifestError
from specdata.interruption import Interrupted, stopping_on_signals
from tests.support.random_pair import texts_of
from tests.support.trainings import (
    assert_same_weights,
    assert_trained_alike,
    changed,
    distilled,
    tuned,
)
from tests.support.two_processes import ON_CPU, ZERO_2, ZERO_3, finish, kill, start_two, wait_for

BASE = DistilConfig(epochs=6, batch_size=5, learning_rate=5e-3, save_steps=5, report_to=[])
Train = Callable[[Path, Path, dict[str, Any]], None]
LORA = {"lora": {"rank": 4}}


def trained(pair: Path, out: Path, changes: dict[str, Any], **given: Any) -> None:
    """Distil the draft of a pair on 24 rollouts: 30 steps, the last of each epoch a short batch."""
    distilled(pair, out, changed(BASE, **changes), rows=24, **given)


def trained_on_states(pair: Path, out: Path, changes: dict[str, Any], layout: Any = None) -> None:
    """Distil a draft that reads the states of the pair's target, made of the same rollouts."""
    initial = out.parent / "on-states"
    make_initial(
        target=pair / "target",
        draft=None,
        rollouts=texts_of(pair, 24, seed=1),
        out=initial,
        config=InitConfig(kind="states", layers=1, vocabulary=200, layout=layout),
        seed=0,
    )
    trained(pair, out, changes, draft=initial)


trained_in_blocks = partial(trained_on_states, layout="dspark")
ON_POLICY = {"on_policy": 0.4, "epochs": 3}
CASES: dict[str, tuple[Train, dict[str, Any]]] = {
    "accumulated": (trained, {"accumulation": 2, "epochs": 10, "save_steps": 4}),
    "adapters": (trained, LORA),
    "completions of the draft": (trained, ON_POLICY),
    "the target's states": (trained_on_states, {"optimizer": "muon", "epochs": 4}),
    "masks": (trained, {"depths": 3}),
    "blocks": (trained_in_blocks, {"optimizer": "muon", "epochs": 4}),
    "fine-tuning": (tuned, {}),
}
COMBINED = {**LORA, "epochs": 3, "on_policy": 0.5, "eval_steps": 3}


def exhaustive_but(slow: str, cases: Iterable[str]) -> pytest.MarkDecorator:
    """A test of cases, of which one is slow and the others are exhaustive."""
    marks = [pytest.mark.slow if case == slow else pytest.mark.exhaustive for case in cases]
    given = [pytest.param(case, marks=mark) for case, mark in zip(cases, marks, strict=True)]
    return pytest.mark.parametrize("case", given)


def assert_same_draft(ours: Path, theirs: Path) -> None:
    """The same weights, and the same results beside them but for times."""
    assert_same_weights(ours, theirs)
    for path in theirs.glob("*.json"):
        if path.name != "history.json":  # has tokens a second
            assert (ours / path.name).read_bytes() == path.read_bytes(), path.name


def until_interrupted(train: Train, pair: Path, out: Path, changes: dict[str, Any]) -> None:
    """As `train`, ending with the status of a signal as a recipe does."""
    with stopping_on_signals():
        try:
            train(pair, out, changes)
        except Interrupted as stop:
            os._exit(stop.status)


@exhaustive_but("adapters", CASES)
def test_an_interrupted_and_then_killed_training_ends_in_the_same_weights(
    pair: Path, tmp_path: Path, server: ForkServerContext, case: str
) -> None:
    train, changes = CASES[case]
    train(pair, tmp_path / "whole", changes)
    out, work = tmp_path / "out", tmp_path / "out.training"
    for number, status in ((signal.SIGTERM, 143), (signal.SIGKILL, -9)):
        before = {*work.glob("checkpoint-*/complete.json")}
        process = server.Process(target=until_interrupted, args=(train, pair, out, changes))
        process.start()
        while not {*work.glob("checkpoint-*/complete.json")} - before:
            assert process.is_alive(), "it ended before it could be stopped"
            time.sleep(0.001)
        os.kill(process.pid, number)  # type: ignore[arg-type]
        process.join()
        assert process.exitcode == status
        assert not out.exists()
    train(pair, out, changes)
    assert_same_draft(out, tmp_path / "whole")
    assert not work.exists()


# --- two processes


@pytest.mark.exhaustive
@pytest.mark.parametrize("engine", [ON_CPU, ZERO_2], ids=["DDP", "ZeRO-2"])
def test_an_interrupted_and_killed_training_in_two_processes_ends_in_the_same_weights(
    pair: Path, tmp_path: Path, server: ForkServerContext, engine: dict[str, str]
) -> None:
    finish(start_two(server, trained, pair, tmp_path / "whole", COMBINED, **engine))
    out, work = tmp_path / "out", tmp_path / "out.training"
    given = (trained, pair, out, COMBINED)
    processes = start_two(server, until_interrupted, *given, **engine)
    wait_for(work, "best-0", processes)
    processes[1].terminate()  # one of them alone, yet both stop after the same step
    for process in processes:
        process.join()
        assert process.exitcode == 143
    (stopped,) = work.glob("checkpoint-*/complete.json")
    assert json.loads(stopped.read_text())["step"] < 5
    processes = start_two(server, trained, pair, out, COMBINED, **engine)
    wait_for(work, "checkpoint-5/complete.json", processes)
    kill(processes)
    assert not out.exists()
    (checkpoint, *_) = work.glob("checkpoint-*/complete.json")
    written_under = json.loads(checkpoint.read_text())["engine"]
    zero_2 = "DeepSpeed ZeRO-1 or 2 in 2 processes"
    assert written_under == ("PyTorch" if engine is ON_CPU else zero_2)
    if engine is ZERO_2:  # in which a checkpoint has a part for each process
        with pytest.raises(ManifestError, match=f"was written under {zero_2}"):
            trained(pair, out, COMBINED)
    finish(start_two(server, trained, pair, out, COMBINED, **engine))
    assert_same_draft(out, tmp_path / "whole")


# 24 rollouts in batches of 23: of the last batch of an epoch one process has none. What the target
# says is kept from 3 epochs on.
UNEVEN = {"epochs": 3, "batch_size": 23, "eval_steps": 2}


CASES_OF_TWO = {
    "adapters, ZeRO-3": (trained, LORA, ZERO_3),
    "uneven, ZeRO-3": (trained, UNEVEN, ZERO_3),
    # The output matrix is of a reduced vocabulary, and ZeRO-3 divides it, too.
    "states, ZeRO-3": (trained_on_states, {}, ZERO_3),
    "blocks, DDP": (trained_in_blocks, {}, ON_CPU),
    "blocks, ZeRO-3": (trained_in_blocks, {}, ZERO_3),
}


@exhaustive_but("states, ZeRO-3", CASES_OF_TWO)
def test_two_processes_end_in_the_weights_of_one(
    pair: Path, tmp_path: Path, server: ForkServerContext, case: str
) -> None:
    """Under ZeRO-3 the main process alone gets the weights; the others go on without them."""
    train, changes, engine = CASES_OF_TWO[case]
    changes = {"epochs": 1, **changes}
    train(pair, tmp_path / "alone", changes)
    finish(start_two(server, train, pair, tmp_path / "two", changes, **engine))
    initial = pair / "draft" if train is trained else tmp_path / "on-states"
    assert_trained_alike(tmp_path / "two", tmp_path / "alone", initial)


# --- waiting for the main process


def slowly_measured(pair: Path, out: Path, changes: dict[str, Any]) -> None:
    """Distil where the main process measures for longer than a collective may take."""
    processes.TIMEOUT = timedelta(seconds=3)
    measure, held_back = HeldOut.measure, 5.0

    def slowly(self: HeldOut, *arguments: Any, **settings: Any) -> Any:
        time.sleep(held_back)
        return measure(self, *arguments, **settings)

    HeldOut.measure = slowly  # type: ignore[method-assign]
    trained(pair, out, changes)


@pytest.mark.exhaustive
def test_processes_wait_for_the_main_one_for_longer_than_a_collective_may_take(
    pair: Path, tmp_path: Path, server: ForkServerContext
) -> None:
    """The only test of the waits for a main process; 10 s are what it holds the others back."""
    once = {"epochs": 0}
    finish(start_two(server, slowly_measured, pair, tmp_path / "two", once, **ON_CPU))
    trained(pair, tmp_path / "one", once)
    assert_same_draft(tmp_path / "two", tmp_path / "one")
