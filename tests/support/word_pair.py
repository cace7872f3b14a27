"""A pair of tiny random models whose tokens are words, and runs of its rollouts' recipe."""

import json
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import PreTrainedTokenizerFast

from tests.support.tiny import tiny_llama


def word_tokenizer(*more: str) -> PreTrainedTokenizerFast:
    """Of the words w0 (padding), w1 (the end), ... w39, and some more."""
    words = [*(f"w{index}" for index in range(40)), *more]
    core = Tokenizer(WordLevel({word: at for at, word in enumerate(words)}, unk_token="w2"))
    core.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=core, eos_token="w1", pad_token="w0")


def word_pair(folder: Path) -> None:
    """Write `folder/target` and `folder/draft`, both of 2 layers and width 32."""
    for name, seed in (("target", 4), ("draft", 5)):
        tiny_llama(seed, vocab=40, width=32, layers=2).float().save_pretrained(folder / name)
        word_tokenizer().save_pretrained(folder / name)


def with_train_and_dev(pair: Path, folder: Path) -> dict[str, Any]:
    """A configuration of the pair, with 16 prompts to train on and 4 others held out, as files."""
    prompts = []
    for n in range(20):
        text = " ".join(f"w{2 + (n * 7 + i * i) % 37}" for i in range(2 + n % 6))
        prompts.append(json.dumps({"prompt": f"{text} w{2 + n % 38} w2"}) + "\n")
    sets = []
    for split, lines in (("train", prompts[4:]), ("dev", prompts[:4])):
        path = folder / f"{split}.jsonl"
        path.write_text("".join(lines))
        sets.append({"name": str(path), "split": split, "count": 0})
    return {
        "output": "out",
        "models": {"target": str(pair / "target"), "draft": str(pair / "draft")},
        "toy": None,
        "rollouts": {"max_new_tokens": 12, "shard_size": 4, "samples": 2, "sets": sets},
        "eval": {
            "sets": [{"name": str(folder / "dev.jsonl"), "split": "test", "count": 2}],
            "methods": [{"name": "plain", "decoder": "plain"}],
        },
    }
