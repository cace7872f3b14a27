"""Saved heads, and the code that they and released drafts carry for users of transformers alone.

The code is the project's own: a file is copied with those of ours that it imports, whose imports
become relative. `tests/documents/test_layers.py` holds that they need torch, transformers and what
comes with them only.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from huggingface_hub.constants import CONFIG_NAME, SAFETENSORS_SINGLE_FILE
from safetensors.torch import save_file

from specdata.storage.files import atomic_write, write_json, write_text

if TYPE_CHECKING:
    from heads.model import BaseHead

OURS = re.compile(r"^from ((?:heads|specdata)[\w.]*)\.(\w+) import ", re.M)


def save_head(head: BaseHead, settings: Mapping[str, Any], folder: Path) -> None:
    """Write a head as both this project and `AutoModel` with trust_remote_code=True load it."""
    weights = {name: value.contiguous() for name, value in head.state_dict().items()}
    with atomic_write(folder / SAFETENSORS_SINGLE_FILE) as temporary:
        save_file(weights, temporary, metadata={"format": "pt"})
    of_kind = next(each for each in type(head).__mro__ if "kind" in vars(each))
    file = of_kind.__module__.rpartition(".")[2]
    write_code(f"heads.kinds.{file}", folder)
    write_custom_generate(folder)
    auto_map = {"AutoConfig": "model.SavedHeadConfig", "AutoModel": f"{file}.{of_kind.__name__}"}
    about = {"model_type": "acceptance_head", "auto_map": auto_map}
    # Last, because loading starts with it: the folder is a head or it is none.
    write_json(folder / CONFIG_NAME, {"kind": head.kind, **settings, **about})


def write_custom_generate(folder: Path) -> None:
    """Write what `target.generate(custom_generate=folder, trust_remote_code=True)` runs."""
    write_code("heads.generate", folder / "custom_generate")
    # The first release in which it was tested; transformers says what is missing.
    write_text(folder / "custom_generate" / "requirements.txt", "transformers>=4.57.0\n")


def write_code(module: str, folder: Path) -> None:
    """Copy a module's file, and those of ours that it imports, into a folder without rooms."""
    spec = find_spec(module)
    assert spec is not None
    assert spec.origin is not None
    source = Path(spec.origin).read_text(encoding="utf-8")
    for package, name in OURS.findall(source):
        write_code(f"{package}.{name}", folder)
    write_text(folder / Path(spec.origin).name, OURS.sub(r"from .\2 import ", source))
