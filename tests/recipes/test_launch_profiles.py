"""Launch profiles: accelerate and DeepSpeed know every key, and each changes what is started."""

import json
import os
from functools import partial
from pathlib import Path
from typing import Any

import accelerate.commands.launch as accelerate_launch
import accelerate.utils.launch as launch_utils
import psutil
import pytest
import torch.distributed.run as torchrun
from accelerate.utils import DeepSpeedPlugin, patch_environment
from accelerate.utils.launch import _filter_args

from recipes.command import LAUNCH, RECIPES, environment, launch_command
from specdata.errors import ConfigError
from specdata.processes import check_launcher
from tests.support.checks import own

STAGES = {"zero1": 1, "zero2": 2, "zero3": 3, "zero3_offload": 3}
NAMES = ["cpu", "cpu-2", "multi_gpu", "multi_node", "single_gpu", *STAGES]
TWO_MACHINES = ["--num_machines", "2", "--main_process_ip", "10.0.0.1", "--main_process_port", "1"]
found: list[dict[str, Any]] = []


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine of 16 cores whose ports are free, and no settings of a launcher."""
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(psutil, "cpu_count", lambda logical=True: 16)
    monkeypatch.setattr(launch_utils, "get_free_port", lambda: 0)
    monkeypatch.setattr(launch_utils, "is_port_in_use", lambda port=None: False)
    for name in ("simple_launcher", "multi_gpu_launcher", "deepspeed_launcher"):
        monkeypatch.setattr(accelerate_launch, name, partial(started, name))


def started(launcher: str, arguments: Any) -> None:
    """Keep what a launcher of accelerate starts: environment, command, torchrun's arguments."""
    command: Any = None
    if launcher == "simple_launcher":
        command, environment = launch_utils.prepare_simple_launcher_cmd_env(arguments)
    elif launcher == "deepspeed_launcher":
        command, environment = launch_utils.prepare_deepspeed_cmd_env(arguments)
    else:
        environment = launch_utils.prepare_multi_gpu_env(arguments)
    here = {key: value for key, value in environment.items() if os.environ.get(key) != value}
    words = ["--training_script", arguments.training_script]
    own = vars(_filter_args(arguments, torchrun.get_args_parser(), words))
    found.append({"launcher": launcher, "environment": here, "torchrun": own, "command": command})


def launched(profile: Path, *options: str) -> dict[str, Any]:
    words = ["--config_file", str(profile), *options, "--module", "recipes.train_head"]
    accelerate_launch.launch_command(accelerate_launch.launch_command_parser().parse_args(words))
    return found.pop()


MULTI, ZERO = "multi_gpu_launcher", "deepspeed_launcher"
FILE = "ACCELERATE_DEEPSPEED_CONFIG_FILE"
SAYS: dict[str, tuple[str, dict[str, str]]] = {
    "cpu": ("simple_launcher", {"ACCELERATE_USE_CPU": "True", "CUDA_VISIBLE_DEVICES": "-1"}),
    "single_gpu": ("simple_launcher", {"ACCELERATE_USE_CPU": "False"}),
    "cpu-2": (MULTI, {"CUDA_VISIBLE_DEVICES": "-1,-1", "OMP_NUM_THREADS": "8"}),
    "multi_gpu": (MULTI, {"ACCELERATE_MIXED_PRECISION": "no"}),
    "multi_node": (MULTI, {"ACCELERATE_MIXED_PRECISION": "no"}),
    **{name: (ZERO, {FILE: f"launch/{name}.json"}) for name in STAGES},
}


@pytest.mark.parametrize("name", NAMES)
def test_a_profile_starts_what_its_name_says(name: str) -> None:
    launcher, environment = SAYS[name]
    start = launched(LAUNCH / f"{name}.yaml")
    assert start["launcher"] == launcher
    assert environment.items() <= start["environment"].items()
    if launcher != "simple_launcher":
        processes = start["torchrun"]["nproc_per_node"], start["torchrun"]["nnodes"]
        assert processes == (("1", "2") if name == "multi_node" else ("2", "1:1"))
    two = launched(LAUNCH / f"{name}.yaml", *TWO_MACHINES, "--machine_rank", "1")
    if launcher != "simple_launcher":  # one torchrun on each machine, no ssh
        assert two["command"] is None
        assert two["torchrun"]["node_rank"] == 1
        assert two["torchrun"]["rdzv_endpoint"] == "10.0.0.1:1"


