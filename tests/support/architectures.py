"""What several files of tests use of `test_architectures`."""

from __future__ import annotations

from typing import Any

import torch

from tests.support.families import tiny


def nearby(family: str, **changes: Any) -> Any:
    """A draft that agrees with the model now and then, so that caches are cropped in the middle."""
    draft, noise = tiny(family, 2, **changes), tiny(family, 3, **changes)
    with torch.no_grad():
        for mine, other in zip(draft.parameters(), noise.parameters(), strict=True):
            mine.add_(0.1 * other)
    return draft
