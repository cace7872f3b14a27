"""What each process of a launch holds on its device, stage by stage, found without weights.

`--plan` prints it under a launcher, and where `--memory` says how large a device is. Forwards and
backwards are those of the stages themselves, of models made of shapes (`specdata.memory`); what an
engine adds to a training follows from how it divides weights, gradients and optimizer.
"""

from __future__ import annotations

import json
import logging
import math
import os
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import PreTrainedModel

from distill.adapters import base_of, with_adapters
from distill.batches import collate
from distill.config import DistilConfig
from distill.distillation import Distillation, freeze
from distill.finetune import NextToken
from distill.initial import new_draft
from distill.muon import muon_optimizer
from distill.objective import Objective
from distill.teacher import TargetTeacher, learnt_part
from distill.watch import HeldOut
from recipes.config import PipelineConfig
from recipes.models import model_config
from recipes.run import Stage, say
from specdata.draft_models.depths import add_masks
from specdata.draft_models.draft_vocabulary import reduce_vocabulary
from specdata.draft_models.state_store import StateStore
from specdata.draft_models.states_draft import TargetStates, states_input
from specdata.draft_models.taps import read_taps
from specdata.least_squares import PART, ridge
from specdata.lm_head import find_lm_head
from specdata.memory import Memory, of_shapes, peak, shape_of, size_of
from specdata.models import DTYPES, positions, without_weights
from specdata.prepack import copies
from specdata.processes import TRUE, process_count
from specdata.rollouts.backend import PROMPT_TOKENS, completing
from specdata.sampling import SamplingConfig
from specdata.texts import POSITIONS, TOKENS_AT_ONCE, TextBatch

PROMPT = 512
"""Tokens that a prompt is taken to have."""
COLUMNS = tuple(each.name for each in fields(Memory))
REMEDIES = {
    "weights": "load the target in bfloat16, or over several devices (models.load.target)",
    "gradients": "launch zero2 or zero3, or reduce draft.init.vocabulary",
    "optimizer": "launch zero1, zero2 or zero3, with more processes",
    "activations": "lower draft.batch_size (raise draft.accumulation) or draft.max_length",
    "cache": "lower rollouts.batch_size (or eval.batch)",
}
BUCKET, LIVE = 4 * 500_000_000, 4 * 1_000_000_000
"""Bytes of DeepSpeed's buffer of gradients, and of whole weights under ZeRO-3, by default."""


