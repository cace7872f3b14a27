"""The embedded pair: a deep target and a shallow base draft, trained from scratch.

Both become ordinary model folders, which later stages treat as any other pair.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Sequence
from itertools import chain
from pathlib import Path

import torch
from datasets import Dataset
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    AutoTokenizer,
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
    Trainer,
    default_data_collator,
    set_seed,
)

from distill.config import TOY_POSITIONS, ToyPairConfig
from distill.training import save_model, train_resumably, training_arguments
from specdata.saving import copy_tokenizer
from specdata.storage.files import atomic_folder
from specdata.toy.corpus import corpus

BATCH_BLOCKS = 4
"""Blocks of a training step."""
TARGET_RATE, DRAFT_RATE = 3e-3, 4e-3
"""Largest learning rates."""


def train_toy_pair(folder: Path, config: ToyPairConfig, *, seed: int) -> None:
    """Train `folder/target` and `folder/draft`; a model that is already finished is kept.

    The seed decides the text, the initial weights and the order of the blocks.
    """
    for name in ("target", "draft"):
        if not (folder / name).exists():
            _train(folder / name, config, seed=seed)


def language_model(
    tokenizer: PreTrainedTokenizerBase,
    *,
    layers: int,
    width: int,
    seed: int,
    vocabulary: int | None = None,
    positions: int = TOY_POSITIONS,
) -> LlamaForCausalLM:
    """Return a Llama with random weights, tied embeddings and heads of 64 (32 if narrow).

    `vocabulary` is the number of rows of the embedding, by default the tokenizer's tokens.

    Weights start at about 1/sqrt(width), and layers add to the residual stream at 1/sqrt(2 layers)
    of that. With the usual 0.02, a narrow deep model learns too slowly for so short a training.
    """
    head_size = 64 if width % 64 == 0 and width > 128 else min(32, width)
    set_seed(seed)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=vocabulary or len(tokenizer),
            hidden_size=width,
            intermediate_size=width * 8 // 3 // 16 * 16,
            num_hidden_layers=layers,
            num_attention_heads=width // head_size,
            max_position_embeddings=positions,
            tie_word_embeddings=True,
            initializer_range=0.7 / math.sqrt(width),
            bos_token_id=tokenizer.bos_token_id,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
    )
    with torch.no_grad():
        for layer in model.model.layers:
            for output in (layer.self_attn.o_proj, layer.mlp.down_proj):
                output.weight /= math.sqrt(2 * layers)
    model.generation_config = GenerationConfig(
        do_sample=True,  # from the full distribution: generate() would cut at top_k = 50 by itself
        temperature=1.0,
        top_k=0,
        top_p=1.0,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return model


def token_blocks(texts: list[str], tokenizer: PreTrainedTokenizerBase, block_size: int) -> Dataset:
    """Return blocks of `block_size` tokens: the documents in a row, each ended by the end token."""
    documents = tokenizer(texts)["input_ids"]
    end = [tokenizer.eos_token_id]
    tokens = list(chain.from_iterable(document + end for document in documents))
    blocks = [
        tokens[start : start + block_size]
        for start in range(0, len(tokens) - block_size + 1, block_size)
    ]
    return Dataset.from_dict({"input_ids": blocks, "labels": blocks})


def _train(path: Path, config: ToyPairConfig, *, seed: int) -> None:
    texts = corpus(
        seed=seed,
        examples_per_family=config.examples_per_family,
        library_characters=config.library_characters,
    )
    target = path.name == "target"
    # The draft shares the target's tokenizer.
    tokenizer = (
        train_tokenizer(texts, config.vocab_size)
        if target
        else AutoTokenizer.from_pretrained(path.with_name("target"), trust_remote_code=False)
    )
    model = language_model(
        tokenizer,
        layers=config.target_layers if target else config.draft_layers,
        width=config.target_width if target else config.draft_width,
        seed=seed,
    )
    work = path.with_name(f"{path.name}.training")
    trainer = Trainer(
        model=model,
        args=training_arguments(
            work,
            steps=config.target_steps if target else config.draft_steps,
            batch_size=BATCH_BLOCKS,
            learning_rate=TARGET_RATE if target else DRAFT_RATE,
            warmup_ratio=0.1,
            save_steps=config.save_steps,
            seed=seed,
        ),
        train_dataset=token_blocks(texts, tokenizer, config.block_size),
        data_collator=default_data_collator,
    )
    train_resumably(trainer, work, label=f"training the {path.name}")
    with atomic_folder(path) as temporary:
        save_model(model, temporary)
        if target:
            save_tokenizer(tokenizer, temporary)
        else:
            copy_tokenizer(str(path.with_name("target")), temporary)
    shutil.rmtree(work)
    del trainer
    torch.cuda.empty_cache()


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
