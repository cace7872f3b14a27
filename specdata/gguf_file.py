"""Models in one GGUF file, llama.cpp's format: what they are, and as ordinary transformers models.

Everything is read from the file itself: what lies beside it is another model's.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specdata.errors import ConfigError, full_disk

if TYPE_CHECKING:
    import torch
    from transformers import (
        GenerationConfig,
        PreTrainedConfig,
        PreTrainedModel,
        PreTrainedTokenizerBase,
    )

SUFFIX = ".gguf"
# A key of config.json -> the key after the architecture's name (the format's specification).
_SIZES = {
    "num_hidden_layers": "block_count",
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
    "max_position_embeddings": "context_length",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "vocab_size": "vocab_size",
}
_SPECIAL = {
    "bos_token_id": "tokenizer.ggml.bos_token_id",
    "eos_token_id": "tokenizer.ggml.eos_token_id",
    "pad_token_id": "tokenizer.ggml.padding_token_id",
}
# Chat models of some families end a turn with another token than a text.
_END_OF_TURN = "tokenizer.ggml.eot_token_id"
# What a loader leaves in a configuration of where and in how many bits the weights were.
_REMNANTS = ("quantization_config", "_name_or_path", "_model_name_or_path")


@dataclass(frozen=True, slots=True)
class GgufHeader:
    """What a GGUF file says of its model.

    Attributes:
        architecture: by llama.cpp's name.
        fields: texts and numbers by their keys; of a list only how long it is.
        tensors: names.
    """

    architecture: str
    fields: Mapping[str, Any]
    tensors: frozenset[str]


def is_gguf(name: str) -> bool:
    """Whether a model's name is that of a GGUF file, there or not."""
    return name.lower().endswith(SUFFIX) and not Path(name).is_dir()


def read_header(name: str) -> GgufHeader:
    """What a GGUF file says of its model; reads no weights.

    Raises:
        ConfigError: if the file is not there, damaged, or `gguf` is not installed.
    """
    path = Path(name)
    if find_spec("gguf") is None:
        raise ConfigError(
            f"{name} is read with the package gguf, which is not installed: run pip install "
            "'draftsmith[gguf]' (or pip install gguf), or give the model as a folder"
        )
    try:
        status = path.stat()
    except OSError as error:
        raise ConfigError(
            f"{name} cannot be read ({error.strerror}): give the path of a GGUF file, a folder "
            "with a saved model or a Hub id"
        ) from error
    return _header(path, status.st_size, status.st_mtime_ns)


def describe_gguf(name: str) -> dict[str, Any]:
    """What the config.json of a GGUF file's model would say of its sizes.

    Raises:
        ConfigError: as `read_header`.
    """
    header = read_header(name)
    sizes = {
        ours: header.fields.get(f"{header.architecture}.{theirs}")
        for ours, theirs in _SIZES.items()
    }
    sizes["vocab_size"] = sizes["vocab_size"] or header.fields.get("tokenizer.ggml.tokens")
    sizes["tie_word_embeddings"] = "output.weight" not in header.tensors
    return {key: value for key, value in sizes.items() if value is not None}


def has_template(name: str) -> bool:
    """Whether a GGUF file holds a chat template. Raises ConfigError as `read_header`."""
    return "tokenizer.chat_template" in read_header(name).fields


def load_gguf(name: str, dtype: torch.dtype) -> tuple[PreTrainedModel, dict[str, Any]]:
    """Load a GGUF file as a plain model, its weights dequantised.

    What transformers makes of such a file is marked as quantised, and cannot be saved. So the
    weights go into a model that is built from the configuration alone.

    Args:
        name: path of the file.
        dtype: of the weights.

    Returns:
        The model on the CPU, and what transformers says of keys that are missing, unexpected or
        misfit.

    Raises:
        ConfigError: if the file cannot be read, or is of a kind that transformers does not read.
    """
    import transformers

    config, generation = gguf_configs(name)
    # Later versions would keep the weights in their blocks where it has kernels for them.
    keeps_blocks = hasattr(transformers, "GgufConfig")
    options = (
        {"quantization_config": transformers.GgufConfig(dequantize=True)} if keeps_blocks else {}
    )
    with _alone(name, "model") as (folder, file):
        loaded, info = transformers.AutoModelForCausalLM.from_pretrained(
            folder,
            gguf_file=file,
            dtype=dtype,
            trust_remote_code=False,
            output_loading_info=True,
            **options,
        )
    plain = type(loaded)._from_config(config, dtype=dtype)
    plain.load_state_dict(loaded.state_dict(), assign=True)
    plain.tie_weights()
    plain.generation_config = generation
    return plain, info


