"""Errors that a user can act on. Recipes turn them into a message on stderr and exit status 2."""

from __future__ import annotations

import errno
import re
from pathlib import Path

_FULL = (errno.ENOSPC, errno.EDQUOT)
# What libraries say in errors that carry no error number: safetensors and tokenizers (Rust) name
# the system's, torch's writer of archives names none at all.
_FULL_TEXTS = (
    "No space left on device",
    "Disk quota exceeded",
    f"(os error {errno.ENOSPC})",
    f"(os error {errno.EDQUOT})",
    "PytorchStreamWriter failed",
    ". unexpected pos ",
    "basic_ios::clear: iostream error",
)
# What torch says on a CPU, on a GPU and in cuBLAS; numpy raises MemoryError.
_MEMORY_TEXTS = ("can't allocate memory", "out of memory", "CUBLAS_STATUS_ALLOC_FAILED")
# What gloo, NCCL and the store say when the process at the other end is gone.
_LOST_TEXTS = (
    "gloo/transport",
    "Connection closed by peer",
    "Connection reset by peer",
    "ncclRemoteError",
    "Broken pipe",
)


class ConfigError(ValueError):
    """A configuration that cannot be used: unknown key, wrong type, impossible combination."""


class VocabularyMismatchError(ValueError):
    """Target and draft do not share a vocabulary."""


class NotFiniteError(ConfigError):
    """A model's weights or logits are NaN or infinite, so they give no distribution."""

    def __init__(self, model: str = "a model") -> None:
        super().__init__(
            f"{model or 'a model'} has weights or logits that are NaN or infinite: restore or "
            "download it again, or load it in a wider type (models.dtype: float32 or bfloat16)"
        )


class ManifestError(ValueError):
    """A stored folder is incomplete, damaged, or belongs to another run."""


class OtherSettingsError(ManifestError, ConfigError):
    """An artefact was made with other settings: change the configuration, or where it writes."""


class TrainingDivergedError(ConfigError):
    """A loss, gradient or weight is not finite, or what was trained is worth nothing.

    The same settings would end so again.

    Attributes:
        found: which training, and what is not finite in which steps.
        remedy: what to do about the folder once the learning rate is lower, an imperative without a
            full stop; a stage, whose record holds the learning rate, names its own.
    """

    def __init__(self, found: str, *, last_good: Path | None, learning_rate: float) -> None:
        super().__init__(found)
        self.found = found
        self.last_good = last_good
        self.learning_rate = learning_rate
        self.remedy = "remove what it left, or choose another output folder"

    def __str__(self) -> str:
        last_good = (
            f"{self.last_good} is kept" if self.last_good else "no checkpoint was written before"
        )
        advice = f"lower its learning_rate, {self.learning_rate:g}, to a tenth for example"
        return f"{self.found}, so the training diverged ({last_good}): {advice}, and {self.remedy}"


class CacheNotRewindableError(RuntimeError):
    """A model's key-value cache cannot drop its last tokens, which every decoding round needs."""


USER_ERRORS = (ConfigError, ManifestError, VocabularyMismatchError, CacheNotRewindableError)
"""What a user can mend; all else is trouble outside (OSError) or a defect with its traceback."""


def trouble_outside(error: BaseException) -> OSError | None:
    """The trouble of a machine behind an error (disk, memory, another process), or None.

    Libraries wrap what the system reported: `datasets` in an error of generating, safetensors,
    tokenizers and torch in errors of their own that carry no error number. So the errors that it
    was raised from, or while handling, are looked at as well.
    """
    link: BaseException | None = error
    seen: set[int] = set()
    while link is not None and id(link) not in seen:
        seen.add(id(link))
        text = str(link)
        if isinstance(link, OSError) and link.errno in _FULL:
            return link
        if any(sign in text for sign in _FULL_TEXTS):
            return OSError(errno.ENOSPC, f"the disk seems to be full, or a quota used up ({link})")
        is_memory = isinstance(link, RuntimeError) and any(sign in text for sign in _MEMORY_TEXTS)
        if is_memory or isinstance(link, MemoryError):
            return OSError(
                f"out of memory ({text.partition(chr(10))[0] or type(link).__name__}): lower "
                "batch_size (eval: batch) of the stage at work or max_new_tokens, load the models "
                "in bfloat16 (models.dtype), or spread them (models.load)"
            )
        if isinstance(link, RuntimeError) and any(sign in text for sign in _LOST_TEXTS):
            return OSError("another process of this run ended or was lost")
        link = link.__cause__ or link.__context__
    return None


def without_passwords(text: str) -> str:
    """A message in which no address shows a name and password (`scheme://NAME:PASSWORD@...`).

    Nor does one that was taken for a path, which leaves one of the slashes.
    """
    # Linear in the length: a message may hold long words, and \b tries each of them once.
    return re.sub(
        r"(\b\w+:/+)([^\s'\"]*)@",
        lambda match: f"{match[1]}{'***' if ':' in match[2] else match[2]}@",
        text,
    )
