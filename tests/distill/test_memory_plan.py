"""A plan's memory: it counts what tensors take, and divides a training's as its engine does."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
from transformers.cache_utils import DynamicCache

from recipes.command import RECIPES, environment, launch_command
from recipes.config import PipelineConfig
from recipes.memory import PROMPT, cached_numbers, held, layers_bytes, size_of, training_bytes
from tests.support.checks import own
from tests.support.families import small

SIZES = {"vocab_size": 512, "hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 4}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256}


def test_weights_and_cached_tokens_are_counted_as_tensors_take_them() -> None:
    model, cache = LlamaForCausalLM(LlamaConfig(**SIZES)), DynamicCache()
    model(torch.zeros(1, 9, dtype=torch.long), cache=cache)
    kept = sum(each.nbytes for layer in cache.layers for each in (layer.keys, layer.values))
    assert 4 * cached_numbers(model, 9, in_windows=True) == kept
    assert size_of(model, "float32") == sum(each.nbytes for each in model.parameters())


@pytest.mark.parametrize(
    "family",
    [
        *("mamba", "falcon_h1", "falcon", "gemma4_text", "gemma3n_text", "mistral", "deepseek_v3"),
        "mixtral",
    ],
)
def test_a_cache_is_counted_as_the_family_keeps_it(family: str) -> None:
    """States alone or beside, one head of all queries, wider or shared layers, latents, windows."""
    config = small(family)
    with torch.device("meta"):
        described = AutoModelForCausalLM.from_config(config).to(torch.bfloat16)
    read = AutoModelForCausalLM.from_config(config)(torch.zeros(1, 30, dtype=torch.long))
    layers = getattr(read.get("past_key_values"), "layers", ())
    kept = [getattr(layer, name, None) for layer in layers for name in ("keys", "values")]
    numbers = sum(each.numel() for each in kept if isinstance(each, Tensor))
    assert cached_numbers(described, 30, in_windows=True) == numbers


def kept_by_layers(layers: int, *, half: bool) -> int:
    """Bytes that autograd keeps of 2 x 512 tokens in a Llama, but for its weights."""
    sizes = {**SIZES, "hidden_size": 256, "intermediate_size": 704, "num_key_value_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(**{**sizes, "num_hidden_layers": layers})).model.train()
    weights = {each.untyped_storage().data_ptr() for each in model.parameters()}
    kept: dict[int, Tensor] = {}

    def keep(tensor: Tensor) -> Tensor:
        if (place := tensor.untyped_storage().data_ptr()) not in weights:
            kept[place] = tensor
        return tensor

    with (
        torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor),
        torch.autocast("cpu", torch.bfloat16, enabled=half),
    ):
        model(torch.zeros(2, 512, dtype=torch.long), use_cache=False)
    return sum(each.untyped_storage().nbytes() for each in kept.values())


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_the_rule_for_what_a_layer_keeps_is_within_a_fifth_of_it(precision: str) -> None:
    half = precision == "bfloat16"
    measured = (kept_by_layers(3, half=half) - kept_by_layers(1, half=half)) / 2
    config = LlamaConfig(hidden_size=256, intermediate_size=704, num_hidden_layers=1)
    assert 0.8 < measured / (2 * 512 * layers_bytes(config, precision)) < 1.2


def test_the_evaluations_cache_is_counted_in_windowed_layers_too(tmp_path: Path) -> None:
    """It keeps all tokens there, and transformers' cache, of rollouts, those of the window."""
    small("gemma3_text", sliding_window=8).save_pretrained(tmp_path / "target")
    models = dict.fromkeys(("target", "draft"), str(tmp_path / "target"))
    given: dict[str, Any] = {"output": str(tmp_path), "toy": None, "models": models}
    given |= {"rollouts": {"sets": [{"name": "a.jsonl", "split": "train", "count": 0}]}}
    given["eval"] = {"sets": [{"name": "a.jsonl", "split": "test", "count": 0}]}
    given["eval"]["methods"] = [{"name": "plain", "decoder": "plain"}]
    config = PipelineConfig.model_validate(given)
    text, texts = small("gemma3_text"), config.eval.batch
    cache = held("eval", config)["cache"]
    a_token = 4 * 2 * text.num_hidden_layers * text.num_key_value_heads * text.head_dim
    longest = min(PROMPT + config.rollouts.max_new_tokens, text.max_position_embeddings)
    assert cache == texts * longest * a_token


@pytest.mark.parametrize(
    ("profile", "options", "expected"),
    [
        ("multi_gpu", ["--num_processes", "1"], (1, 3)),
        ("multi_gpu", ["--num_processes", "16"], (1, 4)),  # DDP's buckets
        ("zero1", ["--num_processes", "16"], (1, 1 + 3 / 16)),
        ("zero2", ["--num_machines", "2", "--num_processes", "16"], (1, 4 / 16)),
        ("zero3", ["--num_processes", "16"], (1 / 16, 4 / 16)),
        ("zero3_offload", ["--num_processes", "16"], (0, 0)),
        ("multi_gpu", ["--config_file", "own.yaml"], (1, 1 + 3 / 4)),
    ],
)
def test_a_launch_divides_weights_gradients_and_optimizer_among_its_processes(
    profile: str,
    options: list[str],
    expected: tuple[float, float],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As `--plan` finds it in one process; DeepSpeed's optimizer has a copy of the weights."""
    monkeypatch.chdir(tmp_path)
    engine = {"distributed_type": "DEEPSPEED", "deepspeed_config": {"zero_stage": 1}}
    Path("own.yaml").write_text(json.dumps({**engine, "num_processes": 4}))
    for key, value in environment(launch_command(profile, options, "train-draft", [])).items():
        monkeypatch.setenv(key, value)
    assert training_bytes(1600, 1600, 3200) == tuple(1600 * share for share in expected)


def test_a_plan_says_which_stage_does_not_fit_and_what_to_lower(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    described = {"model_type": "llama", **SIZES}
    flags = own(tmp_path / "out", described, described)
    methods = "[{name: plain, decoder: plain}, {name: K=2}, {name: head, stop: head}]"
    flags += ["--draft={}", f"--eval.methods={methods}"]
    plan = [*flags, "--plan"]
    assert RECIPES["pipeline"].run([*plan, "--memory", "80GB"]) == 0
    shown = capsys.readouterr().out
    assert "does not fit" not in shown
    assert "GB of 80" in shown
    assert RECIPES["pipeline"].run([*plan, "--memory", "20MB"]) == 0
    said = capsys.readouterr().out
    assert "does not fit: most are logits, taps; lower batch_size" in said
    assert RECIPES["pipeline"].run([*flags, "--memory=1GB"]) == 2  # of no plan
