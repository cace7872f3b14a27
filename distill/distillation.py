"""Stage 2: distil a draft on completions that its target wrote earlier.

The target runs beside the draft as a frozen teacher; the loss is taken at completion positions
only, between the very distributions that serving will compare.
"""

from __future__ import annotations

import math
import shutil
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path

from accelerate.utils import broadcast_object_list
from datasets import Dataset
from pydantic import TypeAdapter
from transformers import PreTrainedModel

from distill.adapters import (
    base_of,
    load_plain,
    load_student,
    merged,
    set_weights,
    trained_weights,
)
from distill.batches import check_context, content_of, fitted
from distill.callbacks import (
    Watch,
    best_step,
    history_of,
    load_best,
    reporters,
)
from distill.config import DistilConfig
from distill.trainer import draft_trainer
from distill.training import save_model, train_resumably
from distill.watch import HeldOut, History, Measurement
from specdata.errors import TrainingDivergedError
from specdata.loading import ONE_DEVICE, Loading
from specdata.models import (
    check_shared_vocabulary,
    load_configs,
    load_model,
    load_tokenizer,
)
from specdata.processes import join_processes, wait_for_main
from specdata.sampling import SamplingConfig
from specdata.saving import copy_tokenizer
from specdata.state_store import StateStore
from specdata.states_draft import reads_states
from specdata.storage.checkpoints import newest_complete
from specdata.storage.files import atomic_folder, fingerprint, write_json
from specdata.storage.resume import Settings, read_record
from specdata.taps import attach
from specdata.top_logits import TopLogitDistributions, TopLogits, check_decided

SETTINGS_FILE = "training.json"
RESULT_FILE = "distillation.json"


@dataclass(frozen=True, slots=True)
class DistilResult:
    """The changes by distillation, on rollouts that were not trained on.

    `acceptance_before` and `acceptance_after` are means of sum_x min(p, q) over `positions`
    completion positions: the probability that a drafted token is accepted there. `before` and
    `after` have more, for each prompt set, too. The draft's weights are those after `best_step` of
    `steps` optimizer steps; 0 are those it started from. Of the training rollouts, `cut` were
    longer than `max_length`, and `left_out` had no completion, or none that was not cut.

    `is_bound`: p is known from top logits in which all other tokens count as one. Then acceptances
    are upper bounds and KL lower ones; expected tokens are exact where the logits of the text's own
    tokens are kept (stage logits), else so where a token is among the N. `undecided` positions of
    training and held-out rollouts are left out, because top logits do not decide p there.
    """

    acceptance_before: float
    acceptance_after: float
    positions: int
    steps: int
    best_step: int
    before: Measurement
    after: Measurement
    cut: int
    left_out: int
    is_bound: bool
    undecided: int


