"""How good a run's head is: `eval.analysis.quality` of its labels, kept beside its results."""

from __future__ import annotations

from pathlib import Path

from eval.analysis.quality import QUALITY, Quality, head_quality
from eval.measuring.results import Results
from recipes.config import PipelineConfig
from recipes.layout import RESULTS, draft_in_use, eval_folder, folder, head_in_use
from recipes.run import finished
from specdata.storage.files import fingerprint


def quality_file(config: PipelineConfig) -> Path:
    """Where an evaluation keeps it."""
    return eval_folder(config) / QUALITY


def known_quality(config: PipelineConfig) -> Quality | None:
    """What is kept, if it is of this run's results, labels, draft and head as they are."""
    return Quality.read(quality_file(config), _made_of(config)) if config.head else None


def quality_of(config: PipelineConfig, results: Results) -> Quality | None:
    """What is kept, or made now of the run's labels, without keeping it.

    Args:
        config: the run.
        results: its evaluation.

    Returns:
        None without a head, without labels of dev rollouts, or if those were made under another
        sampler than this evaluation's: they say nothing of it.
    """
    where = folder(config, "labels")
    head = head_in_use(config)
    if head is None or not finished(where):
        return None
    if known := known_quality(config):
        return known
    from heads import BaseHead
    from specdata.labels.make import load_labels, sampling_of
    from specdata.models import load_model

    if sampling_of(where) != config.sampling:
        return None
    draft = load_model(draft_in_use(config), load=config.models.loading("draft"))
    return head_quality(
        load_labels(where, config.sampling),
        draft,
        BaseHead.from_pretrained(head).to(draft.device),
        sampling=config.sampling,
        results=results,
        made_of=_made_of(config),
    )


def _made_of(config: PipelineConfig) -> dict[str, str | None]:
    """Contents of what a head's quality is made of."""
    return {
        "results": fingerprint(str(eval_folder(config) / RESULTS)),
        "labels": fingerprint(str(folder(config, "labels"))),
        "draft": fingerprint(draft_in_use(config)),
        "head": fingerprint(head_in_use(config) or ""),
    }
