"""What `--plan` says of memory, work and time."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig, Qwen3Config

from recipes import memory, pipeline, train_head
from recipes.config import build
from recipes.memory import (
    PARTS,
    Machine,
    Setting,
    Sharding,
    sharding,
    stage_memory,
    training_parts,
    weights_bytes,
)
from recipes.model_sizes import ModelSizes
from recipes.resources import plan_lines, tokens_of
from specdata.loading import Loading, PairLoading
from tests.random_pair import random_pair

ROOT = Path(__file__).parent.parent
SIZES = ModelSizes.of(
    {
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "vocab_size": 32000,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
    }
)
CPU = Machine("cpu")


def values(output: Path, target: Path, draft: Path) -> dict[str, Any]:
    sets = [{"name": "instruct", "split": split, "count": 8} for split in ("train", "dev")]
    return {
        "output": str(output),
        "models": {"target": str(target), "draft": str(draft)},
        "rollouts": {"sets": sets, "max_new_tokens": 12},
        "draft": {"epochs": 2, "batch_size": 4, "report_to": []},
        "head": {"kind": "immediate", "epochs": 2},
        "eval": {
            "sets": [{"name": "instruct", "split": "test", "count": 2}],
            "methods": [
                {"name": "plain", "decoder": "plain"},
                {"name": "K=2", "length": 2},
                {"name": "head", "stop": "head"},
            ],
            "max_new_tokens": 6,
        },
    }


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pair")
    random_pair(folder)
    return folder


@pytest.fixture
def setting(pair: Path, tmp_path: Path) -> Setting:
    config = build(values(tmp_path / "out", pair / "target", pair / "draft"))
    return replace(Setting.of(config), here=CPU, shards=Sharding())


@pytest.mark.parametrize(
    ("module", "name", "value"),
    [
        ("specdata.labels.labeller", "TOKENS_AT_ONCE", memory.TOKENS_AT_ONCE),
        ("specdata.labels.labeller", "VALUES_AT_ONCE", memory.LABEL_VALUES),
        ("specdata.labels.labeller", "POSITIONS", memory.LABEL_POSITIONS),
        ("specdata.rollouts.backend", "PROMPT_TOKENS", memory.TOKENS_AT_ONCE),
        ("specdata.rollouts.backend", "GROWTH", memory.GROWTH),
        ("specdata.prepack", "LARGEST_COPY", memory.LARGEST_COPY),
        ("distill.teacher", "KEPT_BYTES", memory.KEPT_BYTES),
        ("distill.watch", "KEPT_BYTES", memory.KEPT_BYTES),
        ("distill.watch", "VALUES_AT_ONCE", memory.WATCH_VALUES),
        ("distill.chunked", "CHUNK_BYTES", memory.CHUNK_BYTES),
        ("distill.chunked", "ENTRY_BYTES", memory.ENTRY_BYTES),
        ("heads.contexts", "VALUES_AT_ONCE", memory.HEAD_VALUES),
        ("eval.runtime.kv_cache", "CAPACITY_STEP", memory.CAPACITY_STEP),
        ("eval.analysis.tree_trace", "VALUES_AT_ONCE", memory.TREE_VALUES),
    ],
)
def test_the_plan_knows_the_bounds_of_the_code_without_importing_it(
    module: str, name: str, value: object
) -> None:
    assert getattr(import_module(module), name) == value


SMALL = {"hidden_size": 48, "num_hidden_layers": 3, "num_attention_heads": 6, "vocab_size": 97}


@pytest.mark.parametrize(
    "config",
    [
        LlamaConfig(**SMALL, intermediate_size=80, num_key_value_heads=2),
        LlamaConfig(**SMALL, intermediate_size=80, tie_word_embeddings=True),
        Qwen3Config(**SMALL, intermediate_size=80, num_key_value_heads=2, head_dim=16),
        GPT2Config(n_embd=48, n_layer=3, n_head=6, vocab_size=970, n_positions=16),
    ],
    ids=["grouped", "tied", "wide heads", "GPT-2"],
)
def test_weights_are_counted_from_config_json(config: Any) -> None:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    sizes = ModelSizes.of(config.to_dict())
    assert sizes is not None
    # Biases, positions and norms of heads are left out.
    assert sizes.parameters == pytest.approx(model.num_parameters(), rel=0.03)
    if config.model_type == "llama":
        assert sizes.parameters == model.num_parameters()


def test_a_mixture_of_experts_or_uneven_layers_have_no_known_sizes() -> None:
    assert ModelSizes.of({**SMALL, "intermediate_size": [8, 8, 16]}) is None
    assert ModelSizes.of({**SMALL, "intermediate_size": 8, "num_local_experts": 4}) is None
    assert ModelSizes.of({"hidden_size": 8}) is None


def test_llama_2_7b_takes_what_its_paper_says() -> None:
    assert SIZES is not None
    assert SIZES.parameters == 6_738_415_616
    half = weights_bytes(SIZES, Loading(dtype="bfloat16"), CPU, 1)
    assert half == 2 * SIZES.parameters
    # 2 x 32 layers x 4096 x 2 bytes: half a megabyte a token.
    assert memory.cache_bytes(SIZES, 1, 1, 2) == 2 * 32 * 4096 * 2


def test_a_loading_divides_or_packs_the_weights() -> None:
    assert SIZES is not None
    gpus = Machine("cuda", 4, 80e9)
    whole = weights_bytes(SIZES, Loading(dtype="bfloat16"), gpus, 2)
    spread = weights_bytes(SIZES, Loading(dtype="bfloat16", device_map="auto"), gpus, 2)
    assert spread == whole / 4
    limited = Loading(dtype="bfloat16", device_map="auto", max_memory={"0": "2GiB", "cpu": "9GiB"})
    assert weights_bytes(SIZES, limited, gpus, 2) == 2 * 2**30
    assert weights_bytes(SIZES, Loading(dtype="bfloat16", device_map="cpu"), gpus, 2) == 0
    parts = weights_bytes(SIZES, Loading(dtype="bfloat16", tp_plan="auto"), gpus, 2)
    assert parts == whole - SIZES.matrices
    cpu = Machine("cpu", 1, 80e9)
    assert weights_bytes(SIZES, limited, cpu, 2) == whole  # where is the rest to go?
    on_disk = limited.model_copy(update={"offload_folder": "rest"})
    assert weights_bytes(SIZES, on_disk, cpu, 2) == min(whole, 9 * 2**30)
    less = on_disk.model_copy(update={"max_memory": {"cpu": "1GiB"}})
    assert weights_bytes(SIZES, less, cpu, 2) == 2**30
    packed = weights_bytes(SIZES, Loading(dtype="bfloat16", bits=4), gpus, 2)
    assert 0.25 < packed / whole < 0.32


def test_zero_divides_one_more_part_with_each_stage() -> None:
    """Rajbhandari et al. 2019, figure 1, in float32: 4 + 4 + 8 bytes a weight.

    DDP has another four in its buckets.
    """

    def total(stage: int, **more: Any) -> float:
        shards = Sharding(4, stage, **more)
        return sum(training_parts(1000.0, 1000.0, 0.0, "adamw", shards, CPU).values())

    assert [total(stage) for stage in range(4)] == [20000, 10000, 7000, 4000]
    assert total(2, offload=True) == 5000
    muon = training_parts(1000.0, 1000.0, 600.0, "muon", Sharding(), CPU)
    assert muon["optimizer"] == 4 * (2000 - 600)


def test_the_launcher_s_environment_says_what_is_divided(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in list(os.environ):
        if name.startswith(("ACCELERATE_", "FSDP_")):
            monkeypatch.delenv(name)
    assert sharding() == Sharding()
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert sharding() == Sharding(4)
    monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "true")
    monkeypatch.setenv("ACCELERATE_DEEPSPEED_ZERO_STAGE", "3")
    assert sharding().stage == 3
    monkeypatch.setenv("ACCELERATE_DEEPSPEED_CONFIG_FILE", str(ROOT / "launch" / "zero2.json"))
    found = sharding()
    assert (found.stage, found.is_deepspeed, found.offload) == (2, True, False)
    path = tmp_path / "offload.json"
    path.write_text(
        json.dumps({"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}}})
    )
    monkeypatch.setenv("ACCELERATE_DEEPSPEED_CONFIG_FILE", str(path))
    assert (sharding().stage, sharding().offload) == (3, True)
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    assert sharding() == Sharding(4, 3)


def test_every_stage_that_runs_models_states_tokens_and_memory(setting: Setting) -> None:
    for stage in PARTS:
        if stage == "finetuned":
            continue
        (work, held) = plan_lines(stage, setting)
        assert work.endswith(f"writes at most {tokens_of(stage, setting):,} tokens")
        assert held.startswith("holds on the CPU, in 1 process, about ")
    assert list(plan_lines("release", setting)) == []
    assert tokens_of("rollouts", setting) == 16 * (setting.prompt + 12)
    assert tokens_of("eval", setting) == 2 * 3 * 6


def test_a_smaller_batch_and_more_processes_hold_less(setting: Setting) -> None:
    def held(stage: str, **sections: Any) -> float:
        config = setting.config
        for name, values in sections.items():
            section = getattr(config, name).model_copy(update=values)
            config = config.model_copy(update={name: section})
        found = stage_memory(stage, replace(setting, config=config))
        assert found is not None
        return found.total

    assert held("rollouts", rollouts={"batch_size": 4}) < held("rollouts")
    assert held("draft", draft={"batch_size": 1}) < held("draft")
    assert held("head", head={"micro_batch_size": 2}) < held("head")
    several = stage_memory("draft", replace(setting, shards=Sharding(4, 3)))
    alone = stage_memory("draft", setting)
    assert several is not None
    assert alone is not None
    assert several.parts["weights in training"] == alone.parts["weights in training"] / 4


def test_a_target_in_parts_takes_an_nth_of_its_layers(setting: Setting) -> None:
    assert SIZES is not None
    draft = setting.config.draft
    assert draft is not None
    parts = draft.model_copy(update={"shard_teacher": True})
    config = setting.config.model_copy(update={"draft": parts})
    large = replace(setting, config=config, target=SIZES, shards=Sharding(8))
    found = stage_memory("draft", large)
    assert found is not None
    # An eighth of 32 layers, two that are gathered, and the embeddings whole.
    layers = 4 * SIZES.matrices
    rest = 4 * (SIZES.parameters - SIZES.matrices)
    assert found.parts["target"] == pytest.approx(layers / 8 + layers / 16 + rest)
    alone = stage_memory("draft", replace(large, shards=Sharding()))
    assert alone is not None
    assert alone.parts["target"] == 4 * SIZES.parameters


def test_too_little_memory_is_said_with_what_helps(setting: Setting) -> None:
    small = replace(setting, here=Machine("cuda", 1, 1e5))
    lines = list(plan_lines("rollouts", small))
    assert "that is more than a GPU here has" in lines[-1]
    assert "a smaller rollouts.batch_size" in lines[-1]
    enough = replace(setting, here=Machine("cuda", 1, 80e9))
    assert not any("more than" in line for line in plan_lines("rollouts", enough))


def test_the_remedies_are_those_that_a_stage_takes_and_the_run_has_not_taken(
    setting: Setting,
) -> None:
    def tried(stage: str, processes: int = 1, **load: object) -> str:
        loads = PairLoading(target=Loading.model_validate(load))
        models = setting.config.models.model_copy(update={"load": loads})
        config = setting.config.model_copy(update={"models": models})
        shards = replace(setting.shards, processes=processes)
        here = Machine("cuda", 1, 1.0)
        changed = replace(setting, config=config, target=SIZES, here=here, shards=shards)
        return list(plan_lines(stage, changed))[-1]

    key = "models.load.target"
    alone, several = tried("labels"), tried("labels", 2)
    assert f"{key}.device_map auto" in alone
    assert f"{key}.tp_plan auto" not in alone
    assert f"{key}.tp_plan auto" in several
    assert f"{key}.device_map" not in several
    assert "labels.cache" in alone
    assert "draft.shard_teacher true" in tried("draft", 2)
    assert "tp_plan" not in tried("draft", 2) + tried("eval", 2)
    taken = tried("labels", device_map="auto", bits=4, dtype="bfloat16")
    assert key not in taken


def test_models_that_are_not_here_have_no_known_memory(tmp_path: Path) -> None:
    config = build(values(tmp_path, Path("someone/target"), Path("someone/draft")))
    lines = list(plan_lines("labels", Setting.of(config)))
    missing = "config.json of the target and the draft is not on this machine"
    assert lines[-1] == f"memory: not known, as {missing}"
    assert not any("target" in line for line in plan_lines("head", Setting.of(config)))


def test_a_plan_takes_no_other_word_than_time(capsys: pytest.CaptureFixture[str]) -> None:
    assert train_head.RECIPE.run(["--plan", "tiem"]) == 2
    assert "--plan takes nothing, or the word time, got 'tiem'" in capsys.readouterr().err


@pytest.mark.slow
def test_a_time_is_measured_for_every_stage(
    pair: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = values(tmp_path / "out", pair / "target", pair / "draft")
    path = tmp_path / "pair.yaml"
    path.write_text(yaml.safe_dump(asked))
    assert pipeline.RECIPE.run(["--config", str(path), "--plan", "time"]) == 0
    printed = capsys.readouterr().out
    times = printed.split("\ntime\n")[1]
    for stage in ("rollouts", "draft", "labels", "head", "eval"):
        assert f"{stage}: about " in times, times
    assert not (tmp_path / "out").exists(), "nothing is made"


@pytest.mark.slow
def test_planned_memory_is_measured_memory_within_the_stated_factor(tmp_path: Path) -> None:
    """Real stages in processes of their own; Linux counts their peaks."""
    script = [sys.executable, ROOT / "benchmarks" / "stage_memory.py"]
    done = subprocess.run(
        [*script, "--out", tmp_path / "memory.json"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    report = json.loads((tmp_path / "memory.json").read_text())
    assert report["within"] == memory.WITHIN == 1.5
    assert [each["stage"] for each in report["records"]] == [
        "rollouts",
        "draft",
        "labels",
        "head",
        "eval",
    ]
    for each in report["records"]:
        ratio = each["planned_mib"] / each["peak_mib"]
        assert 1 / memory.WITHIN <= ratio <= memory.WITHIN, (each["stage"], each)
