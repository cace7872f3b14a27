"""Load causal language models and tokenizers, with errors that say what to do."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from specdata.errors import ConfigError

T = TypeVar("T")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def load_model(name: str, *, dtype: str = "float32") -> Any:
    """Load a causal LM from a folder or the Hub, in eval mode, on the GPU if there is one.

    A Hub id may carry a revision, OWNER/NAME@REVISION. Remote code is never run.

    Raises:
        ConfigError: if it cannot be had, or `dtype` is unknown.
    """
    check_dtype(dtype)
    source, revision = hub_source(name)
    model: PreTrainedModel = _from_hub(
        "model",
        name,
        lambda: AutoModelForCausalLM.from_pretrained(
            source, dtype=DTYPES[dtype], revision=revision
        ),
    )
    return model.to(device()).eval()


def load_tokenizer(name: str) -> PreTrainedTokenizerBase:
    """Load a tokenizer from a folder or the Hub. Raises ConfigError if it cannot be had."""
    source, revision = hub_source(name)
    return _from_hub(
        "tokenizer", name, lambda: AutoTokenizer.from_pretrained(source, revision=revision)
    )


def check_dtype(dtype: str) -> None:
    """Raise ConfigError for a precision that models are not loaded in."""
    if dtype not in DTYPES:
        raise ConfigError(f"dtype must be one of {', '.join(DTYPES)}, got {dtype!r}")


def hub_source(name: str) -> tuple[str, str | None]:
    """Split OWNER/NAME@REVISION; anything that exists here is a folder, whatever its name."""
    source, found, revision = name.partition("@")
    return (source, revision) if found and not Path(name).exists() else (name, None)


def device() -> torch.device:
    """The GPU if there is one, else the CPU."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def end_ids(model: PreTrainedModel) -> frozenset[int]:
    """Token ids that end a text, from the model's generation configuration."""
    ids = model.generation_config.eos_token_id
    if ids is None:
        return frozenset()
    return frozenset([ids] if isinstance(ids, int) else ids)


def _from_hub(what: str, name: str, load: Callable[[], T]) -> T:
    try:
        return load()
    except (OSError, ValueError) as error:
        reason = (str(error).strip() or repr(error)).splitlines()[0]
        raise ConfigError(
            f"cannot load the {what} {name!r}: give a folder with a saved {what} or a Hub id that "
            f"can be reached (gated ones need `hf auth login`). {reason}"
        ) from error
