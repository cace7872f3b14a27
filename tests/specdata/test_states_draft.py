"""Drafts that read their target's states: which states of which target, or they are refused."""

import copy
import json
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from distill.config import InitConfig
from distill.drafts import round_places
from distill.drafts.states import llama_draft
from distill.toy import save_tokenizer, train_tokenizer
from distill.watch import HeldOut
from eval.decoder import DecodeConfig, SpeculativeDecoder
from specdata.drafts.states_network import states_input, token_embedding, unit
from specdata.drafts.taps import attach, decoder_layers, read_taps
from specdata.errors import ConfigError
from specdata.lm_head import capturing_hidden, find_lm_head, hidden_states
from specdata.models import load_model
from specdata.probability import SamplingConfig
from specdata.target_states import reading_stored
from tests.support.families import greedy, tiny
from tests.support.initial import make, stored
from tests.support.states_draft import pair
from tests.support.tiny import tiny_llama


def test_taps_are_the_hidden_states_of_transformers() -> None:
    target = tiny_llama(0, vocab=40, layers=3)
    ids = torch.tensor([[2, 9, 31, 4]])
    theirs = target(input_ids=ids, output_hidden_states=True).hidden_states[:3]
    taps = read_taps(target, [0, 1, 2, 3], ids)
    ours, scaled = taps.split(16, dim=-1), unit(taps, 4).split(16, dim=-1)
    for mine, small, state in zip(ours, scaled, theirs, strict=False):
        torch.testing.assert_close(mine, state)
        size = state.square().mean(dim=-1, keepdim=True).sqrt()
        torch.testing.assert_close(small, state / size, rtol=1e-3, atol=1e-3)
    # The last one leaves the last layer: the final norm gives what the output matrix reads.
    torch.testing.assert_close(
        target.model.norm(ours[3]), hidden_states(target, ids), rtol=1e-3, atol=1e-3
    )
    assert InitConfig(kind="states").taps_of(30) == [2, 15, 27, 30]
    assert InitConfig(kind="states").taps_of(1) == [0, 1]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return stored(tmp_path_factory.mktemp("target") / "model", num_hidden_layers=4)


made = partial(make, kind="states", layers=1)


@pytest.fixture(scope="module")
def stored_draft(target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    made(target, folder := tmp_path_factory.mktemp("states") / "draft")
    return folder


@pytest.mark.parametrize("vocabulary", [None, 40])
def test_a_stored_draft_is_the_one_that_was_made_and_finds_its_target(
    target: Path, tmp_path: Path, vocabulary: int | None
) -> None:
    found = made(target, tmp_path / "draft", vocabulary=vocabulary)  # compares the logits itself
    assert (found["layers"], found["taps"]) == ([3], [1, 2, 4])
    draft, theirs = load_model(str(tmp_path / "draft")), load_model(str(target))
    assert torch.equal(token_embedding(draft).weight, theirs.get_input_embeddings().weight)
    ids = torch.tensor([[2, 9, 31, 4]])
    with torch.inference_mode():
        lazily = draft(input_ids=ids).logits
        attach(draft, theirs)
        assert torch.equal(draft(input_ids=ids).logits, lazily)
    # The taps are those recorded, wherever the draft is read.
    assert made(target, tmp_path / "draft", vocabulary=vocabulary) == found


def test_states_of_another_target_and_weights_that_nothing_is_said_of_are_refused(
    target: Path, tmp_path: Path
) -> None:
    made(target, tmp_path / "draft")
    other = stored(tmp_path / "other", num_hidden_layers=3)
    draft = load_model(str(tmp_path / "draft"))
    with pytest.raises(ConfigError, match=r"made for, .*model .*and those of .*other are others"):
        SpeculativeDecoder.from_config(load_model(str(other)), draft, DecodeConfig())
    (target_moved := tmp_path / "moved").symlink_to(target)  # another name is no other target
    SpeculativeDecoder.from_config(load_model(str(target_moved)), draft, DecodeConfig())
    path = tmp_path / "draft" / "model.safetensors"
    weights = load_file(path) | {"model.embed_tokens.masks.weight": torch.zeros(2, 2)}
    save_file(weights, path, {"format": "pt"})
    with pytest.raises(ConfigError, match=r"weights hold .*masks.weight, of which it says nothing"):
        load_model(str(tmp_path / "draft"))


def test_a_draft_on_states_loaded_as_another_and_a_target_that_is_gone_are_refused(
    target: Path, tmp_path: Path
) -> None:
    made(target, tmp_path / "draft", vocabulary=None)
    with pytest.raises(ValueError, match=r"load-with-draftsmith_see-README\.md"):
        AutoModelForCausalLM.from_pretrained(tmp_path / "draft")
    plain = AutoModelForCausalLM.from_pretrained(target)
    plain.config.target_states = load_model(str(tmp_path / "draft")).config.target_states
    with pytest.raises(ConfigError, match=r"reads none: load it with specdata\.models\.load_model"):
        SpeculativeDecoder.from_config(load_model(str(target)), plain, DecodeConfig())
    draft = load_model(str(tmp_path / "draft"), target=str(tmp_path / "gone"))
    with pytest.raises(ConfigError, match=r"reads the states of its target, .*gone"):
        draft(input_ids=torch.tensor([[1, 2]]))


def test_a_draft_and_its_copies_load_the_target_once(
    target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made(target, tmp_path / "draft")
    draft, loaded = load_model(str(tmp_path / "draft")), list[str]()
    monkeypatch.setattr(
        "specdata.models.load_model",
        lambda name, **rest: loaded.append(name) or load_model(name, **rest),
    )
    copied, ids = copy.deepcopy(draft), torch.tensor([[5, 6]])
    logits = [model(input_ids=ids).logits for model in (copied, copied, draft)]
    assert loaded == [str(target)]
    assert all(torch.equal(logits[0], each) for each in logits)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        *((key, ..., f"{key}: is missing") for key in ("taps", "target", "width", "probe")),
        ("taps", [-1, 2], "or equal to 0"),
        ("taps", [9, 1, 2], "states of the target that it was made for"),
        ("probe", [1.0], "states of the target that it was made for"),
        ("width", 7, "cannot load the model"),
        ("layout", "eagle3", r"layout.*must be a section"),
        ("depths", 2, "depths: unknown key"),
        ("output_bias", True, "1 are missing"),
        (None, [], "must be a section"),
    ],
)
def test_a_draft_says_which_states_of_which_target_it_reads_or_is_refused(
    target: Path, stored_draft: Path, tmp_path: Path, key: str | None, value: Any, message: str
) -> None:
    path = shutil.copytree(stored_draft, tmp_path / "draft") / "config.json"
    config = json.loads(path.read_text())
    record = config["target_states"] | {key: value}
    kept = {name: each for name, each in record.items() if each is not ...}
    path.write_text(json.dumps(config | {"target_states": value if key is None else kept}))
    with pytest.raises(ConfigError, match=message):
        attach(load_model(str(tmp_path / "draft")), load_model(str(target)))


