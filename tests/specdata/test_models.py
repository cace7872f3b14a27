"""Models: what does not fit is refused, code of their own, too; others read what is saved."""

import ast
import io
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import constants
from safetensors.torch import load_file, save_file
from tokenizers import Regex, Tokenizer, pre_tokenizers
from tokenizers.models import BPE
from torch import Tensor
from transformers import (
    AutoConfig,
    GPT2Config,
    GPTNeoXConfig,
    LlamaConfig,
    PhiConfig,
    PreTrainedConfig,
    Qwen2Config,
)

from distill.toy import END_TOKEN, save_tokenizer, train_tokenizer
from distill.training import save_model
from eval.publishing.release import _load_whole
from specdata.errors import ConfigError
from specdata.loading import contradictions, reach
from specdata.models import (
    check_length,
    end_ids,
    load_configs,
    load_model,
    load_tokenizer,
    positions,
    revision_of,
)
from specdata.sampling import early_end_words
from specdata.saving import add_former_names, copy_tokenizer
from tests.support.chats import chat_tokenizer
from tests.support.models import LLAMA3
from tests.support.tiny import tiny_gemma3, tiny_llama

COMMIT = "c" * 40
TEXT = "  A short text,\nnothing more: 0123 naïve 漢字"


def save_target(folder: Path, *, of_kind: str | None = "PreTrainedTokenizerFast") -> None:
    """A model's folder as a Hub repository may have it: hand-written files, CRLF, other files."""
    LlamaConfig(vocab_size=300).save_pretrained(folder)
    save_tokenizer(train_tokenizer([TEXT] * 4, vocab_size=280), folder)
    settings = {"tokenizer_class": of_kind} if of_kind else {}
    settings |= {"eos_token": END_TOKEN, "a_key_of_another_version": [1, 2]}
    (folder / "tokenizer_config.json").write_bytes(
        json.dumps(settings, indent=7).replace("\n", "\r\n").encode()
    )
    (folder / "special_tokens_map.json").write_text(f'{{"eos_token":   "{END_TOKEN}"}}')
    (folder / "chat_template.jinja").write_text("{{ messages[0].content }}\n\n")
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tools.jinja").write_text("{{ tools }}")
    (folder / "tokenizer.model").write_bytes(bytes(range(256)))
    for other in ("README.md", "tokenization_mine.py", "model.safetensors"):
        (folder / other).write_text("not of the tokenizer")


