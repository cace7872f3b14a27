"""How many processes train, and under which engine, changes losses and weights by rounding alone.

Drafts that go on in another number of them.
"""

from __future__ import annotations

from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

import pytest

from tests.trainings import QUICK, assert_trained_alike, changed, distilled
from tests.two_processes import ENGINES, finish, kill, start_group, wait_for

# An epoch's last batch has three rows: of four processes one has none.
DRAFT = changed(QUICK, batch_size=5, save_steps=2)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("engine", "changes"),
    [("ZeRO-1", {}), ("ZeRO-2", {}), ("ZeRO-3", {}), ("ZeRO-3", {"lora": {"rank": 4}})],
    ids=["ZeRO-1", "ZeRO-2", "ZeRO-3", "adapters"],
)
def test_a_draft_killed_in_four_processes_goes_on_in_two_and_in_one(
    pair: Path, tmp_path: Path, server: ForkServerContext, engine: str, changes: dict[str, Any]
) -> None:
    config = changed(DRAFT, epochs=1, **changes)
    out, work = tmp_path / "out", tmp_path / "out.training"
    for count, step in ((4, 2), (2, 4)):
        given = (distilled, pair, out, config)
        processes = start_group(server, count, *given, **ENGINES[engine])
        wait_for(work, f"checkpoint-{step}/complete.json", processes)
        kill(processes)
    finish(start_group(server, 1, distilled, pair, out, config, **ENGINES[engine]))
    distilled(pair, tmp_path / "alone", config)
    assert_trained_alike(out, tmp_path / "alone", pair / "draft")
