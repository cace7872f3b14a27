"""The heads that targets bring along, written back: alone, or into a folder of their target.

Names are those of the target's family, and each tensor has the precision that it has in the
target's files, or that the target's own layers have it in. So what was not trained is written as
it was read, byte for byte.
"""

from __future__ import annotations

import copy
import os
import re
import shutil
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from distill.drafts.mtp import turned
from distill.published import stored
from specdata.drafts import kind_of
from specdata.drafts.mtp import MTP, PARTS, Convention
from specdata.drafts.states_network import TargetStates
from specdata.errors import ConfigError
from specdata.saving import copy_tokenizer
from specdata.sources import WHOLE, config_of
from specdata.storage.files import atomic_folder, write_json
from specdata.target_heads import (
    FLOAT_TYPES,
    LAYER,
    NoHeadError,
    TargetFiles,
    find_head,
    target_files,
)

SHARD = "model-mtp.safetensors"
"""Of a target's folder, the file of its head: llama.cpp's converter reads model*.safetensors."""
OWN_LAYERS = re.compile(r"(?:model\.)?(?:language_model\.)?(?:model\.)?layers\.\d+\.(.+)")
"""Of a target's language model."""
WEIGHT_PATTERNS = tuple(
    f"*.{end}" for end in ("safetensors", "bin", "pt", "pth", "gguf", "h5", "onnx")
)
TORCH_TYPES = dict(
    zip(FLOAT_TYPES, (torch.float64, torch.float32, torch.bfloat16, torch.float16), strict=True)
)


def write_head(draft: Path, folder: Path, *, target: str) -> None:
    """Write the head that a draft is into a folder: one shard, its target's config.json."""
    files = target_files(target)
    save_file(_published(draft, files), folder / WHOLE[1], metadata={"format": "pt"})
    write_json(folder / "config.json", _config(files, 1))
    copy_tokenizer(target, folder)


def write_into(draft: Path, target: str, out: Path) -> None:
    """Write a target's folder, with a head: a draft of ours, a release, or another target's.

    The target's weights are linked; a file that holds a head, too, is written without it. Raises
    ConfigError where the target's own head could not be read (`find_head`), this is of another, or
    weights lie in folders of their own.
    """
    files, count = target_files(target), 1
    paths = sorted({path for path, _ in files.held.values()})
    if deep := [path for path in paths if path.parent != files.folder]:
        raise ConfigError(
            f"the weights of {target} must lie beside its {WHOLE[0]}, where engines look for them, "
            f"and it names {deep[0].relative_to(files.folder)}: move them there, and correct it"
        )
    with suppress(NoHeadError):
        count = find_head(target).count
    tensors, former = _published(draft, files), {*files.of_head}
    with atomic_folder(out) as folder:
        ignored = shutil.ignore_patterns(".*", *WEIGHT_PATTERNS)
        shutil.copytree(files.folder, folder, dirs_exist_ok=True, ignore=ignored)
        places = {name: path for name, (path, _) in files.held.items() if name not in former}
        for path in paths:
            held = [name for name, place in places.items() if place == path]
            if path.name != SHARD and not any(files.held[name][0] == path for name in former):
                _link(path, folder / path.name)
                continue
            with safe_open(path, framework="pt") as file:
                kept = {name: file.get_tensor(name) for name in held}
                if path.name == SHARD:
                    tensors |= kept
                elif kept:
                    save_file(kept, folder / path.name, metadata=file.metadata())
        save_file(tensors, folder / SHARD, metadata={"format": "pt"})
        named = {name: path.name for name, path in places.items()} | dict.fromkeys(tensors, SHARD)
        index = {
            "metadata": {"total_size": _size(folder)},
            "weight_map": dict(sorted(named.items())),
        }
        write_json(folder / WHOLE[0], index)
        write_json(folder / "config.json", _config(files, count))