@pytest.mark.parametrize(("token", "ids"), [("[INST]", 2), ("other", 1)])
def test_mistrals_published_tokenizers_split_numbers_as_its_models_learned(
    token: str, ids: int, tmp_path: Path
) -> None:
    """Of those of that size transformers only warns."""
    words = ["1", "2", "12", token, *(f"t{number}" for number in range(100_000))]
    tokenizer = Tokenizer(BPE({word: n for n, word in enumerate(words)}, [("1", "2")]))
    bytes_of_each = pre_tokenizers.ByteLevel(False, use_regex=False)
    split = pre_tokenizers.Split(Regex(r"\p{N}{1,3}|[^\p{N}]+"), "isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, bytes_of_each])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    config = {"model_type": "mistral", "transformers_version": "4.50.0"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert len(load_tokenizer(str(tmp_path))("12")["input_ids"]) == ids


def test_an_end_token_that_the_tokenizer_alone_names_is_said() -> None:
    tokenizer = chat_tokenizer("chatml")
    end = tokenizer.eos_token_id
    assert not early_end_words(tokenizer, {end})
    assert f"ends texts with {tokenizer.eos_token} ({end})" in early_end_words(tokenizer, {end + 1})


COPIED = {
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "additional_chat_templates/tools.jinja",
    "tokenizer.model",
}


def files(folder: Path) -> dict[str, bytes]:
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


def test_tokenizer_files_alone_are_copied_byte_for_byte_of_a_hub_model_from_its_snapshot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    repository = tmp_path / "models--acme--tiny"
    save_target(snapshot := repository / "snapshots" / COMMIT)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(COMMIT)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    expected = files(snapshot)
    for number, name in enumerate((str(snapshot), "acme/tiny", f"acme/tiny@{COMMIT}")):
        LlamaConfig(vocab_size=280).save_pretrained(draft := tmp_path / f"{number}")
        before = files(draft)
        copy_tokenizer(name, draft)
        assert files(draft) == before | {name: expected[name] for name in COPIED}
    with pytest.raises(ConfigError, match="acme/absent"):
        copy_tokenizer("acme/absent", draft)


def test_a_tokenizer_whose_kind_follows_from_its_model_stays_that_kind(tmp_path: Path) -> None:
    target = tmp_path / "target"
    save_target(target, of_kind=None)
    Qwen2Config(vocab_size=300).save_pretrained(target)
    LlamaConfig(vocab_size=280).save_pretrained(draft := tmp_path / "draft")
    copy_tokenizer(str(target), draft)
    ours, theirs = load_tokenizer(str(draft)), load_tokenizer(str(target))
    assert type(ours) is type(theirs)
    assert ours(TEXT)["input_ids"] == theirs(TEXT)["input_ids"]


NEOX = {"rope_type": "default", "rope_theta": 20_000.0, "partial_rotary_factor": 0.5}


@pytest.mark.parametrize(
    ("config", "former"),
    [
        (
            LlamaConfig(rope_parameters=LLAMA3, dtype="bfloat16"),
            {
                "torch_dtype": "bfloat16",
                "rope_theta": 500_000.0,
                "rope_scaling": {k: v for k, v in LLAMA3.items() if k != "rope_theta"},
            },
        ),
        (LlamaConfig(rope_parameters={"rope_theta": 7e4}), {"rope_theta": 7e4}),
        (GPTNeoXConfig(rope_parameters=NEOX), {"rotary_emb_base": 2e4, "rotary_pct": 0.5}),
        (PhiConfig(rope_parameters=NEOX), {"rope_theta": 2e4, "partial_rotary_factor": 0.5}),
        (GPT2Config(), {}),
    ],
    ids=lambda value: getattr(value, "model_type", None),
)
def test_former_names_of_settings_are_added_and_change_nothing_here(
    config: PreTrainedConfig, former: dict[str, object], tmp_path: Path
) -> None:
    config.save_pretrained(tmp_path)
    before = AutoConfig.from_pretrained(tmp_path).to_dict()
    written = json.loads((tmp_path / "config.json").read_text())
    add_former_names(tmp_path)
    after = json.loads((tmp_path / "config.json").read_text())
    assert after == written | former
    assert contradictions(after) == []
    assert AutoConfig.from_pretrained(tmp_path).to_dict() == before


YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}
ORIGINAL = YARN | {"original_max_position_embeddings": 64}
LOCAL = {"rope_type": "default", "rope_theta": 1e4}


@pytest.mark.parametrize(
    "said",
    [
        {"rope_theta": 5.0, "rope_parameters": LOCAL},
        {"rope_scaling": YARN, "rope_parameters": LOCAL},
        {"rope_scaling": YARN, "rope_parameters": YARN | {"factor": 2.0}},
        {"rope_scaling": YARN | {"type": "linear"}},
        {"rope_scaling": {"factor": 2.0}},
        {"partial_rotary_factor": 0.5, "rope_parameters": LOCAL | {"partial_rotary_factor": 1.0}},
        {"original_max_position_embeddings": 8, "rope_parameters": ORIGINAL},
        {"rope_local_base_freq": 5.0, "rope_parameters": {"sliding_attention": LOCAL}},
        {"rope_theta": 5.0, "rope_parameters": {"full_attention": LOCAL}},
        {"torch_dtype": "float16", "dtype": "float32"},
    ],
)
def test_a_setting_that_is_said_twice_must_be_the_same(
    said: dict[str, Any], tmp_path: Path
) -> None:
    described = {"model_type": "llama", **said}
    for each in (described, {"model_type": "gemma3", "text_config": described}):
        (tmp_path / "config.json").write_text(json.dumps(each))
        with pytest.raises(ConfigError, match=r"once: .*\) contradicts ") as refusal:
            load_configs(str(tmp_path))
        assert next(iter(said)) in str(refusal.value)


