"""DSpark's layout: drafts are read from it as it is defined, and written to it with their head."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn.functional import linear, silu

from distill.engine_layouts import read_published
from heads import AcceptanceHead, BaseHead, ConfidenceHead
from heads.probe import probe_of
from recipes.command import run_tool
from specdata.drafts.taps import read_taps
from specdata.errors import ConfigError
from specdata.lm_head import hidden_states
from specdata.models import load_model
from tests.support.dspark_layout import (
    BLOCK,
    CONFIG,
    GROUPS,
    HEADS,
    IDS,
    KEPT,
    MASK,
    SIZE,
    H,
    published,
)
from tests.support.eagle import norm, turned
from tests.support.initial import make, stored

TEXT = torch.tensor([5, 9, 31, 4, 17, 8])


def defined(w: dict[str, Tensor], layers: int, taps: Tensor, embedding: Tensor) -> Tensor:
    """(BLOCK, H) states of a block behind contexts whose states are (n, F), written out."""
    contexts, x = norm(linear(taps, w["fc.weight"]), w["hidden_norm.weight"]), embedding
    for n in range(layers):
        of = {name.removeprefix(f"layers.{n}."): each for name, each in w.items()}
        read = norm(x, of["input_layernorm.weight"])
        every = torch.cat([contexts, read])
        k, v = (
            linear(every, of[f"self_attn.{s}_proj.weight"]).view(-1, GROUPS, SIZE) for s in "kv"
        )
        q = linear(read, of["self_attn.q_proj.weight"]).view(-1, HEADS, SIZE)
        # Only how far keys stand from queries counts.
        q = torch.cat(
            [q.new_zeros(len(contexts), HEADS, SIZE), norm(q, of["self_attn.q_norm.weight"])]
        )
        q = turned(q)[len(contexts) :]
        k = turned(norm(k, of["self_attn.k_norm.weight"]))
        k, v = (each.repeat_interleave(HEADS // GROUPS, dim=1) for each in (k, v))
        seen = torch.einsum("qhs,khs->hqk", q, k).div(SIZE**0.5).softmax(-1)
        attended = torch.einsum("hqk,khs->qhs", seen, v).flatten(1)
        x = x + linear(attended, of["self_attn.o_proj.weight"])
        inner = norm(x, of["post_attention_layernorm.weight"])
        gate = silu(linear(inner, of["mlp.gate_proj.weight"]))
        x = x + linear(gate * linear(inner, of["mlp.up_proj.weight"]), of["mlp.down_proj.weight"])
    return norm(x, w["norm.weight"])


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    sizes = {"hidden_size": H, "head_dim": H // 4, "num_hidden_layers": 4}
    return stored(tmp_path_factory.mktemp("target") / "model", **sizes)


@pytest.mark.parametrize(("layers", "kept"), [(1, None), (2, KEPT)])
@torch.inference_mode()
def test_a_draft_is_what_its_definition_says_and_is_written_as_it_was_read(
    target: Path, tmp_path: Path, layers: int, kept: int | None
) -> None:
    model = load_model(str(target))
    w = published(tmp_path / "theirs", model.config.vocab_size, layers, kept)
    draft = read_published(tmp_path / "theirs", model)
    logits = draft(input_ids=TEXT[None]).logits[0]
    taps = read_taps(model, [each + 1 for each in IDS], TEXT[None])[0]
    matrix, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    ids = torch.arange(len(head)) if kept is None else w["d2t"] + torch.arange(KEPT)
    for begin in (0, BLOCK):
        block = torch.tensor([int(TEXT[begin])] + [MASK] * (BLOCK - 1))
        states = defined(w, layers, taps[:begin], matrix[block])
        bias = w["markov_head.markov_w1.weight"][TEXT[begin : begin + BLOCK]]
        expected = linear(states, w.get("lm_head.weight", head))
        expected = expected + linear(bias, w["markov_head.markov_w2.weight"])
        torch.testing.assert_close(logits[begin : begin + BLOCK, ids], expected)
    paths = [str(tmp_path / "theirs"), "--target", str(target), "--out", str(tmp_path / "ours")]
    assert run_tool("import", paths) == 0
    assert run_tool("export", [str(tmp_path / "ours"), "--out", str(tmp_path / "out")]) == 0
    written = load_file(tmp_path / "out" / "model.safetensors")
    assert written.keys() == w.keys()
    assert all(torch.equal(written[name], w[name]) for name in w)
    said = json.loads((tmp_path / "out" / "config.json").read_text())
    same = {**CONFIG, "num_hidden_layers": layers, "torch_dtype": "float32"}
    assert {key: said[key] for key in same} == same
    again = read_published(tmp_path / "out", model)
    assert torch.equal(again(input_ids=TEXT[None]).logits[0], logits)


def test_an_exported_head_says_in_the_engines_form_what_it_says_here(
    target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make(target, tmp_path / "draft", kind="states", layers=1, layout="dspark", block=BLOCK)
    # A release does not say where its target was.
    path = tmp_path / "draft" / "config.json"
    path.write_text(path.read_text().replace(str(target), "/path/to/target"))
    draft = load_model(str(tmp_path / "draft"), target=str(target))
    sizes = {"hidden_size": draft.get_output_embeddings().in_features, "probe": probe_of(draft)}
    torch.manual_seed(1)
    head = ConfidenceHead(**sizes, rejection_weight=3.0)
    head.save_pretrained(tmp_path / "head")
    others: dict[str, BaseHead] = {"another": ConfidenceHead(**{**sizes, "probe": [9.0] * 64})}
    others["other kind"] = AcceptanceHead(**sizes)
    for name, each in others.items():
        each.save_pretrained(tmp_path / name)
    paths = [str(tmp_path / "draft"), "--out", str(tmp_path / "out"), "--target", str(target)]
    for name, message in (
        ("another", "trained for another draft"),
        ("other kind", "must be a head of kind confidence"),
        ("draft", "not an acceptance head"),
    ):
        assert run_tool("export", [*paths, "--head", str(tmp_path / name)]) == 2
        assert message in capsys.readouterr().err
    assert run_tool("export", [*paths, "--head", str(tmp_path / "head")]) == 0
    written = load_file(tmp_path / "out" / "model.safetensors")
    states = hidden_states(draft, TEXT[None])[0]
    said = torch.sigmoid(
        linear(states, written["confidence_head.proj.weight"], written["confidence_head.proj.bias"])
    )
    expected = torch.sigmoid(head(states) + torch.tensor(3.0).log())
    torch.testing.assert_close(said[:, 0], expected)
    assert json.loads((tmp_path / "out" / "config.json").read_text())["enable_confidence_head"]
    assert str(tmp_path) not in (tmp_path / "out" / "README.md").read_text()
    # The head is no part of the draft that is read back.
    again = read_published(tmp_path / "out", load_model(str(target)))
    with torch.inference_mode():
        assert torch.equal(again(input_ids=TEXT[None]).logits, draft(input_ids=TEXT[None]).logits)


def test_a_draft_whose_matrices_are_not_the_targets_is_not_released(
    target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make(target, tmp_path / "draft", kind="states", layers=1, layout="dspark", block=BLOCK)
    path = tmp_path / "draft" / "model.safetensors"
    tensors = load_file(path)
    tensors["lm_head.weight"] *= 1.1
    save_file(tensors, path, metadata={"format": "pt"})
    assert run_tool("export", [str(tmp_path / "draft"), "--out", str(tmp_path / "out")]) == 2
    assert "lm_head.weight of" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("sample_from_anchor", None, "sample_from_anchor is not said, and engines differ"),
        ("sample_from_anchor", False, "sample_from_anchor must be True, .* it is False"),
        ("target_layer_ids", [0, 3], "from 0 to 2, got .0, 3.: llama.cpp"),
        ("target_layer_ids", None, "target_layer_ids .* got .."),
        ("target_layer_ids", [2, 0], "in order"),
        ("markov_head_type", "gated", "markov_head_type: must be 'vanilla'"),
        ("aux_hidden_state_layer_ids", [1, 2], r"one more each than target_layer_ids, .0, 2."),
        ("dflash_config", {"causal": True}, "causal must be False, .* it is True"),
        ("dflash_config", {"mask_token_id": 8}, "mask_token_id is said twice, 7 and 8"),
        ("layer_types", ["sliding_attention"], "layer_types.0: must be 'full_attention'"),
        ("attention_bias", True, "attention_bias: must be False"),
        ("head_dim", None, "head_dim: is missing"),
        ("num_target_layers", 5, "target of 5 layers .* has 4 layers"),
        ("mask_token_id", 1000, "mask 1000, and the target has .* 298 tokens"),
        ("markov_rank", 4, "2 tensors .* have another shape .as markov_head.markov_w2"),
        ("final_logit_softcapping", 30.0, "final_logit_softcapping .30.0. is not known"),
        ("markov_head.markov_w2.weight", None, "missing .as markov_head.markov_w2.weight"),
        ("lm_head.weight", torch.ones(KEPT, H), "has no d2t"),
        ("mask_embedding", torch.ones(H), "not known .as mask_embedding"),
    ],
)
def test_a_folder_that_cannot_be_followed_is_refused_with_what_is_wrong(
    target: Path, tmp_path: Path, key: str, value: Any, message: str
) -> None:
    model, folder = load_model(str(target)), tmp_path / "ill"
    tensors = published(folder, model.config.vocab_size)
    if isinstance(value, Tensor) or key in tensors:
        kept = {name: each for name, each in {**tensors, key: value}.items() if each is not None}
        save_file(kept, folder / "model.safetensors")
    else:
        path = folder / "config.json"
        said = {**json.loads(path.read_text()), key: value}
        path.write_text(json.dumps({name: each for name, each in said.items() if each is not None}))
    with pytest.raises(ConfigError, match=message):
        read_published(folder, model)
