"""What lies beside saved weights, so that transformers 4 and the engines read it, too."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from huggingface_hub import snapshot_download
from huggingface_hub.constants import CONFIG_NAME, HF_HUB_OFFLINE
from huggingface_hub.errors import HfHubHTTPError

from specdata.drafts.kind import KEY
from specdata.drafts.states_network import MODEL_TYPE
from specdata.errors import ConfigError
from specdata.models import load_tokenizer
from specdata.sources import hub_source
from specdata.storage.files import write_json

# Files that transformers and the engines read tokenizers of: their settings, chat templates, and
# vocabularies in the formats of tokenizers, sentencepiece, tiktoken, Mistral and byte-pair merges.
# Never code: a tokenizer that needs its own cannot be loaded here either.
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "additional_chat_templates/*.jinja",
    "vocab.*",
    "merges.txt",
    "*.model",
    "*.tiktoken",
    "tekken.json",
)


def copy_tokenizer(name: str, folder: Path) -> None:
    """Copy the tokenizer of a model into the folder of another, each file byte for byte.

    Saving a loaded tokenizer writes the names and settings of the installed transformers, which
    older ones and other engines refuse. Only if the files make another tokenizer here (without a
    `tokenizer_class` its kind follows from the model that it lies beside) is it saved that way.
    """
    tokenizer = load_tokenizer(name)
    source, revision = hub_source(name)
    place = Path(source)
    if not place.is_dir():  # its snapshot in the Hub's cache
        try:
            # huggingface_hub 1.33 asks for a commit's list of files offline, too.
            cached = snapshot_download(
                source,
                revision=revision,
                allow_patterns=[*TOKENIZER_FILES],
                local_files_only=HF_HUB_OFFLINE,
            )
        except (OSError, ValueError, HfHubHTTPError) as error:
            raise ConfigError(f"cannot load the tokenizer files of {name!r}: {error}") from error
        place = Path(cached)
    for file in sorted(path for pattern in TOKENIZER_FILES for path in place.glob(pattern)):
        copied = folder / file.relative_to(place)
        copied.parent.mkdir(exist_ok=True)
        shutil.copyfile(file, copied)
    try:
        copy = load_tokenizer(str(folder))
    except ConfigError:  # its files alone make none beside this model
        copy = None
    is_same = type(copy) is type(tokenizer) and copy.get_vocab() == tokenizer.get_vocab()
    if is_same and tokenizer.is_fast:
        steps = (each.backend_tokenizer.to_str() for each in (tokenizer, copy))
        is_same = next(steps) == next(steps)
    if not is_same:
        tokenizer.save_pretrained(folder)


def add_former_names(folder: Path) -> None:
    """Write the settings of a saved model's config.json under their former names, too.

    transformers 5 calls `rope_parameters` and `dtype` what earlier ones and engines look for as
    `rope_theta`, `rope_scaling` and `torch_dtype`, without which those take other rotations and say
    nothing. A draft on its target's states gets a `model_type` that transformers does not know.
    """
    path = folder / CONFIG_NAME
    config: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    former = {"torch_dtype": config["dtype"]} if config.get("dtype") else {}
    rope = dict(config.get("rope_parameters") or {})
    if "rope_theta" in rope:  # else there are no ropes, or several, which have no former name
        neox = config["model_type"] == "gpt_neox"
        former["rotary_emb_base" if neox else "rope_theta"] = rope.pop("rope_theta")
        if "partial_rotary_factor" in rope:
            share = rope.pop("partial_rotary_factor")
            former["rotary_pct" if neox else "partial_rotary_factor"] = share
        if rope.get("rope_type", "default") != "default":
            former["rope_scaling"] = rope
    if KEY in config and config["model_type"] != MODEL_TYPE:
        config[KEY]["model_type"], config["model_type"] = config["model_type"], MODEL_TYPE
    write_json(path, dict(sorted({**former, **config}.items())))