def load_gguf_tokenizer(name: str) -> PreTrainedTokenizerBase:
    """The tokenizer in a GGUF file, with its chat template if it has one.

    Raises:
        ConfigError: if there is none, or one that transformers does not read.
    """
    from transformers import AutoTokenizer

    with _alone(name, "tokenizer") as (folder, file):
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
            folder, gguf_file=file, trust_remote_code=False
        )
        _drop_made_up_tokens(tokenizer, read_header(name).fields["tokenizer.ggml.tokens"])
    tokenizer.name_or_path = name
    return tokenizer


def gguf_configs(name: str) -> tuple[PreTrainedConfig, GenerationConfig]:
    """The configuration of a GGUF file's model and its generation configuration.

    Raises:
        ConfigError: if the file cannot be read, or is of a kind that transformers does not read.
    """
    from transformers import AutoConfig, GenerationConfig

    header = read_header(name)
    with _alone(name, "model configuration") as (folder, file):
        read = AutoConfig.from_pretrained(folder, gguf_file=file, trust_remote_code=False)
    known = {key: value for key, value in read.to_dict().items() if key not in _REMNANTS}
    special = {ours: header.fields.get(theirs) for ours, theirs in _SPECIAL.items()}
    config = type(read).from_dict(known | special)
    config.name_or_path = name
    _check_rope(name, header, config)
    turn = header.fields.get(_END_OF_TURN)
    if turn is not None and turn != special["eos_token_id"]:
        special["eos_token_id"] = [special["eos_token_id"], turn]
    return config, GenerationConfig(**special)


@cache
def _header(path: Path, _size: int, _modified: int) -> GgufHeader:
    """The header of a file as it was then: a large vocabulary takes seconds to read."""
    from gguf import GGUFReader, GGUFValueType

    try:
        reader = GGUFReader(path)
        fields = {
            key: len(field.data) if field.types[0] == GGUFValueType.ARRAY else field.contents()
            for key, field in reader.fields.items()
            if field.types
        }
        return GgufHeader(
            str(fields["general.architecture"]),
            fields,
            frozenset(tensor.name for tensor in reader.tensors),
        )
    except Exception as error:  # whatever a part of a file makes numpy say
        raise ConfigError(
            f"{path} is no whole GGUF file ({_first_line(error)}): it may be damaged or not fully "
            "downloaded, so download it again"
        ) from error


@contextmanager
def _alone(name: str, what: str) -> Iterator[tuple[str, str]]:
    """A folder that holds nothing but the file, and the file's name there.

    Raises:
        ConfigError: for whatever goes wrong while it is read.
    """
    read_header(name)
    with tempfile.TemporaryDirectory(prefix="gguf-") as folder:
        (Path(folder) / "model.gguf").symlink_to(Path(name).absolute())
        try:
            yield folder, "model.gguf"
        except Exception as error:
            if full := full_disk(error):
                raise full from error
            raise ConfigError(
                f"cannot load the {what} in {name}: {_first_line(error)}. transformers does not "
                "read every architecture, quantisation and tokenizer of GGUF files: give the model "
                "as a folder or Hub id, or in another quantisation, such as Q8_0 or F16"
            ) from error


def _drop_made_up_tokens(tokenizer: Any, count: int) -> None:
    """Leave a tokenizer the first `count` ids, those of the file.

    transformers gives every byte-level one GPT-2's end token, too: with an id that the model does
    not have and that drafts of the same family lack.
    """
    if len(tokenizer) > count:
        state = json.loads(tokenizer.backend_tokenizer.to_str())
        state["added_tokens"] = [each for each in state["added_tokens"] if each["id"] < count]
        # A backend cannot lose a token, and its owner has no other way to get another backend.
        tokenizer._tokenizer = type(tokenizer.backend_tokenizer).from_str(json.dumps(state))


def _check_rope(name: str, header: GgufHeader, config: PreTrainedConfig) -> None:
    """Refuse stretched positions that transformers has not read, which it would not say."""
    stretched = header.fields.get(f"{header.architecture}.rope.scaling.type", "none") != "none"
    ropes: Mapping[str, Any] = getattr(config.get_text_config(), "rope_parameters", None) or {}
    if (stretched or "rope_freqs.weight" in header.tensors) and (
        ropes.get("rope_type", "default") == "default"
    ):
        raise ConfigError(
            f"{name} has scaled rotary positions (rope.scaling or rope_freqs), which transformers "
            f"does not read from GGUF files of architecture {header.architecture}: it would be "
            "another model. Give the model as a folder or Hub id"
        )


def _first_line(error: Exception) -> str:
    return (str(error).strip() or repr(error)).splitlines()[0]