def test_taps_that_cannot_be_had_and_rollouts_of_other_tokens_or_taps_are_refused_or_read_again(
    target: Path, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=r"from 0 .* to 4 .*; got 5"):
        made(target, tmp_path / "draft", taps=[1, 5])
    for name, ids, message in (
        ("none", [], "at least one completion token"),
        ("negative", [[-1]], "from 0 to .* a text has -1 to"),
        ("beyond", [[100_000]], "from 0 to .* to 100000"),
    ):
        rows = Dataset.from_dict({"prompt_ids": ids, "completion_ids": ids})
        with pytest.raises(ValueError, match=message):
            made(target, tmp_path / name, rows)
    theirs = load_model(str(target))
    with pytest.raises(ConfigError, match=r"from 0 to .* to 100000"):
        HeldOut(theirs, rows, SamplingConfig()).measure(theirs)
    made(target, tmp_path / "draft")
    draft = load_model(str(tmp_path / "draft"), target=str(target))
    row = {"prompt_ids": [5], "completion_ids": [6, 7], "target_taps": b"abc"}
    for more in ({}, {"taps": None}):
        with reading_stored(draft, [{**row, **more}], 2):  # without their taps: read of the target
            draft(input_ids=torch.tensor([[5, 6]]))
    taps = draft.config.target_states["taps"]
    with pytest.raises(ConfigError, match="numbers of the target's states"):
        reading_stored(draft, [{**row, "taps": taps}], 2).__enter__()


def test_a_target_is_needed_and_reads_a_text_once_and_what_it_said_is_learnt_from() -> None:
    target, draft = pair(40)
    reads = states_input(draft)
    assert reads is not None
    ids, seen = torch.tensor([[2, 9, 31, 4]]), list[int]()
    target.model.register_forward_hook(lambda *_: seen.append(1))
    with torch.inference_mode():
        first = reads.read_target(ids)
    reads.after_target(ids, reads.read_target(ids)).sum().backward()
    assert reads.read_target(ids) is first
    assert len(seen) == 1
    assert copy.deepcopy(draft).get_input_embeddings().read_target(ids) is first
    with pytest.raises(ConfigError, match="has no target here: load it with"):
        type(reads)(reads.tokens, 16, 3, 16)(ids)
    # Another shape of the same ids is another text.
    assert reads.read_target(ids.view(2, 2)).shape[:2] == (2, 2)


# --- Drafts on the states of targets whose own layers they cannot begin with.


