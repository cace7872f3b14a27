"""What an evaluation measures, loaded: prompts, models, and rules' parameters that fit labels."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from eval.measuring.methods import needs_fit, with_fit
from recipes.config import PipelineConfig
from recipes.models import load_head, load_models, load_own_head, shared_tokenizer
from recipes.run import say
from specdata.sampling import early_end_words
from specdata.storage.files import PROGRESS, locked, write_json
from specdata.storage.resume import read_record

if TYPE_CHECKING:
    from eval.measuring.experiment import Experiment
    from specdata.prompts.prompt import LoadedPrompts

CALIBRATION = "calibration.json"
"""Beside an evaluation's results, so that a resume uses the same."""


def load_experiment(
    config: PipelineConfig,
) -> tuple[Experiment, LoadedPrompts, dict[str, Any] | None]:
    """Load what an evaluation measures.

    Returns:
        The experiment, with fitted parameters of rules where methods give none; its prompts; those
        parameters, if any were fitted.
    """
    from eval.measuring.environment import describe_environment
    from eval.measuring.experiment import Artefacts, Experiment
    from specdata.drafts.masks import DEPTHS, MASK
    from specdata.models import end_ids, prompt_limits
    from specdata.prompts.loading import load_prompts
    from specdata.storage.dataset import example_ids
    from specdata.threads import using_threads

    models, evaluation, output = config.models, config.eval, config.eval_folder
    tokenizer = shared_tokenizer(models.target, config.draft_in_use)
    learns, rollouts = config.draft or config.head, config.folder("rollouts")
    if learns and not rollouts.exists():
        say(f"{rollouts} is not there, so prompts that the run learnt from cannot be left out")
    loaded = load_prompts(
        evaluation.sets,
        tokenizer,
        seed=config.seed,
        template_variables=config.chat_template_kwargs,
        trained_on=example_ids(rollouts, "train") if learns else (),
        **prompt_limits(models.target, evaluation.max_new_tokens),
    )
    if later := sum(len(each.follow_ups) for each in loaded.prompts):
        say(f"{later} later turns, which would follow the target's answers, are not measured")
    parts, prompts = {(each.dataset, each.split) for each in loaded.prompts}, []
    splits = Counter(dataset for dataset, _ in parts)
    for each in loaded.prompts:
        is_part = splits[each.dataset] > 1  # a set of two splits is two
        name = f"{each.dataset}-{each.split}" if is_part else each.dataset
        prompts.append(replace(each, dataset=name))
    target, draft = load_models(config)
    if words := early_end_words(tokenizer, end_ids(target.generation_config)):
        say(words)
    settings = draft.config.to_dict()
    if settings.get(MASK) is not None and DEPTHS not in settings:
        say(
            f"{config.draft_in_use} names a mask ({MASK}) and no {DEPTHS}, so it drafts a token a "
            f"forward: if it was trained for several (PARD), write {DEPTHS} into its config.json, "
            "the most that it proposes"
        )
    head, fitted = None, None
    if head_name := config.evaluated_head:
        remedy = f"remove {config.head_folder} and train it again with recipes/train_head.py"
        head = load_head(head_name, f"; {remedy}")
    if needs_fit(evaluation):
        with locked(output / PROGRESS / "calibration.lock"):  # one fits, all read
            fitted = fitted_values(config)
            write_json(output / CALIBRATION, fitted)
        evaluation = with_fit(evaluation, fitted)
    artefacts = Artefacts(
        target,
        draft,
        head,
        {"target": models.target, "draft": config.draft_in_use, "head": head_name},
        load_own_head(config, target) if any(each.mtp for each in evaluation.methods) else None,
    )
    with using_threads(evaluation.threads):
        environment = describe_environment(
            device=str(target.device),
            dtype=models.dtype_of("target"),
            draft_dtype=models.dtype_of("draft"),
            batch_size=evaluation.batch,
        )
    sampling, seed = config.sampling, config.seed
    experiment = Experiment(artefacts, prompts, output, evaluation, sampling, seed, environment)
    return experiment, loaded, fitted


def fitted_values(config: PipelineConfig) -> dict[str, Any]:
    """Parameters of stopping rules that no method gives: those that an evaluation keeps, if any.

    Besides their values it holds the number of labelled `rows` that they were fitted on.
    """
    path = config.eval_folder / CALIBRATION
    if path.is_file():
        return read_record(path, (), f"remove {path} and run the same command again")
    fitted = {"rows": 0}
    if config.head:
        from eval.analysis.traces import fitted_on

        rules = [method.stop for method in config.eval.methods]
        fitted = fitted_on(config.folder("labels"), rules, config.sampling)
    if rows := fitted["rows"]:
        names = ", ".join(name for name in fitted if name != "rows")
        say(f"  {names} of stopping rules fitted on {rows} labelled rollouts")
    else:
        why = "labels of drawn tokens" if config.head else "labels (no head section)"
        say(f"  this run has no {why}: stopping rules keep their first guesses")
    return fitted