@pytest.mark.parametrize("factor", [None, 1.0])
def test_a_factor_of_a_rope_that_changes_nothing_needs_no_type(factor: float | None) -> None:
    assert contradictions({"rope_scaling": {"factor": factor}}) == []


def test_a_wrappers_precision_is_that_of_its_language_model(tmp_path: Path) -> None:
    text = {"model_type": "gemma3_text", "hidden_size": 16, "num_hidden_layers": 1, "vocab_size": 8}
    wrapper = {"model_type": "gemma3", "dtype": "bfloat16", "text_config": text}
    (tmp_path / "config.json").write_text(json.dumps(wrapper))
    assert load_configs(str(tmp_path))[0].dtype == torch.bfloat16


def test_weights_of_whole_numbers_without_their_scales_are_refused_by_name(tmp_path: Path) -> None:
    tiny_llama(0).save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    key = next(name for name in tensors if name.endswith("q_proj.weight"))
    tensors[key] = torch.ones_like(tensors[key], dtype=torch.int8)
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ConfigError, match=f"{key} .* is in 8-bit whole numbers"):
        load_model(str(tmp_path))


@pytest.mark.parametrize(
    ("rope", "longest"),
    [
        (ORIGINAL, 256),
        ({"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}, 64),
        (YARN, 256),
        ({"rope_type": "linear", "factor": 2.0}, 128),
        ({"rope_type": "dynamic", "factor": 2.0}, 64),  # further on its frequencies change
        (LLAMA3, 64),
        (LOCAL, 64),
        (None, 64),
    ],
)
def test_a_rope_that_extends_a_context_is_read_as_far_as_engines_do(
    rope: dict[str, Any] | None, longest: int, tmp_path: Path
) -> None:
    """vLLM's `_get_and_verify_max_len`, but of the kinds whose frequencies change."""
    described = {"model_type": "llama", "max_position_embeddings": 64, "rope_scaling": rope}
    (tmp_path / "config.json").write_text(json.dumps(described))
    assert positions(load_configs(str(tmp_path))[0]) == reach(described) == longest


def test_a_wrapper_without_a_generation_config_ends_where_transformers_ends_it(
    tmp_path: Path,
) -> None:
    wrapper = tiny_gemma3(tmp_path)
    (tmp_path / "generation_config.json").unlink()
    expected = type(wrapper).from_pretrained(tmp_path).generation_config.eos_token_id
    ends = [load_configs(str(tmp_path))[1], load_model(str(tmp_path)).generation_config]
    assert [each.eos_token_id for each in ends] == [expected, expected] == [[1, 2], [1, 2]]


@pytest.mark.parametrize("model_type", ["qwen2", "gemma2", "gpt2", "cohere", "gpt_neox"])
def test_a_model_without_the_files_of_its_tokenizer_has_none_and_no_empty_one(
    tmp_path: Path, model_type: str
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))
    with pytest.raises(ConfigError, match=r"holds no vocabulary \(tokenizer\.json"):
        load_tokenizer(str(tmp_path))


def test_missing_and_damaged_files_and_absent_models_are_named(tmp_path: Path) -> None:
    tiny_llama(0, layers=1).save_pretrained(tmp_path)
    load_model(str(tmp_path))
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 2}))
    with pytest.raises(ConfigError, match=r"9 are missing \(first: model\.layers\.1\."):
        load_model(str(tmp_path))
    asked = tmp_path / "generation_config.json"
    sound = asked.read_text()
    asked.write_text('{"eos_token_id": [2')
    for load in (load_model, load_configs):
        with pytest.raises(ConfigError, match=r"generation_config\.json is damaged .*restore it"):
            load(str(tmp_path))
    asked.write_text(sound)
    (tmp_path / "model.safetensors").write_bytes(b"nothing")
    with pytest.raises(ConfigError, match=r"model\.safetensors is damaged .*restore it"):
        load_model(str(tmp_path))
    with pytest.raises(ConfigError, match="cannot load the tokenizer"):
        load_tokenizer("nobody/nothing")