@pytest.mark.parametrize("name", STAGES)
def test_accelerate_takes_the_file_of_deepspeed_with_the_profile(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It refuses a setting of the profile that the file has, or overrules."""
    config = json.loads((LAUNCH / f"{name}.json").read_text())
    zero = config["zero_optimization"]
    assert STAGES[name] == 3 or not any(key.startswith("stage3") for key in zero)
    monkeypatch.chdir(LAUNCH.parent)
    with patch_environment(**launched(LAUNCH / f"{name}.yaml")["environment"]):
        plugin = DeepSpeedPlugin()
    assert plugin.zero_stage == STAGES[name]
    assert plugin.zero3_init_flag is False
    assert plugin.hf_ds_config.is_offload() == (name == "zero3_offload")
    assert {**plugin.deepspeed_config, **config} == plugin.deepspeed_config, "nothing is replaced"


AUTO_BATCH = {"gradient_accumulation_steps": "auto", "gradient_clipping": "auto"}
CONTRADICTIONS: dict[str, tuple[dict[str, Any], str]] = {
    "FSDP": ({"ACCELERATE_USE_FSDP": "true"}, "nothing is trained under FSDP here"),
    "compiled": ({"ACCELERATE_DYNAMO_BACKEND": "INDUCTOR"}, "dynamo_backend INDUCTOR"),
    "precision": ({"ACCELERATE_MIXED_PRECISION": "bf16"}, "is bf16, .*draft.precision.*to 'no'"),
    "YAML": ({"ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "1"}, "steps: 1, .* write auto"),
    "scheduler": ({FILE: {"scheduler": {"type": "WarmupLR"}}}, "scheduler.type.*remove scheduler"),
    "optimizer": ({FILE: {"optimizer": {"params": {"lr": 1}}}}, "optimizer.params.lr: 1, "),
    "bf16": ({FILE: {"bf16": {"enabled": True}}}, "bf16.enabled: True, .*draft.precision"),
    "autocast": ({FILE: {"torch_autocast": {"enabled": True}}}, "draft.precision.: remove torch_a"),
    "batch": ({FILE: {"train_batch_size": 8}}, "train_batch_size: 8, .* write auto"),
    "several": (
        {FILE: {"scheduler": {"type": "WarmupLR"}, "train_batch_size": 8}},
        "type: WarmupLR, .*remove scheduler; and train_batch_size: 8, .*write auto",
    ),
    "no steps": ({FILE: {}}, "steps: 1 .accelerate.s.* write auto"),
}


@pytest.mark.parametrize("case", CONTRADICTIONS)
def test_launcher_settings_that_contradict_the_recipe_are_refused_by_key(
    case: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    environment, words = CONTRADICTIONS[case]
    monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "true")
    for name, value in environment.items():
        if name == FILE:
            (tmp_path / "zero.json").write_text(json.dumps(value and AUTO_BATCH | value))
        monkeypatch.setenv(name, str(tmp_path / "zero.json") if name == FILE else value)
    with pytest.raises(ConfigError, match=words):
        check_launcher()


def test_what_the_recipe_leaves_open_is_taken(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(LAUNCH.parent)
    for name in NAMES:
        with patch_environment(**launched(LAUNCH / f"{name}.yaml")["environment"]):
            check_launcher()
    more = {"bf16": {"enabled": False}, "wall_clock_breakdown": True}
    more |= {"zero_optimization": {"stage": 2, "reduce_bucket_size": "auto"}}
    (tmp_path / "zero.json").write_text(json.dumps(AUTO_BATCH | more))
    with patch_environment(**{"ACCELERATE_USE_DEEPSPEED": "true", FILE: tmp_path / "zero.json"}):
        check_launcher()


@pytest.mark.parametrize(
    ("profile", "setting", "remedy"),
    [("zero1", "optimizer: muon", "optimizer: adamw"), ("zero3", "on_policy: 0.5", "on_policy: 0")],
)
def test_a_plan_refuses_a_training_that_the_launchers_engine_divides(
    profile: str, setting: str, remedy: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """And takes what the refusal advises, as nothing was made; without DeepSpeed it takes all."""
    described = {"model_type": "llama", "vocab_size": 512, "num_hidden_layers": 2}
    plan = [*own(tmp_path / "out", described, described), "--head=null", "--plan"]
    plan += ["--eval.methods=[{name: plain, decoder: plain}, {name: K=2}]"]
    for name, given, status in ((profile, setting, 2), (profile, remedy, 0), ("cpu", setting, 0)):
        with patch_environment(
            **environment(launch_command(name, ["--num_processes", "1"], "pipeline", []))
        ):
            assert RECIPES["pipeline"].run([*plan, f"--draft={{{given}}}"]) == status
        if status:
            assert f"draft.{given.partition(':')[0]}" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
