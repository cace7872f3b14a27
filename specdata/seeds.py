"""Randomness that belongs to an example, not to a process.

Sharding, batching, the number of workers and a resume can then not change what is drawn.
"""

from __future__ import annotations

import hashlib

import torch


def seed_for(seed: int, *key: str | int) -> int:
    """A 63-bit seed for a key such as (example id, sample): the start of a SHA-256 of both."""
    text = "\x1f".join(str(part) for part in (seed, *key))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


def generator_for(seed: int, *key: str | int) -> torch.Generator:
    """A CPU generator seeded by `seed_for`."""
    return torch.Generator().manual_seed(seed_for(seed, *key))
