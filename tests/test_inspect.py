"""The output of `draftsmith inspect` is what the dataset holds."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import PreTrainedTokenizerFast

from recipes.command import run_tool
from recipes.tools import inspect as module
from recipes.tools.inspect import summarise
from specdata.labels.config import LabelsConfig
from specdata.labels.make import make_labels
from specdata.models import vocabulary_fingerprint
from specdata.probability import SamplingConfig
from specdata.storage.dataset import fill_dataset, load_stored, read_manifest
from specdata.storage.resume import Settings
from specdata.storage.schema import ROLLOUTS, Rollout
from tests.test_acceptance import rollouts
from tests.tiny import tiny_llama

V = 12


def stored(folder: Path, **settings: object) -> list[Rollout]:
    """Three shards of two sets."""
    rows = rollouts(9, vocab=V)
    for number, row in enumerate(rows):
        row["dataset"], row["finish"] = ("a", "eos") if number < 5 else ("b", "length")
    shards = [lambda start=start: rows[start : start + 3] for start in (0, 3, 6)]
    fill_dataset(folder, ROLLOUTS, Settings(settings), shards, lambda rows: None)
    return rows


def labels(folder: Path) -> Path:
    stored(folder / "rollouts")
    make_labels(
        tiny_llama(0, vocab=V),
        tiny_llama(1, vocab=V),
        load_stored(folder / "rollouts"),
        folder / "labels",
        LabelsConfig(shard_size=4),
        sampling=SamplingConfig(top_k=5),
        seed=0,
        settings=Settings({}),
        report=lambda rows: None,
    )
    return folder / "labels"


def tokenizer() -> PreTrainedTokenizerFast:
    words = {f"word{index}": index for index in range(V)}
    words["word5"], words["\x1b[31m[bold]red"] = 12, 5  # as hostile as a model's text may be
    words = dict(sorted(words.items(), key=lambda item: item[1]))
    made = Tokenizer(WordLevel(words, unk_token="word0"))
    made.pre_tokenizer = Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=made, unk_token="word0")


def test_what_is_counted_is_what_the_rows_hold(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "ROWS_AT_ONCE", 2)
    rows = load_stored(folder := labels(tmp_path)).to_list()
    groups, _ = summarise(folder)
    assert groups.keys() == {"a/train", "b/train"}
    for name, group in groups.items():
        of_set = [row for row in rows if row["dataset"] == name[0]]
        for counted, row in zip(group, of_set, strict=True):
            assert counted == {
                "turn": row["turn"],
                "finish": row["finish"],
                "prompt": len(row["prompt_ids"]),
                "completion": len(row["completion_ids"]),
                "overlap": pytest.approx(sum(row["overlap"])),
            }


def test_samples_come_from_all_over_the_dataset(tmp_path: Path) -> None:
    rows = stored(tmp_path)
    assert summarise(tmp_path, 3)[1] == [rows[1], rows[4], rows[7]]
    assert summarise(tmp_path, 50)[1] == rows
    assert summarise(tmp_path, 0)[1] == []


def test_labels_are_shown_with_their_sampler_and_acceptance(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = labels(tmp_path)
    assert run_tool("inspect", [str(folder)]) == 0
    shown = capsys.readouterr().out
    group = summarise(folder)[0]["a/train"]
    mean = sum(row["overlap"] for row in group) / sum(row["completion"] for row in group)
    for text in ("9 rows", "temperature 1.0, top_k 5", "a/train", "eos 100%", f"{mean:.3f}"):
        assert text in shown
    assert "token ids instead of texts: the manifest names no target" in shown


def test_texts_are_those_of_the_targets_tokenizer_without_control_characters(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = tokenizer()
    words.save_pretrained(tmp_path / "target")
    stored(
        tmp_path / "rollouts",
        target={"name": str(tmp_path / "target"), "revision": "x"},
        tokenizer=vocabulary_fingerprint(words),
    )
    assert run_tool("inspect", [str(tmp_path / "rollouts"), "--samples", "9"]) == 0
    shown = capsys.readouterr().out
    assert "word3" in shown
    assert "\\x1b[31m[bold]red" in shown
    assert "\x1b[31m" not in shown


def test_an_unfinished_dataset_is_shown_with_a_warning(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = rollouts(6, vocab=V)

    def stop() -> list[Rollout]:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):  # shards are made from the last to the first
        fill_dataset(tmp_path, ROLLOUTS, Settings({}), [stop, lambda: rows[3:]], lambda rows: None)
    assert not read_manifest(tmp_path)["finished"]
    assert run_tool("inspect", [str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    assert "3 rows" in shown
    assert "warning: unfinished" in shown
    with pytest.raises(KeyboardInterrupt):
        fill_dataset(tmp_path / "begun", ROLLOUTS, Settings({}), [stop], lambda rows: None)
    assert run_tool("inspect", [str(tmp_path / "begun")]) == 0
    assert "no rows" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ("empty", "holds no dataset"),
        ("absent", "is not a folder"),
        ("above", "datasets are in"),
        ("edited", "is not the file that was written"),
        ("foreign", "neither rollouts nor labels"),
        ("torn", "is not readable parquet"),
    ],
)
def test_what_is_no_dataset_is_refused(
    wrong: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "some" / "dataset"
    folder.mkdir(parents=True)
    if wrong == "absent":
        folder = tmp_path / "nowhere"
    elif wrong != "empty":
        stored(folder)
    shard = folder / "shard-00001.parquet"
    if wrong == "above":
        folder = folder.parent
    elif wrong == "edited":
        shard.write_bytes(shard.read_bytes() + b"x")
    elif wrong in ("foreign", "torn"):
        manifest = read_manifest(folder)
        (folder / "manifest.json").write_text(json.dumps({**manifest, "finished": False}))
        if wrong == "torn":
            shard.write_bytes(shard.read_bytes()[:100])
        else:
            pq.write_table(pa.table({"x": [1]}), shard)
    assert run_tool("inspect", [str(folder)]) == 2
    said = capsys.readouterr()
    assert message in said.err
    assert "Traceback" not in said.err
