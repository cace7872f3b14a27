"""Rollouts by the recipe, as users run it: several processes, kill -9, a full disk, bad input."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import PreTrainedTokenizerFast

from recipes.make_rollouts import RECIPE
from specdata.storage.dataset import load_stored
from tests.tiny import tiny_llama

ROOT = Path(__file__).parent.parent
PROMPTS = 60


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a target, a draft of its vocabulary, prompts and a configuration."""
    folder = tmp_path_factory.mktemp("pair")
    words = {f"w{index}": index for index in range(40)}
    core = Tokenizer(WordLevel(words, unk_token="w2"))
    core.pre_tokenizer = WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="w1", pad_token="w0")
    for name, seed in (("target", 4), ("draft", 5)):
        tiny_llama(seed, vocab=40, width=32, layers=2).float().save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    with (folder / "mine.jsonl").open("w") as lines:
        for n in range(PROMPTS):
            text = " ".join(f"w{2 + (n * 7 + i * i) % 37}" for i in range(2 + n % 6))
            lines.write(json.dumps({"prompt": f"{text} w{2 + n % 38} w{2 + n // 38}"}) + "\n")
    config: dict[str, Any] = {
        "output": "out",
        "models": {"target": str(folder / "target"), "draft": str(folder / "draft")},
        "toy": None,
        "rollouts": {
            "max_new_tokens": 100,
            "shard_size": 4,
            "samples": 2,
            "sets": [
                {"name": str(folder / "mine.jsonl"), "split": "train", "count": PROMPTS},
            ],
        },
        "eval": {
            "verifiers": 0,
            "sets": [{"name": str(folder / "mine.jsonl"), "split": "test", "count": 2}],
            "methods": [{"name": "plain", "decoder": "plain"}],
        },
    }
    (folder / "pair.yaml").write_text(yaml.safe_dump(config))
    return folder


def with_train_and_dev(pair: Path, folder: Path) -> dict[str, Any]:
    """The pair's configuration with 16 prompts to train on and 4 others held out, as files."""
    tree: dict[str, Any] = yaml.safe_load((pair / "pair.yaml").read_text())
    (prompt_set,) = tree["rollouts"]["sets"]
    lines = Path(prompt_set["name"]).read_text().splitlines(keepends=True)
    (folder / "dev.jsonl").write_text("".join(lines[:4]))
    (folder / "train.jsonl").write_text("".join(lines[4:20]))
    tree["rollouts"] |= {
        "max_new_tokens": 12,
        "sets": [
            {"name": str(folder / f"{split}.jsonl"), "split": split, "count": 0}
            for split in ("train", "dev")
        ],
    }
    return tree


def start(
    pair: Path, folder: Path, count: int, *arguments: str, grace: int = 30
) -> list[subprocess.Popen[str]]:
    """The recipe in several processes, as a launcher starts them on one or several nodes.

    `grace` is how many seconds a process waits for a main one that is gone.
    """
    folder.mkdir(exist_ok=True)
    program = (
        f"import recipes.run, sys; recipes.run.GRACE = {grace};"
        "from recipes.make_rollouts import RECIPE; sys.exit(RECIPE.run())"
    )
    command = [sys.executable, "-c", program, "--config", str(pair / "pair.yaml"), *arguments]
    return [
        subprocess.Popen(
            command,
            cwd=folder,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            env={
                **os.environ,
                "PYTHONPATH": str(ROOT),
                "RANK": str(rank),
                "WORLD_SIZE": str(count),
            },
        )
        for rank in range(count)
    ]


def run_here(pair: Path, folder: Path) -> int:
    """The recipe in this process; its exit status."""
    output = str(folder / "out")
    return RECIPE.run(["--config", str(pair / "pair.yaml"), "--output", output])


def end(processes: list[subprocess.Popen[str]]) -> list[tuple[int, str]]:
    """Exit status and stderr of each."""
    errors = [process.communicate(timeout=120)[1] for process in processes]
    return [(process.returncode, text) for process, text in zip(processes, errors, strict=True)]


def content(folder: Path) -> dict[str, bytes]:
    dataset = folder / "out" / "rollouts"
    return {
        path.name: path.read_bytes()
        for path in dataset.iterdir()
        if path.is_file() and path.name != "run.json"
    }


@pytest.fixture(scope="module")
def alone(pair: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    folder = tmp_path_factory.mktemp("alone")
    assert run_here(pair, folder) == 0
    rows = load_stored(folder / "out" / "rollouts")
    keys = set(zip(rows["example_id"], rows["sample"], strict=True))
    assert len(keys) == len(rows) == 2 * PROMPTS
    record = json.loads((folder / "out" / "rollouts" / "run.json").read_text())
    assert record["results"]["rows"] == record["results"]["asked"] == 2 * PROMPTS
    assert record["results"]["prompts"][0]["kept"] == PROMPTS
    return content(folder)


@pytest.mark.exhaustive
def test_when_the_main_process_dies_the_other_finishes_the_shards_and_then_ends_with_a_message(
    pair: Path, tmp_path: Path, alone: dict[str, bytes]
) -> None:
    """As on a second node, whose launcher does not see that the first is lost."""
    main, other = start(pair, tmp_path, 2, grace=2)
    dataset = tmp_path / "out" / "rollouts"
    while not list(dataset.glob("shard-00010.parquet")):
        assert main.poll() is None
    main.send_signal(signal.SIGKILL)
    while not json.loads((dataset / "manifest.json").read_text())["finished"]:
        assert other.poll() is None
    (_, (status, errors)) = end([main, other])
    assert status == 1
    assert errors.count("\n") < 3
    assert f"no main process has been at work in {dataset.relative_to(tmp_path)}" in errors
    assert "rank 0 ended, was lost, or never began, and rank 1 waited" in errors
    assert "run the same command again" in errors
    assert [status for status, _ in end(start(pair, tmp_path, 2))] == [0, 0]
    assert content(tmp_path) == alone


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--sampling.temperature", "0"], "every sample of a prompt is the same"),
        (["--rollouts.max_new_tokens", "256"], "has positions for 256 tokens, prompt included"),
        (["--rollouts.max_new_tokens", "253"], "over_long"),
        (["--rollouts.backend", "sglang"], "rollouts.backend: must be 'transformers' or 'vllm'"),
        (["--output", "/proc/nowhere"], "cannot write into /proc/nowhere/rollouts"),
    ],
)
def test_what_cannot_work_is_refused_with_what_to_do(
    pair: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    message: str,
) -> None:
    whole = ["--config", str(pair / "pair.yaml"), "--output", str(tmp_path / "out"), *arguments]
    assert RECIPE.run(whole) == 2
    assert message in capsys.readouterr().err
