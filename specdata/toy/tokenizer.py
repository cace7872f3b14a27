"""The tokenizer of the embedded pair, trained on the embedded text."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

END_TOKEN = "<|end|>"
PAD_TOKEN = "<|pad|>"  # not the end token: models learn where text ends, and never learn to pad

_OF_TRANSFORMERS_5 = ("backend", "is_local", "local_files_only")


def train_tokenizer(texts: Sequence[str], vocab_size: int = 2048) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE tokenizer; any text can be encoded and decoded back exactly.

    `vocab_size` counts the 256 bytes and the two special tokens, too. Raises ValueError if the
    texts are too few to fill it, or it is below 258.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_TOKEN, PAD_TOKEN],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    if tokenizer.get_vocab_size() != vocab_size:
        raise ValueError(
            f"vocab_size must be at least 258 and within reach of the texts: {vocab_size} was "
            f"asked for, {len(texts)} texts gave {tokenizer.get_vocab_size()}"
        )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=END_TOKEN,
        eos_token=END_TOKEN,
        pad_token=PAD_TOKEN,
        clean_up_tokenization_spaces=False,
        padding_side="left",
    )


def save_tokenizer(tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Save a tokenizer such that transformers 4 loads it as well as transformers 5.

    transformers 5 writes a class that 4 does not have, and where the tokenizer came from. For one
    made by `train_tokenizer`, or read from a GGUF file.
    """
    tokenizer.save_pretrained(folder)
    path = folder / "tokenizer_config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    kept = {name: value for name, value in config.items() if name not in _OF_TRANSFORMERS_5}
    if kept["tokenizer_class"] == "TokenizersBackend":
        kept["tokenizer_class"] = "PreTrainedTokenizerFast"
    path.write_text(json.dumps(kept, indent=2) + "\n", encoding="utf-8")
