"""EAGLE-3's layouts: drafts are read from them and written to them, and draft as is defined."""

import json
import shutil
import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from huggingface_hub import ModelCard
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn.functional import linear, silu

from benchmarks.papers.traces import tree_states
from distill.drafts import round_places
from distill.drafts.eagle3 import _attention_to_itself
from distill.engine_layouts import read_published
from distill.objective import ChunkedLoss, Columns
from recipes.command import RECIPES, run_tool
from specdata.drafts.taps import read_taps
from specdata.errors import ConfigError
from specdata.lm_head import find_lm_head, hidden_states
from specdata.models import load_model
from tests.support.eagle import learnt, norm, turned
from tests.support.initial import make, stored
from tests.support.states_draft import DRAFTED, decoded_as_defined
from tests.support.tiny import tiny_llama
from tests.support.word_pair import with_train_and_dev

ROOT = Path(__file__).parents[2]
H, INNER, HEADS, KEPT = 16, 24, 2, 40
TAPS = [1, 2, 3]
AUX = "eagle_aux_hidden_state_layer_ids"
LAYER = {
    "model_type": "llama",
    "hidden_size": H,
    "intermediate_size": INNER,
    "num_attention_heads": HEADS,
    "num_key_value_heads": 1,
    "num_hidden_layers": 1,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "rope_theta": 10000.0,
}
FLAGS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")


def published(
    folder: Path, vocabulary: int, layout: str, *flags: str, seed: int = 0, **changes: Any
) -> dict[str, Tensor]:
    """Write a random draft in a published layout; its tensors by their names there."""
    torch.manual_seed(seed)
    size = H // HEADS
    shapes = {
        "self_attn.q_proj": (H, 2 * H),
        "self_attn.k_proj": (size, 2 * H),
        "self_attn.v_proj": (size, 2 * H),
        "self_attn.o_proj": (H, H),
        "mlp.gate_proj": (INNER, H),
        "mlp.up_proj": (INNER, H),
        "mlp.down_proj": (H, INNER),
    }
    first = "midlayer." if layout == "eagle3" else "layers.0."
    made = {f"{first}{name}.weight": 0.3 * torch.randn(shape) for name, shape in shapes.items()}
    for name in ("hidden_norm", "input_layernorm", "post_attention_layernorm"):
        made[f"{first}{name}.weight"] = 1.0 + 0.2 * torch.randn(H)
    made["fc.weight"] = 0.3 * torch.randn(H, len(TAPS) * H)
    made["norm.weight"] = 1.0 + 0.2 * torch.randn(H)
    made["lm_head.weight"] = torch.randn(KEPT, H)
    if "norm_before_fc" in flags:
        made["input_norm.weight"] = 1.0 + 0.2 * torch.randn(len(TAPS) * H)
    if "fc_norm" in flags:
        made |= {f"fc_norm.{n}.weight": 1.0 + 0.2 * torch.randn(H) for n in range(len(TAPS))}
    ids = torch.randperm(vocabulary)[:KEPT].sort().values
    made["d2t"] = ids - torch.arange(KEPT)
    made["t2d"] = torch.zeros(vocabulary, dtype=torch.bool).index_fill_(0, ids, True)
    if layout == "speculators":
        made["embed_tokens.weight"] = torch.randn(vocabulary, H)
    folder.mkdir()
    save_file(made, folder / "model.safetensors")
    taps = {AUX: TAPS}
    shared = {"draft_vocab_size": KEPT, **dict.fromkeys(flags, True), **changes}
    config: dict[str, Any] = {"architectures": ["LlamaForCausalLMEagle3"], **LAYER, **shared}
    config |= {"vocab_size": vocabulary, "eagle_config": taps}
    if layout == "speculators":
        config = {"speculators_model_type": "eagle3", "architectures": ["Eagle3Speculator"]}
        layer = {**LAYER, "vocab_size": vocabulary}
        config |= {**shared, **taps, "transformer_layer_config": layer}
    (folder / "config.json").write_text(json.dumps(config))
    return made


