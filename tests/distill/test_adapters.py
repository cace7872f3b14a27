"""Drafts with adapters: what is trained, stored and merged, and adapters that do not fit."""

import copy
import json
import re
import shutil
from pathlib import Path

import peft
import pytest
import torch
from huggingface_hub import constants
from safetensors.torch import load_file, save_file
from torch import Tensor

from distill.adapters import (
    base_of,
    load_student,
    merged,
    set_weights,
    trained_weights,
    with_adapters,
)
from distill.config import DistilConfig, LoraConfig
from recipes.models import model_config
from specdata.errors import ConfigError
from specdata.lm_head import find_lm_head
from specdata.models import load_configs, load_model, load_tokenizer
from specdata.sources import NOT_MERGED, contents
from tests.support.families import build
from tests.support.random_pair import texts_of
from tests.support.tiny import tiny_gemma3, tiny_llama
from tests.support.trainings import distilled, trainer_of, weights_of

LORA = LoraConfig(rank=4)
QUICK = DistilConfig(epochs=4, learning_rate=2e-2, save_steps=4, lora=LORA, report_to=[])
IDS = torch.arange(12).unsqueeze(0)


def randomly_adapted(model_folder: Path, folder: Path) -> Tensor:
    """Save random adapters of a model; return the logits of the model with them."""
    adapted = load_student(str(model_folder), LORA, seed=0)
    torch.manual_seed(0)
    for name, parameter in adapted.named_parameters():
        if ".lora_" in name:
            torch.nn.init.normal_(parameter, std=0.2)
    adapted.save_pretrained(folder)
    with torch.no_grad():
        logits: Tensor = adapted.eval()(input_ids=IDS).logits
    return logits


def test_adapters_sit_in_every_linear_layer_but_the_output_embedding_and_alone_are_trained(
    pair: Path,
) -> None:
    student = load_student(str(pair / "draft"), LORA, seed=0)
    linear = {
        name
        for name, module in load_model(str(pair / "draft")).named_modules()
        if isinstance(module, torch.nn.Linear) and name != "lm_head"
    }
    trained = [name for name, parameter in student.named_parameters() if parameter.requires_grad]
    assert {name.removeprefix("base_model.model.").split(".lora_")[0] for name in trained} == linear
    assert len(trained) == 2 * len(linear) == 14
    assert all(".lora_" in name for name in trained)


