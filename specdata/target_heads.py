"""The tensors of the heads that targets bring along (MTP), in the files of a target.

transformers leaves them out when it loads a target, and so when it saves one.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError, safe_open

from specdata.drafts.mtp import FAMILIES, Family
from specdata.errors import ConfigError
from specdata.sources import base_of_adapters, config_of, hub_source, weight_files

if TYPE_CHECKING:
    from torch import Tensor

LAYER = "model.layers.0."
COPIES = {"embed_tokens": "embed_tokens", "lm_head": "lm_head", "shared_head.head": "lm_head"}
"""A head's names of the target's matrices, which its files may repeat -> the target's."""
FLOAT_TYPES = ("F64", "F32", "BF16", "F16")


def local_folder(name: str) -> Path | None:
    """The folder of a model's files on this machine, in the Hub's cache, too; None if not here.

    A snapshot in the cache may lack weights, which a run will download.
    """
    from huggingface_hub import try_to_load_from_cache

    source, revision = hub_source(name)
    if Path(source).is_dir():
        return Path(source)
    found = try_to_load_from_cache(source, "config.json", revision=revision or "main")
    with suppress(ConfigError):
        if isinstance(found, str) and weight_files(snapshot := Path(found).parent):
            return snapshot
    return None


@dataclass(frozen=True, slots=True)
class TargetFiles:
    """What the files of a target of a family that has heads say.

    Attributes:
        settings: config.json.
        family: what is known of its heads.
        model_type: of the language model.
        layers: of the target, without the head's.
        held: name of a tensor -> the file that holds it, its precision and its shape.
    """

    folder: Path
    settings: dict[str, Any]
    family: Family
    model_type: str
    layers: int
    held: Mapping[str, tuple[Path, tuple[str, tuple[int, ...]]]]

    @property
    def text(self) -> dict[str, Any]:
        """The part of config.json that is of the language model."""
        text: dict[str, Any] = self.settings.get("text_config") or self.settings
        return text

    @property
    def of_head(self) -> list[str]:
        """The tensors of a head's first layer, copies of the target's left out."""
        beginnings = (self.family.layer.format(self.layers), *_parts(self.family, self.layers))
        copies = self.copies
        return [each for each in self.held if each.startswith(beginnings) and each not in copies]

    @property
    def copies(self) -> dict[str, str]:
        """What a head repeats of the target -> the target's tensor ("": that is quantised)."""
        layer = self.family.layer.format(self.layers)
        beginnings = (layer, layer.removesuffix("layers.0."))
        own = sorted((each for each in self.held if not each.startswith(beginnings)), key=len)
        found = {}
        for name in self.held:
            of = next((COPIES[end] for end in COPIES if name.endswith(f".{end}.weight")), "")
            if of and name.startswith(beginnings):
                if not any("lm_head." in each for each in own):  # tied
                    of = "embed_tokens"
                found[name] = next((each for each in own if each.endswith(f"{of}.weight")), "")
        return found


class NoHeadError(ConfigError):
    """A target could have a head, and its files hold none."""


@dataclass(frozen=True, slots=True)
class TargetHead(TargetFiles):
    """A head in a target's folder.

    Attributes:
        count: of the head's layers. The first drafts every token, as in vLLM.
    """

    count: int

    @property
    def names(self) -> dict[str, str]:
        """Their name of each tensor -> ours, but for `fc` and its kin, whose place is a draft's."""
        layer = self.family.layer.format(self.layers)
        parts = {theirs.format(self.layers): ours for ours, theirs in self.family.parts.items()}
        names = {}
        for name in self.of_head:
            part = next((each for each in parts if name.startswith(f"{each}.")), None)
            names[name] = (
                f"{parts[part]}{name.removeprefix(part)}"
                if part
                else f"{LAYER}{name.removeprefix(layer)}"
            )
        return names

    def tensors(self) -> dict[str, Tensor]:
        """Read the tensors, by our names: `fc.weight`, `model.layers.0...`. Raises ConfigError.

        They are mapped, not read into memory.
        """
        found, names = {}, self.names
        for path in sorted({self.held[theirs][0] for theirs in names}):
            with safe_open(path, framework="pt") as file:
                for theirs, ours in names.items():
                    if self.held[theirs][0] == path:
                        found[ours] = file.get_tensor(theirs)
        return found


def target_files(name: str) -> TargetFiles:
    """Read what a target's folder, or the Hub's cache, holds. Raises ConfigError."""
    folder = local_folder(name)
    if folder is None:
        raise ConfigError(
            f"{name} must be on this machine for its head to be read: hf download {name}"
        )
    if base := base_of_adapters(str(folder)):
        raise ConfigError(
            f"{name} holds adapters of {base}, and no head: merge them, and write the head into "
            f"the merged model's folder (draftsmith export {base} --into MERGED --out FOLDER)"
        )
    settings = config_of(folder)
    text: Mapping[str, Any] = settings.get("text_config") or settings
    model_type, layers = str(text.get("model_type")), text.get("num_hidden_layers")
    family = FAMILIES.get(model_type)
    if family is None or not isinstance(layers, int):
        raise ConfigError(
            f"draft.init.kind mtp reads the head of {', '.join(FAMILIES)} targets, and {name} is "
            f"{model_type}: take another kind"
        )
    return TargetFiles(folder, settings, family, model_type, layers, _tensors_of(folder))