def save_with(folder: Path, *names: str, layers: int = 2) -> dict[str, Tensor]:
    """Save a model, and tensors of these names beside its own."""
    tiny_llama(0, layers=layers).save_pretrained(folder)
    held = load_file(folder / "model.safetensors") | {name: torch.ones(4) for name in names}
    save_file(held, folder / "model.safetensors", metadata={"format": "pt"})
    return held


MLP, ATTENTION = "model.layers.0.mlp.up_proj.", "model.layers.1.self_attn."
SCALES = ("weight_scale", "weight_scale_inv", "weight_scale_2", "input_scale", "weight_packed")


@pytest.mark.parametrize(
    "name",
    [
        *(MLP + each for each in (*SCALES, "qweight", "qzeros", "weight.absmax", "SCB", "bias")),
        *(ATTENTION + each for each in ("q_proj.bias", "q_norm.weight", "k_scale", "sinks")),
        *("model.layers.0.mlp.experts.0.up_proj.weight", "model.layers.0.post_norm.weight"),
        *("model.layers.2.input_layernorm.weight", "lm_head.bias", "model.norm.bias"),
    ],
)
def test_a_tensor_of_a_module_that_exists_which_nothing_reads_is_named(
    name: str, tmp_path: Path
) -> None:
    save_with(tmp_path, name)
    with pytest.raises(ConfigError, match=rf"1 tensors that nothing would .*first: {name}\)"):
        load_model(str(tmp_path))


def test_tensors_of_other_modules_and_former_ones_are_read_over(tmp_path: Path) -> None:
    names = [ATTENTION + "rotary_emb.cos_cached", ATTENTION + "masked_bias", "score.weight"]
    names += ["v_head.summary.weight", "mtp.fc.weight", "model.mtp_layers.0.eh_proj.weight"]
    names += ["vision_tower.layers.0.mlp.up_proj.weight_scale", "model.visual.norm.weight"]
    names += ["model.layers.2.eh_proj.weight", "model.layers.2.mlp.up_proj.weight"]
    save_with(tmp_path, *names)
    ids = torch.tensor([[2, 3, 1]])
    model, expected = load_model(str(tmp_path)), tiny_llama(0, layers=2).float()
    torch.testing.assert_close(model(ids).logits, expected(ids).logits)


@pytest.mark.parametrize("load", [load_model, lambda name: _load_whole(Path(name))])
def test_what_is_saved_ties_matrices_only_if_they_are_one(
    load: Callable[[str], Any], tmp_path: Path
) -> None:
    """transformers 4 and engines tie two that differ where config.json says so; 5 does not."""
    for ties, differ in ((True, True), (True, False), (False, True)):
        held = save_with(tmp_path)
        path = tmp_path / "config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), "tie_word_embeddings": ties}))
        if not differ:
            held["lm_head.weight"] = held["model.embed_tokens.weight"].clone()
            save_file(held, tmp_path / "model.safetensors", metadata={"format": "pt"})
        save_model(load(str(tmp_path)), tmp_path / "saved")
        saved = json.loads((tmp_path / "saved" / "config.json").read_text())
        stored = load_file(tmp_path / "saved" / "model.safetensors")
        assert saved["tie_word_embeddings"] == (ties and not differ)
        assert ("lm_head.weight" in stored) == differ


def test_sequences_beyond_the_models_positions_are_refused() -> None:
    model = tiny_llama(0)
    check_length(model.config, 256)
    with pytest.raises(ConfigError, match=r"make 257 tokens, but .* has positions for 256"):
        check_length(model.config, 257)


def test_the_configuration_alone_gives_the_end_tokens_and_positions_of_the_model(
    tmp_path: Path,
) -> None:
    model = tiny_llama(0)
    model.save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    config, generation = load_configs(str(tmp_path))
    assert end_ids(generation) == end_ids(model.generation_config) == {1}
    assert positions(config) == 256
    (tmp_path / "generation_config.json").unlink()
    assert end_ids(load_configs(str(tmp_path))[1]) == {1}
    with pytest.raises(ConfigError, match="cannot load the model configuration"):
        load_configs(str(tmp_path / "nowhere"))


