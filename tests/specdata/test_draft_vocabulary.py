"""Drafts with a reduced vocabulary: stored, loaded, trained, decoded and released."""

import copy
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from eval.publishing.release import REDUCED, _make_whole, release_draft
from eval.runtime.feeding import sequence_of
from eval.runtime.model import CachedModel
from heads.inputs import FEATURES, DraftedTokens
from specdata.drafts.draft_vocabulary import draft_vocabulary_ids, reduce_vocabulary
from specdata.errors import ConfigError
from specdata.lm_head import find_lm_head, hidden_states
from specdata.models import load_model
from specdata.probability import SamplingConfig, probabilities, to_vocabulary
from specdata.saving import add_former_names
from tests.support.acceptance import labeller, rollouts
from tests.support.families import FAMILIES, tiny
from tests.support.release import Pair

KEPT = [1, 5, 7, 30, 39]
IDS = torch.arange(1, 13).unsqueeze(0)


def saved(model: Any, folder: Path) -> Path:
    model.save_pretrained(folder)
    add_former_names(folder)
    return folder


def reduced(family: str = "llama", seed: int = 0, **changes: Any) -> Any:
    model = tiny(family, seed, dtype=torch.float32, **changes)
    reduce_vocabulary(model, KEPT)
    return model


@pytest.mark.parametrize("family", FAMILIES)
def test_a_reduced_draft_is_stored_in_the_engines_form_and_loads_as_it_was(
    family: str, tmp_path: Path
) -> None:
    whole = tiny(family, 0, dtype=torch.float32)
    model = copy.deepcopy(whole)
    reduce_vocabulary(model, KEPT)
    logits = model(input_ids=IDS).logits
    outside = torch.ones(40, dtype=torch.bool)
    outside[KEPT] = False
    torch.testing.assert_close(logits[..., KEPT], whole(input_ids=IDS).logits[..., KEPT])
    assert logits[..., outside].isneginf().all()
    reader = find_lm_head(model)
    assert (reader.embedding, reader.vocabulary) == (model.get_output_embeddings(), 40)
    torch.testing.assert_close(reader.logits(hidden_states(model, IDS)), logits)

    folder = saved(model, tmp_path / "once")
    tensors = load_file(folder / "model.safetensors")
    assert (tensors["d2t"] + torch.arange(5)).tolist() == KEPT
    assert tensors["t2d"].nonzero().squeeze(-1).tolist() == KEPT
    loaded = load_model(str(folder))
    assert type(loaded) is type(model)
    assert (loaded.config.vocab_size, loaded.config.draft_vocab_size) == (40, 5)
    assert torch.equal(loaded(input_ids=IDS).logits, logits)

    again = load_file(saved(loaded, tmp_path / "twice") / "model.safetensors")
    assert again.keys() == tensors.keys()
    assert all(torch.equal(again[name], tensors[name]) for name in tensors)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"d2t": torch.tensor([1, 4, 5, 27, 34])}, "different tokens"),
        ({"d2t": None}, "d2t"),
        ({"lm_head.weight": None}, "lm_head.weight"),
        ({"t2d": torch.ones(40, dtype=torch.bool)}, "different tokens"),
    ],
)
def test_a_damaged_folder_is_refused(
    change: dict[str, Tensor | None], said: str, tmp_path: Path
) -> None:
    path = saved(reduced(), tmp_path / "model") / "model.safetensors"
    tensors = load_file(path) | change
    save_file({k: v for k, v in tensors.items() if v is not None}, path, {"format": "pt"})
    with pytest.raises(ConfigError, match=said):
        load_model(str(path.parent))


@torch.inference_mode()
@pytest.mark.parametrize("scale", [1.0, 8.0])
def test_the_whole_form_leaves_next_to_nothing_to_tokens_that_were_left_out(scale: float) -> None:
    """Also of families that scale what the output matrix gives."""
    draft = reduced("granite", logits_scaling=scale)
    ids = torch.tensor([KEPT])  # as its own texts are
    smallest = draft(input_ids=ids).logits[..., KEPT].amin(-1).mean()
    _make_whole(draft)
    outside = [token for token in range(40) if token not in KEPT]
    others = draft(input_ids=ids).logits[..., outside].mean()
    assert (others - smallest).abs() < 0.5 * smallest.abs()


