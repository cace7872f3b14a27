"""Drafts that train in parts (FSDP2), and targets in parts beside them, in two processes."""

from __future__ import annotations

import ctypes
import json
import re
import time
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.context import ForkServerContext
from pathlib import Path
from threading import Event, Thread
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.tensor import DTensor

from distill.config import DistilConfig, FinetuneConfig
from distill.distillation import distil
from distill.finetune import finetune
from distill.toy import language_model
from distill.training import save_model
from distill.watch import HeldOut
from heads.engine import start_accelerator
from recipes import train_draft
from specdata import processes
from specdata.errors import ConfigError, ManifestError
from specdata.lm_head import find_lm_head
from specdata.models import load_model, load_tokenizer
from specdata.processes import join_processes, largest_of_all, leave_processes
from specdata.sampling import SamplingConfig
from specdata.sharded import load_sharded
from tests.random_pair import texts_of
from tests.test_draft_resume import BASE, assert_same_draft, pair, trained
from tests.two_processes import FSDP_2, ON_CPU, ZERO_2, ZERO_3, finish, kill, start_two, wait_for

__all__ = ["pair"]  # a fixture
ENGINES = {"DDP": ON_CPU, "ZeRO-2": ZERO_2, "ZeRO-3": ZERO_3, "FSDP2": FSDP_2}
# 24 rollouts in batches of 23: of the last batch of an epoch one process has none. What the target
# says is kept from 3 epochs on; on_policy makes rows that are read all the same, here or there.
UNEVEN = {"epochs": 3, "batch_size": 23, "eval_steps": 2, "on_policy": {"share": 0.3}}
SHARDED = {**UNEVEN, "shard_teacher": True}


def assert_same_up_to_rounding(ours: Path, theirs: Path, start: Path) -> None:
    """Weights differ by far less than training moved them, in the root mean square."""
    found, expected, before = (load_file(p / "model.safetensors") for p in (ours, theirs, start))
    assert found.keys() == expected.keys()
    for name, weight in expected.items():
        assert found[name].dtype == weight.dtype
        moved = (weight - before[name]).square().mean().sqrt()
        assert (found[name] - weight).square().mean().sqrt() <= moved / 50, name


def losses(out: Path) -> list[float]:
    return [step["loss"] for step in json.loads((out / "history.json").read_text())["steps"]]


