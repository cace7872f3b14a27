"""Which model states are of: heads record some of their draft's, and drafts of their target's.

Another model of equal width would be taken without an error, and its states would mean nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from transformers import PreTrainedModel

TOKENS = 8
# A vocabulary that was padded to a multiple, which is no other model, has the same ids.
STEP = 127
# Relative error |other - recorded| / |recorded| up to which states are of the same model. Measured
# on the demo drafts, one block of width 128: float16 .0008, bfloat16 .007, weights rounded to 8
# bits .01 to .014 and to 4 bits .13 to .15; on ten families of tiny random models, bfloat16 .005 to
# .025. Different drafts: the demo's before and after distillation .49 to .53, other seeds 1.2 to
# 1.5.
BOUND = 0.25


def probe_ids(model: PreTrainedModel) -> Tensor:
    """(1, 8) the fixed tokens."""
    size = model.config.get_text_config().vocab_size
    ids: Tensor = 1 + STEP * torch.arange(TOKENS, device=model.device) % (size - 1)
    return ids.unsqueeze(0)


def probe_values(states: Tensor, count: int) -> list[float]:
    """`count` values of each of (n, H) states, evenly spread, in five digits.

    Rounded by less than half precision changes.
    """
    spread = torch.linspace(0, states.shape[-1] - 1, count, device=states.device).long()
    return [float(f"{value:.5g}") for value in states[:, spread].flatten().tolist()]


def probe_error(found: Sequence[float], recorded: Sequence[float]) -> float:
    """The relative error of as many values; up to `BOUND`, they are of the same model."""
    values, expected = torch.tensor(found), torch.tensor(recorded)
    return float((values - expected).norm() / expected.norm())
