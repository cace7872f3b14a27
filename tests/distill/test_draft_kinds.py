"""Every kind of draft that can be made is told by its config.json, drafts and learns."""

import json
from pathlib import Path
from typing import Any, get_args

import pytest
import torch

from distill.config import DistilConfig, InitConfig, LayoutName
from distill.drafts import TRAININGS, round_places
from distill.engine_layouts import LAYOUTS
from distill.initial import new_draft
from eval.decoder import DecodeConfig, SpeculativeDecoder
from recipes.command import RECIPES
from specdata.drafts import DRAFT_KINDS, kind_of
from specdata.drafts.mtp import FAMILIES
from specdata.drafts.networks import NETWORKS
from specdata.lm_head import find_lm_head
from specdata.models import load_model
from specdata.target_states import target_taps
from tests.support.families import greedy
from tests.support.initial import make, stored
from tests.support.target_heads import with_head

MADE: dict[str, dict[str, Any]] = {
    "plain": {"kind": "target", "layers": 1},
    "states": {"kind": "states", "layers": 1},
    **{name: {"kind": "states", "layers": 1, "layout": name} for name in get_args(LayoutName)},
    **{f"mtp of {family}": {"kind": "mtp"} for family in FAMILIES},
}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    sizes = {"hidden_size": 16, "head_dim": 4, "num_hidden_layers": 4}
    return stored(tmp_path_factory.mktemp("target") / "model", tie_word_embeddings=True, **sizes)


def test_each_kind_says_what_it_is_and_how_it_learns() -> None:
    made = {name.partition(" ")[0] for name in MADE}
    assert DRAFT_KINDS.keys() == {*made, "masks"} == TRAININGS.keys()
    assert NETWORKS.keys() == {name for name, kind in DRAFT_KINDS.items() if kind.reads_states}
    assert LAYOUTS.keys() == {name for name, kind in DRAFT_KINDS.items() if kind.architecture}
    for name, kind in DRAFT_KINDS.items():
        training = TRAININGS[name]
        assert kind.name == name
        assert all(map(callable, (training.begin, training.of_shapes, training.states_by_place)))


FEW = ("mtp of qwen3_5_text", "mtp of glm4_moe")
MANY = [name for name in MADE if name.startswith("mtp") and name not in FEW]


@pytest.mark.parametrize(
    "name",
    [
        *(name for name in MADE if name not in MANY),
        *(pytest.param(name, marks=pytest.mark.exhaustive) for name in MANY),
    ],
)
def test_a_draft_of_each_kind_is_known_keeps_the_targets_text_and_learns(
    target: Path, tmp_path: Path, name: str
) -> None:
    name, _, family = name.partition(" of ")
    settings = {"kind": "mtp"} if family else MADE[name]
    if family:
        target = with_head(tmp_path / "target", family)
    make(target, tmp_path / "draft", **settings)
    draft, model = load_model(str(tmp_path / "draft")), load_model(str(target))
    assert kind_of(draft.config) is DRAFT_KINDS[name]
    planned = new_draft(model, InitConfig(**settings))
    shapes, weights = ([each.shape for each in made.parameters()] for made in (planned, draft))
    assert sorted(shapes) == sorted(weights)
    prompt, config = torch.tensor([5, 6, 7]), DecodeConfig(length=3, temperature=0.0)
    decoder = SpeculativeDecoder.from_config(model, draft, config)
    out = decoder.generate(prompt, max_new_tokens=12, generator=torch.Generator())
    assert out.tokens.tolist() == greedy(model, prompt, 12)
    ids = torch.arange(4, 20)[None]
    places = round_places(find_lm_head(draft), ids, 2, taps=target_taps(draft, [], ids))
    loss = sum(place.states[place.kept].square().mean() for place in places)
    loss.backward()
    assert any(each.grad is not None and each.grad.any() for each in draft.parameters())


OTHER_TRAININGS = {"logits": "a", "on_policy": 0.5, "finetune": {}, "lora": {}, "depths": 4}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        *(
            ({"init": {"kind": "states"}, key: value}, f"{key}.* must be left out with init.kind")
            for key, value in OTHER_TRAININGS.items()
        ),
        ({"init": {"kind": "states", "taps": [3, 1]}}, "in order, each once"),
        ({"init": {"kind": "states", "block": 3}}, "block needs layout dspark, got none"),
        (
            {"init": {"kind": "states", "layout": "dspark", "block": 1}},
            "greater than or equal to 2",
        ),
        ({"init": {"kind": "states", "layout": "eagle3", "layers": 2}}, "needs layers: 1, got 2"),
        ({"init": {"kind": "target", "layout": "dspark"}}, "layout needs kind states, got target"),
        (
            {"init": {"kind": "states", "layout": "dspark"}, "readings": 3},
            "readings must be left out",
        ),
        ({"init": {"kind": "target", "taps": [1]}}, "taps needs kind states"),
        ({"init": {"kind": "target"}, "readings": 3}, "readings needs init.kind states or mtp"),
        ({"depths": 3, "freeze_embeddings": True}, "embeddings must be left out with depths"),
        ({"depths": 3, "lora": {}}, "lora must be left out with depths"),
        ({"optimizer": "muon", "lora": {}}, "optimizer muon must be left out with lora"),
        ({"freeze_embeddings": True, "lora": {}}, "embeddings must be left out with lora"),
        ({"on_policy": 0.5, "logits": "a"}, "on_policy must be left out with logits"),
    ],
)
def test_settings_that_exclude_each_other_are_refused(
    settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        DistilConfig(**settings)


@pytest.mark.parametrize("key", OTHER_TRAININGS)
def test_a_given_draft_on_states_is_not_trained_otherwise_either(
    target: Path, tmp_path: Path, key: str, capsys: pytest.CaptureFixture[str]
) -> None:
    make(target, tmp_path / "draft", **MADE["states"])
    sets = "[{name: maths, split: train, count: 2}, {name: code, split: dev, count: 2}]"
    models = f"{{target: {target}, draft: {tmp_path / 'draft'}}}"
    given = ["--output", str(tmp_path / "out"), "--models", models, "--rollouts.sets", sets]
    given += [f"--draft.{key}", json.dumps(OTHER_TRAININGS[key])]
    assert RECIPES["train-draft"].run([*given, "--plan"]) == 2
    assert f"draft: {key} must be left out with models.draft" in capsys.readouterr().err
