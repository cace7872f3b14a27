"""A plan's memory: shapes take what tensors do, engines divide it, devices are compared."""

from __future__ import annotations

import copy
import json
from functools import partial
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from distill.batches import collate
from distill.config import DistilConfig
from distill.distillation import Distillation
from distill.initial import new_draft
from distill.teacher import TargetTeacher
from recipes.command import RECIPES, environment, launch_command
from recipes.memory import BUCKET, LIVE, Engine, prepare, step_bytes, trained_weights
from specdata.memory import of_shapes
from specdata.sampling import SamplingConfig
from tests.support.checks import own
from tests.support.families import small

SIZES = {"vocab_size": 512, "hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 4}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256}
LAYOUTS = {
    "plain": {"kind": "target", "layers": 2},
    "states": {"kind": "states", "layers": 1},
    "eagle3": {"kind": "states", "layers": 1, "layout": "eagle3"},
    "dspark": {"kind": "states", "layers": 2, "layout": "dspark"},
}


@pytest.mark.parametrize(
    "layout",
    ["plain", *(pytest.param(name, marks=pytest.mark.exhaustive) for name in (*LAYOUTS,)[1:])],
)
def test_a_step_of_shapes_takes_the_bytes_of_the_same_step_of_tensors(layout: str) -> None:
    config = DistilConfig(init=LAYOUTS[layout])

    def bytes_of(shapes: bool) -> int:
        torch.manual_seed(0)
        target = LlamaForCausalLM(LlamaConfig(**SIZES)).eval()
        draft = copy.deepcopy(new_draft(target, config.init))
        for weight in draft.parameters():  # some were never drawn, and no number may be a NaN
            torch.nn.init.normal_(weight, std=0.1)
        for each in (draft, target) if shapes else ():
            of_shapes(each, torch.float32)
        prepare(draft, config, target)
        teacher = TargetTeacher(target, warp=SamplingConfig())
        batch = collate(0)([{"prompt_ids": [0] * 16, "completion_ids": [0] * 48}] * 4)
        objective = partial(Distillation, draft, teacher, config)
        return step_bytes(objective, batch, draft, target, keeps_gradients=True)

    assert bytes_of(shapes=True) == pytest.approx(bytes_of(shapes=False), rel=0.02)


@pytest.mark.parametrize("processes", [1, 8, 16])
def test_zero_divides_what_deepspeed_says_it_does(processes: int) -> None:
    from deepspeed.runtime.zero import stage3, stage_1_and_2

    count = 1_600_000
    size = 4 * count
    two = Engine(processes, 2).memory(size, size, 2 * size, 0)
    _, theirs = stage_1_and_2.estimate_zero2_model_states_mem_needs(
        count, processes, cpu_offload=False
    )
    # Theirs has weights and gradients of 16 bits beside those of 32; ours are all of 32.
    assert two.total - BUCKET - 4 * count == theirs - 2 * count - 2 * count // processes
    three = Engine(processes, 3).memory(size, size, 2 * size, 0)
    _, theirs, _ = stage3.estimate_zero3_model_states_mem_needs(
        count, 1000, processes, cpu_offload=False, cpu_offload_params=False
    )
    assert three.total - BUCKET - size == theirs - 4000 + 2 * count // processes
    offloaded = Engine(processes, 3, frozenset(("param", "optimizer")))
    assert offloaded.memory(size, size, 2 * size, 0).total == size + BUCKET
    assert offloaded.memory(2 * LIVE, size, 2 * size, 0).total == LIVE + BUCKET
    assert Engine(1).memory(size, size, 2 * size, 0).total == 16 * count
    assert Engine(2).memory(size, size, 2 * size, 0).total == 20 * count  # DDP's buckets


def test_muon_keeps_one_moment_of_a_matrix() -> None:
    draft = LlamaForCausalLM(LlamaConfig(**SIZES))
    weights, adam = trained_weights(draft, DistilConfig())
    _, moments = trained_weights(draft, DistilConfig(optimizer="muon"))
    matrices = [each for each in draft.model.layers.parameters() if each.ndim == 2]
    assert adam == 2 * weights
    assert adam - moments == sum(each.nbytes for each in matrices)


def test_a_plan_says_which_stage_does_not_fit_and_what_to_lower(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    described = {"model_type": "llama", **SIZES}
    flags = own(tmp_path / "out", described, described)
    methods = "[{name: plain, decoder: plain}, {name: K=2, length: 2}]"
    flags += ["--draft={}", "--head=null", f"--eval.methods={methods}"]
    plan = [*flags, "--plan"]
    assert RECIPES["pipeline"].run([*plan, "--memory", "80GB"]) == 0
    shown = capsys.readouterr().out
    assert "does not fit" not in shown
    assert "GB of 80" in shown
    assert RECIPES["pipeline"].run([*plan, "--memory", "20MB"]) == 0
    assert "does not fit: most are activations; lower draft.batch_size" in capsys.readouterr().out
    absent = [*plan, "--memory", "80GB", "--models.target", "nobody/nothing"]
    assert RECIPES["pipeline"].run(absent) == 0
    assert "no config.json of nobody/nothing is on this machine" in capsys.readouterr().out
    for more, said in (
        (["--plan", "--memory", "much"], "such as 80GB"),
        (["--memory=1GB"], "both"),
    ):
        assert RECIPES["pipeline"].run([*flags, *more]) == 2
        assert said in capsys.readouterr().err


def test_a_plan_says_of_which_stages_shapes_are_not_enough_to_know_the_memory(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As of experts, of which the numbers decide how many tokens each reads."""
    described = small("dbrx").to_dict()
    flags = own(tmp_path / "out", described, described)
    flags += ["--draft=null", "--head=null", "--eval.methods=[{name: plain, decoder: plain}]"]
    assert RECIPES["pipeline"].run([*flags, "--plan", "--memory", "80GB"]) == 0
    shown, errors = capsys.readouterr()
    assert "\neval        is not known: shapes are not enough" in shown
    assert "Traceback" not in errors


def test_a_launch_is_planned_in_one_process_as_its_first_would_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nodes = ["--num_machines", "2", "--num_processes", "16", "--machine_rank", "0"]
    (tmp_path / "own.yaml").write_text(
        "{distributed_type: DEEPSPEED, deepspeed_config: {zero_stage: 1}, num_processes: 4}"
    )
    own_file = ["--config_file", str(tmp_path / "own.yaml")]
    for profile, options, name in (
        ("zero3", nodes, "16 processes, ZeRO-3"),
        ("multi_node", nodes, "16 processes, DDP"),
        ("multi_gpu", own_file, "4 processes, ZeRO-1"),
    ):
        command = launch_command(profile, options, "train-draft", [])
        for key, value in environment(command).items():
            monkeypatch.setenv(key, value)
        assert Engine.of_launcher().name == name


def test_a_file_of_deepspeeds_says_what_is_offloaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "own.json"
    monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "true")
    monkeypatch.setenv("ACCELERATE_DEEPSPEED_CONFIG_FILE", str(file))
    for param, optimizer, offloads in (
        (None, {"device": "none"}, set()),
        (None, {"device": "cpu"}, {"optimizer"}),
        ({"device": "nvme"}, {"device": "cpu"}, {"param", "optimizer"}),
    ):
        parts = {"offload_param": param, "offload_optimizer": optimizer}
        file.write_text(json.dumps({"zero_optimization": {"stage": 3, **parts}}))
        assert Engine.of_launcher().offloads == offloads
