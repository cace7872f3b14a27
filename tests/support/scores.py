"""What several files of tests use of `test_scores`."""

from pathlib import Path
from typing import Any


def evaluation_of(pair: Path, output: Path, **evaluation: Any) -> dict[str, Any]:
    """The configuration of an evaluation of a pair that is given."""
    return {
        "output": str(output),
        "models": {role: str(pair / role) for role in ("target", "draft")},
        "rollouts": {"sets": [{"name": "instruct", "split": "train", "count": 2}]},
        "draft": None,
        "head": None,
        "eval": {"max_new_tokens": 8, **evaluation},
    }
