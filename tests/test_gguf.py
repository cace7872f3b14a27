"""A GGUF file as a model: what it holds is what is loaded, and all else is refused by name."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from distill.initial import cut
from eval.reporting.release import _target_config
from recipes.checks import has_chat_template
from recipes.config import PipelineConfig, parse
from recipes.pipeline import RECIPE
from recipes.sizes import sizes_of
from specdata import gguf_file
from specdata.errors import ConfigError
from specdata.gguf_file import is_gguf, read_header
from specdata.inspect.__main__ import _tokenizer
from specdata.loading import Loading
from specdata.model_folder import copy_tokenizer
from specdata.models import (
    end_ids,
    hub_commit,
    load_generation,
    load_model,
    load_tokenizer,
    positions,
    revision_of,
)
from specdata.vocabulary import vocabulary_fingerprint
from tests.gguf_files import TEXT, chat_tokenizer, small_llama, write_gguf
from tests.light_imports import run_without_heavy_libraries

Files = Callable[..., Path]
MESSAGES = [{"role": "user", "content": TEXT}]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file that is only read."""
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    write_gguf(path, small_llama())
    return path


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("quantised", [None, "Q8_0", "Q4_1"])
def test_the_weights_are_those_that_the_file_holds(
    tmp_path: Path, quantised: str | None, tied: bool
) -> None:
    model = small_llama(tied=tied)
    held = write_gguf(tmp_path / "a.gguf", model, quantised=quantised)
    loaded = load_model(str(tmp_path / "a.gguf"))
    weights = loaded.state_dict()
    assert {*weights} == {*held, "lm_head.weight"}
    for name, weight in held.items():
        assert torch.equal(weights[name], weight), name
    assert (loaded.lm_head.weight is loaded.model.embed_tokens.weight) == tied
    if quantised is None:
        ids = torch.arange(40)[None]
        assert torch.equal(loaded(ids).logits, model(ids).logits)


def test_the_model_is_a_plain_one_that_can_be_saved_cut_and_read_again(
    tmp_path: Path, whole: Path
) -> None:
    loaded = load_model(str(whole))
    assert not hasattr(loaded.config, "quantization_config")
    loaded.save_pretrained(tmp_path / "saved")
    copy_tokenizer(str(whole), tmp_path / "saved")
    again = load_model(str(tmp_path / "saved"))
    ids = torch.arange(20)[None]
    assert torch.equal(again(ids).logits, loaded(ids).logits)
    assert again.config.rope_parameters == small_llama().config.rope_parameters
    assert end_ids(again) == end_ids(loaded) == {0}
    assert vocabulary_fingerprint(load_tokenizer(str(tmp_path / "saved"))) == (
        vocabulary_fingerprint(load_tokenizer(str(whole)))
    )
    settings = json.loads((tmp_path / "saved" / "tokenizer_config.json").read_text())
    assert settings["tokenizer_class"] == "PreTrainedTokenizerFast"  # transformers 4 has it, too
    short = cut(loaded, [1])
    assert torch.equal(
        short.state_dict()["model.layers.0.mlp.up_proj.weight"],
        small_llama().state_dict()["model.layers.1.mlp.up_proj.weight"],
    )


def test_half_precision_is_rounded_from_what_the_file_holds(tmp_path: Path) -> None:
    held = write_gguf(tmp_path / "a.gguf", small_llama(), quantised="Q8_0")
    weights = load_model(str(tmp_path / "a.gguf"), dtype="bfloat16").state_dict()
    for name, weight in held.items():
        assert torch.equal(weights[name], weight.bfloat16()), name


