"""The target's view of the training rollouts: computed once, or read from stored logits.

A draft passes over the same rollouts several times, and the target says the same of them each time.
So its last hidden states at the completion positions are stored, as far as `STATES_BYTES` go; its
output matrix makes logits of them again, a chunk at a time. Rollouts are read in batches of like
length, which depend on the data alone: what is stored has the same bits whatever the order of
training, so nothing is to be stored for a killed run to go on. Rollouts that are stored with states
(`specdata.target_states`) are not read at all.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from accelerate.utils import align_module_device
from datasets import Dataset
from torch import Tensor, nn
from transformers import PreTrainedModel

from distill.batches import IGNORED, collate
from distill.chunked import chunks, positions_at_once
from distill.losses import Loss, bucketed
from specdata.labels.labeller import by_length, tokens_at_once
from specdata.lm_head import find_lm_head
from specdata.probability import to_vocabulary
from specdata.processes import largest_of_all
from specdata.sharded import is_sharded
from specdata.target_states import has_states, stored_states
from specdata.top_logits import TopLogitDistributions, logits_of, top_logit_columns

STATES_BYTES = 1 << 30
"""States to hold in memory, in bytes, in each process; other rows are read at every pass."""


@dataclass(frozen=True, slots=True)
class Part:
    """The part of its target that a draft with a reduced vocabulary can learn; the rest is a sum.

    A token that the draft cannot propose has q = 0, so it adds to a divergence as part of a sum
    over all such tokens. That sum takes the target's whole output matrix, but only once.

    Attributes:
        vocabulary_ids: (N,) ids of the tokens that the draft can propose.
        temperature: at which distributions are compared, above 0.
    """

    vocabulary_ids: Tensor
    temperature: float


def _rows_of(output: nn.Linear, vocabulary_ids: Tensor) -> tuple[Tensor, Tensor | None]:
    """The rows (N, H) of an output matrix, wherever it lies, and of its bias, where the ids lie."""
    with align_module_device(output):
        there = vocabulary_ids.to(output.weight.device)
        bias = None if output.bias is None else output.bias[there].to(vocabulary_ids.device)
        return output.weight[there].to(vocabulary_ids.device), bias


class Teacher:
    """A frozen target beside the draft that learns from it."""

    def __init__(
        self, model: PreTrainedModel, rollouts: Dataset | None = None, part: Part | None = None
    ) -> None:
        """Choose what is stored.

        Args:
            model: the target.
            rollouts: what the draft trains on, if it pays to keep what the target says of it.
            part: what the draft can learn of it, if that is less than all; left aside where the
                output embedding is not a linear layer, of which rows can be taken.
        """
        self.model = model.eval().requires_grad_(False)
        self.head = find_lm_head(self.model)
        self.part: Part | None = None
        self._rows: tuple[Tensor, Tensor | None] | None = None
        output = self.head.embedding
        if part is not None and type(output) is nn.Linear:
            vocabulary_ids = part.vocabulary_ids.to(model.device)
            self.part = Part(vocabulary_ids, part.temperature)
            self._rows = _rows_of(output, vocabulary_ids)
        self._states: dict[int, Tensor] = {}
        self._rests: dict[int, Tensor] = {}
        self._rollouts = rollouts
        self._group: dict[int, list[int]] = {}
        if rollouts is not None:
            if has_states(rollouts) and self.head.embedding is not None:
                self._group = {index: [index] for index in range(len(rollouts))}
            else:
                self._plan(rollouts)

    def states(self, batch: Mapping[str, Tensor]) -> tuple[Tensor, Tensor | None]:
        """Return the last hidden states at the labelled positions of a batch, row after row.

        Of a target of which a part is learnt, the rest comes with them, as a logit.

        Args:
            batch: of `distill.batches.collate`. A row with an index in `examples` is that rollout;
                one with -1 carries other text, and is read.

        Returns:
            (N, H), or (N, V) logits if `head.embedding` is None, which no gradient reaches; and
            (N,) log of the sum of exp(logit / temperature) over the tokens that the draft cannot
            propose, None without a `part`.
        """
        examples, device = batch["examples"].tolist(), batch["labels"].device
        idle = self._idle_forwards(examples)
        parts: dict[int, Tensor] = {}
        rests: dict[int, Tensor] = {}
        for row, example in enumerate(examples):
            if example in self._group:
                parts[row] = self._state_of(example).to(device)
                if self.part is not None:
                    rests[row] = self._rests[example].to(device)
        others = [row for row in range(len(examples)) if row not in parts]
        if others:
            chosen = torch.tensor(others, device=device)
            parts |= dict(zip(others, self._read(batch, chosen), strict=True))
            if self.part is not None:
                rests |= {row: self._rest_of(parts[row]) for row in others}
        for _ in range(idle):
            self._read(_one_token(device), torch.zeros(1, dtype=torch.long, device=device))
        states = torch.cat([parts[row] for row in range(len(examples))])
        if self.part is None:
            return states, None
        return states, torch.cat([rests[row] for row in range(len(examples))])

    def _idle_forwards(self, examples: Sequence[int]) -> int:
        """Forwards that other processes want and this one does not: a model in parts needs all."""
        if not is_sharded(self.model):
            return 0
        unread = {
            self._group[example][0]
            for example in examples
            if example in self._group and not self._is_known(example)
        }
        mine = len(unread) + any(example not in self._group for example in examples)
        return largest_of_all(mine) - mine

    def _is_known(self, example: int) -> bool:
        """True if the states of a rollout take no forward."""
        if example in self._states:
            return True
        assert self._rollouts is not None
        return stored_states(self._rollouts[example], self.head) is not None

    def part_logits(self, states: Tensor, rest: Tensor) -> Tensor:
        """(n, H) states and the (n,) rest of them -> (n, N + 1) logits at the temperature."""
        assert self.part is not None
        assert self._rows is not None
        logits = self.head.logit_transform(nn.functional.linear(states, *self._rows)).float()
        return torch.cat([logits / self.part.temperature, rest[:, None]], dim=-1)

    @torch.inference_mode()
    def _rest_of(self, states: Tensor) -> Tensor:
        assert self.part is not None
        rests = []
        for chunk in chunks(states, positions_at_once(self.head.vocabulary)):
            logits = self.head.logits(states[chunk]).float()
            logits = logits.index_fill(-1, self.part.vocabulary_ids, -torch.inf)
            rests.append((logits / self.part.temperature).logsumexp(dim=-1))
        return torch.cat(rests)

    def _plan(self, rollouts: Dataset) -> None:
        """Divide the first rollouts, as many as can be stored, into batches of like length."""
        sizes = [
            (len(prompt) + len(completion), len(completion))
            for prompt, completion in zip(
                rollouts["prompt_ids"], rollouts["completion_ids"], strict=True
            )
        ]
        width = self.head.vocabulary
        if self.head.embedding is not None:
            width = self.model.config.get_text_config().hidden_size
        room, lengths = STATES_BYTES // (width * self.model.dtype.itemsize), []
        for length, completion in sizes:
            room -= completion
            if room < 0:
                break
            lengths.append(length)
        for group in by_length(lengths, tokens_at_once(self.head)):
            self._group |= dict.fromkeys(group, group)

    def _state_of(self, example: int) -> Tensor:
        """The states of a rollout; it is read with its whole group when it is first wanted."""
        if example not in self._states:
            assert self._rollouts is not None
            if (state := stored_states(self._rollouts[example], self.head)) is not None:
                if self.part is not None and example not in self._rests:
                    device = self.model.device
                    self._rests[example] = self._rest_of(state.to(device)).cpu()
                return state
            group = self._group[example]
            batch = collate(0)([self._rollouts[index] for index in group])
            batch = {name: values.to(self.model.device) for name, values in batch.items()}
            states = self._read(batch, torch.arange(len(group), device=self.model.device))
            for place, state in zip(batch["rows"].tolist(), states, strict=True):
                self._states[group[place]] = state.cpu()
                if self.part is not None:
                    self._rests[group[place]] = self._rest_of(state).cpu()
        return self._states[example]

    @torch.inference_mode()
    def _read(self, batch: Mapping[str, Tensor], rows: Tensor) -> tuple[Tensor, ...]:
        """The states at the labelled positions of some rows, for each row."""
        attention = batch["attention_mask"][rows]
        longest = int(attention.sum(dim=1).max())
        chosen = batch["labels"][rows, 1:longest] != IGNORED
        ids = batch["input_ids"][rows, :longest]
        states = self.head.states(ids, attention[:, :longest], trained=True)[:, :-1][chosen]
        return states.split_with_sizes(chosen.sum(dim=1).tolist())


def _one_token(device: torch.device) -> dict[str, Tensor]:
    """A batch that the target reads because others read theirs."""
    ids = torch.zeros(1, 1, dtype=torch.long, device=device)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids}


class TopLogitsTeacher:
    """A target beside the draft that learns from it, of which N logits a position are stored.

    Where the sampler's distributions are exact (`TopLogitDistributions.is_exact`), the loss is the
    one that the target itself would give. Else all tokens outside the top N count as one, in the
    target's distribution and in the draft's (`distill.losses.bucketed`). Positions at which the
    top logits do not decide p add nothing.
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
        """The top logits at the labelled positions of a batch, row after row: (n, N) or (n, 1).

        Args:
            batch: of `distill.batches.collate`; each row with a label names its rollout in
                `examples`.
        """
        positions = (batch["labels"][:, 1:] != IGNORED).sum(dim=1).tolist()
        device = batch["labels"].device
        # A share without a row holds one without labels, which is no rollout.
        examples = [max(0, example) for example in batch["examples"].tolist()]
        found = [
            top_logit_columns(self._rows[example], self.known.count, wanted)
            for example, wanted in zip(examples, positions, strict=True)
        ]
        return {name: torch.cat([each[name] for each in found]).to(device) for name in found[0]}

    def divergence(self, objective: Loss, q_logits: Tensor, top: Mapping[str, Tensor]) -> Tensor:
        """The sum of a loss over positions: (n, V') logits and the top logits there -> scalar."""
        q_logits = to_vocabulary(q_logits, self.known.vocabulary)
        q_logits = q_logits / (self.known.sampling.temperature or 1.0)
        if self.known.is_exact:
            # Truncation applies to p alone, as it does with the target.
            p_logits = self.known.distribution(top, q_logits.detach().float()).log()
        else:
            q_logits, p_logits = bucketed(q_logits, top)
        decided = self.known.decided(top).float()
        return objective(q_logits, p_logits, decided) * decided.sum()
