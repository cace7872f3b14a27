"""Model cards of drafts and heads, made of results."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eval.analysis.head_verdict import QUALITY_COLUMNS, HeadVerdict
from eval.measuring.results import Results, Run, fastest
from eval.reporting.lengths import MeasuredLength
from eval.reporting.metadata import hub_id
from eval.reporting.rendering import render
from eval.reporting.report import COLUMNS, environment_rows, sections_of
from eval.reporting.serving import acceptance_positions, serving_lines
from specdata.errors import ManifestError


@dataclass(frozen=True, slots=True)
class DraftFacts:
    """What a draft's card states about the model itself.

    Args:
        name: Hub id, or the folder's name.
        target: the model it drafts for.
        longest: the longest fixed length that was measured.
        lengths: engine -> the best length that was measured with it.
        parameters: number of weights.
        positions: longest context.
        vocabulary: size of the draft's output.
        target_vocabulary: size of the target's output.
        heads: attention heads of draft and target.
        dtype: of the weights.
        kept: tokens that it can propose, if its vocabulary is reduced.
    """

    name: str
    target: str
    longest: int
    lengths: Mapping[str, MeasuredLength | None]
    parameters: int
    positions: int
    vocabulary: int
    target_vocabulary: int
    heads: tuple[int, int]
    dtype: str
    kept: int | None = None


@dataclass(frozen=True, slots=True)
class TrainedOn:
    """What a head was trained on.

    Args:
        sets: the prompt sets.
        rollouts: how many completions of the target.
        draws: tokens drawn from the draft at each of their positions.
    """

    sets: Sequence[str]
    rollouts: int
    draws: int


@dataclass(frozen=True, slots=True)
class HeadFacts:
    """What a head's card states about the head itself.

    Args:
        name: Hub id, or the folder's name.
        target: the model whose acceptance it predicts.
        draft: the model whose hidden states it reads.
        kind: of the head.
        hidden_size: H of the draft.
        depth: residual blocks before the linear layer.
        width: of these blocks where it is not H; else None.
        rejection_weight: weight of rejections in its training loss.
        reads: names of the features that it reads.
        moments: when it judges a token, in words.
        trained: what it was trained on, if that is known.
        lag: whether it judges a token only once the next one has been drawn.
    """

    name: str
    target: str
    draft: str
    kind: str
    hidden_size: int
    depth: int
    width: int | None
    rejection_weight: float
    reads: Sequence[str]
    moments: Sequence[str]
    trained: TrainedOn | None
    lag: bool


def best_head_run(results: Results) -> Run:
    """The run with a head that gained most over plain decoding on average.

    Thresholds are compared by tokens a second over all data sets; where nothing was timed, by
    tokens a forward of the target.

    Raises:
        ManifestError: if no method used a head on every data set.
    """
    groups: dict[str, list[Run]] = {}
    for run in results.runs:
        if run.rule and run.rule.needs_head and run.lossless:
            groups.setdefault(run.method, []).append(run)
    complete = {
        method: runs for method, runs in groups.items() if len(runs) == len(results.datasets())
    }
    if not complete:
        raise ManifestError(
            "the card of a head needs a method with stop: head measured on every prompt set"
        )

    def merit(method: str) -> float:
        runs, spent = complete[method], 0.0
        for run in runs:
            spent += run.seconds["total"] if results.timed else run.rounds
        return sum(run.tokens for run in runs) / spent if spent else 0.0

    return complete[max(complete, key=merit)][0]


def draft_text(
    facts: DraftFacts,
    results: Results,
    measures: Mapping[str, float | None],
    unnamed: Sequence[str] = (),
) -> str:
    """The card of a draft below its metadata.

    Args:
        facts: of the model.
        results: its measurements, without folders of this machine.
        measures: figures of its training.
        unnamed: base models and data sets that the metadata cannot name.
    """
    return _card(
        "draft_card.md.jinja",
        results,
        facts=facts,
        measures=measures,
        unnamed=unnamed,
        sampling=results.runs[0].sampling,
        positions=acceptance_positions(results),
        serving=serving_lines(facts.name, facts.target, facts.heads, facts.lengths),
    )


def head_text(
    facts: HeadFacts,
    results: Results,
    measures: Mapping[str, float | None],
    verdict: HeadVerdict,
    unnamed: Sequence[str] = (),
) -> str:
    """The card of a head below its metadata; the arguments are like those of `draft_text`."""
    return _card(
        "head_card.md.jinja",
        results,
        facts=facts,
        measures=measures,
        unnamed=unnamed,
        verdict=verdict,
        quality_columns=QUALITY_COLUMNS,
        best=head_run(results, verdict),
        sampling=results.runs[0].sampling,
    )


def head_run(results: Results, verdict: HeadVerdict) -> Run:
    """A run of the head at the threshold that its card names: chosen on held-out rollouts if any.

    Raises:
        ManifestError: if no method used a head on every data set.
    """
    best = best_head_run(results)
    return next((run for run in results.runs if run.method == verdict.method), best)


def _card(template: str, results: Results, **values: Any) -> str:
    return render(
        template,
        columns=[name for name, _ in COLUMNS],
        meanings=COLUMNS,
        sections=sections_of(results),
        environment=environment_rows(results),
        commit=results.environment.git_commit,
        fastest={dataset: fastest(results.of(dataset)) for dataset in results.datasets()},
        timed=results.timed,
        batch=results.environment.batch_size,
        **values,
    )


def public_name(name: str) -> str:
    """A Hub id as it is; of a folder only its last part, so that no local path is published."""
    if hub_id(name) is not None:
        return name
    path = Path(name)
    # The pipeline calls its model folders "model"; the folder around it says which.
    return path.parent.name if path.name == "model" and path.parent.name else path.name
