"""Heads trained together on one forward of the draft are those trained alone."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
import torch
from accelerate.data_loader import prepare_data_loader
from accelerate.state import GradientState

from heads import BaseHead
from heads.config import HeadConfig
from heads.together import train_heads
from heads.train import HeadResult, train_head
from specdata.errors import ConfigError, ManifestError
from specdata.sampling import SamplingConfig
from tests.drive_head import synthetic_rows, tiny_draft

SAMPLING = SamplingConfig(top_k=50)
SMALL = {"batch_size": 16, "micro_batch_size": 4, "epochs": 2, "learning_rate": 3e-3}
PAPER = {
    f"{depth}-{weight}": HeadConfig(depth=depth, rejection_weight=weight, **SMALL)  # type: ignore[arg-type]
    for depth in (0, 2)
    for weight in (1.0, 6.0)
}


def ours(**changes: object) -> HeadConfig:
    return HeadConfig.model_validate({"kind": "immediate", "width": 16, **SMALL, **changes})


OURS = {
    "all": ours(),
    "no state after": ours(moments=("before", "drawn"), features=("hidden_before", "log_q")),
    "numbers": ours(moments=("drawn",), features=("log_q", "margin", "entropy")),
}


def together(out: Path, configs: Mapping[str, HeadConfig]) -> dict[str, HeadResult]:
    return train_heads(
        draft=tiny_draft(),
        train=synthetic_rows(40, 1),
        dev=synthetic_rows(12, 2, "dev"),
        out=out,
        configs=configs,
        seed=7,
        sampling=SAMPLING,
    )


@pytest.mark.parametrize("configs", [PAPER, OURS], ids=["specdec++", "immediate"])
def test_heads_trained_together_are_those_trained_alone(
    configs: Mapping[str, HeadConfig], tmp_path: Path
) -> None:
    results = together(tmp_path / "all", configs)
    for name, config in configs.items():
        alone = train_head(
            draft=tiny_draft(),
            train=synthetic_rows(40, 1),
            dev=synthetic_rows(12, 2, "dev"),
            out=tmp_path / "alone" / name,
            config=config,
            seed=7,
            sampling=SAMPLING,
        )
        np.testing.assert_allclose(results[name].losses, alone.losses, atol=1e-5)
        assert results[name].after.kl == pytest.approx(alone.after.kl, abs=1e-5)
        assert results[name].by_moment.keys() == alone.by_moment.keys()
        heads = [
            BaseHead.from_pretrained(tmp_path / where / name).state_dict()
            for where in ("all", "alone")
        ]
        for parameter, value in heads[0].items():
            torch.testing.assert_close(value, heads[1][parameter], atol=1e-5, rtol=1e-4)
        # Made with the same settings: either call takes the other's head for its own.
        stored = [
            json.loads((tmp_path / where / name / "metrics.json").read_text())["settings"]
            for where in ("all", "alone")
        ]
        assert stored[0] == stored[1]
    losses = [result.losses[-1] for result in results.values()]
    assert len({*losses}) == len(losses)


def test_a_dataloader_that_a_trainer_left_at_its_end_does_not_change_the_steps(
    tmp_path: Path,
) -> None:
    config = PAPER["0-1.0"]
    expected = together(tmp_path / "all", {"head": config})["head"].losses
    state = GradientState()
    loader = prepare_data_loader(torch.utils.data.DataLoader([0, 1]), put_on_device=False)
    rows = iter(loader)  # as where the last step raises an error: the state still holds it
    assert [int(next(rows)) for _ in range(2)] == [0, 1]
    assert state.end_of_dataloader
    try:
        result = train_head(
            draft=tiny_draft(),
            train=synthetic_rows(40, 1),
            dev=synthetic_rows(12, 2, "dev"),
            out=tmp_path / "alone",
            config=config,
            seed=7,
            sampling=SAMPLING,
        )
    finally:
        assert next(rows, None) is None
    np.testing.assert_allclose(result.losses, expected, atol=1e-5)


def test_the_draft_runs_once_for_all_heads(tmp_path: Path) -> None:
    calls = dict.fromkeys((1, 4), 0)
    for count in calls:
        draft = tiny_draft()

        def count_forward(*_: object, count: int = count) -> None:
            calls[count] += 1

        draft.base_model.register_forward_hook(count_forward)
        train_heads(
            draft=draft,
            train=synthetic_rows(40, 1),
            dev=synthetic_rows(12, 2, "dev"),
            out=tmp_path / str(count),
            configs=dict([*PAPER.items()][:count]),
            seed=7,
        )
    assert calls[4] - calls[1] == 3  # each head records once what its draft answers


def test_finished_heads_are_kept_and_others_of_the_same_name_refused(tmp_path: Path) -> None:
    first = dict([*PAPER.items()][:2])
    together(tmp_path, first)
    written = {name: (tmp_path / name / "metrics.json").stat().st_mtime_ns for name in first}
    results = together(tmp_path, PAPER)
    assert results.keys() == PAPER.keys()
    for name, when in written.items():
        assert (tmp_path / name / "metrics.json").stat().st_mtime_ns == when
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(PAPER)
    other = {name: config.model_copy(update={"depth": 1}) for name, config in first.items()}
    with pytest.raises(ManifestError, match="made with other settings"):
        together(tmp_path, other)


LONG = {
    name: config.model_copy(update={"epochs": 8, "save_steps": 3}) for name, config in PAPER.items()
}


@pytest.mark.slow
def test_a_killed_sweep_goes_on_where_it_was(tmp_path: Path) -> None:
    """Killed after a checkpoint; what comes out is what an undisturbed one makes."""
    code = (
        "import sys; from pathlib import Path; from tests.test_together import LONG, together\n"
        "together(Path(sys.argv[1]), LONG)"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "killed")]
    process = subprocess.Popen(command, env={**os.environ, "PYTHONPATH": "."})
    try:
        deadline = time.monotonic() + 120
        while not list((tmp_path / "killed").glob("checkpoints/*/step-*.safetensors")):
            assert process.poll() is None, "it ended before it was killed"
            assert time.monotonic() < deadline
            time.sleep(0.005)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert not list((tmp_path / "killed").glob("*/metrics.json"))
    resumed, whole = together(tmp_path / "killed", LONG), together(tmp_path / "whole", LONG)
    for name in LONG:
        np.testing.assert_allclose(resumed[name].losses, whole[name].losses, atol=1e-5)
        assert resumed[name].before == whole[name].before


def test_heads_that_see_other_rows_are_not_trained_together(tmp_path: Path) -> None:
    configs = {**PAPER, "longer": HeadConfig(**{**SMALL, "epochs": 3})}  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"epochs is 2 for .* and 3 for longer: train them apart"):
        together(tmp_path, configs)
    assert not list(tmp_path.iterdir())
