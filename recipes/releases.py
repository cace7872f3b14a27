"""What is assembled of a run's draft and head, and what their cards say of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from eval.measuring.results import Results, check_metrics, read_results
from recipes.config import CERTIFICATE, RESULTS, PipelineConfig
from recipes.models import load_head, model_config, source_model
from recipes.run import check_found, stage_record, stored_config
from specdata.config import PromptSet
from specdata.drafts import kind_of
from specdata.errors import ConfigError, ManifestError
from specdata.prompts.reading import source_of
from specdata.sources import contents
from specdata.storage.resume import read_record

if TYPE_CHECKING:
    from torch import Tensor

    from eval.publishing.metadata import About
    from eval.publishing.release import ForEngines


def draft_release(config: PipelineConfig, engines: ForEngines | None = None) -> Callable[..., Path]:
    """Return what assembles a run's draft, by default in its own layout, and its card."""
    from eval.publishing.release import release_draft

    assert config.draft is not None
    trained, draft = stage_record(config.folder("draft"))["results"], Path(config.draft_in_use)
    what = "acceptance (an upper bound)" if trained["is_bound"] else "acceptance"
    rates = {
        f"{what} before distillation": trained["acceptance_before"],
        f"{what} after distillation": trained["acceptance_after"],
    }
    if trained["steps"] == 0:
        rates = {what: trained["acceptance_after"]}
    about = replace(
        _about(config),
        base_model=None if config.draft.init.kind == "fresh" else source_model(config),
        datasets=_texts_of_draft(stored_config(config.folder("draft"))),
        measures=rates,
    )
    kind = kind_of(model_config(str(draft)))
    if engines is None and kind.layouts:
        head = config.head_in_use if kind.engine_head else None
        linear_head = head if head and load_head(head).for_engines() else None
        engines = for_engines(draft, config.models.target, linear_head)
    return partial(release_draft, draft, about=about, engines=engines)


def head_release(config: PipelineConfig) -> Callable[..., Path]:
    """Return what assembles a run's head and its card."""
    from eval.publishing.release import release_head
    from eval.reporting.rendering import public_name

    trained = stage_record(config.head_folder)["results"]
    was = stored_config(config.head_folder)  # as it was when the head was trained
    assert was.head is not None
    draws = min(was.labels.draws, trained["epochs"] * was.head.draws)  # a pass has the next ones
    if was.head.kind_facts.lag or was.sampling.temperature == 0:
        draws = 1
    tokens = f"{draws} drafted token{'' if draws == 1 else 's'} a position"
    if was.labels.greedy:
        tokens = "the draft's likeliest token, which is kept with p"
    tokens += ", by upper bounds of acceptance where it is not exact" * was.labels.bound
    sets = _training_sets(was)
    return partial(
        release_head,
        Path(str(config.head_in_use)),
        about=replace(
            _about(config),
            base_model=config.publish.draft_id or config.draft_in_use,
            datasets=sets,
            measures=trained["after"],
        ),
        # Where top logits do not decide a position, its rollout is labelled in parts.
        trained=f"{trained['train_rows']} rollouts{' or parts of them' * bool(was.labels.logits)} "
        f"of {', '.join(map(public_name, sets))} with {tokens}",
    )


def for_engines(draft: Path, target: str, head: str | Path | None = None) -> ForEngines:
    """A draft of `draft.init.layout`, an imported one or a target's head, as engines hold it."""
    from distill.engine_layouts import LAYOUTS
    from distill.head_files import write_head
    from distill.published import write
    from eval.publishing.release import ForEngines

    confidence = _confidence(draft, target, head) if head else None
    kind = kind_of(model_config(str(draft)))
    if kind.architecture:
        layout = LAYOUTS[kind.name]
        writes = partial(write, layout, draft, target=target, confidence=confidence)
    else:
        writes = partial(write_head, draft, target=target)
    return ForEngines(kind.name, writes, is_asked=confidence is not None)


def _confidence(draft: Path, target: str, folder: str | Path) -> tuple[Tensor, Tensor]:
    """The weight (1, H + r) and bias (1,) of a head, whose sigmoid is the probability."""
    from heads.probe import check_head
    from specdata.models import load_model

    head = load_head(folder)
    if (weight_and_bias := head.for_engines()) is None:
        raise ConfigError(
            f"{folder} must be a head of kind confidence, the one form that engines ask, and "
            f"is of kind {head.kind}: train one with head.kind: confidence"
        )
    check_head(load_model(str(draft), target=target), head)
    return weight_and_bias


def measurements(config: PipelineConfig) -> Results:
    """The measurements, with models named as this run names them now."""
    evaluation = config.eval_folder
    results = read_results(evaluation / RESULTS)
    check_metrics(results, evaluation / RESULTS)
    measured, models = stage_record(evaluation)["inputs"], config.models
    names = {"target": models.target, "draft": config.draft_in_use}
    if head := config.head_in_use:
        names["head"] = head
    for role, name in names.items():
        check_found(role, name, measured.get(role), evaluation)
        if measured.get(role) != contents(name):
            raise ManifestError(
                f"the {role} {name} is not the one that {evaluation} measured (its contents "
                f"differ): restore it, or remove {evaluation} and run the evaluation again"
            )
    runs = [
        run.model_copy(
            update={
                role: models.target if role == "draft" and run.method.mtp else name
                for role, name in names.items()
                if getattr(run, role)
            }
        )
        for run in results.runs
    ]
    return results.model_copy(update={"runs": runs})


def _about(config: PipelineConfig) -> About:
    """Collect what every card of a run says."""
    from eval.publishing.metadata import About

    certificate, sentence = config.eval_folder / CERTIFICATE, None
    if certificate.exists():
        remedy = "remove it, and certify again"
        sentence = read_record(certificate, ["sentence"], remedy)["sentence"]
    return About(
        license=config.publish.license,
        language=config.publish.language,
        certificate=sentence,
        chat=config.chat_template_kwargs,
    )


def _training_sets(config: PipelineConfig) -> list[str]:
    """The sources of the prompt sets that were trained on."""
    return [
        source_of(prompts) or prompts.name
        for prompts in config.rollouts.sets
        if prompts.split == "train"
    ]


def _texts_of_draft(config: PipelineConfig) -> list[str]:
    """The sources of what a draft was trained on: conversations, and prompt sets of rollouts."""
    draft = config.draft
    assert draft is not None
    talks = draft.finetune.conversations if draft.finetune else []
    sources = [source_of(PromptSet(name, "train", 0)) or name for name in talks]
    if draft.epochs or (draft.finetune and not talks):
        sources += _training_sets(config)
    return sources
