"""Folders are read by transformers 4 as they are read here."""

from __future__ import annotations

import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from specdata.storage.files import locked
from tests.heads import test_published_code as published

pytestmark = pytest.mark.exhaustive
PACKAGES = ("transformers==4.57.6",)


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


def test_transformers_4_decodes_with_a_folders_own_code_as_we_do(
    older: Path, tmp_path: Path
) -> None:
    folders = published.Folders(tmp_path, older)
    assert folders.answers["version"].startswith("4.57")
    published.test_auto_model_gives_the_heads_logits(folders)
    published.test_custom_generate_draws_the_tokens_that_our_decoder_draws(folders)
