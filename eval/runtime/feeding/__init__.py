"""How a draft is fed, a kind a file: `sequence_of` chooses by what the model reads."""

from __future__ import annotations

from collections.abc import Sequence

from eval.runtime.feeding.dspark import BlockSequence
from eval.runtime.feeding.masks import MaskedSequence
from eval.runtime.feeding.plain import CachedSequence
from eval.runtime.feeding.states import StatesSequence
from eval.runtime.model import CachedModel
from specdata.probability import SamplingConfig


def sequence_of(model: CachedModel, slot: int, sampling: SamplingConfig) -> CachedSequence:
    """An empty sequence in a slot of a model's cache."""
    traits = model.traits
    kind = MaskedSequence if traits.depths > 1 else CachedSequence
    if traits.in_blocks:
        kind = BlockSequence
    elif traits.reads_states:
        kind = StatesSequence
    return kind(model, slot, sampling)


def warm_up(
    model: CachedModel, appends: Sequence[tuple[int, int]], nodes: Sequence[int] = ()
) -> None:
    """Make the graphs that decoding will need, so that none is made while something is timed.

    `appends` are (tokens, logits to keep) of the forwards that follow a prompt, `nodes` numbers of
    nodes by which a draft tree will be extended.
    """
    if model.graphs is None:
        return

    def different(count: int) -> list[int]:
        # One token again and again makes states of a size at which half precision rounds several
        # times as much as on a text, and graphs are compared with the eager forward here.
        return [(100 + 31 * place) % model.vocabulary for place in range(count)]

    def prompted(logits_to_keep: int) -> CachedSequence:
        sequence = sequence_of(model, 0, SamplingConfig())
        sequence.append(different(3), logits_to_keep).run()
        return sequence

    prompted(1)  # shows the sizes of the cache
    prompted(max(logits_to_keep for _, logits_to_keep in appends))
    sequence = prompted(1)
    for count, logits_to_keep in appends:
        sequence.append(different(count), logits_to_keep).run()
    traits = model.traits
    if traits.takes_masks and traits.depths == 1 and not traits.in_blocks:  # others read no nodes
        for count in nodes:
            sequence.append_tree(different(count), [0] * count).run()
            sequence.keep([])
    model.kv_cache.free()
