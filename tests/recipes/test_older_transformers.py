"""Folders are read by transformers 4 as they are read here."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from distill.toy import save_tokenizer
from eval.publishing.release import About, release_draft
from specdata.models import load_tokenizer
from specdata.storage.files import locked
from tests.heads import test_published_code as published
from tests.support.models import LLAMA3
from tests.support.release import Pair

pytestmark = pytest.mark.exhaustive
PACKAGES = ("transformers==4.57.6",)
TEXT = "a short text about nothing at all, 0123456789"


@pytest.fixture(scope="module")
def older() -> Path:
    """Python of an environment with `PACKAGES`, kept between runs; torch is that of this one."""
    folder = Path(sys.prefix) / "cache" / "transformers-4"
    folder.parent.mkdir(parents=True, exist_ok=True)
    python, made = folder / "bin" / "python", folder / "made"
    with locked(folder.with_suffix(".lock")):
        if made.is_file() and made.read_text() == " ".join(PACKAGES):
            return python
        shutil.rmtree(folder, ignore_errors=True)
        subprocess.run([sys.executable, "-m", "venv", folder], check=True)
        install = subprocess.run(
            [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *PACKAGES],
            capture_output=True,
            text=True,
            check=False,
        )
        if install.returncode:
            pytest.skip(f"no package registry for {PACKAGES[0]}: {install.stderr.splitlines()[-1]}")
        # Last on its path: everything but torch comes from the environment itself.
        site = Path(sysconfig.get_path("purelib", vars={"base": str(folder)}))
        (site / "torch-of-the-other.pth").write_text(sysconfig.get_path("purelib") + "\n")
        made.write_text(" ".join(PACKAGES))
    return python


@pytest.fixture(scope="module")
def draft(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A released Llama whose ropes are not the default ones, with a tokenizer of the toy pair."""
    pair = Pair(tmp_path_factory.mktemp("pair"))
    config = LlamaConfig.from_pretrained(pair.draft, rope_parameters=LLAMA3, initializer_range=0.3)
    torch.manual_seed(1)
    LlamaForCausalLM(config).save_pretrained(pair.draft)
    for folder in (pair.target, pair.draft):
        save_tokenizer(load_tokenizer(str(folder)), folder)
    return release_draft(pair.draft, pair.draft.with_name("release"), pair.results, About())


@pytest.fixture(scope="module")
def answer(older: Path, draft: Path) -> dict[str, Any]:
    """The released draft as transformers 4 loads it."""
    script = Path(__file__).parents[1] / "support/older_transformers.py"
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    done = subprocess.run(
        [older, script, draft, TEXT], capture_output=True, text=True, env=environment, check=False
    )
    assert done.returncode == 0, done.stderr
    told: dict[str, Any] = json.loads(done.stdout)
    return told


@torch.inference_mode()
def test_a_released_draft_answers_the_same_in_transformers_4(
    answer: dict[str, Any], draft: Path
) -> None:
    assert answer["version"].startswith("4.57")
    tokenizer = load_tokenizer(str(draft))
    prompt = tokenizer(TEXT, return_tensors="pt")["input_ids"]
    assert answer["prompt"] == prompt[0].tolist()
    assert (answer["text"], answer["pad"], answer["end"]) == (TEXT, 1, 0)
    assert answer["dtype"] == "torch.float32"
    model = AutoModelForCausalLM.from_pretrained(draft).eval()
    assert answer["draft_length"] == model.generation_config.num_assistant_tokens in (4, 6)
    torch.testing.assert_close(torch.tensor(answer["logits"]), model(prompt).logits[0])


def test_transformers_4_decodes_with_a_folders_own_code_as_we_do(
    older: Path, tmp_path: Path
) -> None:
    folders = published.Folders(tmp_path, older)
    assert folders.answers["version"].startswith("4.57")
    published.test_auto_model_gives_the_heads_logits(folders)
    published.test_custom_generate_draws_the_tokens_that_our_decoder_draws(folders)
