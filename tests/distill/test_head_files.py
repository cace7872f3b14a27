"""Heads of targets are written back as they were read, and only where they belong."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from distill.head_files import SHARD, write_head, write_into
from distill.lesson import freeze
from eval.decode_config import DecodeConfig
from eval.decoder import SpeculativeDecoder
from specdata.drafts.mtp import FAMILIES
from specdata.errors import ConfigError
from specdata.models import load_model
from specdata.saving import copy_tokenizer
from specdata.target_heads import find_head
from tests.support.initial import make
from tests.support.target_heads import with_head

BIAS = "bias"
INDEX = "model.safetensors.index.json"
Tensors = dict[str, torch.Tensor]


def published(folder: Path, family: str = "glm4_moe", **changes: Any) -> Path:
    """A target in bfloat16, biases in float32, in three files: without the head, with it, of it."""
    with_head(folder, family, dtype=torch.bfloat16, **changes)
    whole = load_file(folder / "model.safetensors")
    whole = {name: each.float() if BIAS in name else each for name, each in whole.items()}
    (folder / "model.safetensors").unlink()
    head = sorted(head_names(family, whole))
    own = sorted(whole.keys() - head)
    parts = {"1": own[:-1], "2": [own[-1], *head[:3]], "3": head[3:]}
    for part, held in parts.items():
        tensors = {name: whole[name] for name in held}
        save_file(tensors, folder / f"{part}.safetensors", metadata={"format": "pt"})
    places = {name: f"{part}.safetensors" for part, held in parts.items() for name in held}
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": places}))
    return folder


def head_names(family: str, tensors: Tensors) -> list[str]:
    known = FAMILIES[family]
    beginnings = (known.layer.format(2), *(f"{each.format(2)}." for each in known.parts.values()))
    return [name for name in tensors if name.startswith(beginnings)]


def held(folder: Path) -> Tensors:
    """The tensors that a folder holds, each once."""
    found: Tensors = {}
    for path in folder.glob("*.safetensors"):
        here = load_file(path)
        assert not here.keys() & found.keys()
        found |= here
    return found


def assert_equal(found: Tensors, expected: Tensors) -> None:
    assert found.keys() == expected.keys()
    for name, each in expected.items():
        assert found[name].dtype == each.dtype, name
        assert torch.equal(found[name].view(torch.uint8), each.view(torch.uint8)), name


@pytest.mark.parametrize("family", FAMILIES)
def test_what_was_not_trained_is_written_back_byte_for_byte_and_other_files_are_linked(
    family: str, tmp_path: Path
) -> None:
    target, draft, out = (
        published(tmp_path / "target", family),
        tmp_path / "draft",
        tmp_path / "out",
    )
    make(target, draft, kind="mtp")
    assert {each.dtype for each in load_file(draft / "model.safetensors").values()} == {
        torch.float32
    }
    write_into(draft, str(target), out)
    assert_equal(held(out), held(target))
    assert (out / "1.safetensors").samefile(target / "1.safetensors")
    index = json.loads((out / INDEX).read_text())
    for path in out.glob("*.safetensors"):
        there = {name for name, place in index["weight_map"].items() if place == path.name}
        assert load_file(path).keys() == there
    sizes = [each.nbytes for each in held(out).values()]
    assert index["metadata"]["total_size"] == sum(sizes)
    assert find_head(str(out)).count == 1


def test_what_else_the_heads_file_holds_is_kept(tmp_path: Path) -> None:
    """Copies of the target's matrices, in a file that is called as the written one."""
    target, out = published(tmp_path / "target"), tmp_path / "out"
    (target / "3.safetensors").rename(target / SHARD)
    (target / INDEX).write_text((target / INDEX).read_text().replace("3.safetensors", SHARD))
    copies = set(load_file(target / SHARD)) - {*find_head(str(target)).of_head}
    assert copies
    write_into(target, str(target), out)
    assert_equal(held(out), held(target))
    assert find_head(str(out)).count == 1


