"""Dynamic trees along held-out text: what they emit ranked by the draft, and by a head.

The verifier `naive` follows the target's own draw, so the text that the target wrote is what it
would draw: a draft's accepted path is the longest one of its tree that the text begins with, the
token after it is the text's, and the next round starts behind that. No target is run, every ranking
meets the same draws, and the rounds counted are exactly those of decoding that text.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from eval.drafting.drafters import Drafter
from eval.drafting.dynamic_tree import DynamicTreeDrafter
from eval.drafts import DraftTree
from eval.measuring.intervals import Interval, resamples
from eval.runtime.model import CachedModel
from eval.runtime.sequence import drive
from heads.candidates import CandidatesHead, Ranker
from heads.probe import check_head
from specdata.models import end_ids
from specdata.sampling import SamplingConfig

if TYPE_CHECKING:
    import datasets
    from transformers import PreTrainedModel


def compare_rankings(
    rows: datasets.Dataset,
    draft: PreTrainedModel,
    head: CandidatesHead,
    *,
    vocabulary: int,
    nodes: Sequence[int],
    depth: int,
    report: Callable[[int], object] = lambda done: None,
) -> dict[int, tuple[Interval, Interval, Interval]]:
    """Draft trees along rollouts with both rankings.

    Args:
        rows: rollouts of the target, at least one.
        draft: the draft.
        head: of this draft.
        vocabulary: V of the target.
        nodes: most nodes of a tree, each compared.
        depth: most levels.
        report: called with 1 when a rollout is done.

    Returns:
        Most nodes -> tokens a round ranked by the draft's own probability (EAGLE-2), and by the
        head; and the second over the first, minus 1.

    Raises:
        ConfigError: if the head is of another draft.
    """
    check_head(draft, head)
    model = CachedModel(draft, vocabulary, capture_hidden=True)
    ranker, ends = Ranker.of(head, draft, vocabulary), end_ids(draft)
    sequence = model.sequence(0, SamplingConfig())
    drafters = [
        DynamicTreeDrafter(sequence, count, depth, 0.0, ends, ranker=each)
        for count in nodes
        for each in (None, ranker)
    ]
    rounds = np.zeros((len(drafters), len(rows)))
    for index, row in enumerate(rows):
        for place, drafter in enumerate(drafters):
            rounds[place, index] = sum(
                1 for _ in rounds_of(drafter, row["prompt_ids"], row["completion_ids"])
            )
        report(1)
    model.reset()
    _, group = np.unique(rows["example_id"], return_inverse=True)
    weights = resamples(int(group.max()) + 1)
    lengths = [len(ids) for ids in rows["completion_ids"]]
    emitted = weights @ np.bincount(group, lengths)

    tokens = [emitted / (weights @ np.bincount(group, each)) for each in rounds]
    return {
        count: (Interval.of(by_draft), Interval.of(by_head), Interval.of(by_head / by_draft - 1.0))
        for count, by_draft, by_head in zip(nodes, tokens[::2], tokens[1::2], strict=True)
    }


@torch.inference_mode()
def rounds_of(drafter: Drafter, prompt: list[int], text: list[int]) -> Iterator[DraftTree]:
    """The draft of each round in which a text is decoded after a prompt."""
    drafter.reset()
    done, unused = 0, torch.Generator()
    while done < len(text):
        tree = drive(drafter.propose([*prompt, *text[:done]], len(text) - done - 1, unused))
        yield tree
        child = {
            (parent, token): node
            for node, (parent, token) in enumerate(
                zip(tree.parent_list, tree.token_list, strict=True), start=1
            )
        }
        path = [0]
        while (path[-1], text[done + len(path) - 1]) in child:
            path.append(child[path[-1], text[done + len(path) - 1]])
        drafter.accept(path[1:], len(prompt) + done + len(path) - 1)
        done += len(path)
