"""Model cards of drafts and heads, made of results."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eval.measuring.results import Results, Run, fastest
from eval.reporting.rendering import render
from eval.reporting.report import COLUMNS, environment_rows, sections_of
from specdata.errors import ManifestError


@dataclass(frozen=True, slots=True)
class DraftFacts:
    """What a draft's card states about the model itself.

    Args:
        name: Hub id, or the folder's name.
        target: the model it drafts for.
        length: measured best number of drafted tokens a round; where nothing was timed, the
            longest measured.
        timed: whether speeds were measured.
        parameters: number of weights.
        positions: longest context.
        vocabulary: size of the draft's output.
        target_vocabulary: size of the target's output.
        dtype: of the weights.
    """

    name: str
    target: str
    length: int
    timed: bool
    parameters: int
    positions: int
    vocabulary: int
    target_vocabulary: int
    dtype: str


@dataclass(frozen=True, slots=True)
class HeadFacts:
    """What a head's card states about the head itself.

    Args:
        name: Hub id, or the folder's name.
        target: the model whose acceptance it predicts.
        draft: the model whose hidden states it reads.
        hidden_size: H of the draft.
        depth: residual blocks before the linear layer.
        rejection_weight: weight of rejections in its training loss.
    """

    name: str
    target: str
    draft: str
    hidden_size: int
    depth: int
    rejection_weight: float


def best_length(results: Results) -> int:
    """The fixed length of a lossless chain with the most tokens a second over all data sets.

    Where nothing was timed, the longest: then only counts are known, and they name no best.
    Measurements of transformers' own loop are preferred, because the setting is for that loop;
    then those of token verification, which the serving engines use; then those of other rules.

    Raises:
        ManifestError: if no fixed length was measured on every data set.
    """
    fixed = [run for run in results.runs if run.fixed_length and run.lossless and run.length]
    for chosen in (
        [run for run in fixed if run.drafter == "transformers"],
        [run for run in fixed if run.drafter == "chain" and run.verifier == "token"],
        [run for run in fixed if run.drafter == "chain"],
    ):
        by_length = _on_all(chosen, len(results.datasets()))
        if by_length:
            return max(by_length, key=lambda length: (_speed(by_length[length]), length))
    raise ManifestError(
        "the card of a draft needs a measured draft length: evaluate a method with a fixed length"
        " (stop: fixed) on every prompt set"
    )


def _on_all(runs: list[Run], datasets: int) -> dict[int, list[Run]]:
    """Length -> its runs, for lengths measured on each data set."""
    by_length: dict[int, list[Run]] = {}
    for run in runs:
        by_length.setdefault(run.length or 0, []).append(run)
    return {
        length: group
        for length, group in by_length.items()
        if len({run.dataset for run in group}) == datasets
    }


def _speed(runs: list[Run]) -> float:
    """Tokens a second over all data sets; 0 if nothing was timed."""
    seconds = sum(run.seconds["total"] for run in runs)
    return sum(run.tokens for run in runs) / seconds if seconds else 0.0


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
        runs = complete[method]
        if results.timed:
            return _speed(runs)
        return sum(run.tokens for run in runs) / sum(run.rounds for run in runs)

    return complete[max(complete, key=merit)][0]


def draft_text(facts: DraftFacts, results: Results, measures: Mapping[str, float | None]) -> str:
    """The card of a draft below its metadata."""
    speculative = {
        "method": "draft_model",
        "model": facts.name,
        "num_speculative_tokens": facts.length,
    }
    return _card(
        "draft_card.md.jinja",
        results,
        facts=facts,
        measures=measures,
        sampling=results.runs[0].sampling,
        positions=acceptance_positions(results),
        speculative=shlex.quote(json.dumps(speculative)),
    )


def head_text(facts: HeadFacts, results: Results, measures: Mapping[str, float | None]) -> str:
    """The card of a head below its metadata."""
    return _card(
        "head_card.md.jinja",
        results,
        facts=facts,
        measures=measures,
        best=best_head_run(results),
        sampling=results.runs[0].sampling,
    )


def acceptance_positions(results: Results) -> list[tuple[str, Run]]:
    """For each data set its longest fixed chain: the acceptance vector that simulators ask for."""
    positions = []
    for dataset in results.datasets():
        chains = [r for r in results.of(dataset) if r.drafter == "chain" and r.fixed_length]
        chains = [r for r in chains if r.verifier == "token"] or chains
        if chains:
            longest = max(chains, key=lambda run: len(run.acceptance_by_position))
            positions.append((dataset, longest))
    return positions


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
    path = Path(name)
    if name.count("/") == 1 and not path.exists() and not path.is_absolute():
        return name
    # The pipeline calls its model folders "model"; the folder around it says which.
    return path.parent.name if path.name == "model" and path.parent.name else path.name
