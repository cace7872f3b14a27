"""Code that published folders carry, for users who have transformers and not this project.

`modeling_acceptance_head.py` is the head as a transformers model, and `generate.py` is speculative
decoding with block verification and the head's stopping rule. Each is one file that imports torch
and transformers only, so each repeats what is written elsewhere in this project, and
`tests/test_published_code.py` keeps them equal. Nothing here imports them: they are copied.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from specdata.storage.files import write_text

MODELING = "modeling_acceptance_head"

# Keys of a head's config.json by which transformers finds the model in the file beside it.
AUTO_CONFIG: dict[str, Any] = {
    "model_type": "acceptance_head",
    "architectures": ["AcceptanceHeadModel"],
    "auto_map": {
        "AutoConfig": f"{MODELING}.AcceptanceHeadConfig",
        "AutoModel": f"{MODELING}.AcceptanceHeadModel",
    },
}


def write_modeling(folder: Path) -> None:
    """Write what `AutoModel.from_pretrained(folder, trust_remote_code=True)` runs."""
    write_text(folder / f"{MODELING}.py", _source(f"{MODELING}.py"))


def write_custom_generate(folder: Path) -> None:
    """Write what `target.generate(custom_generate=folder, trust_remote_code=True)` runs."""
    write_text(folder / "custom_generate" / "generate.py", _source("generate.py"))
    # The first release in which it was tested; transformers says what is missing.
    write_text(folder / "custom_generate" / "requirements.txt", "transformers>=4.57.0\n")


def _source(name: str) -> str:
    return (Path(__file__).parent / name).read_text(encoding="utf-8")
