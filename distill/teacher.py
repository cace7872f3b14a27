"""The target's view of the training rollouts: computed once, or read from stored logits.

A draft passes over the same rollouts several times, and the target says the same of them each time.
So its last hidden states at the completion positions are kept, as far as a `StateStore` goes; its
output matrix makes logits of them again, a chunk at a time. Rollouts are read in batches of like
length, which depend on the data alone: what is kept has the same bits whatever the order of
training, so nothing is to be stored for a killed run to go on. Rollouts that are stored with states
(`specdata.target_states`) are not read at all.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from accelerate.utils import align_module_device
from datasets import Dataset
from torch import Tensor, nn
from transformers import PreTrainedModel

from distill.adapters import base_of
from distill.batches import text_batch
from distill.config import DistilConfig
from distill.losses import bucketed
from distill.objective import Columns, chunks, positions_at_once
from specdata.drafts.draft_vocabulary import draft_vocabulary_ids
from specdata.drafts.state_store import StateStore
from specdata.drafts.states_network import TargetStates, reads_states
from specdata.lm_head import find_lm_head
from specdata.probability import probabilities, to_vocabulary
from specdata.processes import join_processes
from specdata.sampling import SamplingConfig
from specdata.storage.columns import list_lengths
from specdata.target_states import TAPS, has_states, has_taps, stored_states, target_taps
from specdata.texts import TextBatch, TopLogitSource, by_length, tokens_at_once
from specdata.top_logits import TopLogitDistributions, logits_of

logger = logging.getLogger(__name__)


class Teacher(Protocol):
    """The model that a draft learns from: `TargetTeacher` or `TopLogitsTeacher`."""

    @property
    def is_narrow(self) -> bool:
        """True if the draft's logits are of the tokens alone that it can propose."""

    def columns(self, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Columns (N, ...) that are known of the N labelled positions of a batch, row after row."""

    def taps(self, draft: PreTrainedModel, batch: Mapping[str, Tensor]) -> Tensor | None:
        """(B, T, F) the target's states inside along a batch; None if the draft reads none."""

    def once(self, columns: Columns) -> Columns:
        """What `compared` reads of n positions, of their `columns`: made once for all readings."""

    def compared(self, q_logits: Tensor, columns: Columns) -> tuple[Tensor, Tensor, Tensor]:
        """Logits of draft and target that the loss compares at n positions, and which count.

        Of (n, V') logits of the draft and what was made `once` there.
        """


@dataclass(frozen=True, slots=True)
class Part:
    """The part of its target that a draft with a reduced vocabulary can learn; the rest is a sum.

    A token that the draft cannot propose has q = 0, so it adds to a divergence as part of a sum
    over all such tokens. That sum takes the target's whole output matrix, but only once. Of (N,)
    ids that it can propose, and the temperature, above 0, at which distributions are compared.
    """

    vocabulary_ids: Tensor
    temperature: float


def _rows_of(output: nn.Linear, vocabulary_ids: Tensor) -> tuple[Tensor, Tensor | None]:
    """The rows (N, H) of an output matrix, wherever it lies, and of its bias, where the ids lie."""
    with align_module_device(output):
        rows = vocabulary_ids.to(output.weight.device)
        bias = None if output.bias is None else output.bias[rows].to(vocabulary_ids.device)
        return output.weight[rows].to(vocabulary_ids.device), bias


class TargetTeacher:
    """A frozen target beside the draft that learns from it."""

    def __init__(
        self,
        model: PreTrainedModel,
        rollouts: Dataset | None = None,
        part: Part | None = None,
        store: StateStore | None = None,
        *,
        tapped: Dataset | None = None,
        warp: SamplingConfig | None = None,
    ) -> None:
        """Choose what is kept of the target `model`.

        `rollouts` are what the draft trains on, if it pays to keep what the target says in the
        `store`, and `tapped`, if they are stored with the target's states inside. The `part` of the
        target that the draft can learn is left aside where the output embedding is not a linear
        layer, of which rows can be taken. `warp` is that of serving; without it models are compared
        at temperature 1.
        """
        self.warp, self._tapped = warp, tapped
        self.model = model.eval().requires_grad_(False)
        self.head = find_lm_head(self.model)
        self.part: Part | None = None
        self._rows: tuple[Tensor, Tensor | None] | None = None
        output = self.head.embedding
        if part is not None and type(output) is nn.Linear:
            vocabulary_ids = part.vocabulary_ids.to(model.device)
            self.part = Part(vocabulary_ids, part.temperature)
            self._rows = _rows_of(output, vocabulary_ids)
        self._rests: dict[int, Tensor] = {}
        self._rollouts = rollouts
        # Of each rollout that is kept: the rollouts that are read with it, and its positions there.
        self._places: dict[int, tuple[list[int], slice]] = {}
        if rollouts is not None:
            self._store = self._plan(rollouts, store or StateStore())

    @property
    def is_narrow(self) -> bool:
        """See `Teacher`."""
        return self.part is not None

    def columns(self, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """See `Teacher`.

        A row with an index in `examples` is that rollout; one with -1 is other text, and is read.

        Returns:
            `states`, (N, H) last hidden states, or (N, V) logits if `head.embedding` is None, which
            no gradient reaches; and `rest`, if there is a `part`, (N,) log of the sum of
            exp(logit / temperature) over the tokens that the draft cannot propose.
        """
        texts = text_batch(batch)
        device = texts.labels.device
        states = {
            row: self._state_of(example).to(device)
            for row, example in enumerate(texts.examples)
            if example in self._places
        }
        others = [row for row in range(len(texts.examples)) if row not in states]
        if others:
            unread = texts.part(others)
            parts = self._read(unread).split_with_sizes(unread.lengths)
            states |= dict(zip(others, parts, strict=True))
        columns = {"states": torch.cat([states[row] for row in range(len(texts.examples))])}
        if self.part is not None:
            rests = [self._rest_of(states[row], each) for row, each in enumerate(texts.examples)]
            columns["rest"] = torch.cat(rests)
        return columns

    def taps(self, draft: PreTrainedModel, batch: Mapping[str, Tensor]) -> Tensor | None:
        """See `Teacher`; stored with the rollouts, or read."""
        examples, rows = batch["examples"].tolist(), []
        if self._tapped is not None and min(examples) >= 0:
            rows = [self._tapped[example] for example in examples]
        return target_taps(draft, rows, batch["input_ids"])

    @torch.no_grad()
    def once(self, columns: Columns) -> Columns:
        """See `Teacher`."""
        if self.part is not None:  # (n, N) tokens that the draft can propose, and the rest
            assert self._rows is not None
            logits = nn.functional.linear(columns["states"], *self._rows)
            logits = self.head.logit_transform(logits).float().div_(self.part.temperature)
            return {"p_logits": torch.cat([logits, columns["rest"][:, None]], dim=-1)}
        p_logits = self.head.logits(columns["states"])  # (n, V)
        if self.warp is not None:
            p_logits = probabilities(p_logits, self.warp).log_()
        return {"p_logits": p_logits}

    def compared(self, q_logits: Tensor, columns: Columns) -> tuple[Tensor, Tensor, Tensor]:
        """See `Teacher`."""
        p_logits = columns["p_logits"]
        if self.part is not None:
            q_logits = q_logits / self.part.temperature
            q_logits = nn.functional.pad(q_logits, (0, 1), value=-torch.inf)
        else:
            q_logits = to_vocabulary(q_logits, p_logits.shape[-1])
            if self.warp is not None:
                # Truncation applies to p alone: a token cut from q would get no gradient to come
                # back.
                q_logits = q_logits / (self.warp.temperature or 1.0)
        return q_logits, p_logits, torch.ones(len(p_logits), device=p_logits.device)

    @torch.inference_mode()
    def _rest_of(self, states: Tensor, example: int) -> Tensor:
        """(n,) the rest of a row, which is kept if its states are."""
        assert self.part is not None
        if example in self._rests:
            return self._rests[example].to(states.device)
        if len(self.part.vocabulary_ids) == self.head.vocabulary:  # as EAGLE-3's, unreduced
            return torch.full((len(states),), -torch.inf, device=states.device)
        rests = []
        # Without gradients, so in larger chunks; in place, because each copy takes long.
        size, _ = positions_at_once(self.head.vocabulary, states.device, entry_bytes=16)
        for chunk in chunks(states, size):
            logits = self.head.logits(states[chunk]).float().div_(self.part.temperature)
            logits.index_fill_(-1, self.part.vocabulary_ids, -torch.inf)
            rests.append(logits.logsumexp(dim=-1))
        rest = torch.cat(rests)
        if example in self._places:
            self._rests[example] = rest.cpu()
        return rest

    def _plan(self, rollouts: Dataset, store: StateStore) -> StateStore:
        """Divide the first rollouts, as many as can be kept, into batches of like length."""
        if has_states(rollouts) and self.head.embedding is not None:
            self._places = {index: ([index], slice(None)) for index in range(len(rollouts))}
            return store
        width = self.head.vocabulary
        if self.head.embedding is not None:
            width = self.model.config.get_text_config().hidden_size
        size = width * self.model.dtype.itemsize
        columns = list_lengths(rollouts, "prompt_ids", "completion_ids")
        count = np.searchsorted(size * columns[1].cumsum(), store.room, side="right")
        lengths, completions = columns[:, :count].sum(axis=0), columns[1, :count].tolist()
        for group in by_length(lengths, tokens_at_once(self.head)):
            end, group = 0, sorted(group, key=lengths.__getitem__)
            for example in group:
                begin, end = end, end + completions[example]
                self._places[example] = group, slice(begin, end)
        return store.part(size * sum(completions))

    def _state_of(self, example: int) -> Tensor:
        """The states of a rollout; it is read with its whole group when it is first wanted."""
        rollouts, (group, place) = self._rollouts, self._places[example]
        assert rollouts is not None

        def read() -> Tensor:
            batch = TextBatch.of([rollouts[index] for index in group], group)
            return self._read(batch.to(self.model.device))

        if group[0] not in self._store:
            states = stored_states(rollouts[example], self.head)
            if states is not None:
                return states
        return self._store.read(group[0], read)[place]

    @torch.inference_mode()
    def _read(self, batch: TextBatch) -> Tensor:
        """(N, H) the target's states, by the forward that the draft trains with: under a mask."""
        states = self.head.states(batch.input_ids, batch.attention_mask)[:, :-1]
        return states[batch.is_predicted]


class TopLogitsTeacher:
    """A target beside the draft that learns from it, of which N logits a position are stored.

    Where the sampler's distributions are exact (`TopLogitDistributions.is_exact`), the loss is the
    one that the target itself would give. Else all tokens outside the top N count as one, in the
    target's distribution and in the draft's (`distill.losses.bucketed`). Positions at which the
    top logits do not decide p add nothing.
    """

    is_narrow = False

    def __init__(self, rollouts: Dataset, distributions: TopLogitDistributions) -> None:
        """Read from rollouts with columns of `TOP_LOGITS`, at the warp at which p is compared."""
        self.distributions = distributions
        self._source = TopLogitSource(distributions)
        self._rows = logits_of(rollouts)

    def columns(self, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The top logits at the labelled positions of a batch, row after row: (n, N) or (n, 1).

        Each row with a label names its rollout in `examples`.
        """
        columns = self._source.columns(text_batch(batch), self._rows)
        return {name: values.to(batch["labels"].device) for name, values in columns.items()}

    def taps(self, draft: PreTrainedModel, batch: Mapping[str, Tensor]) -> None:
        """None: a draft that reads the target's states needs the target."""

    def once(self, columns: Columns) -> Columns:
        """The columns: they are compared as they are."""
        return columns

    def compared(self, q_logits: Tensor, top: Columns) -> tuple[Tensor, Tensor, Tensor]:
        """See `Teacher`."""
        q_logits = to_vocabulary(q_logits, self.distributions.vocabulary)
        q_logits = q_logits / (self.distributions.sampling.temperature or 1.0)
        if self.distributions.is_exact:
            # Truncation applies to p alone, as it does with the target.
            p_logits = self.distributions.distribution(top, q_logits.detach().float()).log()
        else:
            q_logits, p_logits = bucketed(q_logits, top)
        return q_logits, p_logits, self.distributions.decided(top).float()


def learnt_part(student: nn.Module, config: DistilConfig, sampling: SamplingConfig) -> Part | None:
    """The part of the target's distributions that is enough for the draft; None for all of it.

    Truncation (top_k, top_p, min_p) of p depends on all tokens, and greedy p on the largest of all.
    """
    vocabulary_ids = draft_vocabulary_ids(base_of(student))
    sampled = config.warp == "sampler"
    truncated = sampling.truncates or sampling.temperature == 0.0
    if vocabulary_ids is None or (sampled and truncated):
        return None
    return Part(vocabulary_ids, sampling.temperature if sampled else 1.0)


def teacher_of(
    student: Any,
    target: PreTrainedModel | TopLogitDistributions,
    config: DistilConfig,
    sampling: SamplingConfig,
    train: Dataset,
    store: StateStore | None = None,
) -> Teacher:
    """The teacher of a draft on its rollouts.

    That is the target, whose states a store has room for, or what is made of the logits that the
    rollouts keep of it.
    """
    if isinstance(target, TopLogitDistributions):
        return TopLogitsTeacher(train, target)
    if reads_states(student.config) and has_taps(train):
        read, stored = TargetStates.of(student.config).taps, train[0][TAPS]
        if not {*read} <= {*stored}:
            logger.warning(
                "the rollouts keep the taps %s, and the draft reads %s: the target reads the "
                "rollouts again in every pass. Give rollouts.store_taps all that draft.init.taps "
                "has",
                stored,
                read,
            )
    # Each process keeps all rows; reading them once is worth it if it would read more else.
    stores_states = config.epochs > join_processes().num_processes or has_states(train)
    return TargetTeacher(
        target,
        train if stores_states else None,
        learnt_part(student, config, sampling),
        store,
        tapped=train if has_taps(train) else None,
        warp=sampling if config.warp == "sampler" else None,
    )
