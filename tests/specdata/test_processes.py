"""How many processes train, and under which engine, changes losses and weights by rounding alone.

Heads and drafts in 1, 2 and 4 processes over gloo, and drafts that go on in another number of them.
"""

import json
from multiprocessing.context import ForkServerContext
from pathlib import Path

import pytest
from safetensors.torch import load_file

from specdata.processes import join_processes
from tests.support.drive_head import drive
from tests.support.head_training import IMMEDIATE
from tests.support.trainings import QUICK, assert_trained_alike, changed, distilled
from tests.support.two_processes import ENGINES, finish, kill, start_group, wait_for

# An epoch's last batch has two rows or three, so of four processes some have none. What a head
# accumulates depends on the number of processes, 8 batches for one and 2 for four.
HEAD = changed(IMMEDIATE, epochs=1, micro_batch_size=2)
DRAFT = changed(QUICK, epochs=1, batch_size=5, save_steps=2)
KINDS = ("head", "draft", "draft, two batches a step")


def trained(pair: Path, out: Path) -> None:
    join_processes()  # or the head would leave the group
    drive(out / KINDS[0], HEAD, rows=34, draws=2)
    for accumulation, kind in enumerate(KINDS[1:], 1):
        distilled(pair, out / kind, changed(DRAFT, accumulation=accumulation), rows=17)


def losses(folder: Path) -> list[float]:
    if (folder / "metrics.json").is_file():
        found: list[float] = json.loads((folder / "metrics.json").read_text())["losses"]
        return found
    return [step["loss"] for step in json.loads((folder / "history.json").read_text())["steps"]]


def differences(ours: Path, theirs: Path) -> tuple[float, float]:
    """The largest relative differences: of a loss, and of a matrix (root of the mean square)."""
    mine, others = losses(ours), losses(theirs)
    apart = max(abs(a - b) / b for a, b in zip(mine, others, strict=True))
    weights, expected = (load_file(each / "model.safetensors") for each in (ours, theirs))
    return apart, max(
        float((weights[name] - value).norm() / value.norm()) for name, value in expected.items()
    )


@pytest.fixture(scope="module")
def alone(pair: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("alone")
    trained(pair, folder)
    return folder


@pytest.mark.exhaustive
@pytest.mark.parametrize("count", [1, 2, 4])
@pytest.mark.parametrize("engine", ["DDP", "ZeRO-3"])
def test_any_number_of_processes_and_any_engine_train_the_same_head_and_draft(
    pair: Path, alone: Path, tmp_path: Path, server: ForkServerContext, engine: str, count: int
) -> None:
    finish(start_group(server, count, trained, pair, tmp_path, **ENGINES[engine]))
    for kind in KINDS:
        of_losses, of_weights = differences(tmp_path / kind, alone / kind)
        print(f"{engine} | {count} | {kind} | {of_losses:.0e} | {of_weights:.0e}")  # noqa: T201
        assert of_losses < 1e-5
        assert of_weights < 1e-4
        if kind != "head":
            assert_trained_alike(tmp_path / kind, alone / kind, pair / "draft")


@pytest.mark.exhaustive
def test_a_killed_draft_goes_on_in_another_number_of_processes(
    pair: Path, tmp_path: Path, server: ForkServerContext
) -> None:
    config = changed(DRAFT, epochs=4)
    out, work = tmp_path / "out", tmp_path / "out.training"
    given = (distilled, pair, out, config)
    processes = start_group(server, 1, *given, **ENGINES["DDP"])
    wait_for(work, "checkpoint-2/complete.json", processes)
    kill(processes)
    assert not out.exists()
    finish(start_group(server, 2, *given, **ENGINES["DDP"]))
    alone = distilled(pair, tmp_path / "alone", config)
    result = json.loads((out / "result.json").read_text())
    assert result["steps"] == alone.steps
    assert result["acceptance_after"] == pytest.approx(alone.acceptance_after, abs=1e-5)
    most = config.learning_rate / 50
    assert_trained_alike(out, tmp_path / "alone", pair / "draft", most=most)