KINDS: dict[str, dict[str, Any]] = {
    "gemma2": {"final_logit_softcapping": 5.0},
    "gemma3_text": {},
    "gpt_oss": {},
    "cohere2": {"logit_scale": 0.3},
    "qwen3_next": {},
    "falcon_h1": {"lm_head_multiplier": 0.5, "embedding_multiplier": 3.0},
    "deepseek_v3": {"first_k_dense_replace": 1},
    "gpt2": {},
    "phi": {},  # LayerNorm, and a bias of the logits
    "mamba": {},
}


# One whose norm is scaled anew, one with two kinds of layers, one with a bias and LayerNorm.
BRIEF = ("gemma2", "falcon_h1", "phi")


@pytest.mark.parametrize(
    "kind",
    [pytest.param(kind, marks=() if kind in BRIEF else pytest.mark.exhaustive) for kind in KINDS],
)
def test_a_draft_begins_with_the_targets_norm_and_rows_and_a_silent_layer_of_llamas_kind(
    kind: str, tmp_path: Path
) -> None:
    tokenizer = train_tokenizer(["a short text about nothing at all, 0123456789"] * 4, 290)
    target = tiny(kind, 0, vocab=len(tokenizer), dtype=torch.float32, **KINDS[kind])
    target.save_pretrained(tmp_path / "target")
    save_tokenizer(tokenizer, tmp_path / "target")
    ids = torch.arange(2, 34)[:, None]
    texts = target.generate(ids, do_sample=True, top_k=0, min_new_tokens=24, max_new_tokens=24)
    rows = {"prompt_ids": texts[:, :3].tolist(), "completion_ids": texts[:, 3:].tolist()}
    rollouts = Dataset.from_dict(rows)

    def made(name: str, **init: Any) -> Any:
        make(tmp_path / "target", tmp_path / name, rollouts, **init)
        return load_model(str(tmp_path / name), target=str(tmp_path / "target"))

    draft = made("draft", kind="states", layers=1)
    reads, text = states_input(draft), texts[:2]
    assert reads is not None
    assert draft.config.model_type == "llama"
    with torch.inference_mode():
        x, logits = reads(text), draft(input_ids=text).logits
        assert torch.equal(draft.model(inputs_embeds=x)[0], draft.model.norm(x))  # silent

        normed: list[Tensor] = []
        with capturing_hidden(target, normed.append):
            expected = target(input_ids=text, use_cache=False).logits
        slope = KINDS[kind].get("logit_scale", KINDS[kind].get("lm_head_multiplier", 1.0))
        rows, weights = draft.lm_head.weight, target.state_dict().items()
        size = rows.norm() / (slope * target.get_output_embeddings().weight.norm())
        bias = [each for name, each in weights if name.endswith(("ln_f.bias", "layernorm.bias"))]
        x = (normed[0] - (bias[-1] if bias else 0.0)) / size
        logits_of_target = draft(inputs_embeds=x).logits
        _, made_of = llama_draft(target, 1, 128, 0)
        last = read_taps(target, [len(decoder_layers(target)[1])], text)
        torch.testing.assert_close(made_of(unit(last, 1)), x, rtol=1e-3, atol=1e-3)
    if (cap := KINDS[kind].get("final_logit_softcapping")) is not None:
        expected = cap * (expected / cap).atanh()
    accuracy = 1e-4 * float(expected.abs().max())
    torch.testing.assert_close(logits_of_target, expected, rtol=1e-4, atol=accuracy)

    held_out, fresh = HeldOut(target, rollouts, SamplingConfig()), made("fresh", kind="fresh")
    found = [held_out.measure(each).overall.acceptance for each in (fresh, draft)]
    assert found[0] < found[1]

    decoder = SpeculativeDecoder.from_config(target, draft, DecodeConfig(temperature=0.0, length=3))
    for prompt in texts[2:5, :9]:  # longer than windows are
        out = decoder.generate(prompt, max_new_tokens=16, generator=torch.Generator())
        assert out.tokens.tolist() == greedy(target, prompt, 16)

    taps = read_taps(target, draft.config.target_states["taps"], text)
    optimizer = torch.optim.SGD(decoder_layers(draft)[1].parameters(), lr=1.0)
    places = round_places(find_lm_head(draft), text, 2, taps=taps)
    sum(place.states.square().mean() for place in places).backward()
    optimizer.step()
    with torch.inference_mode():
        assert not torch.equal(draft(input_ids=text).logits, logits)


def test_a_target_that_makes_its_logits_in_another_way_is_refused(tmp_path: Path) -> None:
    target = stored(tmp_path / "target", "opt, projected")  # its output rows are narrower
    with pytest.raises(ConfigError, match=r"RMSNorm or LayerNorm .*OPTForCausalLM does not"):
        make(target, tmp_path / "draft", kind="states", layers=1)