@pytest.mark.parametrize("family", ["glm4_moe", "qwen3_next", "qwen3_5_text"])
def test_a_target_that_transformers_saved_gets_its_head_again(family: str, tmp_path: Path) -> None:
    """Its file is transformers' `model.safetensors`, which then has an index beside it."""
    target, draft, bare = published(tmp_path / "t", family), tmp_path / "draft", tmp_path / "bare"
    make(target, draft, kind="mtp")
    (tmp_path / "release").mkdir()
    write_head(draft, tmp_path / "release", target=str(target))
    model = load_model(str(target), dtype="bfloat16")
    model.save_pretrained(bare)
    copy_tokenizer(str(target), bare)
    config = json.loads((bare / "config.json").read_text())
    config.pop(key := FAMILIES[family].counts[0], None)
    (bare / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match="brings no head along"):
        find_head(str(bare))
    for number, source in enumerate((draft, tmp_path / "release", target)):
        out = tmp_path / f"out-{number}"
        write_into(source, str(bare), out)
        assert json.loads((out / "config.json").read_text())[key] == 1
        expected = {name: held(target)[name] for name in find_head(str(target)).of_head}
        found = load_file(out / SHARD)  # routers in float32, as transformers keeps the target's
        assert_equal(
            {name: each.to(expected[name].dtype) for name, each in found.items()}, expected
        )
        again = load_model(str(out), dtype="bfloat16")
        assert_equal(dict(again.state_dict()), dict(model.state_dict()))
        make(out, tmp_path / f"again-{number}", kind="mtp")


def test_a_folder_gets_the_head_of_its_own_target_alone_in_the_form_that_engines_expect(
    tmp_path: Path,
) -> None:
    target, draft, out = published(tmp_path / "target"), tmp_path / "draft", tmp_path / "out"
    make(target, draft, kind="mtp")

    def refused(into: Path, what: str) -> None:
        with pytest.raises(ConfigError, match=what):
            write_into(draft, str(into), out)
        assert not out.exists()

    refused(published(tmp_path / "other", "deepseek_v3"), "is a head of glm4_moe targets")
    wide = published(tmp_path / "wide", hidden_size=64)
    refused(wide, r"must have the shape .* another target")
    two = published(tmp_path / "two")
    save_file({"mtp.fc.weight": torch.zeros(2, 4)}, two / "mtp.safetensors")
    refused(two, "by the names of another family, too")
    deep = published(tmp_path / "deep")
    (deep / "parts").mkdir()
    (deep / "1.safetensors").rename(deep / "parts/1.safetensors")
    index = (deep / INDEX).read_text().replace('"1.safetensors', '"parts/1.safetensors')
    (deep / INDEX).write_text(index)
    refused(deep, r"must lie beside its .* and it names parts/1\.safetensors: move them there")
    bare = tmp_path / "bare"
    load_model(str(target)).save_pretrained(bare)
    config = json.loads((bare / "config.json").read_text())
    quantised = {**config, "quantization_config": {"quant_method": "fp8"}}
    (bare / "config.json").write_text(json.dumps(quantised))
    refused(bare, "is quantised, and its head would be in 16 bits")


def test_a_head_of_a_reduced_vocabulary_decodes_here_and_engines_get_it_whole(
    tmp_path: Path,
) -> None:
    target, draft, out = published(tmp_path / "target"), tmp_path / "draft", tmp_path / "out"
    made = make(target, draft, kind="mtp", vocabulary=40)
    assert made["vocabulary"] == 40
    models = load_model(str(target)), load_model(str(draft), target=str(target))
    rows = models[1].get_output_embeddings()
    assert rows.weight.equal(models[0].get_output_embeddings().weight[rows.vocabulary_ids])
    config = DecodeConfig("block", length=3, temperature=0.0)
    texts = [
        SpeculativeDecoder.from_config(models[0], each, config)
        .generate(torch.arange(4, 12), max_new_tokens=12, generator=torch.Generator())
        .tokens.tolist()
        for each in models
    ]
    assert texts[1] == texts[0], "the target's greedy text"
    freeze(models[1], freeze_embeddings=False)
    trained = {name for name, each in models[1].named_parameters() if each.requires_grad}
    assert trained == {name for name, _ in models[1].named_parameters()} - {"lm_head.weight"}
    write_into(draft, str(target), out)
    assert_equal(held(out), held(target))