def distil(  # noqa: PLR0913 - what is trained, on what, how
    *,
    target: str | Path,
    draft: str | Path,
    train: Dataset,
    dev: Dataset,
    out: Path,
    config: DistilConfig,
    sampling: SamplingConfig,
    seed: int,
    teacher_load: Loading = ONE_DEVICE,
    top_logits: TopLogits | None = None,
) -> DistilResult:
    """Train a copy of the draft on rollouts of the target and save it as a model folder.

    A killed run goes on from its last checkpoint when called again; a finished one returns its
    stored result. Works in one process, under `accelerate launch` and under DeepSpeed. Each
    step is taken on the same rollouts however many processes there are, so a run may go on in
    another number of them (not under DeepSpeed, whose checkpoints are in as many parts).

    Args:
        target: folder or Hub id of the teacher.
        draft: folder or Hub id of the draft to start from.
        train: rollouts with `prompt_ids` and `completion_ids`.
        dev: rollouts that acceptance is measured on.
        out: the new model folder; it appears once it is complete.
        config: loss and schedule.
        sampling: the warp of serving, applied to both models.
        seed: decides the order of the rollouts.
        teacher_load: how the frozen target is loaded: in the precision that it is served in.
        top_logits: what `train` and `dev` keep of the target's logits (columns of `TOP_LOGITS`), if
            the draft learns from them; then the weights of the target are not read.

    Raises:
        ConfigError: if a model cannot be loaded or has fewer positions than
            a rollout tokens, or if top logits do not decide the target's distributions.
        TrainingDivergedError: if a loss, gradient or weight is not finite.
        VocabularyMismatchError: if the models do not share a vocabulary.
        ManifestError: if `out` or its checkpoints were made with other settings, or its checkpoints
            are damaged.
        ValueError: if a data set is empty, or without a completion.
    """
    for name, rollouts in (("train", train), ("dev", dev)):
        if len(rollouts) == 0:
            raise ValueError(f"{name} must hold at least one rollout, it is empty")
    settings = Settings(
        {
            "target": fingerprint(str(target)),
            "draft": fingerprint(str(draft)),
            # Where top logits lie does not matter, as they are compared by what they hold.
            "config": {**config.decisive(), "cache": None},
            "sampling": asdict(sampling),
            "seed": seed,
            "train": content_of(train),
            "dev": content_of(dev),
            "teacher_dtype": teacher_load.dtype or "float32",
        },
        remedy=f"choose another output folder, or remove {out} and {_work(out)}",
    )
    if out.exists():
        shutil.rmtree(_work(out), ignore_errors=True)  # of a run killed right before its end
        settings.check_file(out / SETTINGS_FILE)
        keys = [each.name for each in fields(DistilResult)]
        stored = read_record(
            out / RESULT_FILE, keys, f"remove {out} and run the same command again"
        )
        return TypeAdapter(DistilResult).validate_python(stored)
    reports = reporters(config.report_to, out.with_name(f"{out.name}.logs"))
    state = join_processes()
    tokenizer = load_tokenizer(str(target))
    check_shared_vocabulary(tokenizer, load_tokenizer(str(draft)))
    fit, dev = fitted(train, config.max_length), fitted(dev, config.max_length).rollouts
    configs = {"target": load_configs(str(target))[0], "draft": load_configs(str(draft))[0]}
    check_context(configs, fit.rollouts, dev)
    # Before any training arguments exist, or ZeRO-3 would split the frozen teacher too.
    undecided = 0
    teacher: PreTrainedModel | TopLogitDistributions
    measured: PreTrainedModel | TopLogitDistributions
    if top_logits:
        compared = sampling if config.warp == "sampler" else SamplingConfig()
        teacher = top_logits.distributions(compared, bound=True)
        measured = top_logits.distributions(sampling, bound=True)  # always of serving
        for rollouts in (fit.rollouts, dev):
            undecided += check_decided(rollouts, teacher, measured)[1]
    else:
        teacher = measured = load_model(str(target), load=teacher_load)
    student, plain = (
        load_student(str(draft), config.lora, seed=seed),
        load_plain(str(draft), config.lora),
    )
    store = _let_read(teacher, base_of(student), base_of(plain))
    held_out = HeldOut(measured, dev, sampling, watched=config.eval_rollouts, store=store)
    before = held_out.measure_on_main(base_of(plain))

    history, kept_step = History(), 0
    if config.epochs > 0:
        trainer = draft_trainer(
            teacher, student, fit.rollouts, _work(out), config, sampling, seed, store
        )
        for callback in reports:
            trainer.add_callback(callback)
        label = "distilling the draft"
        trainer.add_callback(Watch(trainer, held_out, plain, config, label, settings.remedy))
        train_resumably(trainer, _work(out), settings, label=label)
        weights, history = trained_weights(trainer), history_of(trainer.state)
        kept_step = trainer.state.global_step
        if config.keep == "best":
            kept_step = best_step(history.measurements)
        if state.is_main_process:
            set_weights(
                plain, weights if config.keep == "last" else load_best(_work(out), kept_step)
            )
    plain = merged(plain)
    measured_after = held_out.measure_on_main(base_of(plain), step=kept_step)
    (after,) = broadcast_object_list([measured_after])
    assert after is not None  # the main process has sent it
    if not math.isfinite(after.overall.acceptance):
        raise TrainingDivergedError(
            f"distilling the draft: its acceptance is {after.overall.acceptance} after the last "
            "step",
            last_good=newest_complete(_work(out)),
            learning_rate=config.learning_rate,
            remedy=settings.remedy,
        )
    if before is not None:  # on the main process
        result = DistilResult(
            acceptance_before=before.overall.acceptance,
            acceptance_after=after.overall.acceptance,
            positions=after.overall.positions,
            steps=history.measurements[-1].step if history.measurements else 0,
            best_step=kept_step,
            before=before,
            after=after,
            cut=fit.cut,
            left_out=fit.left_out,
            is_bound=isinstance(measured, TopLogitDistributions) and not measured.is_exact,
            undecided=undecided,
        )
        with atomic_folder(out) as temporary:
            save_model(plain, temporary)
            copy_tokenizer(str(target), temporary)
            settings.write(temporary / SETTINGS_FILE)
            write_json(temporary / RESULT_FILE, asdict(result))
            replace(history, before=before, after=after, best_step=kept_step).write(temporary)
        shutil.rmtree(_work(out), ignore_errors=True)
    wait_for_main()
    return TypeAdapter(DistilResult).validate_json((out / RESULT_FILE).read_bytes())


def _let_read(
    teacher: PreTrainedModel | TopLogitDistributions, *drafts: PreTrainedModel
) -> StateStore:
    """Have drafts that read states read those of a target that is loaded already.

    Returns:
        What all that is kept of the target's states goes to.
    """
    store = StateStore()
    for draft in drafts:
        if reads_states(draft.config) and not isinstance(teacher, TopLogitDistributions):
            attach(draft, teacher, store)
    return store


def _work(out: Path) -> Path:
    return out.with_name(f"{out.name}.training")
