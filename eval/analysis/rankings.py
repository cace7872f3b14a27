"""Dynamic trees along held-out text: what they emit ranked by the draft, by a head, by the target.

The verifier `naive` follows the target's own draw, so the text that the target wrote is what it
would draw: a draft's accepted path is the longest one of its tree that the text begins with, the
token after it is the text's, and the next round starts behind that. Every ranking meets the same
draws, and the rounds counted are exactly those of decoding that text. A target is run only as an
oracle: ranked by its own probabilities of the draft's candidates, trees emit what a head emits that
makes no mistake.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from eval.drafting.drafters import Drafter
from eval.drafting.dynamic_tree import UNWARPED, DynamicTreeDrafter
from eval.drafts import DraftTree
from eval.measuring.intervals import Interval, resamples
from eval.runtime.model import CachedModel
from eval.runtime.sequence import CachedSequence, Forward, drive
from heads.candidates import CandidatesHead, Ranker, Reals
from heads.probe import check_head
from specdata.models import end_ids
from specdata.probability import SamplingConfig

if TYPE_CHECKING:
    import datasets
    from transformers import PreTrainedModel

    from eval.runtime.layout import Layout


def compare_rankings(
    rows: datasets.Dataset,
    draft: PreTrainedModel,
    head: CandidatesHead,
    *,
    vocabulary: int,
    nodes: Sequence[int],
    depth: int,
    target: PreTrainedModel | None = None,
    sampling: SamplingConfig = UNWARPED,
    report: Callable[[int], object] = lambda done: None,
) -> dict[int, dict[str, Interval]]:
    """Draft trees along rollouts with each ranking.

    Args:
        rows: rollouts of the target, at least one.
        draft: the draft.
        head: of this draft.
        vocabulary: V of the target.
        nodes: most nodes of a tree, each compared.
        depth: most levels.
        target: the model that wrote them, the oracle; None: without.
        sampling: under which it wrote them; the head's labels are of the same.
        report: called with 1 when a rollout is done.

    Returns:
        Most nodes -> tokens a round ranked by the draft's own probability (`draft`, EAGLE-2), by
        the `head` and by the `target`; and `head gain`, `target gain`, over the draft's, minus 1.

    Raises:
        ConfigError: if the head is of another draft.
    """
    check_head(draft, head)
    model = CachedModel(draft, vocabulary, capture_hidden=True)
    ranker, ends = Ranker.of(head, draft, vocabulary), end_ids(draft)
    sequence = model.sequence(0, SamplingConfig())
    rankings: dict[str, tuple[CachedSequence, Ranker | None]] = {
        "draft": (sequence, None),
        "head": (sequence, ranker),
    }
    if target is not None:
        oracle = CachedModel(target, vocabulary).sequence(0, sampling)
        rankings["target"] = _WithTarget(model, oracle), _Oracle(head.candidates)
    _, group = np.unique(rows["example_id"], return_inverse=True)
    weights = resamples(int(group.max()) + 1)
    emitted = weights @ np.bincount(group, [len(ids) for ids in rows["completion_ids"]])

    rounds = {(count, name): np.zeros(len(rows)) for count in nodes for name in rankings}
    for index, row in enumerate(rows):
        for count, name in rounds:
            own, ranked = rankings[name]
            drafter = DynamicTreeDrafter(own, count, depth, 0.0, ends, ranker=ranked)
            along = rounds_of(drafter, row["prompt_ids"], row["completion_ids"])
            rounds[count, name][index] = sum(1 for _ in along)
        report(1)
    model.reset()
    found: dict[int, dict[str, Interval]] = {}
    for count in nodes:
        tokens = {
            name: emitted / (weights @ np.bincount(group, rounds[count, name])) for name in rankings
        }
        found[count] = {name: Interval.of(each) for name, each in tokens.items()} | {
            f"{name} gain": Interval.of(tokens[name] / tokens["draft"] - 1.0)
            for name in list(rankings)[1:]
        }
    return found


class _WithTarget(CachedSequence):
    """A draft's sequence that the target reads with it: `states` is the target's p, (n, V).

    Args:
        model: the draft.
        target: the target's sequence.
    """

    def __init__(self, model: CachedModel, target: CachedSequence) -> None:
        super().__init__(model, 0, SamplingConfig())
        self._target = target

    def reset(self) -> None:
        """Forget the sequence, in both models."""
        super().reset()
        self._target.reset()

    def commit(
        self, forward: Forward, layout: Layout, states: Tensor | None, taps: Tensor | None = None
    ) -> None:
        """Take account of a forward of the draft, and run the target's over the same tokens."""
        super().commit(forward, layout, states, taps)
        own = replace(forward, sequence=self._target)
        self.states = self._target.distribution(own.model.run(own))

    def accept(self, nodes: Sequence[int]) -> None:
        """Commit a path of nodes, in both models."""
        super().accept(nodes)
        self._target.accept(nodes)


class _Oracle(Ranker):
    """Reads the target's probabilities where a head's ranker reads the draft's states."""

    def __init__(self, candidates: int) -> None:
        self.candidates = candidates

    def __call__(self, states: Tensor, q: Tensor, ids: Tensor) -> Reals:
        """(n, m) the target's probabilities of candidates, given its p (n, V)."""
        chances: Reals = states.gather(1, ids).float().numpy()
        return chances


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