def test_a_draft_is_reduced_once() -> None:
    with pytest.raises(ConfigError, match="can propose 5 tokens already"):
        reduce_vocabulary(reduced(), [1])


@pytest.mark.parametrize(
    "sampling",
    [SamplingConfig(), SamplingConfig(0.0), SamplingConfig(0.7, 2, 0.8), SamplingConfig(0.5, 9)],
    ids=str,
)
def test_a_reduced_draft_is_drawn_from_as_if_all_tokens_were_warped(
    sampling: SamplingConfig,
) -> None:
    """The target may have more tokens than the draft, or fewer."""
    draft = reduced()
    for vocabulary in (44, 40, 36):
        sequence = sequence_of(CachedModel(draft, vocabulary), 0, sampling)
        logits = sequence.append(IDS[0].tolist(), IDS.shape[1]).run()
        found = sequence.distribution(logits)
        everywhere = to_vocabulary(draft(input_ids=IDS).logits[0], vocabulary)
        torch.testing.assert_close(found, probabilities(everywhere, sampling))


def test_features_and_labels_of_a_reduced_draft_are_finite() -> None:
    sampling = SamplingConfig(top_k=8, top_p=0.9)
    target, draft = tiny("llama", 1, vocab=44, dtype=torch.float32), reduced()
    q = probabilities(to_vocabulary(draft(input_ids=IDS).logits[0], 44), sampling)
    torch.testing.assert_close(q.sum(-1), torch.ones(len(q)))
    outside = torch.ones(44, dtype=torch.bool)
    outside[KEPT] = False
    assert not q[:, outside].any()
    drafted = DraftedTokens(
        tokens=q.argmax(-1), before=lambda: q, after=lambda: q, distributions=lambda: q
    )
    for name in ("log_q", "entropy"):
        assert FEATURES[name].compute(drafted).isfinite().all(), name

    for label in labeller(target, draft, sampling)(rollouts(3, vocab=40)):
        assert {*label["draft_ids"]} <= {*KEPT}
        for name in ("log_q", "log_q_max", "entropy", "overlap", "accept_prob"):
            assert all(math.isfinite(value) for value in label[name]), name  # type: ignore[literal-required]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """A pair whose draft proposes 64 tokens; its results are those of the other tests."""
    made = Pair(tmp_path_factory.mktemp("pair"))
    draft = load_model(str(made.draft))
    reduce_vocabulary(draft, range(1, 257, 4))
    saved(draft, made.draft)
    return made


def test_a_reduced_draft_is_released_as_it_was_measured_and_as_a_plain_model(
    pair: Pair, tmp_path: Path
) -> None:
    draft = load_model(str(pair.draft))
    out = release_draft(pair.draft, tmp_path / "release", pair.results)
    ids = torch.arange(4, 20).unsqueeze(0)
    expected = draft(input_ids=ids).logits
    assert torch.equal(load_model(str(out / REDUCED))(input_ids=ids).logits, expected)

    plain, info = AutoModelForCausalLM.from_pretrained(out, output_loading_info=True)
    assert not any(info.values())
    assert not hasattr(plain.config, "draft_vocab_size")
    assert plain.get_output_embeddings().weight.shape[0] == plain.config.vocab_size
    found, kept = plain(input_ids=ids).logits, draft_vocabulary_ids(draft)
    assert kept is not None
    torch.testing.assert_close(found[..., kept], expected[..., kept])
    others = found[..., ~draft.t2d]
    assert others.isfinite().all()
    assert others.amax(-1).mean() < expected[..., kept].mean()
    card = (out / "README.md").read_text()
    assert "proposes 64 of" in card
    assert "This form was not measured" in card
