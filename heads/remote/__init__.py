"""Code that published folders carry, for users who have transformers and not this project.

`modeling_heads.py` has the heads of each kind as transformers models, `generate.py` is speculative
decoding with block verification and the heads' stopping rule. They import torch and transformers
only, so they repeat what is written elsewhere in this project, and `tests/test_published_code.py`
keeps them equal. Nothing here imports them: they are copied.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from specdata.storage.files import write_text

# Kind of a head -> its class among the transformers models, and its model type.
MODELS = {
    "specdec++": ("AcceptanceHead", "acceptance_head"),
    "immediate": ("ImmediateHead", "immediate_acceptance_head"),
    "confidence": ("ConfidenceHead", "confidence_acceptance_head"),
}
MODELING = "modeling_heads"


def auto_config(kind: str) -> dict[str, Any]:
    """Keys of a head's config.json by which transformers finds the model in the file beside it."""
    name, model_type = MODELS[kind]
    return {
        "model_type": model_type,
        "architectures": [f"{name}Model"],
        "auto_map": {
            "AutoConfig": f"{MODELING}.{name}Config",
            "AutoModel": f"{MODELING}.{name}Model",
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
