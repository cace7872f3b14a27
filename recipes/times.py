"""How long stages would take, from about a minute of their real work on a few rows.

A stage's time is what was measured of one batch, step or token times how many there are, divided by
the processes. Not in it: starting, loading models, checkpoints, measuring on held-out rollouts.
"""

from __future__ import annotations

import copy
import math
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from datasets import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, TrainerCallback

from recipes.config import PipelineConfig
from recipes.layout import draft_in_use, initial_draft, on_this_machine
from recipes.memory import Setting
from recipes.model_sizes import ModelSizes
from recipes.resources import rows_of
from recipes.run import prepare_libraries
from recipes.units import in_seconds
from specdata.errors import ConfigError, TrainingDivergedError
from specdata.gguf_file import is_gguf
from specdata.loading import Role
from specdata.models import load_model
from specdata.prepack import prepacked
from specdata.processes import process_count
from specdata.storage.schema import Rollout

if TYPE_CHECKING:
    from transformers import PreTrainedModel

ENOUGH = 60.0  # seconds after which nothing more is begun
# Tokens that are drawn of each row, few and more: the difference is of decoding alone.
DRAWN = (4, 12)
ROWS, STEPS, TOKENS = 8, 3, 16  # rows that are labelled, steps of distillation, tokens of decoding


def estimated(stages: Sequence[str], config: PipelineConfig) -> Iterator[str]:
    """Measure, and say of each stage how long it would take.

    Args:
        stages: those that would be made.
        config: the run.
    """
    if process_count() > 1:
        yield (
            "not measured: run --plan time without a launcher; with n processes rollouts and "
            "labels take an n-th of what it says, trainings more"
        )
        return
    setting = Setting.of(config)
    if setting.target is None or setting.draft is None:
        yield "not measured: config.json of the models is not on this machine"
        return
    prepare_libraries()
    begun = time.perf_counter()
    with tempfile.TemporaryDirectory() as work:
        sample = _Sample.of(setting, Path(work))
        yield sample.said
        measures: dict[str, Callable[[], float | None]] = {
            "rollouts": sample.rollouts,
            "draft": sample.draft_steps,
            "labels": sample.labels,
            "head": sample.head_steps,
            "eval": sample.evaluation,
        }
        for stage in [name for name in stages if name in measures]:
            if time.perf_counter() - begun > ENOUGH:
                yield f"{stage}: not measured, as the minute was over"
                continue
            try:
                seconds = measures[stage]()
            except (ConfigError, TrainingDivergedError) as error:
                yield f"{stage}: not measured: {error}"
                continue
            known = "not known: a prompt set has no count" if seconds is None else None
            yield f"{stage}: {known or 'about ' + in_seconds(seconds or 0.0)}"
    yield (
        f"measured for {time.perf_counter() - begun:.0f} s; an evaluation as if no method were "
        "faster than the target alone"
    )


