"""What a target that is not here said of the training rollouts: its logits, read from a dataset."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from datasets import Dataset
from torch import Tensor

from distill.batches import IGNORED
from distill.losses import Loss, bucketed
from specdata.labels.top_logits import TopLogitDistributions, kept_columns, logits_of
from specdata.probability import to_vocabulary


class KeptTeacher:
    """A target beside the draft that learns from it, of which N logits a position are stored.

    Where the sampler's distributions are exact (`TopLogitDistributions.is_exact`), the loss is the
    one that the target itself would give. Else all tokens that are not kept count as one, in the
    target's distribution and in the draft's (`distill.losses.bucketed`). Positions at which the
    kept logits do not decide p add nothing.
    """

    def __init__(self, rollouts: Dataset, known: TopLogitDistributions) -> None:
        """Read from rollouts.

        Args:
            rollouts: what the draft trains on, with columns of `TOP_LOGITS`.
            known: what p is made of, at the warp at which it is compared.
        """
        self.known = known
        self._rows = logits_of(rollouts)

    def columns(self, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """What is kept at the labelled positions of a batch, row after row: (n, N) or (n, 1).

        Args:
            batch: of `distill.batches.collate`; each row with a label names its rollout in
                `examples`.
        """
        positions = (batch["labels"][:, 1:] != IGNORED).sum(dim=1).tolist()
        device = batch["labels"].device
        # A share without a row holds one without labels, which is no rollout.
        examples = [max(0, example) for example in batch["examples"].tolist()]
        found = [
            kept_columns(self._rows[example], self.known.count, wanted)
            for example, wanted in zip(examples, positions, strict=True)
        ]
        return {name: torch.cat([each[name] for each in found]).to(device) for name in found[0]}

    def divergence(self, objective: Loss, q_logits: Tensor, kept: Mapping[str, Tensor]) -> Tensor:
        """The sum of a loss over positions: (n, V') logits and what is kept there -> scalar."""
        q_logits = to_vocabulary(q_logits, self.known.vocabulary)
        q_logits = q_logits / (self.known.sampling.temperature or 1.0)
        if self.known.is_exact:
            # Truncation applies to p alone, as it does with the target.
            p_logits = self.known.distribution(kept, q_logits.detach().float()).log()
        else:
            q_logits, p_logits = bucketed(q_logits, kept)
        decided = self.known.decided(kept).float()
        return objective(q_logits, p_logits, decided) * decided.sum()
