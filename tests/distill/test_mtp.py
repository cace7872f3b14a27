"""The heads that targets bring along are read as they are, or refused by name."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from huggingface_hub import try_to_load_from_cache
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import DeepseekV3ForCausalLM, Glm4MoeForCausalLM
from transformers.cache_utils import MtpCache
from transformers.modeling_layers import MtpModel
from transformers.models.ernie4_5_moe.modeling_ernie4_5_moe import apply_rotary_pos_emb as in_pairs
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb as in_halves

from distill.config import InitConfig
from distill.drafts.mtp import read_head, turned
from specdata.drafts.mtp import FAMILIES, Convention
from specdata.errors import ConfigError
from specdata.lm_head import hidden_states
from specdata.models import load_model
from specdata.target_heads import find_head
from tests.support.initial import make
from tests.support.target_heads import with_head

LAYERS_BEHIND = {"glm4_moe": Glm4MoeForCausalLM, "deepseek_v3": DeepseekV3ForCausalLM}
OTHERS = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", *LAYERS_BEHIND)
"""Whose heads transformers' own class reads, too."""
FEW = {"qwen3_next", "glm4_moe"}
Tensors = dict[str, torch.Tensor]


@pytest.mark.parametrize(
    "family",
    [
        "qwen3_next",
        "glm4_moe",
        *(pytest.param(each, marks=pytest.mark.exhaustive) for each in OTHERS if each not in FEW),
    ],
)
def test_logits_are_those_of_transformers_own_class(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = with_head(tmp_path / "target", family)
    if family in LAYERS_BEHIND:  # it looks for the layers of published depths alone
        names = [r"model\.layers\.2\..*"]
        monkeypatch.setattr(LAYERS_BEHIND[family], "_keys_to_ignore_on_load_unexpected", names)
    target = load_model(str(folder))
    config = target.config
    config.num_mtp_layers, config.mtp_layer_types = 1, ["full_attention"]
    other = MtpModel.from_pretrained(target).eval()
    ids = torch.tensor([[5, 9, 30, 7, 11, 3, 8]])
    states = hidden_states(target, ids)[:, :-1]
    places = torch.arange(1, ids.shape[1])[None]
    with torch.no_grad():
        cache = MtpCache(config=config.get_mtp_config())
        theirs = other.forward_layer(0, states, places, cache, input_ids=ids[:, 1:])
        expected = other._project_to_logits(theirs)
        draft = read_head(target, find_head(str(folder)), Convention())
        logits = draft(input_ids=ids, use_cache=False).logits[:, 1:]
    torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-5)


def test_only_the_head_is_stored_and_what_it_borrows_stays_the_targets(tmp_path: Path) -> None:
    folder = with_head(tmp_path / "target", "glm4_moe", dtype=torch.bfloat16)
    make(folder, tmp_path / "draft", kind="mtp")
    with safe_open(tmp_path / "draft" / "model.safetensors", framework="pt") as file:
        stored = {*file.keys()}
    assert not {name for name in stored if "tokens.weight" in name or "lm_head.weight" in name}
    head = find_head(str(folder))
    assert len(stored) == len(head.of_head)
    target = load_model(str(folder))
    draft = read_head(target, head, head.family.engines["vllm"])
    assert draft.get_input_embeddings().tokens is target.get_input_embeddings()
    assert draft.get_output_embeddings().weight is target.get_output_embeddings().weight


@pytest.mark.parametrize("engine", ["sglang", "llama.cpp"])
def test_a_head_is_fed_as_the_engine_that_is_named(tmp_path: Path, engine: str) -> None:
    folder = with_head(tmp_path / "target", "glm4_moe")
    ids = torch.arange(4, 14)[None]
    logits = []
    for each in ("vllm", engine):
        make(folder, tmp_path / each, kind="mtp", engine=each)
        draft = load_model(str(tmp_path / each), target=str(folder))
        with torch.no_grad():
            logits.append(draft(input_ids=ids, use_cache=False).logits[0, 2:])
    assert (logits[0] - logits[1]).abs().max() > 1e-3