def find_head(name: str) -> TargetHead:
    """The head in a target's folder, or in the Hub's cache.

    Raises ConfigError, and NoHeadError if there is none.
    """
    files = target_files(name)
    family, model_type, layers = files.family, files.model_type, files.layers
    counted = {**files.settings, **files.text}
    key, count = next(
        ((key, counted[key]) for key in family.counts if counted.get(key)), (family.counts[0], 0)
    )
    shapes, first, of_head = files.held, family.layer.format(layers), files.of_head
    for other in FAMILIES.values():
        foreign = other.parts["fc"].format(layers)
        if other.layer != family.layer and f"{foreign}.weight" in shapes:
            raise ConfigError(
                f"{name} holds a head by the names of another family, too ({foreign}.weight, and "
                f"{model_type} has {family.parts['fc'].format(layers)}): remove the tensors that "
                "are not its own"
            )
    lacks = [part for part in _parts(family, layers) if f"{part}weight" not in of_head]
    if lacks or not any(each.startswith(first) for each in of_head):
        lacking = lacks[0] if lacks else first
        reason = (
            f"config.json says {key}: {count}, and no tensor {lacking}* is in the files; they were "
            "saved by transformers, say, which leaves these out"
            if count
            else f"config.json has no {key}, and no tensor {lacking}* is in the files"
        )
        raise NoHeadError(
            f"{name} brings no head along ({reason}): give the folder that the target was "
            "published in, or take another draft.init.kind"
        )
    held = _layers_held(family, layers, shapes)
    if count not in range(held + 1):
        raise ConfigError(
            f"config.json of {name} says {key}: {count}, and its files hold {held}: restore them"
        )
    for each in sorted(of_head):
        kind = shapes[each][1][0]
        if kind not in FLOAT_TYPES or "scale" in each.rpartition(".")[2]:
            raise ConfigError(
                f"the head of {name} must be in 16 bits or more to be read, and its {each} is "
                f"{kind}: give the target before it was quantised"
            )
    for each, of in files.copies.items():
        if of and not _are_equal(shapes, each, of):
            raise ConfigError(
                f"{each} of {name} must repeat the target's {of}, with which engines draft, and "
                f"has other values: if this head was trained with {of}, remove {each}; else give "
                "another target, or take another draft.init.kind"
            )
    return TargetHead(
        files.folder, files.settings, family, model_type, layers, shapes, count=count or held
    )


def _parts(family: Family, layers: int) -> list[str]:
    return [f"{part.format(layers)}." for part in family.parts.values()]


def _are_equal(held: Mapping[str, tuple[Path, Any]], name: str, other: str) -> bool:
    """Whether two tensors are equal byte for byte."""
    (path, kind), (other_path, other_kind) = held[name], held[other]
    changed = path.stat().st_mtime_ns, other_path.stat().st_mtime_ns
    return bool(kind == other_kind and _read_equal(path, name, other_path, other, changed))


@cache  # a plan and its stages ask several times, of gigabytes
def _read_equal(path: Path, name: str, other_path: Path, other: str, _changed: object) -> bool:
    import torch

    with safe_open(path, framework="pt") as file, safe_open(other_path, framework="pt") as target:
        pair = file.get_tensor(name), target.get_tensor(other)
    return torch.equal(*(each.view(torch.uint8) for each in pair))


def _layers_held(family: Family, layers: int, names: Mapping[str, Any]) -> int:
    """How many layers of a head a target's files hold, one after the other."""
    first, count = family.layer.format(layers), 0
    stem, _, number = first.rstrip(".").rpartition(".")
    while any(name.startswith(f"{stem}.{int(number) + count}.") for name in names):
        count += 1
    return count


def _tensors_of(folder: Path) -> dict[str, tuple[Path, tuple[str, tuple[int, ...]]]]:
    """The tensors of a folder: the file that holds each, its precision and its shape."""
    found: dict[str, tuple[Path, tuple[str, tuple[int, ...]]]] = {}
    beside = folder.glob("mtp*.safetensors")  # of a quantised target, in no index
    for path in sorted({*weight_files(folder), *beside}):
        if path.suffix != ".safetensors":
            raise ConfigError(f"{folder} must hold safetensors for its head to be read")
        try:
            with safe_open(path, framework="numpy") as file:
                for name in file.keys():  # noqa: SIM118 - it is no mapping
                    if name in found:  # engines take the one or the other
                        raise ConfigError(
                            f"{path} and {found[name][0]} both hold {name}: remove the one that is "
                            "not of this target"
                        )
                    part = file.get_slice(name)
                    found[name] = (path, (part.get_dtype(), tuple(part.get_shape())))
        except (SafetensorError, OSError) as error:
            raise ConfigError(f"{path} is damaged ({error}): restore it") from error
    if not found:
        raise ConfigError(f"{folder} holds no weights: give a folder with the target's safetensors")
    return found
