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
    tp_plan: Literal["auto"] | None = Field(
        default=None,
        description="tensor parallelism: each process of the launcher holds a part of every layer",
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
        if self.tp_plan and self.device_map:
            raise ValueError(
                "tp_plan splits every layer over the processes and device_map gives whole layers "
                "to the devices of one process: leave one of them out"
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