@pytest.fixture(scope="module")
def alone(pair: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The draft that one process distils, which knows nothing of parts."""
    out = tmp_path_factory.mktemp("alone") / "draft"
    trained(pair, out, UNEVEN)
    return out


@pytest.mark.exhaustive
@pytest.mark.parametrize("engine", ENGINES)
def test_a_target_in_parts_teaches_what_a_whole_one_does(
    pair: Path, tmp_path: Path, server: ForkServerContext, alone: Path, engine: str
) -> None:
    out = tmp_path / "draft"
    finish(start_two(server, trained, pair, out, SHARDED, **ENGINES[engine]))
    assert losses(out) == pytest.approx(losses(alone), abs=1e-4)
    assert_same_up_to_rounding(out, alone, pair / "draft")
    # How the target lies in memory is no setting: the one draft is the other, finished.
    assert (out / "training.json").read_bytes() == (alone / "training.json").read_bytes()


# --- memory


def large_target(folder: Path, pair: Path) -> int:
    """Write a target of some 100 MB in many layers; return its bytes."""
    tokenizer = load_tokenizer(str(pair / "target"))
    model = language_model(tokenizer, layers=32, width=256, seed=3)
    save_model(model, folder)
    tokenizer.save_pretrained(folder)
    return sum(p.numel() * p.element_size() for p in model.parameters())


def most_grown(action: Callable[[], Any]) -> tuple[Any, int]:
    """The result of an action, and by how many bytes this process grew meanwhile, at most.

    Of memory of its own: pages of a mapped file are the system's, which drops and shares them.
    """

    def own() -> int:
        found = re.search(r"RssAnon:\s+(\d+) kB", Path("/proc/self/status").read_text())
        assert found is not None
        return int(found[1]) * 1024

    before, done = own(), Event()
    seen = [before]

    def watch() -> None:
        while not done.wait(0.001):
            seen.append(own())

    watcher = Thread(target=watch)
    watcher.start()
    try:
        found = action()
    finally:
        done.set()
        watcher.join()
    return found, max(seen) - before


def load_and_compare(target: Path, out: Path) -> None:
    """Load a target in parts, compare it with the whole one on ids of this process alone."""
    torch.set_num_threads(1)
    rank = join_processes().process_index
    # Freed blocks go back to the system, small matrices, too, else the most that was in use would
    # depend on how the heap is fragmented.
    mmap_threshold = -3
    assert ctypes.CDLL(None).mallopt(mmap_threshold, 2**16)
    model, loading = most_grown(lambda: load_sharded(str(target)))
    held = sum((p.to_local() if isinstance(p, DTensor) else p).nbytes for p in model.parameters())
    output = model.get_output_embeddings().weight.nbytes + model.model.norm.weight.nbytes
    ids = (torch.arange(20)[None] * (7 + rank)) % model.config.vocab_size
    with torch.inference_mode():
        logits = model(input_ids=ids).logits
        head = find_lm_head(model)
        states = head.states(ids)
        for _ in range(1 + 2 * rank):  # as often as a process likes: the matrix is at hand
            again = head.logits(states)
    whole = load_model(str(target))
    expected = whole(input_ids=ids).logits.detach()
    _, copying = most_grown(lambda: [weight.clone() for weight in whole.parameters()])
    report = {
        "held": held,
        "loading": loading,
        "copying": copying,
        "output": output,
        "difference": float((logits - expected).abs().max()),
        "of states": float((again - expected).abs().max()),
        "most": largest_of_all(rank + 4),
    }
    out.with_name(f"{rank}.json").write_text(json.dumps(report))
    leave_processes()


@pytest.mark.exhaustive
def test_no_process_holds_a_whole_target_in_parts(
    pair: Path, tmp_path: Path, server: ForkServerContext
) -> None:
    size = large_target(tmp_path / "target", pair)
    finish(start_two(server, load_and_compare, tmp_path / "target", tmp_path / "out", **ON_CPU))
    reports = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)]
    for report in reports:
        # The output matrix and the norm before it are gathered once and stay.
        assert size / 2 < report["held"] <= size / 2 + report["output"] * 1.5
        # Loading ends with a forward, in which some layers at a time are gathered.
        assert report["loading"] < size / 2
        assert report["copying"] > size * 0.75, "else the line above says nothing"
        assert report["difference"] <= 1e-5
        assert report["of states"] <= 1e-5
        assert report["most"] == 5


# --- drafts in parts


def tuned_and_adapted(pair: Path, out: Path) -> None:
    """Fine-tune the draft of a pair, then distil adapters in it."""
    finetune(
        target=pair / "target",
        draft=pair / "draft",
        rollouts=texts_of(pair, 24, seed=1),
        out=out / "tuned",
        config=FinetuneConfig(epochs=1, max_length=256, batch_size=3, learning_rate=5e-3),
        lora=None,
        seed=0,
    )
    trained(pair, out / "adapted", {**UNEVEN, "lora": {"rank": 4}, "keep": "last"})


@pytest.mark.exhaustive
def test_drafts_in_parts_are_fine_tuned_and_adapted_as_in_one_process(
    pair: Path, tmp_path: Path, server: ForkServerContext
) -> None:
    tuned_and_adapted(pair, tmp_path / "one")
    finish(start_two(server, tuned_and_adapted, pair, tmp_path / "two", **FSDP_2))
    assert_same_up_to_rounding(
        tmp_path / "two" / "tuned", tmp_path / "one" / "tuned", pair / "draft"
    )
    ours, theirs, before = (
        load_file(path / "model.safetensors")
        for path in (tmp_path / "two" / "adapted", tmp_path / "one" / "adapted", pair / "draft")
    )
    for name, weight in theirs.items():  # adapters leave most as it was
        moved = (weight - before[name]).square().mean().sqrt()
        assert (ours[name] - weight).square().mean().sqrt() <= moved / 50, name


LONG = {**SHARDED, "epochs": 6, "batch_size": 5, "save_steps": 5}


@pytest.mark.exhaustive
def test_a_killed_training_in_parts_goes_on_in_parts_alone_and_ends_in_the_same_weights(
    pair: Path, tmp_path: Path, server: ForkServerContext
) -> None:
    finish(start_two(server, trained, pair, tmp_path / "whole", LONG, **FSDP_2))
    out, work = tmp_path / "out", tmp_path / "out.training"
    processes = start_two(server, trained, pair, out, LONG, **FSDP_2)
    wait_for(work, "checkpoint-*/complete.json", processes)
    kill(processes)
    assert not out.exists()
    with pytest.raises(ManifestError, match="written under FSDP2 and cannot be read under PyTorch"):
        trained(pair, out, LONG)
    finish(start_two(server, trained, pair, out, LONG, **FSDP_2))
    assert_same_draft(out, tmp_path / "whole")


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


@pytest.mark.slow
def test_processes_wait_for_the_main_one_for_longer_than_a_collective_may_take(
    pair: Path, tmp_path: Path, server: ForkServerContext
) -> None:
    """The only test of the waits for a main process; 10 s are what it holds the others back."""
    once = {"epochs": 0}
    finish(start_two(server, slowly_measured, pair, tmp_path / "two", once, **ON_CPU))
    trained(pair, tmp_path / "one", once)
    assert_same_draft(tmp_path / "two", tmp_path / "one")


# --- refusals


@pytest.mark.slow
def test_one_process_keeps_the_target_whole_and_says_so(
    pair: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    short = {"epochs": 1, "batch_size": 24}
    trained(pair, tmp_path / "whole", short)
    assert not caplog.records
    trained(pair, tmp_path / "one", {**short, "shard_teacher": True})
    assert "draft.shard_teacher keeps the whole target here, in one process" in caplog.text
    assert_same_draft(tmp_path / "one", tmp_path / "whole")


def test_a_target_that_cannot_be_read_in_parts_is_refused(
    pair: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    adapters = tmp_path / "adapters"
    adapters.mkdir()
    (adapters / "adapter_config.json").write_text(
        json.dumps({"base_model_name_or_path": str(pair / "target"), "peft_type": "LORA"})
    )
    message = f"draft.shard_teacher needs whole weights, and {adapters} holds adapters"
    with pytest.raises(ConfigError, match=message):
        load_sharded(str(adapters))
    flags = [f"--output={tmp_path / 'out'}", "--toy=null", "--draft.shard_teacher=true"]
    flags += [f"--models.target={adapters}", f"--models.draft={pair / 'draft'}"]
    assert train_draft.RECIPE.run(flags) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"FSDP_VERSION": "1"}, "fsdp_version must be 2, got 1"),
        (
            {"FSDP_STATE_DICT_TYPE": "SHARDED_STATE_DICT"},
            "fsdp_state_dict_type must be FULL_STATE_DICT, got SHARDED_STATE_DICT",
        ),
        (
            {"FSDP_CPU_RAM_EFFICIENT_LOADING": "true"},
            "fsdp_cpu_ram_efficient_loading must be false, got true",
        ),
    ],
)
def test_other_settings_of_fsdp_are_refused_and_so_are_heads(
    pair: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    changes: dict[str, str],
    message: str,
) -> None:
    for name, value in {**FSDP_2, **changes}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=message):
        distil(
            target=pair / "target",
            draft=pair / "draft",
            train=texts_of(pair, 4, seed=1),
            dev=texts_of(pair, 2, seed=2),
            out=tmp_path / "out",
            config=DistilConfig(**BASE),
            sampling=SamplingConfig(),
            seed=0,
        )
    with pytest.raises(ConfigError, match="which training a head does not"):
        start_accelerator()
