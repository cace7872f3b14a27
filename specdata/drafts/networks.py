"""The networks of drafts that read their target's states, by the names in `DRAFT_KINDS`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from specdata.drafts.dspark_network import dspark_class
from specdata.drafts.eagle3_network import eagle3_class
from specdata.drafts.mtp_network import mtp_class
from specdata.drafts.states_network import states_class

NETWORKS: Mapping[str, Callable[[type[Any]], type[Any]]] = {
    "states": states_class,
    "eagle3": eagle3_class,
    "dspark": dspark_class,
    "mtp": mtp_class,
}
"""Each makes, of a class of language models, the class that such a draft is loaded with."""
