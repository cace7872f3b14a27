"""Every kind of draft that can be made is told by its config.json, drafts and learns."""

from __future__ import annotations

from pathlib import Path
from typing import Any, get_args

import pytest
import torch

from distill.config import InitConfig, LayoutName
from distill.initial import new_draft
from distill.kinds import KINDS, along_rounds
from eval.decoder import DecodeConfig, SpeculativeDecoder
from specdata import draft_kinds
from specdata.draft_kinds import kind_of
from specdata.lm_head import find_lm_head
from specdata.models import load_model
from specdata.target_states import target_taps
from tests.support.families import greedy
from tests.support.initial import make, stored

MADE: dict[str, dict[str, Any]] = {
    "plain": {"kind": "target", "layers": 1},
    "states": {"kind": "states", "layers": 1},
    **{name: {"kind": "states", "layers": 1, "layout": name} for name in get_args(LayoutName)},
}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    sizes = {"hidden_size": 16, "head_dim": 4, "num_hidden_layers": 4}
    return stored(tmp_path_factory.mktemp("target") / "model", tie_word_embeddings=True, **sizes)


def test_each_kind_says_what_it_is_and_how_it_learns() -> None:
    assert draft_kinds.KINDS.keys() == KINDS.keys() == {*MADE, "masks"}
    assert all(kind.name == name for name, kind in draft_kinds.KINDS.items())


@pytest.mark.parametrize("name", MADE)
def test_a_draft_of_each_kind_is_known_keeps_the_targets_text_and_learns(
    target: Path, tmp_path: Path, name: str
) -> None:
    make(target, tmp_path / "draft", **MADE[name])
    draft, model = load_model(str(tmp_path / "draft")), load_model(str(target))
    assert kind_of(draft.config) is draft_kinds.KINDS[name]
    planned = new_draft(model, InitConfig(**MADE[name]))
    shapes, weights = ([each.shape for each in made.parameters()] for made in (planned, draft))
    assert sorted(shapes) == sorted(weights)
    prompt, config = torch.tensor([5, 6, 7]), DecodeConfig(length=3, temperature=0.0)
    decoder = SpeculativeDecoder.from_config(model, draft, config)
    out = decoder.generate(prompt, max_new_tokens=12, generator=torch.Generator())
    assert out.tokens.tolist() == greedy(model, prompt, 12)
    ids = torch.arange(4, 20)[None]
    places = along_rounds(find_lm_head(draft), ids, 2, taps=target_taps(draft, [], ids))
    loss = sum(place.states[place.kept].square().mean() for place in places)
    loss.backward()
    assert any(each.grad is not None and each.grad.any() for each in draft.parameters())