def test_a_layer_that_turns_pairs_attends_as_one_that_turns_halves() -> None:
    heads, width, length = 2, 8, 5
    names = [f"model.layers.0.self_attn.{each}_proj.weight" for each in "qk"]
    read = {name: torch.randn(heads * width, 6, generator=torch.Generator()) for name in names}
    text = {"hidden_size": heads * width, "num_attention_heads": heads}
    convention = FAMILIES["ernie4_5_moe"].engines["vllm"]
    made = turned(read, text, convention)
    x = torch.randn(length, 6, generator=torch.Generator().manual_seed(1))
    angles = torch.arange(length)[:, None] * 0.3 ** torch.arange(width // 2)
    cos, sin = (torch.cat([each, each], -1)[None] for each in (angles.cos(), angles.sin()))

    def scores(
        weights: Tensors, rotate: Callable[..., tuple[torch.Tensor, torch.Tensor]]
    ) -> object:
        q, k = ((x @ weights[name].T).view(1, length, heads, width) for name in names)
        q, k = rotate(q.transpose(1, 2), k.transpose(1, 2), cos, sin)
        return q @ k.mT

    torch.testing.assert_close(scores(made, in_pairs), scores(read, in_halves))
    assert turned(made, text, convention, back=True).keys() == read.keys()
    for name, each in turned(made, text, convention, back=True).items():
        assert torch.equal(each, read[name])


def test_a_head_of_full_attention_beside_windows_reads_all_tokens_and_their_positions(
    tmp_path: Path,
) -> None:
    """EXAONE's other full layers know no positions; its `mtp_layer_types`, vLLM 0.32."""
    folder = with_head(tmp_path / "target", "exaone_moe", sliding_window=4)
    config, ids = json.loads((folder / "config.json").read_text()), torch.arange(4, 14)[None]
    logits = []
    for kind in ("sliding_attention", "full_attention"):
        (folder / "config.json").write_text(json.dumps({**config, "mtp_layer_types": [kind]}))
        target, head = load_model(str(folder)), find_head(str(folder))
        draft = read_head(target, head, Convention())
        attention = draft.base_model.layers[0].self_attn
        assert attention.is_sliding, "which turns queries and keys"
        with torch.no_grad():
            logits.append(draft(input_ids=ids, use_cache=False).logits[0])
    torch.testing.assert_close(logits[0][:4], logits[1][:4])
    assert (logits[0][6:] - logits[1][6:]).abs().max() > 1e-4


def _drop_head(tensors: Tensors, _config: dict[str, object]) -> Tensors:
    return {name: each for name, each in tensors.items() if not name.startswith("model.layers.2.")}


def _drop_config_too(tensors: Tensors, config: dict[str, object]) -> Tensors:
    del config["num_nextn_predict_layers"]
    return _drop_head(tensors, config)


def _ask_for_two(tensors: Tensors, config: dict[str, object]) -> Tensors:
    config["num_nextn_predict_layers"] = 2
    return tensors


def _second_layout(tensors: Tensors, _config: dict[str, object]) -> Tensors:
    return {**tensors, "mtp.fc.weight": tensors["model.layers.2.eh_proj.weight"].clone()}


def _other_shape(tensors: Tensors, _config: dict[str, object]) -> Tensors:
    name = "model.layers.2.self_attn.o_proj.weight"
    return {**tensors, name: torch.cat([tensors[name]] * 2).contiguous()}


def _quantised(tensors: Tensors, _config: dict[str, object]) -> Tensors:
    name = "model.layers.2.self_attn.o_proj.weight"
    return {**tensors, name: tensors[name].to(torch.float8_e4m3fn)}


def _less_than_none(tensors: Tensors, config: dict[str, object]) -> Tensors:
    config["num_nextn_predict_layers"] = -1
    return tensors


def _half_an_expert(tensors: Tensors, _config: dict[str, object]) -> Tensors:
    del tensors["model.layers.2.mlp.experts.0.up_proj.weight"]
    return tensors


def _own_output(tensors: Tensors, _config: dict[str, object]) -> Tensors:
    name = "model.layers.2.shared_head.head.weight"
    return {**tensors, name: tensors[name] + 1}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_own_output, "shared_head.head.weight .* must repeat the target's lm_head.weight"),
        (_drop_head, "says num_nextn_predict_layers: 1, and no tensor .* saved by transformers"),
        (_drop_config_too, "config.json has no num_nextn_predict_layers, and no tensor"),
        (_ask_for_two, "says num_nextn_predict_layers: 2, and its files hold 1"),
        (_second_layout, "another family, too"),
        (_other_shape, "does not fit its target's layers: .*o_proj.* another shape"),
        (_quantised, "o_proj.weight is F8_E4M3"),
        (_less_than_none, "says num_nextn_predict_layers: -1"),
        (_half_an_expert, "check the files of the head there"),
    ],
)
def test_what_is_no_head_of_its_target_is_refused_by_name(
    tmp_path: Path, change: Callable[[Tensors, dict[str, object]], Tensors], message: str
) -> None:
    folder = with_head(tmp_path / "target", "glm4_moe")
    config = json.loads((folder / "config.json").read_text())
    tensors = change(load_file(folder / "model.safetensors"), config)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=message):
        make(folder, tmp_path / "draft", kind="mtp")


