"""The recipe that makes a draft: what is refused before it begins, and what passes."""

import json
import shlex
from contextlib import nullcontext
from pathlib import Path

import pytest

from distill.adapters import load_student
from distill.config import LoraConfig
from recipes import train_draft
from recipes.config import parse
from recipes.make_rollouts import Rollouts
from specdata.errors import ConfigError
from tests.support.initial import stored


def arguments(target: Path, *more: str) -> list[str]:
    """A draft cut from a target, with rollouts that it has room for."""
    own = ["--toy", "null", "--models.target", str(target), "--models.draft", "null"]
    own += ["--draft.init={kind: target}", "--rollouts.max_new_tokens", "8"]
    return [*own, "--head", "null", "--output", str(target.parent / "run"), *more]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Targets and drafts: of few positions, of another family, and adapters."""
    folder = tmp_path_factory.mktemp("models")
    stored(folder / "target", num_hidden_layers=4, max_position_embeddings=64)
    stored(folder / "short", max_position_embeddings=32, hidden_size=16)
    load_student(str(folder / "short"), LoraConfig(), seed=0).save_pretrained(folder / "adapters")
    (folder / "talks.jsonl").write_text('{"text": "x"}')
    (folder / "gemma").mkdir()
    sizes = {"model_type": "gemma2", "num_hidden_layers": 4}
    (folder / "gemma" / "config.json").write_text(json.dumps(sizes))
    return folder


SHORT = "--draft.init.kind=model --models.draft=short --rollouts.max_new_tokens=40"
ADAPTED = "--draft.init.kind=model --models.draft=adapters --draft.lora.rank"
PLANS = [
    ("--draft.init='{kind: target, layers: 5}'", "must be 1 to 4"),
    ("--draft.init='{kind: target, vocabulary: 4000}'", "must be at most"),
    ("--draft.init='{kind: states, layers: 1, taps: [2, 5]}'", "init: taps must be .* to 4"),
    (
        "--draft.init='{kind: states, taps: [1]}' --rollouts.store_taps=[2]",
        "store all that the draft",
    ),
    (
        "--draft.init='{kind: states, layout: eagle3, layers: 1}' --rollouts.store_taps=[3]",
        r"the draft reads \[1, 2\]",
    ),
    (
        "--draft.init='{kind: states, layout: eagle3, layers: 1}' --models.target=gemma",
        r"eagle3 needs a target of llama.* is gemma2",
    ),
    (
        "--draft.init='{kind: states, layout: dspark, layers: 1, taps: [1, 4]}'",
        r"^draft\.init: taps must be from 1 to 3 .* got \[1, 4\]",
    ),
    (SHORT, "positions for 32 .* set draft.max_length to 32"),
    (f"{SHORT} --draft.max_length=32", None),
    (f"{ADAPTED}=16", None),
    (f"{ADAPTED}=17", "must not exceed the draft's hidden size, 16, got 17"),  # its base's
    ("--draft.lora.rank=4 --draft.init.kind=fresh", "kind fresh are random"),
    ("--draft.finetune.max_length=64", None),
    ("--draft.finetune.max_length=65", "must be at most 64, the positions of .*target"),
    (
        "--draft.finetune.conversations=[talks.jsonl]",
        r"^draft\.finetune\.conversations: .* no column 'messages'; it has 'text'\. Each row must",
    ),
    ("--draft.report_to=[wandb]", "draft.report_to names wandb, which is not installed"),
]


@pytest.mark.parametrize(("asked", "said"), PLANS, ids=[asked for asked, _ in PLANS])
def test_what_cannot_be_made_or_trained_is_refused_before_anything_runs(
    asked: str, said: str | None, models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("transformers.integrations.get_available_reporting_integrations", list)
    monkeypatch.chdir(models)
    config = parse(arguments(Path("target"), *shlex.split(asked))).config
    outcome = nullcontext() if said is None else pytest.raises(ConfigError, match=said)
    with outcome:
        for stage in train_draft.RECIPE.stages_of(config):
            stage.check()


def test_taps_that_the_target_does_not_have_are_not_stored(models: Path) -> None:
    asked = arguments(models / "target", "--rollouts.store_taps=[2, 5]")
    with pytest.raises(ConfigError, match=r"store_taps: taps must be from 0 .* to 4"):
        Rollouts(parse(asked).config).check()
