"""What lies beside a saved model's weights is read by other versions and engines as here."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from huggingface_hub import constants
from transformers import (
    AutoConfig,
    GPT2Config,
    GPTNeoXConfig,
    LlamaConfig,
    PhiConfig,
    PreTrainedConfig,
    Qwen2Config,
)

from specdata.errors import ConfigError
from specdata.models import add_former_names, copy_tokenizer, load_tokenizer
from specdata.toy.tokenizer import END_TOKEN, save_tokenizer, train_tokenizer

COMMIT = "c" * 40
TEXT = "  A short text,\nnothing more: 0123 naïve 漢字"


def save_target(folder: Path, *, of_kind: str | None = "PreTrainedTokenizerFast") -> None:
    """A model's folder as a Hub repository may have it: hand-written files, CRLF, other files."""
    LlamaConfig(vocab_size=300).save_pretrained(folder)
    save_tokenizer(train_tokenizer([TEXT] * 4, vocab_size=280), folder)
    settings = {"tokenizer_class": of_kind} if of_kind else {}
    settings |= {"eos_token": END_TOKEN, "a_key_of_another_version": [1, 2]}
    (folder / "tokenizer_config.json").write_bytes(
        json.dumps(settings, indent=7).replace("\n", "\r\n").encode()
    )
    (folder / "special_tokens_map.json").write_text(f'{{"eos_token":   "{END_TOKEN}"}}')
    (folder / "chat_template.jinja").write_text("{{ messages[0].content }}\n\n")
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tools.jinja").write_text("{{ tools }}")
    (folder / "tokenizer.model").write_bytes(bytes(range(256)))
    for other in ("README.md", "tokenization_mine.py", "model.safetensors"):
        (folder / other).write_text("not of the tokenizer")


COPIED = {
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "additional_chat_templates/tools.jinja",
    "tokenizer.model",
}


def files(folder: Path) -> dict[str, bytes]:
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


def draft_folder(folder: Path, config: PreTrainedConfig | None = None) -> Path:
    (config or LlamaConfig(vocab_size=280)).save_pretrained(folder)
    return folder


def test_tokenizer_files_are_copied_byte_for_byte_and_no_others(tmp_path: Path) -> None:
    save_target(tmp_path / "target")
    draft = draft_folder(tmp_path / "draft")
    before = files(draft)
    copy_tokenizer(str(tmp_path / "target"), draft)
    source, copied = files(tmp_path / "target"), files(draft)
    assert copied == before | {name: source[name] for name in COPIED}


def test_tokenizer_files_of_a_hub_model_come_from_its_snapshot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    repository = tmp_path / "models--acme--tiny"
    save_target(repository / "snapshots" / COMMIT)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(COMMIT)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    expected = files(repository / "snapshots" / COMMIT)
    for name in ("acme/tiny", f"acme/tiny@{COMMIT}"):
        draft = draft_folder(tmp_path / name.replace("/", "-"))
        copy_tokenizer(name, draft)
        assert {name: files(draft)[name] for name in COPIED} == {
            name: expected[name] for name in COPIED
        }
    with pytest.raises(ConfigError, match="acme/absent"):
        copy_tokenizer("acme/absent", draft)


def test_a_tokenizer_whose_kind_follows_from_its_model_stays_that_kind(tmp_path: Path) -> None:
    target = tmp_path / "target"
    save_target(target, of_kind=None)
    Qwen2Config(vocab_size=300).save_pretrained(target)
    draft = draft_folder(tmp_path / "draft")
    copy_tokenizer(str(target), draft)
    ours, theirs = load_tokenizer(str(draft)), load_tokenizer(str(target))
    assert type(ours) is type(theirs)
    assert ours(TEXT)["input_ids"] == theirs(TEXT)["input_ids"]


def test_files_that_make_no_tokenizer_beside_the_draft_are_written_as_others(
    tmp_path: Path,
) -> None:
    target = tmp_path / "target"
    GPT2Config(vocab_size=300, bos_token_id=0, eos_token_id=0).save_pretrained(target)
    tokenizer = train_tokenizer([TEXT] * 4, vocab_size=280)
    tokenizer.backend_tokenizer.model.save(str(target))  # vocab.json and merges.txt
    draft = draft_folder(tmp_path / "draft")
    copy_tokenizer(str(target), draft)
    theirs = load_tokenizer(str(target))
    assert load_tokenizer(str(draft))(TEXT)["input_ids"] == theirs(TEXT)["input_ids"]


LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
NEOX = {"rope_type": "default", "rope_theta": 20_000.0, "partial_rotary_factor": 0.5}


@pytest.mark.parametrize(
    ("config", "former"),
    [
        (
            LlamaConfig(rope_parameters=LLAMA3, dtype="bfloat16"),
            {
                "torch_dtype": "bfloat16",
                "rope_theta": 500_000.0,
                "rope_scaling": {k: v for k, v in LLAMA3.items() if k != "rope_theta"},
            },
        ),
        (LlamaConfig(rope_parameters={"rope_theta": 7e4}), {"rope_theta": 7e4}),
        (GPTNeoXConfig(rope_parameters=NEOX), {"rotary_emb_base": 2e4, "rotary_pct": 0.5}),
        (PhiConfig(rope_parameters=NEOX), {"rope_theta": 2e4, "partial_rotary_factor": 0.5}),
        (GPT2Config(), {}),
    ],
    ids=lambda value: getattr(value, "model_type", None),
)
def test_former_names_of_settings_are_added_and_change_nothing_here(
    config: PreTrainedConfig, former: dict[str, object], tmp_path: Path
) -> None:
    config.save_pretrained(tmp_path)
    before = AutoConfig.from_pretrained(tmp_path).to_dict()
    written = json.loads((tmp_path / "config.json").read_text())
    add_former_names(tmp_path)
    after = json.loads((tmp_path / "config.json").read_text())
    assert after == written | former
    assert AutoConfig.from_pretrained(tmp_path).to_dict() == before


def test_the_embedded_tokenizer_names_a_class_that_every_transformers_has(tmp_path: Path) -> None:
    tokenizer = train_tokenizer([TEXT] * 4, vocab_size=280)
    save_tokenizer(tokenizer, tmp_path / "first")
    save_tokenizer(load_tokenizer(str(tmp_path / "first")), tmp_path / "again")
    for name in ("first", "again"):
        settings = json.loads((tmp_path / name / "tokenizer_config.json").read_text())
        assert settings["tokenizer_class"] == "PreTrainedTokenizerFast"
        assert not settings.keys() & {"backend", "is_local", "local_files_only"}
        loaded = load_tokenizer(str(tmp_path / name))
        assert loaded(TEXT)["input_ids"] == tokenizer(TEXT)["input_ids"]
        assert (loaded.eos_token, loaded.pad_token) == (tokenizer.eos_token, tokenizer.pad_token)
        assert loaded.padding_side == "left"