def _published(draft: Path, target: TargetFiles) -> dict[str, Tensor]:
    """The head of a folder, as the files of a target would hold it. Raises ConfigError."""
    settings = config_of(draft)
    if kind_of(settings) is MTP:
        states = TargetStates.of(settings)
        model_type, convention = states.model_type, cast(Convention, states.kind_record)
        head = dict(filter(None, map(_ours, stored(draft).items())))
        head = turned(head, target.text, convention, back=True)
    else:
        found = find_head(str(draft))
        model_type, head = found.model_type, found.tensors()
    family, layers, of_head = target.family, target.layers, {*target.of_head}
    if model_type != target.model_type:
        raise ConfigError(
            f"{draft} is a head of {model_type} targets, and {target.folder} is "
            f"{target.model_type}: give a target that it was trained for"
        )
    if target.settings.get("quantization_config") and not of_head:
        raise ConfigError(
            f"{target.folder} is quantised, and its head would be in 16 bits, which engines would "
            "read as quantised, too: give the target before it was quantised, or one that was "
            "published with its head in 16 bits"
        )
    known = {name: each for name, (_, each) in target.held.items()}
    last_layer = {  # of the target, by the name within it
        match[1]: each
        for name, each in known.items()
        if (match := OWN_LAYERS.match(name)) and name not in of_head
    }
    usual = Counter(kind for kind, _ in known.values() if kind in FLOAT_TYPES).most_common(1)[0][0]
    width: int = target.text["hidden_size"]
    sizes: dict[str, tuple[int, ...]] = {**dict.fromkeys(PARTS, (width,)), "fc": (width, 2 * width)}
    tensors: dict[str, Tensor] = {}
    for ours, tensor in head.items():
        part, _, rest = ours.partition(".")
        if part in family.parts:
            name, like = f"{family.parts[part].format(layers)}.{rest}", (usual, sizes[part])
        else:
            rest = ours.removeprefix(LAYER)
            name = family.layer.format(layers) + rest
            like = last_layer.get(rest, (usual, tuple(tensor.shape)))
        precision, shape = known.get(name, like)
        if shape != tuple(tensor.shape):
            raise ConfigError(
                f"{name} must have the shape {[*shape]} in {target.folder}, and has "
                f"{[*tensor.shape]} in {draft}: it is the head of another target"
            )
        tensors[name] = tensor.to(TORCH_TYPES.get(precision, TORCH_TYPES[usual])).contiguous()
    return tensors


def _ours(item: tuple[str, Tensor]) -> tuple[str, Tensor] | None:
    """A tensor of a draft of ours, by the name that `TargetHead.tensors` gives it.

    None of a reduced vocabulary: engines take the target's own output matrix.
    """
    name, tensor = item
    plain = re.sub(r"^(model\.embed_tokens|model|lm_head)\.(?!layers\.)", "", name)
    is_part = plain.partition(".")[0] in PARTS
    return (plain, tensor) if is_part or name.startswith(LAYER) else None


def _config(target: TargetFiles, count: int) -> dict[str, Any]:
    """A target's config.json that says how many layers its head has."""
    settings = copy.deepcopy(target.settings)
    parts = [settings, *filter(None, [settings.get("text_config")])]
    counted = [(part, key) for part in parts for key in target.family.counts if key in part]
    for part, key in counted or [(parts[-1], target.family.counts[0])]:
        part[key] = count
    return settings


def _size(folder: Path) -> int:
    """Bytes of all tensors of a folder."""
    size = 0
    for path in folder.glob("*.safetensors"):
        with path.open("rb") as file:
            size += path.stat().st_size - 8 - int.from_bytes(file.read(8), "little")
    return size


def _link(source: Path, to: Path) -> None:
    """Have a file at another place without copying it, where the file system can."""
    source = source.resolve()  # of the Hub's cache, say
    for link in (os.link, os.symlink):
        with suppress(OSError):
            link(source, to)
            return
    shutil.copyfile(source, to)