@dataclass(frozen=True)
class Engine:
    """The division of a training among the processes of a launcher.

    Attributes:
        zero: DeepSpeed's stage; None without it.
        offloads: what lies in the memory of the CPU: "param", "optimizer".
    """

    processes: int
    zero: int | None = None
    offloads: frozenset[str] = frozenset()

    @classmethod
    def of_launcher(cls) -> Engine:
        """Read what accelerate tells its processes in the environment."""
        if os.environ.get("ACCELERATE_USE_DEEPSPEED", "").lower() not in TRUE:
            return cls(process_count())
        file = Path(os.environ.get("ACCELERATE_DEEPSPEED_CONFIG_FILE", "none"))
        zero = json.loads(file.read_text()).get("zero_optimization", {}) if file.is_file() else {}
        stage = zero.get("stage", os.environ.get("ACCELERATE_DEEPSPEED_ZERO_STAGE", 2))
        devices = {
            each: (zero.get(f"offload_{each}") or {}).get("device", "none")
            for each in ("param", "optimizer")
        }
        offloads = frozenset(each for each, where in devices.items() if where != "none")
        return cls(process_count(), int(stage), offloads)

    @property
    def keeps_gradients(self) -> bool:
        """True if a process holds all of them at the end of a backward."""
        return self.zero is None or self.zero < 2

    @property
    def name(self) -> str:
        """The engine in words."""
        kind = "DDP" if self.zero is None else f"ZeRO-{self.zero}"
        return f"{self.processes} processes, {kind}" if self.processes > 1 else "one process"

    def memory(self, held: int, trained: int, moments: int, made: int) -> Memory:
        """Divide the bytes of a training whose weights and updates are float32.

        Bytes of all weights, of those that are trained and of their moments, and what a step makes
        beyond weights, gradients included. DeepSpeed's own estimates are of weights in 16 bits.
        """
        parts = self.processes
        if self.keeps_gradients:
            made = max(0, made - trained)
        if self.zero is None:  # DDP sends gradients in buffers of their size
            return Memory(held, (1 + (parts > 1)) * trained, moments, made)
        is_offloaded = "optimizer" in self.offloads
        moments, updated = (0 if is_offloaded else each // parts for each in (moments, trained))
        if self.zero == 3:
            held = min(held, LIVE) + (0 if "param" in self.offloads else held // parts)
        # `updated` is DeepSpeed's own copy of the weights, and from ZeRO-2 on of the gradients.
        gradients = BUCKET + (trained if self.keeps_gradients else updated)
        return Memory(held + updated, gradients, moments, made)


@dataclass(frozen=True)
class Planned:
    """The memory of a run's stages on a kind of device, "cuda" or "cpu"."""

    config: PipelineConfig
    engine: Engine
    device: str

    @property
    def texts(self) -> tuple[int, int]:
        """Tokens of a prompt and its completion, the longest; of an assumed prompt if none is."""
        draft, new = self.config.draft, self.config.rollouts.max_new_tokens
        longest = draft.max_length if draft else None
        most = min(longest or PROMPT + new, positions(self.target.config))
        new = min(new, most - 1)
        return most - new, new

    @cached_property
    def target(self) -> PreTrainedModel:
        """The target, in the precision that it is loaded in."""
        models = self.config.models
        return of_shapes(without_weights(models.target), DTYPES[models.dtype_of("target")])

    def draft(self, dtype: str, *, trained: bool = False) -> Any:
        """The draft, with its adapters if it is trained with some."""
        config = self.config
        init = config.draft.init if config.draft else None
        with torch.device("meta"):
            if init is None or init.kind == "model":
                assert config.models.draft is not None  # the configuration's own check
                model = without_weights(config.models.draft)
            else:
                model = new_draft(without_weights(config.models.target), init)
        if init and init.vocabulary:
            reduce_vocabulary(model, range(init.vocabulary))
        with torch.device("meta"):
            if trained and config.draft and config.draft.lora:
                model = with_adapters(model, config.draft.lora, seed=0)
        model = of_shapes(model, DTYPES[dtype])
        if config.draft:
            prepare(model, config.draft, self.target)
        return model

    def batch(self, count: int) -> Dataset:
        """So many of these texts."""
        prompt, completion = self.texts
        row = {"prompt_ids": [0] * prompt, "completion_ids": [0] * completion}
        return Dataset.from_list([row] * count)

    @property
    def sampling(self) -> SamplingConfig:
        """The sampling without top_p: how many tokens that leaves depends on numbers."""
        return replace(self.config.sampling, top_p=1.0)

    def stage(self, name: str) -> Memory | None:
        """Find what a stage holds; None if that is nothing to speak of."""
        config = self.config
        rollouts, evaluation, logits = config.rollouts, config.eval, config.logits
        if name == "rollouts" and rollouts.backend != "vllm":
            return self._generating([self.target], rollouts.batch_size, rollouts.max_new_tokens)
        if name == "eval":
            return self._generating(
                [self.target, self.used], evaluation.batch, evaluation.max_new_tokens
            )
        if name == "logits" and logits and logits.backend == "transformers":
            return self._reading(self.target, self.target)
        if name == "labels" and not config.labels.logits:
            return self._reading(self.target, self.used)
        if name in ("labels", "head"):  # a draft on states has its target read the texts
            reads_states = states_input(self.used) is not None
            return self._reading(self.target if reads_states else self.used, self.used)
        if name == "initial":
            return self._beginning()
        return self._training(name) if name in ("finetuned", "draft") else None

    @cached_property
    def used(self) -> Any:
        """The draft, in the precision that it is served in."""
        return self.draft(self.config.models.dtype_of("draft"))

    def _held(self, *models: Any) -> int:
        """Bytes of models on the device."""
        target = size_of(self.target) * (self.target in models)
        on_cpu = self.config.models.load.target.device_map == "cpu"
        return size_of(*models) - target * on_cpu

    def _generating(self, models: Sequence[Any], rows: int, new: int) -> Memory:
        """Find what models hold that write so many texts together."""
        made = cached = 0
        for model in models:
            lengths = (self.texts[0], new)
            most, cache = completing(model, rows, lengths, PROMPT_TOKENS[self.device])
            made, cached = max(made, most - size_of(model)), cached + cache
        packed = copies(self.target) if self.device == "cpu" and len(models) == 1 else 0
        return Memory(self._held(*models) + packed, activations=made, cache=cached)

    def _reading(self, target: Any, draft: Any) -> Memory:
        """Find what models hold that read rollouts, while their distributions are compared."""
        rows = self.batch(max(1, TOKENS_AT_ONCE[self.device] // sum(self.texts)))
        texts = TextBatch.of(rows.to_list(), range(len(rows)))
        held_out = HeldOut(target, rows, self.sampling, store=StateStore(0))

        @torch.inference_mode()
        def work() -> None:
            held_out.look(texts, find_lm_head(draft))(slice(POSITIONS[self.device]))

        most = peak(work, target, draft)
        return Memory(self._held(target, draft), activations=most - size_of(target, draft))

    def _beginning(self) -> Memory:
        """Find what one process holds that makes a draft of a target in float32."""
        target = of_shapes(without_weights(self.config.models.target), torch.float32)
        draft, made = self.draft("float32"), 0
        # Least squares of the target's last state.
        if (input_embedding := states_input(draft)) is not None:
            width = target.config.get_text_config().hidden_size
            inputs = input_embedding.states.in_features + width
            x, y = (shape_of(PART // inputs, each, dtype=torch.float32) for each in (inputs, width))
            made = peak(lambda: ridge([(x, y), (x, y)]))
        is_here = not self.config.models.load.target.is_spread
        return Memory(size_of(target) * is_here + size_of(draft), activations=made)

    def _training(self, stage: str) -> Memory:
        """Find what a training holds: the draft, a copy to measure and save, and the target."""
        config, parts = self.config.draft, self.engine.processes
        assert config is not None
        keeps = {"keeps_gradients": self.engine.keeps_gradients}
        student = self.draft("float32", trained=True)
        held, (trained, moments) = size_of(student), trained_weights(student, config)
        if stage == "finetuned":
            assert config.finetune is not None
            rows = math.ceil(config.finetune.batch_size / parts)
            ids = torch.zeros(rows, config.finetune.max_length, dtype=torch.long)
            batch = {"input_ids": ids, "labels": ids}
            made = step_bytes(lambda: NextToken(student), batch, student, **keeps) - held
            step = self.engine.memory(held, trained, 2 * trained, made)
            return replace(step, weights=step.weights + held)
        batch = collate(0)(self.batch(math.ceil(config.batch_size / parts)).to_list())
        warp = self.sampling if config.warp == "sampler" else None

        def objective() -> Distillation:
            part = learnt_part(student, config, self.sampling)
            return Distillation(student, TargetTeacher(self.target, None, part, warp=warp), config)

        both = held + size_of(self.target)
        made = step_bytes(objective, batch, student, self.target, **keeps) - both
        step = self.engine.memory(held, trained, moments, made)
        measured = self._reading(self.target, base_of(student)).activations
        return replace(
            step,
            weights=step.weights + held + (0 if config.logits else self._held(self.target)),
            activations=max(step.activations, measured - step.gradients),  # which are gone then
        )


def step_bytes(
    objective: Callable[[], Objective],
    batch: Any,
    student: Any,
    *others: PreTrainedModel,
    keeps_gradients: bool,
) -> int:
    """The most bytes that a forward and backward of models of shapes take, weights included.

    Under ZeRO-2 and 3 gradients are not kept: each is gone as soon as it is there.
    """

    def drop(weight: torch.Tensor) -> None:
        weight.grad = None

    for weight in [] if keeps_gradients else student.parameters():
        if weight.requires_grad:
            weight.register_post_accumulate_grad_hook(drop)

    def work() -> None:
        torch.autograd.backward(objective().train()(batch)[0])

    most = peak(work, student, *others)
    student.zero_grad()
    return most


def prepare(student: Any, config: DistilConfig, target: PreTrainedModel) -> None:
    """Freeze what is not trained of a draft of shapes, and have it read its target's states."""
    freeze(student, config)
    draft = base_of(student)
    if config.depths > 1:
        add_masks(draft, config.depths, [0])
    if (input_embedding := states_input(draft)) is not None:
        taps = TargetStates.of(draft.config).taps
        input_embedding.read_target = lambda ids: read_taps(target, taps, ids)


def trained_weights(student: Any, config: DistilConfig) -> tuple[int, int]:
    """Bytes of a frozen draft's trained weights, and of its optimizer's moments."""
    weights = sum(each.nbytes for each in student.parameters() if each.requires_grad)
    if config.optimizer == "adamw":
        return weights, 2 * weights
    matrices, _ = muon_optimizer(student, lr=1.0, betas=(0.9, 0.9)).parts
    of_muon = sum(each.nbytes for group in matrices.param_groups for each in group["params"])
    return weights, 2 * weights - of_muon


def show_memory(stages: Sequence[Stage], size: int | None) -> None:
    """Print what each stage holds in each process, and what to lower where a device is too small.

    `size` is that of a device, in bytes; by default that of the GPU there is.
    """
    config = stages[0].config
    device = "cuda" if size or torch.cuda.is_available() else "cpu"
    if size is None and device == "cuda":
        size = torch.cuda.get_device_properties(0).total_memory
    if absent := [name for name in config.given_models if not model_config(name)]:
        say(f"memory is not known: no config.json of {', '.join(absent)} is on this machine")
        return
    planned = Planned(config, Engine.of_launcher(), device)
    prompt, completion = planned.texts
    of = f"GB of {size / 1e9:.0f}" if size else "GB"
    say(
        f"\nmemory of each process ({planned.engine.name}), {of}; texts of {prompt:,} + "
        f"{completion:,} tokens"
    )
    say("".join(f"{each:>12}" for each in ("", *COLUMNS, "together")))
    logging.getLogger("torch._subclasses.fake_tensor").setLevel(logging.CRITICAL)  # said below
    for stage in stages:
        try:
            memory = planned.stage(stage.name)
        except RuntimeError as error:  # torch's, of experts above all: who is asked decides sizes
            reason = str(error).partition("\n")[0]
            say(f"{stage.name:<12}is not known: shapes are not enough for its models ({reason})")
            continue
        if memory is None:
            continue
        values = (*astuple(memory), memory.total)
        say(f"{stage.name:<12}" + "".join(f"{value / 1e9:>12.2f}" for value in values))
        if size and memory.total > size:
            most = max(COLUMNS, key=lambda column: getattr(memory, column))
            say(f"  does not fit: most are {most}; {REMEDIES[most]}")