@dataclass(frozen=True, slots=True)
class _Sample:
    """A few rows of random tokens, as long as the run's, and both models.

    Attributes:
        setting: what is known of the run.
        target: the target, or random weights of its sizes.
        draft: likewise.
        work: a folder that is removed.
        said: what stands for what.
    """

    setting: Setting
    target: PreTrainedModel
    draft: PreTrainedModel
    work: Path
    said: str

    @classmethod
    def of(cls, setting: Setting, work: Path) -> _Sample:
        config = setting.config
        assert setting.target is not None
        assert setting.draft is not None
        target, is_real = _model(config, "target", config.models.target, setting.target)
        made = draft_in_use(config)
        name = made if on_this_machine(made) is not None else initial_draft(config)
        draft, is_real_draft = _model(config, "draft", name, setting.draft)
        random = [
            role for role, real in (("target", is_real), ("draft", is_real_draft)) if not real
        ]
        stand_in = f", random weights in place of the {' and '.join(random)}" if random else ""
        said = (
            f"for prompts of {setting.prompt} tokens and completions of "
            f"{config.rollouts.max_new_tokens}{stand_in}:"
        )
        return cls(setting, target, draft, work, said)

    def rows(self, count: int) -> list[Rollout]:
        """Rows of random tokens that both models know."""
        generator = torch.Generator().manual_seed(0)
        size = min(model.config.get_text_config().vocab_size for model in (self.target, self.draft))
        tokens = torch.randint(size, (count, self.setting.length), generator=generator).tolist()
        begin = self.setting.prompt
        return [
            Rollout(
                example_id=f"{number}",
                dataset="",
                split="train",
                sample=0,
                turn=0,
                prompt_ids=row[:begin],
                completion_ids=row[begin:],
                finish="length",
            )
            for number, row in enumerate(tokens)
        ]

    def rollouts(self) -> float | None:
        """Of a batch: what reading prompts takes, and each further token."""
        from specdata.rollouts.backend import sample_batch

        config, count = self.setting.config, rows_of(self.setting)
        if count is None or config.rollouts.backend != "transformers":
            return None
        wanted = config.rollouts
        batch = min(wanted.batch_size, wanted.shard_size * wanted.samples, count)
        prompts = [row["prompt_ids"] for row in self.rows(batch)]

        def draw(tokens: int) -> None:
            uniforms = torch.full((batch, tokens), 0.5, dtype=torch.float64)
            sample_batch(self.target, prompts, uniforms, config.sampling, ends=[])

        with prepacked(self.target):
            draw(1)
            few, more = (_seconds(partial(draw, tokens)) for tokens in DRAWN)
        step = max(0.0, more - few) / (DRAWN[1] - DRAWN[0])
        reading = max(0.0, few - DRAWN[0] * step)
        return math.ceil(count / batch) * (reading + wanted.max_new_tokens * step)

    def labels(self) -> float | None:
        """Of a few rows."""
        count = rows_of(self.setting)
        if count is None or self.setting.config.labels.cache:
            return None
        self._labelled()  # the first of anything is slow
        return count / ROWS * _seconds(self._labelled)

    def _labelled(self) -> list[Any]:
        from specdata.labels.labeller import Labeller, target_distributions, tokens_at_once
        from specdata.lm_head import find_lm_head

        config = self.setting.config
        p, q = find_lm_head(self.target), find_lm_head(self.draft)
        work = Labeller(
            partial(target_distributions, p, config.sampling, 0),
            q,
            p.vocabulary,
            config.sampling,
            config.seed,
            tokens_at_once(p, q),
            config.labels.draws if config.sampling.temperature > 0 else 1,
        )
        with prepacked(self.target, self.draft):
            return work(self.rows(ROWS))

    def draft_steps(self) -> float | None:
        """Of optimizer steps, in which the target reads all rows."""
        from transformers import PrinterCallback

        from distill.trainer import draft_trainer

        config, train = self.setting.config.draft, rows_of(self.setting, "train")
        assert config is not None
        if train is None:
            return None
        batch = config.batch_size * config.accumulation
        trainer = draft_trainer(
            self.target,
            _float32(self.draft),
            Dataset.from_list(cast("list[dict[str, Any]]", self.rows(batch * (STEPS + 1)))),
            self.work / "draft",
            config.model_copy(update={"epochs": 1.0, "report_to": [], "save_steps": 10**6}),
            self.setting.config.sampling,
            self.setting.config.seed,
        )
        clock = _Clock()
        trainer.remove_callback(PrinterCallback)
        trainer.add_callback(clock)
        trainer.train()
        steps = math.ceil(config.epochs * train * (1 - config.spared) / batch)
        return steps * (clock.ends[-1] - clock.ends[0]) / STEPS

    def head_steps(self) -> float | None:
        """Of more passes over a batch less fewer."""
        from heads.train import train_head

        config, train = self.setting.config.head, rows_of(self.setting, "train")
        assert config is not None
        if train is None or self.setting.config.labels.cache:
            return None
        rows = self._labelled()
        rows = (rows * math.ceil(config.batch_size / len(rows)))[: config.batch_size]
        data = Dataset.from_list(rows)

        def learn(passes: int) -> None:
            alone = {"epochs": passes, "report_to": "none", "cache": "none"}
            train_head(
                draft=self.draft,
                train=data,
                dev=data.select(range(1)),
                out=self.work / f"head-{passes}",
                config=config.model_copy(update=alone),
                seed=self.setting.config.seed,
                sampling=self.setting.config.sampling,
            )

        few, more = (_seconds(partial(learn, passes)) for passes in (1, 1 + STEPS))
        learnt = math.ceil(train * (self._spared or 1.0))
        steps = config.passes(learnt) * math.ceil(learnt / config.batch_size)
        return steps * max(0.0, more - few) / STEPS

    @property
    def _spared(self) -> float:
        draft = self.setting.config.draft
        return draft.spared if draft else 0.0

    def evaluation(self) -> float | None:
        """Of tokens that the target decodes alone."""
        from eval.decoder import DecodeConfig, SpeculativeDecoder

        config = self.setting.config
        if not all(wanted.count for wanted in config.eval.sets):
            return None
        decoder = SpeculativeDecoder.from_config(
            self.target, None, DecodeConfig(**asdict(config.sampling))
        )
        prompt = torch.tensor(self.rows(1)[0]["prompt_ids"])

        def decode() -> None:
            generator = torch.Generator().manual_seed(0)
            decoder.generate(prompt, max_new_tokens=TOKENS, generator=generator)

        decode()
        generations = sum(wanted.count for wanted in config.eval.sets) * len(config.eval.methods)
        return generations * config.eval.max_new_tokens * _seconds(decode) / TOKENS


class _Clock(TrainerCallback):  # type: ignore[misc]
    """When steps end."""

    def __init__(self) -> None:
        self.ends: list[float] = []

    def on_step_end(self, *_: Any, **__: Any) -> None:
        """Note the time."""
        self.ends.append(time.perf_counter())


def _model(
    config: PipelineConfig, role: Role, name: str, sizes: ModelSizes
) -> tuple[PreTrainedModel, bool]:
    """A model, and whether it is the real one: else it has random weights of its sizes."""
    load = config.models.loading(role)
    if is_gguf(name) or on_this_machine(name) is not None:
        return load_model(name, load=load), True
    torch.manual_seed(0)
    described = LlamaConfig(
        vocab_size=sizes.vocabulary,
        hidden_size=sizes.width,
        intermediate_size=sizes.inner,
        num_hidden_layers=sizes.layers,
        num_attention_heads=1,
        max_position_embeddings=1 << 16,
        tie_word_embeddings=not sizes.output,
        eos_token_id=None,
        pad_token_id=0,
    )
    return LlamaForCausalLM(described).to(getattr(torch, str(load.dtype))).eval(), False


def _float32(model: PreTrainedModel) -> PreTrainedModel:
    """A copy to train, in the precision of trainings."""
    return copy.deepcopy(model).float()


def _seconds(work: Callable[[], object]) -> float:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    begun = time.perf_counter()
    work()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - begun
