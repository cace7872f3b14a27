"""The facts by which a kind of draft is known and told of, of which none needs torch."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

KEY = "target_states"
"""The key of config.json by which a draft on its target's states is known."""
ConfigJson = Mapping[str, Any]
"""What a draft's config.json holds."""
LLAMA_LIKE = ("llama", "mistral", "qwen2", "qwen3")
"""Targets with the layers that engines give a draft of a layout of theirs."""


@dataclass(frozen=True, slots=True)
class Served:
    """What engines are told of a kind of draft.

    Attributes:
        method: its name in vLLM's `--speculative-config`, and, but for a plain draft, in other
            engines'.
        tags: of its card: engines that load it as it is released, and its paper.
        options: of vLLM's `--speculative-config`, beside the usual ones.
        one_forward_engines: those that take all its tokens after one forward, however many.
        fastest: the draft length that was fastest in vLLM with a draft of this project.
        in_target: whether they look for it in the target's folder (`draftsmith export --into`).
    """

    method: str = "draft_model"
    tags: tuple[str, ...] = ("vllm", "sglang", "llama-cpp")
    options: ConfigJson = field(default_factory=dict)
    one_forward_engines: tuple[str, ...] = ()
    fastest: int | None = None
    in_target: bool = False


@dataclass(frozen=True, slots=True)
class DraftKind:
    """What a kind of draft is.

    Attributes:
        name: of a draft on its target's states, as `draft.init.layout` has it.
        is_of: whether a config.json is of this kind, or of one that this kind is made of.
        depths: of a config.json, how many tokens it proposes after one forward.
        in_blocks: whether it drafts a block, and no token beyond that.
        record_key, record_class: in `target_states`, where what this kind adds to it stands, and
            its class.
        taps_of: the taps of a target of so many layers, those asked for or its own. Raises
            ConfigError.
        targets: `model_type`s of the targets that it can begin with; empty: of any.
        most_layers: that it can have, if there is a limit.
        layouts: in which engines load it -> whose each is, as a card says it; its own comes first.
        architecture: a part of the name of its class there, by which config.json tells it.
        section: what `draftsmith init` writes of it.
        engine_head: the kind of acceptance head that engines ask of it, if they ask any.
    """

    name: str
    is_of: Callable[[ConfigJson], bool]
    served: Served = Served()
    depths: Callable[[ConfigJson], int] = lambda settings: 1
    reads_states: bool = False
    in_blocks: bool = False
    record_key: str = ""
    record_class: type[Any] | None = None
    taps_of: Callable[[list[int] | None, int], list[int]] = lambda taps, count: []
    targets: tuple[str, ...] = ()
    most_layers: int | None = None
    layouts: Mapping[str, str] = field(default_factory=dict)
    architecture: str = ""
    section: str = ""
    engine_head: str | None = None

    def longest(self, settings: ConfigJson) -> int:
        """The longest path that a draft was made for: its block's, where it drafts in blocks."""
        return self.depths(settings) if self.in_blocks else sys.maxsize


def has_record(key: str) -> Callable[[ConfigJson], bool]:
    """A test whether a config.json says something of the target's states under such a key."""

    def is_of(settings: ConfigJson) -> bool:
        states = settings.get(KEY)
        return isinstance(states, Mapping) and states.get(key) is not None

    return is_of


def usual_taps(count: int) -> list[int]:
    """Early, middle and late of so many layers (Li et al. 2025, arXiv:2503.01840), and the last."""
    return sorted({min(2, count), count // 2, max(count - 3, 0), count})
