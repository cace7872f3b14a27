"""What is decided before a draft trains: one value, from which the training reads."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from datasets import Dataset
from torch import Tensor
from transformers import PreTrainedModel, TrainingArguments

from distill.adapters import base_of
from distill.batches import DraftTexts, Numbered, collate
from distill.config import DistilConfig
from distill.drafts import TRAININGS
from distill.muon import MuonWithAdamW, muon_optimizer
from distill.rounds import Place, Texts, weights_of
from distill.teacher import Teacher, teacher_of
from distill.training import draft_arguments
from specdata.drafts import kind_of
from specdata.drafts.depths import depths_of
from specdata.drafts.state_store import StateStore
from specdata.drafts.states_network import states_input
from specdata.errors import ConfigError
from specdata.lm_head import LMHead
from specdata.models import end_ids, positions
from specdata.processes import join_processes
from specdata.sampling import SamplingConfig
from specdata.texts import TextRow
from specdata.top_logits import TopLogitDistributions


@dataclass(frozen=True, slots=True)
class Lesson:
    """What a draft learns, from whom, and how.

    Attributes:
        states_by_place: of the draft's kind (`distill.drafts`), the states that are learnt from.
        weights: of the places of a round, as many as are read; 1 together.
        teacher: what the target says of the rollouts.
        rollouts, collator: the rows, and from some of them the batch of this process.
        texts: what the draft writes in their place, if it does.
        optimizer: with the draft's matrices; None: the Trainer makes it (AdamW).
        arguments: the Trainer's: steps, rates, checkpoints.
    """

    config: DistilConfig
    states_by_place: Callable[[LMHead, Texts], Iterator[Place]]
    weights: list[float]
    teacher: Teacher
    rollouts: Numbered
    collator: Callable[[Sequence[TextRow]], dict[str, Tensor]]
    texts: DraftTexts | None
    optimizer: MuonWithAdamW | None
    arguments: TrainingArguments


def lesson_of(
    target: PreTrainedModel | TopLogitDistributions,
    student: PreTrainedModel,
    train: Dataset,
    work: Path,
    config: DistilConfig,
    sampling: SamplingConfig,
    seed: int,
    store: StateStore | None = None,
) -> Lesson:
    """Decide how a draft learns: `config.batch_size` rollouts a batch, checkpoints in `work`.

    The target, whose states a store has room for, may be what is made of the logits that `train`
    keeps of it. Matrices of the draft that are not trained are frozen.
    """
    state, draft = join_processes(), base_of(student)
    arguments = draft_arguments(work, config, len(train), save_steps=config.save_steps, seed=seed)
    arguments.report_to = config.report_to or []
    # By default TensorBoard's files would lie among the checkpoints, and go with them.
    os.environ.setdefault("TENSORBOARD_LOGGING_DIR", str(work.with_suffix(".logs")))
    freeze(draft, freeze_embeddings=config.freeze_embeddings)
    # A draft that reads its own states is read again, one that proposes several tokens is not.
    depths = depths_of(draft)
    is_read_again = states_input(draft) is not None and depths == 1
    pad_id, texts = 0, None
    if isinstance(target, PreTrainedModel):
        # Padding is masked everywhere, so any id will do where a model names none.
        pad_id = target.generation_config.pad_token_id or 0
        if config.on_policy > 0:
            room = positions(target.config), positions(student.config)
            texts = DraftTexts(
                config.on_policy,
                sampling,
                seed,
                ends=end_ids(target.generation_config),
                vocabulary=target.config.get_text_config().vocab_size,
                longest=min(*room, config.max_length or sys.maxsize),
                batch_size=config.batch_size,
                pad_id=pad_id,
            )
    optimizer = None
    if config.optimizer == "muon":
        betas = (arguments.adam_beta1, arguments.adam_beta2)
        optimizer = muon_optimizer(student, lr=config.learning_rate, betas=betas)
    return Lesson(
        config=config,
        states_by_place=TRAININGS[kind_of(draft.config).name].states_by_place,
        weights=weights_of(config.readings if is_read_again else depths),
        teacher=teacher_of(student, target, config, sampling, train, store),
        rollouts=Numbered(train),
        collator=collate(pad_id, process=state.process_index, processes=state.num_processes),
        texts=texts,
        optimizer=optimizer,
        arguments=arguments,
    )


def freeze(draft: PreTrainedModel, *, freeze_embeddings: bool) -> None:
    """Freeze the matrices of a draft that are not trained."""
    embedding, output = draft.get_input_embeddings(), draft.get_output_embeddings()
    if freeze_embeddings or states_input(draft) is not None:
        if output is not None and embedding.weight is output.weight:
            raise ConfigError(
                "draft.freeze_embeddings would freeze the draft's output matrix, which is its "
                "input embedding: leave it out, or reduce the vocabulary (draft.init.vocabulary)"
            )
        embedding.weight.requires_grad_(False)
    if getattr(output, "is_frozen", False):
        output.weight.requires_grad = False
