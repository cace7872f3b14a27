"""The loading of models: in what precision, over which devices. Imported without torch."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from specdata.config import Config
from specdata.errors import ConfigError, VocabularyMismatchError

Dtype = Literal["float32", "bfloat16", "float16"]
Role = Literal["target", "draft"]
# As accelerate reads them; units of bits, which it takes too ("10Gb"), would be slips.
_SIZE = re.compile(r"\d+(\.\d+)?(GiB|MiB|KiB)|\d+(GB|MB|KB)")


ROPES = ("rope_scaling", "rope_parameters")
FORMER_KEYS = {
    **dict.fromkeys(("rope_theta", "rotary_emb_base"), "full_attention.rope_theta"),
    "rope_local_base_freq": "sliding_attention.rope_theta",
    **dict.fromkeys(
        ("partial_rotary_factor", "rotary_pct"), "full_attention.partial_rotary_factor"
    ),
    "original_max_position_embeddings": "full_attention.original_max_position_embeddings",
    **dict.fromkeys(("torch_dtype", "dtype"), "dtype"),
}
"""Settings of a rope outside of its section, and others of two names; a rope of all layers counts
as that of full attention."""
SAME = {"mrope": "default", "su": "longrope"}
"""Kinds of rope by other names; of text alone, the axes of a multimodal one are one position."""


def shorter(draft: str, its: int | None, of_target: int | None = None) -> str:
    """That a draft ends before its target, by their positions; "" if it does not, or unknown."""
    if its is None or of_target is None or its >= of_target:
        return ""
    far = "any number" if of_target == sys.maxsize else f"{of_target:,}"
    return (
        f"the draft {draft} has positions for {its:,} tokens, prompt included, and the target for "
        f"{far}: nothing is drafted beyond {its:,}. If it learnt longer texts, raise "
        "max_position_embeddings in its config.json"
    )


def in_numbers(size: str) -> int:
    """Bytes of a size such as 80GB or 24GiB. Raises ConfigError."""
    if not _SIZE.fullmatch(size):
        raise ConfigError(f"--memory must be a size such as 80GB or 24GiB, got {size!r}")
    number, unit = size.rstrip("GMKiB"), size.lstrip("0123456789.")
    return int(float(number) * (1024 if "i" in unit else 1000) ** ("KMG".index(unit[0]) + 1))


class DraftLoading(Config):
    """The loading of a draft where its weights are only read: whole, on its process's device.

    A draft in training has weights in float32.
    """

    dtype: Dtype | None = Field(default=None, description="precision (default: models.dtype)")
    attn_implementation: Literal["eager", "sdpa"] | None = Field(
        default=None, description="transformers' attention (default: its own choice)"
    )


class Loading(DraftLoading):
    """The loading of one model where its weights are only read."""

    device_map: Literal["auto", "cpu"] | None = Field(
        default=None,
        description="spread the layers over the devices, CPU memory and disk that there are, as "
        "transformers does; cpu: stay there (default: all on one device)",
    )
    max_memory: dict[str, str] | None = Field(
        default=None,
        description="most that device_map may use of each place: {0: 20GiB, cpu: 100GiB}, GPUs by "
        "number",
    )
    offload_folder: str | None = Field(
        default=None, min_length=1, description="where device_map may put what fits nowhere else"
    )

    @field_validator("max_memory", mode="before")
    @classmethod
    def _by_name(cls, given: Any) -> Any:
        """YAML reads the number of a GPU as a number, and a size without a unit, too."""
        return (
            {str(key): str(size) for key, size in given.items()}
            if isinstance(given, Mapping)
            else given
        )

    @field_validator("max_memory")
    @classmethod
    def _are_sizes(cls, given: dict[str, str] | None) -> dict[str, str] | None:
        for place, size in (given or {}).items():
            if not (place.isdecimal() or place == "cpu"):
                raise ValueError(f"its keys must be numbers of GPUs or cpu (got {place!r})")
            if not _SIZE.fullmatch(size):
                raise ValueError(f"{place} must be a size such as 20GiB or 500MB (got {size!r})")
        return given

    @model_validator(mode="after")
    def _agree(self) -> Loading:
        """Refuse settings that contradict each other."""
        if not self.is_spread and (self.max_memory or self.offload_folder):
            raise ValueError(
                "max_memory and offload_folder say where device_map may put layers: add "
                "device_map: auto, or leave them out"
            )
        return self

    @property
    def is_spread(self) -> bool:
        """True if the layers may lie in several places."""
        return self.device_map == "auto"


ONE_DEVICE = Loading()
"""All on the process's device, in the precision that is asked for."""