def test_the_commit_of_a_hub_model_is_the_one_its_branch_had_when_it_was_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    repository = tmp_path / "models--me--model"
    for name, commit in (("main", "a" * 40), ("v2", "b" * 40)):
        (repository / "snapshots" / commit).mkdir(parents=True)
        (repository / "snapshots" / commit / "config.json").write_text("{}")
        (repository / "refs").mkdir(exist_ok=True)
        (repository / "refs" / name).write_text(commit)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    assert revision_of("me/model") == "a" * 40
    assert revision_of("me/model@v2") == "b" * 40
    assert revision_of(f"me/model@{'b' * 40}") == "b" * 40
    folder = repository.rename(tmp_path / "run@night")
    assert len(revision_of(str(folder))) != 40, "a folder, of any name, is what it holds"


# --- code that comes with a model is never run, whatever is answered on the terminal

ROOT = Path(__file__).parents[2]
PACKAGES = ("specdata", "heads", "distill", "eval", "recipes", "benchmarks")
# Our own loaders; transformers' class of generation settings and PEFT's of adapters around
# a model that is there, which have no code.
WITHOUT = ("AcceptanceHead", "BaseHead", "super()", "super(BaseHead, actual)", "SpeculativeDecoder")
WITHOUT += ("GenerationConfig", "peft.PeftModel")


def calls(tree: ast.AST) -> list[ast.Call]:
    return [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr in ("from_pretrained", "from_config")
        and ast.unparse(node.func.value) not in WITHOUT
    ]


def test_every_call_that_loads_with_transformers_refuses_remote_code() -> None:
    counted = {}
    for path in (path for package in PACKAGES for path in (ROOT / package).rglob("*.py")):
        found = calls(ast.parse(path.read_text()))
        for call in found:
            given = {word.arg: ast.unparse(word.value) for word in call.keywords}
            assert given.get("trust_remote_code") == "False", f"{path}:{call.lineno}"
        counted[path.relative_to(ROOT).as_posix()] = len(found)
    assert counted["specdata/models.py"] == 6, "they are found"


def with_code(folder: Path, marker: Path) -> str:
    """A model's folder with classes of its own, whose code writes a file if it runs."""
    tiny_llama(0, vocab=400).save_pretrained(folder)
    chat_tokenizer("chatml").save_pretrained(folder)
    (folder / "mine.py").write_text(f"open({str(marker)!r}, 'w').close()\nclass Mine: pass\n")
    described = json.loads((folder / "config.json").read_text())
    auto = dict.fromkeys(("AutoConfig", "AutoModelForCausalLM"), "mine.Mine")
    described |= {"model_type": "mine", "architectures": ["Mine"], "auto_map": auto}
    (folder / "config.json").write_text(json.dumps(described))
    settings = folder / "tokenizer_config.json"
    mine = {"tokenizer_class": "Mine", "auto_map": {"AutoTokenizer": [None, "mine.Mine"]}}
    settings.write_text(json.dumps({**json.loads(settings.read_text()), **mine}))
    return str(folder)


@pytest.mark.parametrize(
    "load", [load_model, load_tokenizer, load_configs, lambda name: _load_whole(Path(name))]
)
def test_a_model_with_code_of_its_own_is_refused_without_a_question(
    load: Callable[[str], object],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("y\n" * 100))  # who is asked answers yes
    name = with_code(tmp_path / "model", tmp_path / "was-run")
    with pytest.raises(ConfigError, match="such code is never run here") as refusal:
        load(name)
    assert not (tmp_path / "was-run").exists()
    assert "y/N" not in capsys.readouterr().out
    assert "auto_map" in str(refusal.value)
    assert "architecture transformers itself has" in str(refusal.value)


@pytest.mark.parametrize("value", [0, -3, 10**18])
def test_a_model_of_no_or_endless_layers_is_refused_before_it_is_made(
    tmp_path: Path, value: int
) -> None:
    config = LlamaConfig().to_dict() | {"num_hidden_layers": value}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=f"from 1 to 4096, it is {value}"):
        load_model(str(tmp_path))
