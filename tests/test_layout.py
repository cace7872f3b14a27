"""Layouts of forwards: positions and masks by hand, and that making one changes nothing."""

from __future__ import annotations

import torch

from eval.runtime.layout import Layout, lay_out
from eval.runtime.model import CachedModel
from specdata.probability import SamplingConfig
from tests.tiny import tiny_llama

NO_NODES = torch.zeros(0, 0, dtype=torch.bool)


def boolean(*rows: str) -> torch.Tensor:
    return torch.tensor([[character == "1" for character in row] for row in rows])


def test_consecutive_tokens_need_positions_only() -> None:
    layout = lay_out(3, NO_NODES, 2, ())
    assert (layout.start, layout.positions, layout.visible) == (3, [3, 4], None)
    assert layout.ancestors is NO_NODES


def test_a_tree_sees_committed_tokens_and_its_ancestors_and_stands_at_its_depth() -> None:
    """Two committed tokens in the cache and one not yet; nodes 1 and 2 follow it, 3 follows 1."""
    layout = lay_out(2, NO_NODES, 4, (0, 0, 1))
    assert (layout.start, layout.positions) == (2, [2, 3, 3, 4])
    assert layout.visible is not None
    assert torch.equal(layout.visible, boolean("111000", "111100", "111010", "111101"))
    assert torch.equal(layout.ancestors, boolean("100", "010", "101"))


def test_further_nodes_find_their_ancestors_in_the_cache() -> None:
    first = lay_out(2, NO_NODES, 2, (0, 0))
    second = lay_out(2, first.ancestors, 2, (2, 3))
    assert (second.start, second.positions) == (4, [3, 4])
    assert second.visible is not None
    assert torch.equal(second.visible, boolean("110110", "110111"))
    assert torch.equal(first.ancestors, boolean("10", "01")), "the first layout has changed"


def state(sequence: object) -> tuple[object, ...]:
    return tuple(
        getattr(sequence, name) for name in ("length", "in_use", "forwards", "ancestors", "hidden")
    )


def test_only_running_a_forward_changes_its_sequence() -> None:
    model = CachedModel(tiny_llama(1, vocab=40), 40, capture_hidden=True)
    sequence = model.sequence(0, SamplingConfig())
    with torch.inference_mode():
        model.run(sequence.append([2, 3], 1))
        for forward in (sequence.append([4], 1), sequence.append_tree([4, 5], [0, 1])):
            before = state(sequence)
            layouts = [forward.layout() for _ in range(2)]
            assert all(isinstance(layout, Layout) for layout in layouts)
            assert layouts[0].positions == layouts[1].positions
            assert all(
                new is old or new == old for new, old in zip(state(sequence), before, strict=True)
            )
            model.run(forward)
            assert sequence.in_use == before[1] + len(forward.tokens)  # type: ignore[operator]
            assert sequence.forwards == before[2] + 1  # type: ignore[operator]
            assert sequence.hidden is not before[4]
