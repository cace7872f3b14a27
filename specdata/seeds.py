"""Randomness that belongs to an example, not to a process.

Sharding, batching, the number of workers and a resume can then not change what is drawn. Both
generators are seeded by one digest of the key's parts.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    import torch


def seed_for(seed: int, *key: str | int) -> int:
    """A 63-bit seed for a key such as (example id, sample): the start of a SHA-256 of both."""
    return int.from_bytes(_digest(seed, *key)[:8], "big") >> 1


def generator_for(seed: int, *key: str | int) -> torch.Generator:
    """A CPU generator seeded by `seed_for`."""
    import torch

    return torch.Generator().manual_seed(seed_for(seed, *key))


def numpy_generator_for(*key: str | int) -> np.random.Generator:
    """A numpy generator that depends on the key and on nothing else; the seed is a part of it."""
    import numpy as np

    return np.random.default_rng(int.from_bytes(_digest(*key), "big"))


def _digest(*parts: str | int) -> bytes:
    return hashlib.sha256("\x1f".join(map(str, parts)).encode()).digest()