def test_the_tokenizer_and_its_chat_template_are_the_files(tmp_path: Path, whole: Path) -> None:
    ours, theirs = chat_tokenizer(), load_tokenizer(str(whole))
    assert vocabulary_fingerprint(ours) == vocabulary_fingerprint(theirs)
    assert ours.special_tokens_map == theirs.special_tokens_map
    for text in (TEXT, "  déjà vu\n\n\tx = 12345", "<|end|> inside"):
        ids = ours(text)["input_ids"]
        assert theirs(text)["input_ids"] == ids
        assert theirs.decode(ids) == text
    assert theirs.chat_template == ours.chat_template
    copy_tokenizer(str(whole), tmp_path)
    saved = load_tokenizer(str(tmp_path))
    assert saved.apply_chat_template(MESSAGES) == ours.apply_chat_template(MESSAGES)
    found, reason = _tokenizer({"target": str(whole), "tokenizer": vocabulary_fingerprint(ours)})
    assert (type(found), reason) == (type(theirs), "")


def test_what_lies_beside_the_file_is_not_read(tmp_path: Path) -> None:
    small_llama(7, layers=1).save_pretrained(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text('{"chat_template": "other"}')
    (tmp_path / "adapter_config.json").write_text('{"base_model_name_or_path": "nobody/nothing"}')
    held = write_gguf(tmp_path / "a.gguf", small_llama())
    name = str(tmp_path / "a.gguf")
    weights = load_model(name).state_dict()
    assert all(torch.equal(weights[key], weight) for key, weight in held.items())
    assert load_tokenizer(name).chat_template == chat_tokenizer().chat_template


def test_the_configuration_is_had_without_the_weights_and_ends_turns_too(tmp_path: Path) -> None:
    name = str(tmp_path / "a.GGUF")
    write_gguf(Path(name), small_llama(), numbers={"tokenizer.ggml.eot_token_id": 5})
    config, ends = load_generation(name)
    assert (positions(config), ends) == (512, {0, 5})
    assert _target_config(name).vocab_size == 288
    assert end_ids(load_model(name)) == {0, 5}
    assert config.name_or_path == name


def test_a_file_is_known_by_its_content(tmp_path: Path, whole: Path) -> None:
    shutil.copy(whole, tmp_path / "b.gguf")
    assert hub_commit(str(whole)) is None
    assert revision_of(str(tmp_path / "b.gguf")) == revision_of(str(whole))
    write_gguf(tmp_path / "b.gguf", small_llama(1))
    assert revision_of(str(tmp_path / "b.gguf")) != revision_of(str(whole))


def planned(target: Path, *arguments: str) -> PipelineConfig:
    return parse(options(target, *arguments), "").config


def options(target: Path, *arguments: str) -> list[str]:
    """The command line of a run whose draft is cut from a target."""
    methods = "[{name: plain, decoder: plain}, {name: K=2, length: 2}]"
    sets = "[{name: maths, split: train, count: 4}, {name: maths, split: dev, count: 2}]"
    return [
        *("--toy", "null", "--head", "null", "--models.target", str(target)),
        *("--models.draft", "null", "--draft.init", "{kind: target, layers: 1, vocabulary: 200}"),
        *("--rollouts.sets", sets, "--rollouts.max_new_tokens", "8"),
        *("--rollouts.shard_size", "8", "--draft.epochs", "1"),
        *("--eval.sets", "[{name: maths, split: test, count: 2}]", "--eval.methods", methods),
        *("--eval.max_new_tokens", "8", "--output", str(target.with_name("run"))),
        *arguments,
    ]


def test_the_checks_know_its_sizes_and_template(whole: Path) -> None:
    config = planned(whole)
    stored = small_llama().config.to_dict()
    for key, value in sizes_of(config, str(whole)).items():
        assert value == (pytest.approx(stored[key]) if key == "rms_norm_eps" else stored[key]), key
    assert has_chat_template(config) is True


def test_a_plan_reads_it_without_heavy_libraries(whole: Path) -> None:
    shown = run_without_heavy_libraries("recipes/pipeline.py", *options(whole), "--plan")
    assert f"reads target: {whole}" in shown
    # 200 of 288 rows, one layer of 24,640 weights + norms, and the embedding, 4 bytes each.
    assert "the draft, about 248.6 KB" in shown


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--draft.init.layers", "3"], "draft.init.layers must be 1 to 2, because"),
        (["--draft.init.vocabulary", "289"], "draft.init.vocabulary must be at most 288"),
        (["--rollouts.max_new_tokens", "512"], "has positions for 512 tokens"),
    ],
)
def test_what_cannot_work_with_it_is_refused_before_the_first_stage(
    whole: Path, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert RECIPE.run([*options(whole), *arguments]) == 2
    assert message in capsys.readouterr().err
    assert not whole.with_name("run").exists()


@pytest.mark.slow
def test_the_whole_pipeline_takes_it_as_target(tmp_path: Path) -> None:
    target = tmp_path / "tiny.gguf"
    write_gguf(target, small_llama(), quantised="Q8_0")
    assert RECIPE.run(options(target)) == 0
    results = json.loads((tmp_path / "run" / "eval" / "results.json").read_text())
    assert {run["target"] for run in results["runs"]} == {str(target)}
    released = tmp_path / "run" / "release" / "draft"
    assert vocabulary_fingerprint(load_tokenizer(str(released))) == (
        vocabulary_fingerprint(chat_tokenizer())
    )
    assert RECIPE.run(options(target)) == 0  # and finds everything made


def test_without_the_package_the_command_to_install_it_is_named(
    whole: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(gguf_file, "find_spec", lambda _name: None)
    assert RECIPE.run(options(whole)) == 2
    assert "pip install 'draftsmith[gguf]'" in capsys.readouterr().err
    for load in (load_model, load_tokenizer, load_generation):
        with pytest.raises(ConfigError, match="not installed: run pip install"):
            load(str(whole))


def test_a_file_that_is_not_there_and_a_folder_of_such_a_name_are_told_apart(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert RECIPE.run(options(tmp_path / "none.gguf")) == 2
    assert "none.gguf cannot be read (No such file or directory)" in capsys.readouterr().err
    small_llama().save_pretrained(tmp_path / "folder.gguf")
    assert not is_gguf(str(tmp_path / "folder.gguf"))
    load_model(str(tmp_path / "folder.gguf"))


@pytest.mark.parametrize("share", [0.0, 0.00002, 0.001, 0.02, 0.3, 0.999])
def test_a_part_of_a_file_is_refused(tmp_path: Path, whole: Path, share: float) -> None:
    data = whole.read_bytes()
    path = tmp_path / "part.gguf"
    path.write_bytes(data[: int(share * len(data))])
    with pytest.raises(ConfigError, match=r"part\.gguf is no whole GGUF file .*download it again"):
        read_header(str(path))
    with pytest.raises(ConfigError, match="is no whole GGUF file"):
        load_model(str(path))


def test_what_transformers_does_not_read_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.gguf"
    write_gguf(path, small_llama(), architecture="mpt")
    with pytest.raises(ConfigError, match=r"(?s)cannot load the model .* mpt .*folder or Hub id"):
        load_model(str(path))
    write_gguf(path, small_llama(), left_out="blk.1.ffn_up.weight")
    with pytest.raises(ConfigError, match=r"1 are missing \(first: model\.layers\.1\.mlp\.up_proj"):
        load_model(str(path))
    write_gguf(path, small_llama())
    with pytest.raises(ConfigError, match="cannot be quantised again: leave bits out"):
        load_model(str(path), load=Loading(bits=8))


@pytest.mark.parametrize("how", ["tensor", "metadata"])
def test_scaled_positions_which_transformers_would_skip_are_refused(
    tmp_path: Path, how: str
) -> None:
    path = tmp_path / "a.gguf"
    if how == "tensor":
        write_gguf(path, small_llama(), tensors={"rope_freqs.weight": np.ones(8, np.float32)})
    else:
        write_gguf(path, small_llama(), texts={"llama.rope.scaling.type": "yarn"})
    for load in (load_generation, load_model):
        with pytest.raises(ConfigError, match=r"scaled rotary positions .*another model"):
            load(str(path))
