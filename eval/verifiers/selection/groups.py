"""A large vocabulary as a few groups: likely tokens by themselves, the others by their p/q."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

Array = NDArray[np.float64]
Ids = NDArray[np.int64]

# Ratios p/q from 1/16 to 16 in steps of an eighth of an octave.
OCTAVES, PER_OCTAVE = 4, 8
BUCKETS = 2 * OCTAVES * PER_OCTAVE


def largest(scores: Array, count: int) -> Ids:
    """Ids (count,) of the largest of scores (V,), largest first; all ids if there are fewer."""
    ids: Ids = torch.from_numpy(scores).topk(min(count, len(scores))).indices.numpy()
    return ids


def groups_by_ratio(p: Array, q: Array, head: Ids) -> Ids:
    """A group for every head token, and `BUCKETS` groups of other tokens with similar p/q.

    Tokens with equal p/q should be selected with equal preference, so a group loses no more than
    the width of its interval costs. The h head tokens get the groups 0 .. h-1.
    """
    # Single precision suffices: any assignment gives an exact rule.
    target, draft = torch.from_numpy(p).float(), torch.from_numpy(q).float()
    octaves = target.div_(draft).log2_().nan_to_num_(nan=0.0)
    bucket = ((octaves + OCTAVES) * PER_OCTAVE).clamp_(0, BUCKETS - 1)
    group: Ids = bucket.long().numpy() + len(head)
    group[head] = np.arange(len(head))
    return group


def group_masses(group: Ids, distribution: Array, count: int) -> Array:
    """(count,) probability of every group under a distribution (V,)."""
    masses: Array = np.bincount(group, distribution, count).astype(np.float64, copy=False)
    return masses
