"""Loading: what does not fit is refused before it is used."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from specdata.errors import ConfigError
from specdata.models import (
    check_length,
    end_ids,
    hub_commit,
    known_ids,
    load_generation,
    load_model,
    load_tokenizer,
    positions,
)
from specdata.sources import hub_source
from tests.tiny import tiny_llama


def test_weights_that_are_missing_are_not_made_up(tmp_path: Path) -> None:
    tiny_llama(0, layers=1).save_pretrained(tmp_path)
    load_model(str(tmp_path))
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 2}))
    with pytest.raises(ConfigError, match=r"9 are missing \(first: model\.layers\.1\."):
        load_model(str(tmp_path))


def test_damaged_weights_and_absent_models_are_named(tmp_path: Path) -> None:
    tiny_llama(0).save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"nothing")
    with pytest.raises(ConfigError, match=r"cannot load the model .*model\.safetensors is damaged"):
        load_model(str(tmp_path))
    with pytest.raises(ConfigError, match="cannot load the tokenizer"):
        load_tokenizer("nobody/nothing")
    with pytest.raises(ConfigError, match="dtype must be one of float32"):
        load_model(str(tmp_path), dtype="int8")


def test_a_hub_id_may_carry_a_revision_and_a_folder_any_name(tmp_path: Path) -> None:
    assert hub_source("owner/name@v1.0") == ("owner/name", "v1.0")
    assert hub_source("owner/name") == ("owner/name", None)
    folder = tmp_path / "run@night"
    folder.mkdir()
    assert hub_source(str(folder)) == (str(folder), None)


def test_sequences_beyond_the_models_positions_are_refused() -> None:
    model = tiny_llama(0)
    check_length(model.config, 256)
    with pytest.raises(ConfigError, match=r"make 257 tokens, but .* has positions for 256"):
        check_length(model.config, 257)


def test_ids_beyond_a_models_matrix_get_a_stand_in_and_others_none() -> None:
    ids = torch.tensor([[0, 3, 4, 9]])
    assert known_ids(ids, tiny_llama(0, vocab=4)).tolist() == [[0, 3, 0, 0]]


def test_the_configuration_alone_gives_the_end_tokens_and_positions_of_the_model(
    tmp_path: Path,
) -> None:
    model = tiny_llama(0)
    model.save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    config, ends = load_generation(str(tmp_path))
    assert ends == end_ids(model) == {1}
    assert positions(config) == 256
    (tmp_path / "generation_config.json").unlink()
    assert load_generation(str(tmp_path))[1] == {1}
    with pytest.raises(ConfigError, match="cannot load the model configuration"):
        load_generation(str(tmp_path / "nowhere"))


def test_the_commit_of_a_hub_model_is_the_one_its_branch_had_when_it_was_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    repository = tmp_path / "models--me--model"
    for name, commit in (("main", "a" * 40), ("v2", "b" * 40)):
        (repository / "snapshots" / commit).mkdir(parents=True)
        (repository / "snapshots" / commit / "config.json").write_text("{}")
        (repository / "refs").mkdir(exist_ok=True)
        (repository / "refs" / name).write_text(commit)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    assert hub_commit("me/model") == "a" * 40
    assert hub_commit("me/model@v2") == "b" * 40
    assert hub_commit(f"me/model@{'b' * 40}") == "b" * 40
    assert hub_commit(str(tmp_path)) is None
