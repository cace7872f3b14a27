"""The kinds of drafts: what each is, one a file. What each does is in `specdata.draft_models`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from specdata.draft_kinds.dspark import DSPARK
from specdata.draft_kinds.eagle3 import EAGLE3
from specdata.draft_kinds.kind import DraftKind, Settings
from specdata.draft_kinds.masks import MASKS
from specdata.draft_kinds.mtp import MTP
from specdata.draft_kinds.plain import PLAIN
from specdata.draft_kinds.states import STATES

KINDS: Mapping[str, DraftKind] = {
    "plain": PLAIN,
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
    return next(kind for kind in [*KINDS.values()][::-1] if kind.is_of(settings))


def settings_in(config: Any) -> Settings:
    """The settings of a configuration, as config.json has them."""
    return config if isinstance(config, Mapping) else vars(config)


def is_for_engines(settings: Settings) -> bool:
    """True of a config.json in a layout of engines, which `draftsmith import` reads."""
    architectures = str(settings.get("architectures"))
    return any(kind.architecture in architectures for kind in KINDS.values() if kind.architecture)
