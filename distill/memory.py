"""What distillation holds in memory, of models made of shapes (`specdata.memory`)."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Any

import torch
from datasets import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from distill.adapters import base_of
from distill.batches import collate
from distill.config import ARCHITECTURES, DistilConfig, InitConfig
from distill.kinds import KINDS
from distill.plain import Source
from distill.teacher import TargetTeacher, learnt_part
from distill.trainer import Distillation, freeze, muon_optimizer
from distill.watch import HeldOut
from specdata.draft_models.depths import add_masks
from specdata.draft_models.state_store import StateStore
from specdata.draft_models.states_draft import TargetStates, states_input
from specdata.draft_models.taps import read_taps
from specdata.lm_head import find_lm_head
from specdata.memory import peak
from specdata.sampling import SamplingConfig
from specdata.texts import TextBatch


def new_draft(target: PreTrainedModel, init: InitConfig) -> PreTrainedModel:
    """The draft that `distill.initial.make_initial` makes, of a target on no device, there, too.

    A vocabulary is left as it is.
    """
    text: Any = target.config.get_text_config()
    if init.kind == "fresh":
        sizes = asdict(ARCHITECTURES[init.architecture])
        ties = init.architecture == "toy"
        config = LlamaConfig(**sizes, vocab_size=text.vocab_size, tie_word_embeddings=ties)
        return LlamaForCausalLM(config)
    return KINDS[init.form.name].of_shapes(target, Source.of(target, init))


def measuring(
    target: PreTrainedModel,
    draft: PreTrainedModel,
    sampling: SamplingConfig,
    lengths: tuple[int, int],
    at_once: tuple[int, int],
) -> int:
    """The most bytes that p and q along texts take, weights included, as in labels, too.

    Of models of shapes; `at_once` are tokens that they read at a time, and positions whose
    distributions are held (`specdata.texts`).
    """
    row, count = _row(lengths), max(1, at_once[0] // sum(lengths))
    batch = TextBatch.of([row] * count, range(count))
    texts = Dataset.from_list([row] * count)
    held_out = HeldOut(target, texts, _known(sampling), store=StateStore(0))

    @torch.inference_mode()
    def work() -> None:
        held_out._look(batch, find_lm_head(draft))(slice(at_once[1]))

    return peak(work, target, draft)


def training(
    target: PreTrainedModel,
    student: Any,
    config: DistilConfig,
    sampling: SamplingConfig,
    rows: int,
    lengths: tuple[int, int],
    *,
    keeps_gradients: bool,
) -> int:
    """The most bytes that a forward and backward of distillation take, weights included.

    Of a target and a draft of shapes, prepared (`prepare`), and so many rows in one process; of a
    prompt and a completion the `lengths` in tokens. Under ZeRO-2 and 3 gradients are not kept: each
    is gone as soon as it is there.
    """
    sampling = _known(sampling)

    def work() -> None:
        warp = sampling if config.warp == "sampler" else None
        teacher = TargetTeacher(target, None, learnt_part(student, config, sampling), warp=warp)
        objective = Distillation(student, teacher, config).train()
        torch.autograd.backward(objective(collate(0)([_row(lengths)] * rows))[0])

    def drop(weight: torch.Tensor) -> None:
        weight.grad = None

    for weight in [] if keeps_gradients else student.parameters():
        if weight.requires_grad:
            weight.register_post_accumulate_grad_hook(drop)
    most = peak(work, target, student)
    student.zero_grad()
    return most


def prepare(student: Any, config: DistilConfig, target: PreTrainedModel) -> None:
    """Freeze what is not trained of a draft of shapes, and have it read its target's states."""
    freeze(student, config)
    draft = base_of(student)
    if config.depths > 1:
        add_masks(draft, config.depths, [0])
    if (reads := states_input(draft)) is not None:
        taps = TargetStates.of(draft.config).taps
        reads.read_target = lambda ids: read_taps(target, taps, ids)


def _row(lengths: tuple[int, int]) -> dict[str, list[int]]:
    return {"prompt_ids": [0] * lengths[0], "completion_ids": [0] * lengths[1]}


def _known(sampling: SamplingConfig) -> SamplingConfig:
    """Without top_p: how many tokens that leaves depends on numbers."""
    return replace(sampling, top_p=1.0)


def trained_weights(student: Any, config: DistilConfig) -> tuple[int, int]:
    """Bytes of a frozen draft's trained weights, and of its optimizer's moments."""
    weights = sum(each.nbytes for each in student.parameters() if each.requires_grad)
    if config.optimizer == "adamw":
        return weights, 2 * weights
    matrices, _ = muon_optimizer(student, lr=1.0, betas=(0.9, 0.9)).parts
    of_muon = sum(each.nbytes for group in matrices.param_groups for each in group["params"])
    return weights, 2 * weights - of_muon
