"""The text of model cards, made of results."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2 import Environment as Templates
from jinja2 import FileSystemLoader, StrictUndefined

from eval.measuring.results import Results, Run, fastest
from eval.reporting.report import COLUMNS, NOT_MEASURED, environment_rows, sections_of
from specdata.errors import ManifestError


@dataclass(frozen=True, slots=True)
class DraftFacts:
    """What a draft's card says of the model itself.

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
    """What a head's card says of the head itself; see `AcceptanceHead`."""

    name: str
    target: str
    draft: str
    hidden_size: int
    depth: int
    rejection_weight: float


def best_length(results: Results) -> int:
    """The fixed length of a lossless chain with the most tokens a second over all data sets.

    Where nothing was timed, the longest: only counts of it are known, so it is not the best.
    Token verification counts, as the engines use it; another rule only if it was not measured.
    transformers' own loop counts before ours, because the setting is for that loop.

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
        ManifestError: if no method asked a head on every data set.
    """
    groups: dict[str, list[Run]] = {}
    for run in results.runs:
        if run.rule and run.rule.needs_head and run.lossless:
            groups.setdefault(run.method, []).append(run)
    whole = {n: g for n, g in groups.items() if len(g) == len(results.datasets())}
    if not whole:
        raise ManifestError(
            "the card of a head needs a method with stop: head measured on every prompt set"
        )

    def merit(name: str) -> float:
        group = whole[name]
        if results.timed:
            return _speed(group)
        return sum(run.tokens for run in group) / sum(run.rounds for run in group)

    return whole[max(whole, key=merit)][0]


def draft_text(facts: DraftFacts, results: Results, measures: Mapping[str, float | None]) -> str:
    """The card of a draft below its metadata."""
    speculative = {
        "method": "draft_model",
        "model": facts.name,
        "num_speculative_tokens": facts.length,
    }
    return _render(
        "draft_card.md.jinja",
        results,
        facts=facts,
        measures=measures,
        sampling=results.runs[0].sampling,
        positions=_positions(results),
        speculative=shlex.quote(json.dumps(speculative)),
    )


def head_text(facts: HeadFacts, results: Results, measures: Mapping[str, float | None]) -> str:
    """The card of a head below its metadata."""
    return _render(
        "head_card.md.jinja",
        results,
        facts=facts,
        measures=measures,
        best=best_head_run(results),
        sampling=results.runs[0].sampling,
    )


def _positions(results: Results) -> list[tuple[str, Run]]:
    """For each data set its longest fixed chain: the acceptance vector that simulators ask for."""
    found = []
    for dataset in results.datasets():
        chains = [r for r in results.of(dataset) if r.drafter == "chain" and r.fixed_length]
        chains = [r for r in chains if r.verifier == "token"] or chains
        if chains:
            longest = max(chains, key=lambda run: len(run.acceptance_by_position))
            found.append((dataset, longest))
    return found


def _render(template: str, results: Results, **values: Any) -> str:
    templates = Templates(  # Markdown: the `md` filter escapes, not autoescape
        loader=FileSystemLoader(Path(__file__).parent / "templates"),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    templates.filters |= {"md": escape_markdown, "quoted": shlex.quote, "number": _number}
    found = {dataset: fastest(results.of(dataset)) for dataset in results.datasets()}
    return templates.get_template(template).render(
        columns=[name for name, _ in COLUMNS],
        meanings=COLUMNS,
        blocks=sections_of(results),
        environment=environment_rows(results),
        commit=results.environment.git_commit,
        fastest=found,
        timed=results.timed,
        batch=results.environment.batch_size,
        **values,
    )


def short_name(name: str) -> str:
    """A Hub id as it is; of a folder only its last part, which says nothing about this machine."""
    path = Path(name)
    if name.count("/") == 1 and not path.exists() and not path.is_absolute():
        return name
    # The pipeline calls its model folders "model"; the folder around it says which.
    return path.parent.name if path.name == "model" and path.parent.name else path.name


def escape_markdown(text: str) -> str:
    """Text that Markdown and HTML leave as it is within a line or a table cell."""
    return re.sub(r"([\\`*_\[\]<>|~$&])", r"\\\1", " ".join(str(text).split()))


def _number(value: float | None) -> str:
    return NOT_MEASURED if value is None else f"{value:.4g}"
