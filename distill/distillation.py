"""Stage 2: distil a draft on completions that its target wrote earlier.

The target runs beside the draft as a frozen teacher; the loss is taken at completion positions
only, between the very distributions that serving will compare.
"""

from __future__ import annotations

import copy
import math
from dataclasses import asdict, dataclass
from pathlib import Path

from datasets import Dataset
from pydantic import TypeAdapter
from transformers import PreTrainedModel

from distill.adapters import base_of, load_student, merged, set_weights, trained_weights
from distill.batches import check_context, fitted
from distill.callbacks import Watch, best_step, load_best, measurements, reporters
from distill.config import DistilConfig
from distill.masks import with_masks
from distill.trainer import draft_trainer
from distill.training import HISTORY_FILE, RESULT_FILE, ModelFolder, logged_steps, train_resumably
from distill.watch import HeldOut, Measurement
from specdata.draft_models.state_store import StateStore
from specdata.draft_models.states_draft import reads_states
from specdata.draft_models.taps import attach
from specdata.errors import TrainingDivergedError
from specdata.loading import ONE_DEVICE, Loading
from specdata.models import check_shared_vocabulary, load_configs, load_model, load_tokenizer
from specdata.processes import join_processes
from specdata.sampling import SamplingConfig
from specdata.storage.checkpoints import newest_complete
from specdata.top_logits import TopLogitDistributions, TopLogits, check_decided


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
    another number of them.

    Args:
        target: folder or Hub id of the teacher.
        draft: folder or Hub id of the draft to start from.
        train: rollouts with `prompt_ids` and `completion_ids`.
        dev: rollouts that acceptance is measured on.
        out: the new model folder, of this training alone; it appears once it is complete.
        config: loss and schedule.
        sampling: the warp of serving, applied to both models.
        seed: decides the order of the rollouts.
        teacher_load: how the frozen target is loaded: in the precision that it is served in.
        top_logits: what `train` and `dev` keep of the target's logits (columns of `TOP_LOGITS`), if
            the draft learns from them; then the weights of the target are not read.
    """
    for name, rollouts in (("train", train), ("dev", dev)):
        if len(rollouts) == 0:
            raise ValueError(f"{name} must hold at least one rollout, it is empty")
    folder = ModelFolder(out)
    if stored := folder.result():
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
    student = load_student(str(draft), config.lora, seed=seed)
    language_model = base_of(student)
    with_masks(language_model, config.depths, tokenizer.all_special_ids, fit.rollouts, dev)
    store = StateStore()  # what all that is kept of the target's states goes to
    if reads_states(language_model.config) and not isinstance(teacher, TopLogitDistributions):
        attach(language_model, teacher, store)
    plain = copy.deepcopy(student).eval()  # to measure and save: no engine ever wraps this one
    held_out = HeldOut(measured, dev, sampling, watched=config.eval_rollouts, store=store)
    before = held_out.measured_by_main(base_of(plain))

    kept_step, label = 0, "distilling the draft"
    steps: list[dict[str, float]] = []
    watched: list[Measurement] = []
    if config.epochs > 0:
        trainer = draft_trainer(
            teacher, student, fit.rollouts, folder.work, config, sampling, seed, store
        )
        for callback in (*reports, Watch(trainer, held_out, plain, config, label)):
            trainer.add_callback(callback)
        train_resumably(trainer, folder.work, label=label)
        weights = trained_weights(trainer)
        steps, watched = logged_steps(trainer), measurements(trainer.state)
        kept_step = trainer.state.global_step
        if config.keep == "best":
            kept_step = best_step(watched)
        if state.is_main_process:
            is_last = config.keep == "last"
            set_weights(plain, weights if is_last else load_best(folder.work, kept_step))
    plain = merged(plain)
    after = held_out.measured_by_main(base_of(plain), step=kept_step)
    if not math.isfinite(after.overall.acceptance):
        raise TrainingDivergedError(
            f"{label}: its acceptance is {after.overall.acceptance} after the last step",
            last_good=newest_complete(folder.work),
            learning_rate=config.learning_rate,
        )
    result = DistilResult(
        acceptance_before=before.overall.acceptance,
        acceptance_after=after.overall.acceptance,
        positions=after.overall.positions,
        steps=watched[-1].step if watched else 0,
        best_step=kept_step,
        before=before,
        after=after,
        cut=fit.cut,
        left_out=fit.left_out,
        is_bound=isinstance(measured, TopLogitDistributions) and not measured.is_exact,
        undecided=undecided,
    )
    if state.is_main_process:
        stored = asdict(result)
        history = {name: stored[name] for name in ("before", "after", "best_step")}
        history |= {"steps": steps, "measurements": [asdict(each) for each in watched]}
        folder.write(plain, target, {RESULT_FILE: stored, HISTORY_FILE: history})
    return result
