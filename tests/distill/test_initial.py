"""Where a draft comes from: fresh, cut from its target, and with which tokens."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from safetensors.torch import load_file
from torch import nn

from distill.config import FRESH
from distill.drafts.plain import cut
from distill.initial import coverage, frequent_tokens
from specdata import least_squares
from specdata.cache import cache_argument
from specdata.drafts.taps import decoder_layers
from specdata.errors import ConfigError, VocabularyMismatchError
from specdata.least_squares import ridge
from specdata.models import load_model
from specdata.sampling import SamplingConfig
from tests.support.families import FAMILIES, build, tiny
from tests.support.initial import ROWS, make, stored

IDS = torch.arange(1, 13).unsqueeze(0)
PLAIN = SamplingConfig()


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return stored(tmp_path_factory.mktemp("target") / "model", num_hidden_layers=4)


def passing_on(layer: nn.Module) -> Any:
    """Make a decoder layer give what it is given."""

    def hook(_module: nn.Module, given: Any, found: Any) -> Any:
        return (given[0], *found[1:]) if isinstance(found, tuple) else given[0]

    return layer.register_forward_hook(hook)


@pytest.mark.parametrize("family", [*FAMILIES, "gemma3_text"])
def test_all_layers_give_the_targets_logits_and_one_those_of_the_target_without_the_others(
    family: str,
) -> None:
    model = tiny(family, 0, dtype=torch.float32)
    assert torch.equal(cut(model, [0, 1])(input_ids=IDS).logits, model(input_ids=IDS).logits)
    for kept in (0, 1):
        draft = cut(model, [kept])
        handle = passing_on(decoder_layers(model)[1][1 - kept])
        expected = model(input_ids=IDS).logits
        handle.remove()
        assert torch.equal(draft(input_ids=IDS).logits, expected)
        # Its cache has one layer, so the layer must know its new number.
        cached = draft(input_ids=IDS[:, :6], use_cache=True).past_key_values
        rest = draft(input_ids=IDS[:, 6:], **{cache_argument(draft): cached}).logits
        torch.testing.assert_close(rest, expected[:, 6:])


def test_lists_with_an_entry_a_layer_are_cut_alike() -> None:
    kinds = ["sliding_attention", "full_attention", "sliding_attention", "full_attention"]
    model = tiny(
        "qwen2", 0, dtype=torch.float32, num_hidden_layers=4, layer_types=kinds,
        use_sliding_window=True, sliding_window=3,
    )  # fmt: skip
    assert cut(model, [0, 1]).config.layer_types == kinds[:2]
    draft = cut(model, [1, 3])
    assert draft.config.layer_types == ["full_attention"] * 2
    handles = [passing_on(decoder_layers(model)[1][index]) for index in (0, 2)]
    assert torch.equal(draft(input_ids=IDS).logits, model(input_ids=IDS).logits)
    for handle in handles:
        handle.remove()


@pytest.mark.parametrize("family", ["gemma3n_text", "gemma4_text"])
@pytest.mark.parametrize("count", [1, 2, 3])
def test_first_layers_are_cut_where_later_ones_read_their_keys(family: str, count: int) -> None:
    """And where one matrix holds a part of every layer; the last layers alone hold no keys."""
    model = build(family, layers=4)  # the last two share
    draft = cut(model, range(count))
    handles = [passing_on(layer) for layer in decoder_layers(model)[1][count:]]
    expected = model(input_ids=IDS, use_cache=False).logits
    for handle in handles:
        handle.remove()
    assert torch.equal(draft(input_ids=IDS, use_cache=False).logits, expected)
    with pytest.raises(ConfigError, match="cannot be cut: from layer 2 on its layers read"):
        cut(model, [2, 3])


def test_a_layer_that_depends_on_its_place_is_refused() -> None:
    model = tiny("gpt2", 0, scale_attn_by_inverse_layer_idx=True)
    cut(model, [0])
    with pytest.raises(ConfigError, match="depends on its place"):
        cut(model, [1])
    model = tiny("llama", 0)
    decoder_layers(model)[1][1].self_attn.scaling = 0.3
    with pytest.raises(ConfigError, match=r"layers\.1\.self_attn depends on its place .*scaling"):
        cut(model, [0, 1])


@pytest.mark.parametrize("tied", [False, True])
def test_a_cut_draft_has_the_targets_vocabulary_context_and_ends(
    tied: bool, tmp_path: Path
) -> None:
    target = stored(tmp_path / "target", num_hidden_layers=3, tie_word_embeddings=tied)
    made = make(target, tmp_path / "draft", kind="target", layers=2)
    assert made["layers"] == [0, 1]
    draft, whole = load_model(str(tmp_path / "draft")), load_model(str(target))
    assert draft.dtype == torch.float32
    assert draft.config.vocab_size == whole.config.vocab_size
    assert draft.config.max_position_embeddings == 128
    assert draft.generation_config.eos_token_id == [1, 3]
    ours, theirs = draft.get_output_embeddings().weight, draft.get_input_embeddings().weight
    assert (ours is theirs) == tied
    for name in target.glob("tokenizer*"):
        assert (tmp_path / "draft" / name.name).read_bytes() == name.read_bytes()


def test_a_reduced_cut_unties_and_keeps_the_whole_input_embedding(tmp_path: Path) -> None:
    target = stored(tmp_path / "target", tie_word_embeddings=True)
    whole = load_model(str(target)).get_input_embeddings().weight
    made = make(target, tmp_path / "draft", kind="target", layers=1, vocabulary=10)
    tensors = load_file(tmp_path / "draft" / "model.safetensors")
    assert torch.equal(tensors["model.embed_tokens.weight"], whole)
    kept = tensors["d2t"] + torch.arange(10)
    assert {1, 3, 5, 6, 7, 8, 20, 30, 39} < {*kept.tolist()}
    assert torch.equal(tensors["lm_head.weight"], whole[kept])
    assert made["coverage"] == 1.0
    assert not load_model(str(tmp_path / "draft")).config.tie_word_embeddings


def test_a_fresh_draft_is_a_llama_68m_of_the_targets_vocabulary_drawn_from_the_seed(
    target: Path, tmp_path: Path
) -> None:
    for name in ("one", "two"):
        make(target, tmp_path / name, kind="fresh", vocabulary=16)
    draft, theirs = load_model(str(tmp_path / "one")), load_model(str(target)).config
    assert all(getattr(draft.config, name) == size for name, size in FRESH.items())
    assert draft.config.vocab_size == theirs.vocab_size
    assert draft.config.max_position_embeddings == theirs.max_position_embeddings
    assert draft.generation_config.eos_token_id == [1, 3]
    one, two = (load_file(tmp_path / n / "model.safetensors") for n in ("one", "two"))
    assert all(torch.equal(one[name], two[name]) for name in one)


def test_tokens_are_kept_by_frequency_then_id_and_ends_always() -> None:
    # Completions: 6 three times, 7 and 8 twice, 5, 20, 30 and 39 once. Prompts: 9 three times.
    assert frequent_tokens(ROWS, 4, 48, [1]) == [1, 6, 7, 8]
    assert frequent_tokens(ROWS, 6, 48, [30]) == [30, 6, 7, 8, 5, 20]
    assert frequent_tokens(ROWS, 13, 48, []) == [6, 7, 8, 5, 20, 30, 39, 9, 2, 3, 4, 0, 1]
    assert frequent_tokens(ROWS, 4, 20, [1, 40]) == [1, 6, 7, 8]
    assert coverage(ROWS, [6, 7]) == pytest.approx(5 / 11)
    for wrong in (49, 1):
        with pytest.raises(ConfigError, match="must be from 2 to 48"):
            frequent_tokens(ROWS, wrong, 48, [1, 3])


def test_rollouts_without_a_completion_are_refused(target: Path, tmp_path: Path) -> None:
    given = Dataset.from_list([{"prompt_ids": [2, 3], "completion_ids": []}])
    with pytest.raises(ValueError, match="at least one completion token"):
        make(target, tmp_path / "draft", given, kind="target", vocabulary=8)
    assert not list(tmp_path.iterdir())


def test_an_existing_draft_keeps_the_tokens_that_end_its_targets_texts(
    target: Path, tmp_path: Path
) -> None:
    draft = shutil.copytree(target, tmp_path / "given")
    settings = json.loads((draft / "generation_config.json").read_text())
    (draft / "generation_config.json").write_text(json.dumps(settings | {"eos_token_id": 40}))
    make(target, tmp_path / "made", draft=draft, kind="model", vocabulary=4)
    kept = load_model(str(tmp_path / "made")).t2d.nonzero().squeeze(-1).tolist()
    assert kept == [1, 3, 6, 7]


def test_an_existing_draft_is_reduced_once_and_only_of_the_same_vocabulary(
    target: Path, tmp_path: Path
) -> None:
    make(target, tmp_path / "a", draft=target, kind="model", vocabulary=12)
    with pytest.raises(ConfigError, match="12 tokens already"):
        make(target, tmp_path / "b", draft=tmp_path / "a", kind="model", vocabulary=8)
    other = stored(tmp_path / "other", tokens=280)
    with pytest.raises(VocabularyMismatchError):
        make(target, tmp_path / "b", draft=other, kind="model", vocabulary=8)


@pytest.mark.parametrize("part", [least_squares.PART, 90])
def test_least_squares_finds_a_linear_map_of_columns_of_any_size(
    part: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(least_squares, "PART", part)  # numbers that are held at a time
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(400, 6, generator=generator, dtype=torch.float64) * torch.logspace(-3, 2, 6)
    wanted = torch.randn(6, 3, generator=generator, dtype=torch.float64)
    wanted /= torch.logspace(-3, 2, 6)[:, None]
    found = ridge(zip(x.split(10), (x @ wanted).split(10), strict=True))
    torch.testing.assert_close(found, wanted, rtol=3e-3, atol=0.0)
