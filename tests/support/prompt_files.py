"""Small data files, and what comes of them."""

import json
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from specdata.config import PromptSet
from specdata.prompts.loading import load_prompts
from specdata.prompts.prompt import LoadedPrompts
from tests.support.chats import chat_tokenizer

PLAIN, CHAT = chat_tokenizer("none"), chat_tokenizer("llama3")


@pytest.fixture(name="cache")
def datasets_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    datasets.disable_progress_bars()


def parquet(path: Path, rows: list[dict[str, Any]]) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist(rows), path)
    return str(path)


def jsonl(path: Path, rows: list[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def load(wanted: str | PromptSet, tokenizer: Any, **options: Any) -> LoadedPrompts:
    """The prompts of a set of seed 0; a source stands for all its rows, of split train."""
    dataset = PromptSet(wanted, "train", 0) if isinstance(wanted, str) else wanted
    return load_prompts([dataset], tokenizer, seed=0, **options)


def texts(loaded: LoadedPrompts) -> list[str]:
    return [PLAIN.decode(prompt.ids[1:]) for prompt in loaded.prompts]  # less the BOS