def test_a_heads_own_embedding_is_refused_beside_the_targets_layers_too(tmp_path: Path) -> None:
    folder = with_head(tmp_path / "target", "qwen3_5_text")
    tensors, name = load_file(folder / "model.safetensors"), "mtp.embed_tokens.weight"
    (own,) = (each for each in tensors if each.endswith("embed_tokens.weight"))
    for change in (0, 1):
        copied = {**tensors, name: tensors[own] + change}
        save_file(copied, folder / "model.safetensors", metadata={"format": "pt"})
        if not change:
            assert name not in find_head(str(folder)).of_head
    with pytest.raises(ConfigError, match=rf"{name} .* must repeat the target's {own}"):
        find_head(str(folder))


def test_a_folder_is_refused_in_a_sentence_and_a_snapshot_without_weights_is_not_here_yet(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for text, message in ((None, "has none"), ("{", "is damaged")):
        if text:
            (tmp_path / "config.json").write_text(text)
        with pytest.raises(ConfigError, match=rf"config.json.*{message}"):
            find_head(str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    model = tmp_path / "models--of--one"
    (model / "snapshots" / "abc").mkdir(parents=True)
    (model / "snapshots" / "abc" / "config.json").write_text("{}")
    (model / "refs").mkdir()
    (model / "refs" / "main").write_text("abc")
    assert try_to_load_from_cache("of/one", "config.json", cache_dir=tmp_path)
    with pytest.raises(ConfigError, match=r"of/one must be on this machine .* hf download of/one"):
        find_head("of/one")


def test_adapters_and_a_folder_without_weights_are_refused_with_what_to_do(tmp_path: Path) -> None:
    folder = with_head(tmp_path / "target", "qwen3_next")
    adapters = {"base_model_name_or_path": str(folder), "peft_type": "LORA"}
    (tmp_path / "adapter_config.json").write_text(json.dumps(adapters))
    with pytest.raises(ConfigError, match="merge them, and write the head into"):
        find_head(str(tmp_path))
    (folder / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match="holds no weights"):
        find_head(str(folder))


def test_a_head_that_two_files_hold_is_refused(tmp_path: Path) -> None:
    folder = with_head(tmp_path / "target", "qwen3_next")
    whole = load_file(folder / "model.safetensors")
    again = {name: each + 1 for name, each in whole.items() if name.startswith("mtp.")}
    save_file(again, folder / "mtp.safetensors")
    with pytest.raises(ConfigError, match=r"both hold mtp\."):
        find_head(str(folder))


def test_layers_are_the_heads_own_or_refused_by_name() -> None:
    init = InitConfig(kind="mtp")
    assert init.layers == 1
    assert InitConfig(**init.model_dump()) == init
    with pytest.raises(ValueError, match="kind mtp needs layers: 1, got 2"):
        InitConfig(kind="mtp", layers=2)


def test_each_engine_of_the_table_can_be_asked_for() -> None:
    assert {engine for each in FAMILIES.values() for engine in each.engines} <= {
        *InitConfig.model_fields["engine"].annotation.__args__  # type: ignore[union-attr]
    }