@pytest.mark.filterwarnings("ignore:The following .*_pattern:RuntimeWarning")  # PEFT's, of MoE
@pytest.mark.parametrize(
    "family",
    [
        *("falcon", "mamba", "jamba", "longcat_flash", "llama4_text", "deepseek_v32", "bart"),
        "phi4_multimodal",
    ],
)
def test_every_adapter_gets_a_gradient_and_is_in_the_merged_model(family: str) -> None:
    reader = {"hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 2}
    sizes: dict[str, dict[str, object]] = {
        "longcat_flash": {"zero_expert_num": 2},
        "phi4_multimodal": {
            "vision_config": {**reader, "num_hidden_layers": 2},
            "audio_config": {**reader, "num_blocks": 1},
        },
    }
    student = with_adapters(build(family, layers=2, **sizes.get(family, {})), LORA, seed=0).train()
    trained = {name: each for name, each in student.named_parameters() if each.requires_grad}
    for name, weight in trained.items():
        if ".lora_B" in name:
            torch.nn.init.normal_(weight, std=0.1)
    ids = torch.arange(3, 63).reshape(2, 30)  # every expert has some
    student(input_ids=ids).logits.log_softmax(-1)[..., 5].sum().backward()
    assert trained
    assert not [name for name, each in trained.items() if each.grad is None]
    with torch.no_grad():
        expected = student.eval()(input_ids=ids, use_cache=False).logits
        logits = merged(student)(input_ids=ids, use_cache=False).logits
    torch.testing.assert_close(logits, expected, rtol=1e-3, atol=1e-3)


def test_adapters_start_as_no_change_from_the_seed_alone(pair: Path) -> None:
    torch.manual_seed(1)
    before = torch.random.get_rng_state()
    one = load_student(str(pair / "draft"), LORA, seed=0)
    assert torch.equal(torch.random.get_rng_state(), before)
    torch.manual_seed(2)
    same, other = (load_student(str(pair / "draft"), LORA, seed=seed) for seed in (0, 1))
    name = "base_model.model.model.layers.0.mlp.up_proj.lora_A.default.weight"
    assert torch.equal(one.state_dict()[name], same.state_dict()[name])
    assert not torch.equal(one.state_dict()[name], other.state_dict()[name])
    with torch.no_grad():
        expected = load_model(str(pair / "draft"))(input_ids=IDS).logits
        assert torch.equal(one.eval()(input_ids=IDS).logits, expected)


@pytest.mark.smoke
def test_the_saved_draft_is_an_ordinary_folder_with_the_distribution_of_the_trained_adapters(
    pair: Path, tmp_path: Path
) -> None:
    student = load_student(str(pair / "draft"), LORA, seed=0)
    plain = copy.deepcopy(student).eval()
    rows = texts_of(pair, 16, seed=1)
    trainer = trainer_of(pair / "target", student, rows, tmp_path / "work", QUICK)
    trainer.train()
    student = trainer.model.draft.eval()
    assert find_lm_head(base_of(student)).embedding is not None
    trained = trained_weights(trainer)
    assert all(".lora_" in name for name in trained)
    for _ in range(2):  # as measurements while training do
        set_weights(plain, trained)
    result = distilled(pair, tmp_path / "draft", QUICK, rows=16)
    with torch.no_grad():
        expected = student(input_ids=IDS).logits
        start = load_model(str(pair / "draft"))(input_ids=IDS).logits
        assert (expected - start).abs().max() > 0.1
        assert torch.equal(base_of(plain)(input_ids=IDS).logits, expected)
        for model in (merged(plain), load_model(str(tmp_path / "draft"))):
            torch.testing.assert_close(model(input_ids=IDS).logits, expected)
    assert result.acceptance_after > result.acceptance_before
    assert weights_of(tmp_path / "draft").keys() == weights_of(pair / "draft").keys()
    files = {path.name for path in (tmp_path / "draft").iterdir()}
    assert files >= {path.name for path in (pair / "draft").iterdir()}
    assert not [name for name in files if "adapter" in name]
    settings = [folder / "draft" / "config.json" for folder in (tmp_path, pair)]
    assert json.loads(settings[0].read_text()) == json.loads(settings[1].read_text())


# --- adapters as a draft


def test_a_folder_of_adapters_is_loaded_merged_with_its_base(pair: Path, tmp_path: Path) -> None:
    expected = randomly_adapted(pair / "draft", tmp_path / "adapters")
    model = load_model(str(tmp_path / "adapters"))
    assert model.name_or_path == model.config.name_or_path == str(tmp_path / "adapters")
    assert type(model) is type(load_model(str(pair / "draft")))
    assert model.state_dict().keys() == load_model(str(pair / "draft")).state_dict().keys()
    with torch.no_grad():
        torch.testing.assert_close(model(input_ids=IDS).logits, expected, rtol=1e-4, atol=1e-5)
    tokenizers = [load_tokenizer(str(path)) for path in (tmp_path / "adapters", pair / "draft")]
    assert tokenizers[0].get_vocab() == tokenizers[1].get_vocab()
    assert load_configs(str(tmp_path / "adapters"))[0].hidden_size == 16


@torch.no_grad()
def test_adapters_beside_whole_weights_are_refused_and_beside_a_config_alone_merged(
    pair: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = randomly_adapted(pair / "draft", tmp_path)
    load_model(str(tmp_path)).save_pretrained(tmp_path)  # merged in place
    for load in (load_model, load_configs, model_config):
        with pytest.raises(ConfigError, match=r"whole weights \(model\.safetensors\), and nothing"):
            load(str(tmp_path))
    hub = tmp_path.with_name("hub")  # where transformers loads what the adapters name
    snapshot = hub / "models--me--merged" / "snapshots" / ("a" * 40)
    shutil.copytree(tmp_path, snapshot)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(hub))
    with pytest.raises(ConfigError, match="holds adapters beside whole weights"):
        load_model(f"me/merged@{snapshot.name}")
    (tmp_path / "model.safetensors").unlink()
    logits = load_model(str(tmp_path))(input_ids=IDS).logits
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-5)