def defined(w: dict[str, Tensor], flags: tuple[str, ...], states: Tensor, e: Tensor) -> Tensor:
    """(T, H) what a draft gives of states (T, H) and embeddings (T, H), written out."""
    w = {name.removeprefix("midlayer.").removeprefix("layers.0."): each for name, each in w.items()}
    normed = norm(states, w["hidden_norm.weight"])
    read = torch.cat([norm(e, w["input_layernorm.weight"]), normed], -1)
    size = H // HEADS
    q, k, v = (
        linear(read, w[f"self_attn.{name}_proj.weight"]).view(len(read), -1, size) for name in "qkv"
    )
    k, v = (each.repeat_interleave(q.shape[1] // each.shape[1], dim=1) for each in (k, v))
    scores = torch.einsum("qhs,khs->hqk", turned(q), turned(k)) / size**0.5
    scores = scores.masked_fill(torch.ones(len(read), len(read)).triu(1).bool(), float("-inf"))
    seen = torch.einsum("hqk,khs->qhs", scores.softmax(-1), v).flatten(1)
    x = normed if "norm_before_residual" in flags else states
    x = x + linear(seen, w["self_attn.o_proj.weight"])
    inner = norm(x, w["post_attention_layernorm.weight"])
    gate = silu(linear(inner, w["mlp.gate_proj.weight"]))
    inner = gate * linear(inner, w["mlp.up_proj.weight"])
    return x + linear(inner, w["mlp.down_proj.weight"])


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    sizes = {"hidden_size": H, "head_dim": H // 4, "num_hidden_layers": 4}
    return stored(tmp_path_factory.mktemp("target") / "model", **sizes)


@pytest.mark.parametrize("layout", ["eagle3", "speculators"])
@pytest.mark.parametrize("flags", [(), FLAGS[:2], FLAGS[2:]])
@torch.inference_mode()
def test_a_draft_of_each_layout_is_what_its_definition_says(
    target: Path, tmp_path: Path, layout: str, flags: tuple[str, ...]
) -> None:
    model = load_model(str(target))
    vocabulary = model.config.vocab_size
    w = published(tmp_path / "theirs", vocabulary, layout, *flags)
    draft = read_published(tmp_path / "theirs", model)
    text = torch.tensor([5, 9, 31, 4, 17, 8])
    embedding = w.get("embed_tokens.weight", model.get_input_embeddings().weight)
    taps = read_taps(model, TAPS, text[None])[0]
    if "norm_before_fc" in flags:
        taps = norm(taps, w["input_norm.weight"])
    if "fc_norm" in flags:
        parts = taps.split(H, dim=-1)
        taps = torch.cat([norm(x, w[f"fc_norm.{n}.weight"]) for n, x in enumerate(parts)], -1)
    # From the second token on, each with the state before it; then one after the draft's own.
    states = linear(taps, w["fc.weight"])[:-1]
    last = defined(w, flags, states, embedding[text[1:]])[-1:]
    final = norm(last, w["norm.weight"])
    fed = final if "norm_output" in flags else last
    token = torch.tensor([12])
    after = torch.cat([text[1:], token])
    further = defined(w, flags, torch.cat([states, fed]), embedding[after])[-1:]
    head, ids = find_lm_head(draft), w["d2t"] + torch.arange(KEPT)
    along, drafted = tree_states(draft, text[None], token[None], torch.tensor([[len(text)]]))
    second = norm(further, w["norm.weight"])
    for found, expected in ((along[0, -1], final), (drafted[0, 0], second)):
        logits = head.logits(found)
        torch.testing.assert_close(logits[ids], linear(expected, w["lm_head.weight"])[0])
        assert logits.isneginf().sum() == vocabulary - KEPT
    torch.testing.assert_close(hidden_states(draft, text[None]), along)


@pytest.mark.parametrize("name", ["traversal", "dynamic tree"])
def test_an_imported_draft_decodes_as_it_is_defined(
    target: Path, tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    model = load_model(str(target))
    published(tmp_path / "theirs", model.config.vocab_size, "eagle3", "norm_output")
    paths = [str(tmp_path / "theirs"), "--target", str(target), "--out", str(tmp_path / "ours")]
    assert run_tool("import", paths) == 0
    assert run_tool("import", paths) == 2  # it exists
    assert "exists" in capsys.readouterr().err
    draft = load_model(str(tmp_path / "ours"), target=str(target))
    decoded_as_defined(model, draft, DRAFTED[name], [5, 9, 31], 1e-4)


def test_a_new_draft_learns_and_what_is_released_of_it_is_the_same_draft(
    target: Path, tmp_path: Path
) -> None:
    assert learnt(target, tmp_path, layout="eagle3", vocabulary=KEPT)["taps"] == [1, 2]
    paths = [str(tmp_path / "draft"), "--out", str(tmp_path / "out")]
    assert run_tool("export", paths) == 0
    model = load_model(str(target))
    mine = load_model(str(tmp_path / "draft"), target=str(target))
    theirs = read_published(tmp_path / "out", model)
    ids = torch.tensor([[5, 9, 31, 4, 17, 8]])
    with torch.inference_mode():
        assert torch.equal(mine(input_ids=ids).logits, theirs(input_ids=ids).logits)
    # What engines look for, and nothing else.
    published(tmp_path / "like", model.config.vocab_size, "eagle3")
    like = load_file(tmp_path / "like" / "model.safetensors").keys() | {"embed_tokens.weight"}
    assert load_file(tmp_path / "out" / "model.safetensors").keys() == like
    config_of = {
        name: json.loads((tmp_path / name / "config.json").read_text()) for name in ("out", "like")
    }
    assert config_of["like"].keys() <= config_of["out"].keys() | set(FLAGS)
    assert all(config_of["out"][flag] is False for flag in FLAGS)


def test_a_new_drafts_attention_adds_the_best_that_its_rank_allows() -> None:
    sizes = {"hidden_size": 8, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 2}
    draw = torch.Generator().manual_seed(0)
    read, weight = (torch.randn(n, 16, generator=draw) for n in (300, 8))
    wanted = (read @ weight.T).double()
    made = _attention_to_itself([read], [wanted], SimpleNamespace(**sizes))
    of_heads = made["v"].view(2, 2, 16).repeat_interleave(2, dim=0).reshape(8, 16)
    added = read.double() @ (made["o"] @ of_heads).T
    left = torch.linalg.svdvals(wanted)[4:].square().sum()  # by the best map of rank 4
    assert float((wanted - added).square().sum()) == pytest.approx(float(left), rel=1e-3)


@torch.no_grad()
def test_training_reads_what_drafting_does(target: Path, tmp_path: Path) -> None:
    model = load_model(str(target))
    published(tmp_path / "theirs", model.config.vocab_size, "eagle3", *FLAGS[:3])
    draft = read_published(tmp_path / "theirs", model)
    ids = torch.tensor([[5, 9, 31, 4, 17, 8, 3]])
    taps = read_taps(model, TAPS, ids)
    places = round_places(find_lm_head(draft), ids, 3, taps=taps)
    first, second, _ = (place.states for place in places)
    torch.testing.assert_close(first[:, 1:], hidden_states(draft, ids)[:, 1:])
    for at in range(2, ids.shape[1]):  # a round that began one token before
        text, token = ids[:, :at], ids[0, at : at + 1]
        _, drafted = tree_states(draft, text, token[None], torch.tensor([[at]]))
        torch.testing.assert_close(second[0, at], drafted[0, 0])


@pytest.mark.parametrize("layout", ["eagle3", "dspark"])
def test_gradients_of_few_logits_are_those_of_all(
    target: Path, tmp_path: Path, layout: str
) -> None:
    """Of the norm and of the bias by tokens, too."""
    init: dict[str, Any] = {"kind": "states", "layers": 1, "layout": layout, "vocabulary": KEPT}
    make(target, tmp_path / "draft", **init)
    draft = load_model(str(tmp_path / "draft"), target=str(target))
    head, output = find_lm_head(draft), draft.get_output_embeddings()
    width, more = output.in_features, output.markov if layout == "dspark" else output.norm.weight
    torch.nn.init.normal_(more)
    states = torch.randn(9, width, generator=torch.Generator().manual_seed(0))
    wanted = torch.randn(9, KEPT, generator=torch.Generator().manual_seed(1))
    found = []
    for is_narrow in (True, False):

        def loss(logits: Tensor, columns: Columns, is_narrow: bool = is_narrow) -> Tensor:
            narrow = logits if is_narrow else logits[:, output.vocabulary_ids]
            return (narrow.log_softmax(-1) * columns["wanted"]).sum()

        given = states.clone().requires_grad_()
        chunked = ChunkedLoss(head, loss, at_once=4, is_narrow=is_narrow)
        total = chunked(given, {"wanted": wanted})
        of = torch.autograd.grad(total, [given, output.weight, more])
        with torch.no_grad():
            alone = chunked(states, {"wanted": wanted})
        found.append([total.detach(), alone, *of])
    for narrow, whole in zip(*found, strict=True):
        torch.testing.assert_close(narrow, whole)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("fc.weight", None, "has no tensor fc"),
        ("fc.weight", torch.ones(H, 2 * H), "have another shape"),
        ("midlayer.mlp.up_proj.weight", None, "1 tensors .* are missing"),
        ("fc_norm.0.weight", torch.ones(H), "are not known .*: flags"),
        ("d2t", torch.full((KEPT,), -1), "d2t .* must give ids below"),
        ("d2t", None, "has no d2t: .* the 40 rows"),
        ("d2t", torch.zeros(KEPT - 1, dtype=int), "d2t .* a number for each of the 40 rows"),
        ("eagle_config", {AUX: [1, 2, 9]}, "from 0 .* to 4 .*got 9"),
        ("eagle_config", {AUX: [1, 3, 2]}, "in order"),
        ("config.json", b"{", r"config\.json is damaged"),
        ("model.safetensors", b"cut off", r"model\.safetensors is damaged"),
        ("model.safetensors", None, r"safetensors, .*convert a \.bin"),
        ("num_attention_heads", 0, "must be greater than 0 .got 0"),
        ("num_hidden_layers", 2, "num_hidden_layers: must be 1 .got 2"),
        ("rope_parameters", {"rope_theta": 1e6}, r"rope_theta .1000000.0. contradicts rope_theta"),
        ("head_dim", 10**18, "describes no layer"),
        ("d2t", torch.ones(KEPT), "d2t .* must have rows of integers, it is float32"),
        ("lm_head.weight", torch.tensor(1.0), "lm_head.weight .* rows of floats, .* shape .."),
        ("t2d", torch.ones(320, dtype=torch.bool), "t2d marks other tokens"),
        ("layer_types", ["sliding_attention"], "layer_types.0: must be 'full_attention'"),
        ("partial_rotary_factor", 0.5, "partial_rotary_factor must be 1.0"),
        ("rope_scaling", {"partial_rotary_factor": 0.5}, "factor in rope_scaling must be 1.0"),
        ("embedding_multiplier", 2.0, "embedding_multiplier must be 1.0, .* it is 2.0"),
        ("eagle_config", {AUX: TAPS, "use_mtp_layernorm": True}, "use_mtp_layernorm must be False"),
        ("eagle_config", {AUX: TAPS, "parallel_draft_heads_num_layers": 2}, "must be 1, the one"),
        ("num_aux_hidden_states", len(TAPS) + 1, "num_aux_hidden_states must be 3"),
        ("parallel_drafting", True, "parallel_drafting must be False"),
        ("rope_scaling", {"full_attention": {"rope_theta": 1e4}}, "must be one rope for all"),
        ("model.norm.weight", torch.ones(H), "two tensors (model.)?norm.weight, by two names"),
        ("eagle_config", {AUX: TAPS, "norm_output": 7}, "norm_output: must be a valid boolean"),
    ],
)
def test_a_folder_that_is_no_published_draft_is_refused_with_what_is_wrong(
    target: Path, tmp_path: Path, key: str, value: Any, message: str
) -> None:
    model, folder = load_model(str(target)), tmp_path / "ill"
    tensors = published(folder, model.config.vocab_size, "eagle3")
    path = folder / "config.json"
    if isinstance(value, bytes):
        (folder / key).write_bytes(value)
    elif key == "model.safetensors":
        (folder / key).rename(folder / "pytorch_model.bin")
    elif isinstance(value, Tensor) or key in tensors:
        changed_tensors = {**tensors, key: value}
        kept = {name: each for name, each in changed_tensors.items() if each is not None}
        save_file(kept, folder / "model.safetensors")
    else:
        path.write_text(json.dumps({**json.loads(path.read_text()), key: value}))
    with pytest.raises(ConfigError, match=message):
        read_published(folder, model)


def test_the_weights_of_a_folder_are_what_its_index_names_all_of_it_and_nothing_else(
    target: Path, tmp_path: Path
) -> None:
    model, folder = load_model(str(target)), tmp_path / "shards"
    tensors, ids = published(folder, model.config.vocab_size, "eagle3"), torch.tensor([[5, 9, 31]])
    whole = read_published(folder, model)(input_ids=ids).logits
    parts: list[dict[str, Tensor]] = [{}, {}]
    wrong = {"lm_head.weight": -tensors["lm_head.weight"]}
    save_file(wrong, folder / "older.safetensors")  # beside model.safetensors
    torch.testing.assert_close(read_published(folder, model)(input_ids=ids).logits, whole)
    (folder / "model.safetensors").unlink()
    for key, each in tensors.items():
        parts[key == "lm_head.weight"][key] = each
    names = [f"model-0000{number}-of-00002.safetensors" for number in (1, 2)]
    index = {key: names[key == "lm_head.weight"] for key in tensors}
    save_file(parts[0], folder / names[0])
    with pytest.raises(ConfigError, match="or the index of its parts"):
        read_published(folder, model)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    with pytest.raises(ConfigError, match=f"lacks {names[1]}"):
        read_published(folder, model)
    more = {**parts[1], "b": torch.ones(1)}
    for held, said in (({}, "lacks lm_head"), (more, "holds b")):
        save_file(held, folder / names[1])
        with pytest.raises(ConfigError, match=f"{names[1]} {said}"):
            read_published(folder, model)
    save_file(parts[1], folder / names[1])
    torch.testing.assert_close(read_published(folder, model)(input_ids=ids).logits, whole)


@pytest.mark.parametrize(
    ("model_type", "message"), [("llama", ""), ("ernie4_5", "not said, which means 500000.0 to")]
)
def test_silence_about_the_rope_is_refused_where_it_means_another_base_to_engines(
    target: Path, tmp_path: Path, model_type: str, message: str
) -> None:
    model, path = load_model(str(target)), tmp_path / "draft" / "config.json"
    published(tmp_path / "draft", model.config.vocab_size, "eagle3", model_type=model_type)
    settings = json.loads(path.read_text())
    del settings["rope_theta"]
    path.write_text(json.dumps(settings))
    with pytest.raises(ConfigError, match=message) if message else nullcontext():
        read_published(path.parent, model)


def test_an_imported_draft_names_the_special_tokens_of_its_target(
    target: Path, tmp_path: Path
) -> None:
    model = load_model(str(target))
    model.config.eos_token_id, model.config.pad_token_id = [3, 5], 7
    published(tmp_path / "draft", model.config.vocab_size, "speculators")
    config = read_published(tmp_path / "draft", model).config
    assert [config.eos_token_id, config.pad_token_id] == [[3, 5], 7]


@torch.no_grad()
def test_keys_are_read_beside_the_section_of_the_layer_and_inside_of_it_alike(
    target: Path, tmp_path: Path
) -> None:
    model, ids = load_model(str(target)), torch.tensor([[5, 9, 31, 4, 17, 8]])
    path = tmp_path / "draft" / "config.json"
    flag: dict[str, Any] = {"norm_before_residual": True}
    published(path.parent, model.config.vocab_size, "speculators", *flag)
    settings = json.loads(path.read_text())
    layer = settings["transformer_layer_config"]
    expected = read_published(path.parent, model)(input_ids=ids).logits
    moved = {key: layer.pop(key) for key in ("rms_norm_eps", "hidden_size")}
    del settings["norm_before_residual"]
    path.write_text(json.dumps(settings | moved | {"transformer_layer_config": layer | flag}))
    torch.testing.assert_close(read_published(path.parent, model)(input_ids=ids).logits, expected)


OF_PUBLISHED: dict[str, Any] = {
    **{"attention_dropout": 0.0, "bos_token_id": 1, "eos_token_id": [2, 3], "pad_token_id": 0},
    **{"initializer_range": 0.02, "pretraining_tp": 1, "rope_scaling": None, "use_cache": True},
    **{"tie_word_embeddings": False, "torch_dtype": "bfloat16", "transformers_version": "4.52.4"},
    **{"sliding_window": 4096, "use_sliding_window": False, "max_window_layers": 36},
    **{"attention_bias": False, "mlp_bias": False, "return_dict": True, "temperature": 1.0},
    "eagle_config": {
        **{AUX: TAPS, "use_aux_hidden_state": True, "use_input_layernorm_in_first_layer": True},
        **{"use_last_layernorm": True, "use_mtp_layernorm": False, "next_layer_regular": True},
        **{"parallel_draft_step": 1, "parallel_draft_heads_num_layers": 1},
    },
    **{"num_aux_hidden_states": len(TAPS), "parallel_drafting": False},
}


OF_TARGETS: list[dict[str, Any]] = [
    {"model_type": "qwen2", "tie_word_embeddings": True},
    {"model_type": "phi3", "rope_scaling": {"type": "mrope", "mrope_section": [1, 1, 2]}},
    {"rope_parameters": {"rope_type": "mrope", "rope_theta": 1e4}, "image_token_id": 9},
]


def test_a_head_that_is_tied_to_a_matrix_of_the_draft_must_be_stored(
    target: Path, tmp_path: Path
) -> None:
    model, folder = load_model(str(target)), tmp_path / "tied"
    w = published(folder, model.config.vocab_size, "speculators", tie_word_embeddings=True)
    del w["lm_head.weight"]
    save_file(w, folder / "model.safetensors")
    with pytest.raises(ConfigError, match="ties its own embed_tokens"):
        read_published(folder, model)


@pytest.mark.parametrize("of_target", OF_TARGETS)
@torch.no_grad()
def test_what_published_files_say_beside_is_taken_and_flags_and_scale_wherever_they_stand(
    target: Path, tmp_path: Path, of_target: dict[str, Any]
) -> None:
    model, ids = load_model(str(target)), torch.tensor([[5, 9, 31, 4, 17, 8]])
    tensors = published(tmp_path / "plain", model.config.vocab_size, "eagle3", "norm_before_fc")

    def read() -> Tensor:
        logits: Tensor = read_published(tmp_path / "plain", model)(input_ids=ids).logits
        return logits

    logits, path = read(), tmp_path / "plain" / "config.json"
    settings = json.loads(path.read_text()) | OF_PUBLISHED | of_target | {"logit_scale": 0.5}
    settings["eagle_config"] = settings["eagle_config"] | {
        "norm_before_fc": settings.pop("norm_before_fc")
    }
    path.write_text(json.dumps(settings))
    torch.testing.assert_close(read(), logits / 2)
    # Without an lm_head, the target's rows of the tokens are meant.
    kept = torch.arange(KEPT) + tensors["d2t"]
    tensors["lm_head.weight"] = model.get_output_embeddings().weight[kept].clone()
    found = []
    for _ in range(2):
        save_file(tensors, tmp_path / "plain" / "model.safetensors")
        found.append(read())
        tensors.pop("lm_head.weight", None)
    torch.testing.assert_close(*found)


def test_publish_writes_what_export_does_of_a_measured_run_and_it_is_the_same_draft(
    target: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Card and head included, also from a folder where the target's relative path is none."""
    monkeypatch.chdir(tmp_path)
    layout = "dspark"
    given = with_train_and_dev(target, tmp_path) | {"output": "run"}
    shutil.copytree(target, tmp_path / "own")
    given["models"] = {"target": "own"}
    given["draft"] = {"init": {"kind": "states", "layers": 1, "layout": layout}, "epochs": 1}
    given["head"] = {"kind": "confidence", "epochs": 1}
    methods = [{"name": "plain", "decoder": "plain"}, {"name": "K=1", "length": 1}]
    given["eval"]["max_new_tokens"] = 12
    given["eval"]["methods"] = [*methods, {"name": "head", "stop": "head"}]
    given["publish"] = {"license": "mit"}
    config = ["--config", str(tmp_path / "pair.yaml")]
    Path(config[1]).write_text(json.dumps(given))
    assert RECIPES["pipeline"].run(config, "draftsmith pipeline") == 0
    out, made = tmp_path / "draft", tmp_path / "run" / "draft" / "model"
    release = tmp_path / "run" / "release" / "draft"
    served = f'"method": "{layout}", "model": '
    assert f'{served}"run/release/draft"' in capsys.readouterr().out
    head = ["--head", str(tmp_path / "run" / "head" / "model")]
    monkeypatch.chdir(release)
    assert run_tool("export", [str(made), "--out", str(out), *head]) == 0
    assert f'{served}"{out}"' in capsys.readouterr().out
    monkeypatch.chdir(tmp_path)
    files = {path.name: path.read_bytes() for path in release.iterdir()}
    assert files == {path.name: path.read_bytes() for path in out.iterdir()}
    card = ModelCard.load(out / "README.md")
    assert (card.data.license, layout in card.data.tags) == ("mit", True)
    assert f'{served}"/path/to/draft"' in card.text[: card.text.index("## Measured")]
    ids = torch.tensor([[5, 9, 31, 4, 17, 8]])
    with torch.inference_mode():
        mine, theirs = load_model(str(made)), read_published(release, load_model(str(target)))
        torch.testing.assert_close(mine(input_ids=ids).logits, theirs(input_ids=ids).logits)
    with pytest.raises(ConfigError, match=r"layout of engines, .*draftsmith import"):
        load_model(str(release))


def test_export_for_openvino_takes_a_draft_or_its_release_but_not_what_genai_computes_otherwise(
    target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, flags in (("of", ()), ("flagged", ("norm_before_residual", "norm_output"))):
        theirs = tmp_path / f"theirs-{name}"
        published(theirs, load_model(str(target)).config.vocab_size, "eagle3", *flags)
        paths = [str(theirs), "--target", str(target), "--out", str(tmp_path / name)]
        assert run_tool("import", paths) == 0
    make(target, tmp_path / "early", kind="states", layout="eagle3", layers=1, taps=[0, 1, 2])
    make(target, tmp_path / "blocks", kind="states", layout="dspark", layers=1, block=2)
    make(target, tmp_path / "few", kind="target", layers=1, vocabulary=KEPT)
    other = tmp_path / "other"
    tiny_llama(0).save_pretrained(other)
    capsys.readouterr()
    for folder, message, *more in (
        (tmp_path / "flagged", "and has norm_before_residual, norm_output"),
        (tmp_path / "early", "has taps [0, 1, 2]"),
        (tmp_path / "blocks", "and has dspark"),
        (tmp_path / "of", "takes no --head", "--head", "head"),
        (other, "tokens of", "--target", str(target)),
        (tmp_path / "few", "its release, which", "--target", str(target)),
        (tmp_path / "of", "could not convert: ", "--python", sys.executable),
        # A release, here one that keeps the whole vocabulary, is taken as what it was made of.
        (tmp_path / "theirs-of", "give its --target"),
        (tmp_path / "theirs-flagged", "and has norm_before_residual", "--target", str(target)),
        (
            *(tmp_path / "theirs-of", "could not convert: ", "--python", sys.executable),
            *("--target", str(target)),
        ),
    ):
        paths = [str(folder), "--out", str(tmp_path / "out"), "--for", "openvino", *more]
        assert run_tool("export", paths) == 2
        assert message in capsys.readouterr().err
        assert not (tmp_path / "out").exists()


def test_a_model_of_no_layout_and_a_draft_without_weights_are_not_released(
    target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make(target, tmp_path / "bare", kind="states", layout="eagle3", layers=1)
    (tmp_path / "bare" / "model.safetensors").unlink()
    make(target, tmp_path / "states", kind="states", layers=1)
    for folder, message in (
        (target, "needs no other layout: engines load it as it is"),
        (tmp_path / "bare", "must hold its weights in safetensors"),
        (tmp_path / "states", "must be a draft of draft.init.layout eagle3"),
    ):
        assert run_tool("export", [str(folder), "--out", str(tmp_path / "out")]) == 2
        assert message in capsys.readouterr().err
    run = tmp_path / "run"
    shutil.copytree(target, run / "draft" / "model")
    for where in ("draftsmith publish writes", f"is {run}/release/draft"):
        assert run_tool("export", [f"{run}/draft/model", "--out", str(tmp_path / "out")]) == 2
        assert f"its release, which {where}" in capsys.readouterr().err
        (run / "release" / "draft").mkdir(parents=True, exist_ok=True)
    assert not (tmp_path / "out").exists()
