"""The kinds of drafts, and the networks of those that are no model as it is.

A kind is `KIND.py` here, without torch, and `KIND_network.py` if it reads its target's states; how
it begins and learns is in `distill/drafts/KIND.py`, how it is fed in `eval/runtime/feeding/`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from specdata.drafts.dspark import DSPARK
from specdata.drafts.eagle3 import EAGLE3
from specdata.drafts.kind import ConfigJson, DraftKind
from specdata.drafts.masks import MASKS
from specdata.drafts.mtp import MTP
from specdata.drafts.plain import PLAIN_DRAFT
from specdata.drafts.states import STATES

DRAFT_KINDS: Mapping[str, DraftKind] = {
    "plain": PLAIN_DRAFT,
    "masks": MASKS,
    "states": STATES,
    "eagle3": EAGLE3,
    "dspark": DSPARK,
    "mtp": MTP,
}
"""Order matters: `kind_of` tries the last entry first."""


def kind_of(config: Any) -> DraftKind:
    """The kind of a draft, by its configuration or what its config.json holds."""
    settings = settings_in(config)
    return next(kind for kind in [*DRAFT_KINDS.values()][::-1] if kind.is_of(settings))


def settings_in(config: Any) -> ConfigJson:
    """The settings of a configuration, as config.json has them."""
    return config if isinstance(config, Mapping) else vars(config)


def is_for_engines(settings: ConfigJson) -> bool:
    """True of a config.json in a layout of engines, which `draftsmith import` reads."""
    architectures = str(settings.get("architectures"))
    known = (kind.architecture for kind in DRAFT_KINDS.values() if kind.architecture)
    return any(name in architectures for name in known)
