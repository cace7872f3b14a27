"""Drafts that read masks behind the last token, and so propose several after one forward.

A mask is one token again and again, which stands for tokens that are not known yet (PARD, An et al.
2025, arXiv:2504.18583): `pard_token` in config.json, as vLLM and TensorRT-LLM read it.
"""

from __future__ import annotations

from specdata.config import MOST_TIMES
from specdata.drafts.kind import KEY, ConfigJson, DraftKind, Served
from specdata.errors import ConfigError

MASK = "pard_token"
DEPTHS = "depths"


def _depths(settings: ConfigJson) -> int:
    depths, mask, size = settings[DEPTHS], settings.get(MASK), settings.get("vocab_size", 2**31)
    is_id = isinstance(mask, int) and 0 <= mask < size
    if not (isinstance(depths, int) and 1 <= depths <= MOST_TIMES and is_id):
        raise ConfigError(
            f"a draft's config.json must have {DEPTHS} of 1 to {MOST_TIMES} and, above 1, {MASK}, "
            f"the id of its mask, below {size}; this one's are {depths!r} and {mask!r}: mend them, "
            f"or remove {DEPTHS}"
        )
    return depths


MASKS = DraftKind(
    "masks",
    is_of=lambda settings: settings.get(DEPTHS, 1) != 1 and settings.get(KEY) is None,
    depths=_depths,
    served=Served(
        tags=("pard", "vllm", "arxiv:2504.18583"),
        options={"parallel_drafting": True},
        one_forward_engines=("vLLM",),
    ),
)