class PairLoading(Config):
    """The loading of the pair."""

    target: Loading = Field(default=Loading(), description="the target")
    draft: DraftLoading = Field(
        default=DraftLoading(), description="the draft, and other drafts of methods"
    )


def reach(values: Mapping[str, Any]) -> int | None:
    """The longest sequence that a model reads, in tokens, as its config.json says; None if unsaid.

    YaRN and a linear rope read `factor` times the length that they extend, as vLLM counts too:
    max_position_embeddings may be left at that. Llama 3's rope and Gemma 3 have all of it there.
    Beyond the original length of a longrope (Phi) and the limit of a dynamic rope, a forward reads
    all tokens by other frequencies than the keys in the cache were written with.
    """
    limit = values.get("max_position_embeddings", values.get("n_positions"))
    if not isinstance(limit, int):
        return None
    ropes = values.get("rope_scaling") or values.get("rope_parameters") or {}
    found = [limit]
    # Some models have one for each kind of layer.
    for rope in (ropes, *(each for each in ropes.values() if isinstance(each, Mapping))):
        kind, factor = rope.get("rope_type", rope.get("type")), rope.get("factor") or 1.0
        original = rope.get("original_max_position_embeddings") or limit
        if kind in ("longrope", "su"):
            return int(values.get("original_max_position_embeddings") or original)
        if kind == "yarn" or (kind == "linear" and "gemma3" not in values.get("model_type", "")):
            found.append(int((original if kind == "yarn" else limit) * factor))
    return max(found)


def contradictions(values: Mapping[str, Any]) -> list[str]:
    """What a config.json says twice and differently: transformers 5 takes one without a word."""
    places_of: dict[str, dict[str, Any]] = {}  # setting -> where it stands -> value
    for name in FORMER_KEYS.keys() & values.keys():
        places_of.setdefault(FORMER_KEYS[name], {})[name] = values[name]
    for section in ROPES:
        if not isinstance(rope := values.get(section), Mapping):
            continue
        kinds = {kind: part for kind, part in rope.items() if isinstance(part, Mapping)}
        for kind, part in (kinds or {"full_attention": rope}).items():
            for key, value in {"rope_type": part.get("type", "default"), **part}.items():
                place = f"{section}.{kind}.{key}" if kinds else f"{section}.{key}"
                setting = f"{kind}.{'rope_type' if key == 'type' else key}"
                value = SAME.get(value, value) if isinstance(value, str) else value
                places_of.setdefault(setting, {})[place] = value
    found = []
    for setting, places in places_of.items():
        filled = {place: value for place, value in places.items() if value is not None}
        first = next(iter(filled.values()), None)
        kind, _, key = setting.rpartition(".")
        types = {*places_of.get(f"{kind}.rope_type", {}).values()}
        # Only a log says that it is left out.
        if key == "factor" and first not in (None, 1) and types == {"default"}:
            found.append(f"{next(iter(filled))} ({first!r}) contradicts rope_type ('default')")
        if any(value != first for value in filled.values()):
            each = (f"{place} ({value!r})" for place, value in sorted(filled.items()))
            found.append(" contradicts ".join(each))
    return found


def check_vocabularies(target: Mapping[int, str], draft: Mapping[int, str]) -> None:
    """Compare two vocabularies, id -> token. Sizes of embedding matrices may differ by padding."""
    wrong = [index for index in sorted({*target, *draft}) if target.get(index) != draft.get(index)]
    if wrong:
        first = ", ".join(
            f"{index} is {target.get(index)!r} in the target and {draft.get(index)!r} in the draft"
            for index in wrong[:3]
        )
        raise VocabularyMismatchError(
            f"target and draft must share a vocabulary; {len(wrong)} ids differ (first: {first}). "
            "Use a draft of the target's own family, or train one on the target's tokenizer"
        )