@torch.no_grad()
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is:FutureWarning")
@pytest.mark.parametrize("is_former", [False, True])
def test_adapters_of_a_wrapper_are_merged_into_its_language_model_and_others_said(
    is_former: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    wrapper = tiny_gemma3(tmp_path / "base")
    settings = peft.LoraConfig(target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    adapted, folder = peft.get_peft_model(wrapper, settings).eval(), tmp_path / "adapters"
    adapted.save_pretrained(folder)
    if is_former:  # as transformers 4.51 named them
        names = {"model.model.language_model.": "model.language_model.model."}
        names |= {"model.model.vision_tower.": "model.vision_tower."}
        held = load_file(folder / "adapter_model.safetensors")
        for new, old in names.items():
            held = {key.replace(new, old): each for key, each in held.items()}
        save_file(held, folder / "adapter_model.safetensors")
    model = load_model(str(folder))
    torch.testing.assert_close(model(input_ids=IDS).logits, adapted(input_ids=IDS).logits)
    assert re.search(r"4 tensors of its adapters are left out.*first: .*vision_tower", caplog.text)


def renamed(adapters: Path, base: object) -> None:
    path = adapters / "adapter_config.json"
    changed = {**json.loads(path.read_text()), "base_model_name_or_path": base}
    path.write_text(json.dumps(changed))


def test_adapters_that_do_not_fit_their_base_are_refused_with_both_names(
    pair: Path, tmp_path: Path
) -> None:
    """PEFT would leave out what it does not find and say nothing."""
    adapters = tmp_path / "adapters"
    randomly_adapted(pair / "target", adapters)
    both = f"adapters in {adapters} do not fit their base, {pair / 'draft'}: "
    renamed(adapters, str(pair / "draft"))
    with pytest.raises(ConfigError, match=both):  # it has one layer, and another width
        distilled(pair, tmp_path / "draft", QUICK, draft=adapters)
    assert not (tmp_path / "draft").exists()
    shorter = load_model(str(pair / "target"))
    shorter.model.layers = shorter.model.layers[:1]
    shorter.config.num_hidden_layers = 1
    shorter.save_pretrained(tmp_path / "shorter")
    renamed(adapters, str(tmp_path / "shorter"))
    with pytest.raises(ConfigError, match=r"names are in one alone \(first: .*layers\.1\..*adapt"):
        load_model(str(adapters))
    gone = tmp_path / "gone"
    renamed(adapters, str(gone))
    for load in (load_model, load_tokenizer, load_configs):
        with pytest.raises(ConfigError, match=f"{adapters} holds adapters of {gone}, and that "):
            load(str(adapters))
    renamed(adapters, None)
    with pytest.raises(ConfigError, match="names no base model"):
        load_model(str(adapters))


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is:FutureWarning")
@pytest.mark.filterwarnings("ignore:.*(embedding layer|tie_word_embeddings|tied_target)")
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(
    "modules", [["embed_tokens"], ["lm_head"], ["embed_tokens", "lm_head"], []]
)
def test_adapters_of_embeddings_are_merged_into_the_matrices_that_lie_beside_them(
    modules: list[str], tied: bool, tmp_path: Path
) -> None:
    base = tiny_llama(0, vocab=40).float()
    base.config.tie_word_embeddings = tied
    base.tie_weights()
    base.save_pretrained(tmp_path / "base")
    settings = peft.LoraConfig(target_modules=["q_proj", *modules], init_lora_weights=False)
    adapted = peft.get_peft_model(load_model(str(tmp_path / "base")), settings)
    if not modules:  # trained without adapters, and saved because that is asked for
        adapted.get_input_embeddings().weight.data.mul_(1.5)
    adapted.save_pretrained(tmp_path / "adapters", save_embedding_layers=modules or True)
    model = load_model(str(tmp_path / "adapters"))
    model.save_pretrained(tmp_path / "merged")
    assert model.config.tie_word_embeddings == (tied and not modules)
    with torch.no_grad():
        expected = adapted.eval()(input_ids=IDS).logits
        for each in (model, load_model(str(tmp_path / "merged"))):
            torch.testing.assert_close(each(input_ids=IDS).logits, expected)


KINDS = peft.PEFT_TYPE_TO_CONFIG_MAPPING.items()
PROMPTS = {name.value for name, kind in KINDS if issubclass(kind, peft.PromptLearningConfig)}
CANNOT: list[dict[str, object]] = [{"peft_type": kind} for kind in sorted({*NOT_MERGED, *PROMPTS})]
CANNOT += [{"alora_invocation_tokens": [3]}, {"layer_replication": [[0, 1], [0, 1]]}]


@pytest.mark.parametrize("settings", CANNOT, ids=lambda value: str(*value.values()))
def test_adapters_that_cannot_be_merged_are_refused_by_name(
    settings: dict[str, object], tmp_path: Path
) -> None:
    made = {"base_model_name_or_path": "me/base", "peft_type": "LORA"} | settings
    (tmp_path / "adapter_config.json").write_text(json.dumps(made))
    for load in (load_model, load_tokenizer, load_configs, model_config):  # a plan asks the last
        with pytest.raises(ConfigError, match="of me/base that cannot be merged") as refusal:
            load(str(tmp_path))
        found = settings.get("peft_type") or next(iter(settings))
        assert f"({found} in adapter_config.json)" in str(refusal.value)


def test_adapters_are_others_where_their_base_changed(tmp_path: Path) -> None:
    for name in ("base", "adapters"):
        (tmp_path / name).mkdir()
    settings = {"base_model_name_or_path": str(tmp_path / "base")}
    (tmp_path / "adapters" / "adapter_config.json").write_text(json.dumps(settings))
    before = contents(str(tmp_path / "adapters"))
    (tmp_path / "base" / "generation_config.json").write_text("{}")
    assert contents(str(tmp_path / "adapters")) != before
