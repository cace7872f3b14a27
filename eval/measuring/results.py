"""results.json: what was run, every metric, and the raw counts that each metric is made of.

A metric in the file is never trusted alone: `check_metrics` derives it again from the generations
and refuses a file in which the two differ.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from pydantic import (
    Field,
    SerializerFunctionWrapHandler,
    ValidationError,
    field_validator,
    model_serializer,
    model_validator,
)

from eval.decode_config import ONLY_READ_BY, SERVED_BY, Method
from eval.drafting.stopping import STOPPING_RULES
from eval.measuring.environment import Environment
from eval.measuring.intervals import Interval
from eval.measuring.methods import PLAIN, baseline
from eval.measuring.metrics import Metrics, compute_metrics
from eval.measuring.records import PromptRecord, Strict
from eval.verifiers import VERIFIERS
from specdata.errors import ManifestError
from specdata.storage.files import write_json

SCHEMA_VERSION: Literal[1] = 1

REMEDY = "restore it, or remove its folder and measure again"


def columns(method: Method) -> dict[str, Any]:
    """A method as a row of results keeps it; `method_of` reads it.

    `length` is that of `Method.deepest`, and `parameters` holds every setting of what it drafts and
    of its stopping rule that has no column. Columns that a way of decoding has not are None.
    """
    drafters = {"plain": None, "speculative": method.drafter, "server": "server"}
    rule = method.stop.reported() if method.uses_draft else {}
    settings = {
        name: value
        for name in (*ONLY_READ_BY, "lookup", "match", "mtp", "verifier_args")
        if method.drafter in ONLY_READ_BY.get(name, (method.drafter,))
        and (value := getattr(method, name)) != Method.model_fields[name].default
    }
    parameters: dict[str, Any] = dict(settings.pop("verifier_args", {}))
    parameters |= {n: v for n in SERVED_BY if (v := getattr(method, n))}
    if method.drafter == "paths":
        settings["paths"] = method.paths
    if method.drafter == "tree":
        settings["siblings"] = method.how
    parameters |= {n: list(v) if isinstance(v, tuple) else v for n, v in settings.items()}
    shown = ("length", "limit", "threshold")
    return {
        "method": method.name,
        "drafter": drafters.get(method.decoder, "transformers"),
        "verifier": method.verifier if method.decoder == "speculative" else None,
        "stop": method.stop.name if method.uses_draft else None,
        "length": method.deepest if method.uses_draft else None,
        "threshold": rule.get("threshold"),
        "parameters": parameters | {n: v for n, v in rule.items() if n not in shown},
        "lossless": method.lossless,
    }


def method_of(row: Mapping[str, Any], *, draft: bool, head: bool) -> Method:
    """The method of a row of results, whose columns are as `columns` gives them.

    `draft` and `head` say whether the row names one. Raises ValueError if there is no such
    method.
    """
    drafter, parameters = row["drafter"], row["parameters"]
    is_assisted = draft or "lookup" in parameters
    decoders = {None: "plain", "transformers": "assisted" if is_assisted else "generate"}
    decoders["server"] = "server"
    fields = {"name": row["method"], "decoder": decoders.get(drafter, "speculative")}
    if ours := fields["decoder"] == "speculative":
        verifier = row["verifier"]
        named = VERIFIERS[verifier].parameters if verifier in VERIFIERS else ()
        read = (*ONLY_READ_BY, "lookup", "match", "mtp")
        fields |= {"drafter": drafter, "verifier": verifier}
        fields |= {name: parameters[name] for name in read if name in parameters}
        fields["verifier_args"] = {n: parameters[n] for n in named if n in parameters}
    if not draft:
        return Method(**(fields if ours else fields | parameters))
    if (kind := STOPPING_RULES.get(row["stop"])) is None:
        raise ValueError(f"unknown stopping rule {row['stop']!r}")
    rule = {"threshold": row["threshold"], "head": head, **parameters}
    if drafter not in ("tree", "dynamic_tree"):  # their length is in their own settings
        rule |= dict.fromkeys(("length", "limit"), row["length"])
    settings = {name: rule[name] for name in kind.model_fields if rule.get(name) is not None}
    fields["stop"] = kind.model_validate(settings)
    return Method(**fields)


class Setup(Strict):
    """The settings behind a row of a report: a method on a dataset.

    Attributes:
        method: how it was decoded; its name is unique within the dataset, and `PLAIN` for the
            target alone. Written out it is flat (`columns`).
        draft: folder or Hub id of the draft, None for plain decoding.
        head: folder or Hub id of the acceptance head, if the stopping rule reads one.
        split: of the dataset: where others are measured, too, methods are chosen on `dev`.
        longest_draft: tokens that the draft can propose at most, if that is limited.
        sampling: a `SamplingConfig`, and what else fixes the output (max_new_tokens, seed).
        engine: how forwards of ours ran; written among the method's parameters, unless "eager".
    """

    dataset: str
    method: Method
    target: str
    draft: str | None
    head: str | None
    split: str = "test"
    longest_draft: int | None = None
    sampling: dict[str, float | int | None]
    engine: str = "eager"

    @property
    def name(self) -> str:
        """The method's name."""
        return self.method.name

    @model_validator(mode="before")
    @classmethod
    def _of_columns(cls, stored: Any) -> Any:
        """The method of a row that was written out."""
        if not isinstance(stored, Mapping) or isinstance(stored.get("method"), Method):
            return stored
        rest = {name: value for name, value in stored.items() if name not in _COLUMNS}
        # What a validator has seen is no longer known to be JSON, which has arrays alone.
        rest["intervals"] = {k: tuple(ends) for k, ends in stored["intervals"].items()}
        row = {name: stored.get(name) for name in _COLUMNS}
        parameters = dict(stored.get("parameters", {}))
        engine = parameters.pop("engine", "eager")
        draft, head = (stored.get(role) is not None for role in ("draft", "head"))
        method = method_of(row | {"parameters": parameters}, draft=draft, head=head)
        return {**rest, "method": method, "engine": engine}

    @model_serializer(mode="wrap")
    def _flat(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Written out, the method beside the rest."""
        row: dict[str, Any] = handler(self)
        method, engine = columns(self.method), row.pop("engine")
        if engine != "eager":
            method["parameters"] = {**method["parameters"], "engine": engine}
        return {**row, **method}


_COLUMNS = tuple(columns(Method(name=PLAIN)))


class Run(Metrics, Setup):
    """One method on one dataset: what was run, its metrics, and its generations."""

    generations: list[PromptRecord] = Field(min_length=1)

    @field_validator("generations", mode="before")
    @classmethod
    def _rows(cls, stored: Any) -> Any:
        """Generations as a file may hold them: name -> a value a generation, which takes less."""
        if not isinstance(stored, dict):
            return stored
        return [
            dict(zip(stored, values, strict=True)) for values in zip(*stored.values(), strict=True)
        ]


ENOUGH = 16
"""Places of a row of the table of verifiers; on fewer, luck would be called the best."""


class VerifierRow(Strict):
    """One verifier on one kind of draft, enumerated: a row of `eval.analysis.verifier_table`.

    Attributes:
        dataset: name of the prompt set, or `eval.measuring.pooled.ALL_SETS`.
        draft_kind: such as "chain of 4", a key of `eval.analysis.forms.FORMS`.
        expected_tokens: that a call of the target emits.
        gain: expected tokens over those of the kind's first verifier in the table, minus 1, at the
            places that both were enumerated at; None for that one itself.
        ceiling: expected tokens of the best rule at the same places: for siblings any lossless
            rule's optimum, for chains block verification; None where none is known.
        share_of_ceiling: accepted tokens over those of that rule. On chains no lossless one has
            more than 1; on siblings it is a mean over drafts that were drawn, and may by luck.
        microseconds: median of one sampled verification.
        speedup: predicted over the target alone; None without times.
    """

    dataset: str
    verifier: str
    parameters: dict[str, Any]
    draft_kind: str
    lossless: bool
    expected_tokens: Interval
    gain: Interval | None
    positions: int
    ceiling: float | None
    share_of_ceiling: float | None
    microseconds: float
    speedup: float | None

    @property
    def name(self) -> str:
        """The verifier with its parameters, as in "importance (luce)"."""
        values = [
            f"{k} {v}" if isinstance(v, int | float) else v for k, v in self.parameters.items()
        ]
        return f"{self.verifier} ({', '.join(values)})" if values else self.verifier


class Results(Strict):
    """The whole file; `repeats` of it are what further evaluations of the same settings measured.

    That is, for each of `runs`: the fields of its generations that may differ, a list a field.
    """

    schema_version: Literal[1]
    environment: Environment
    runs: list[Run]
    verifiers: list[VerifierRow] = Field(default_factory=list)
    repeats: list[list[dict[str, list[Any]]]] = Field(default_factory=list)

    @property
    def judged(self) -> list[Run]:
        """Runs that figures are of: without those of split dev, if there are others."""
        return [run for run in self.runs if run.split != "dev"] or self.runs

    def datasets(self) -> list[str]:
        """Names of the sets that figures are of, in the order they were run."""
        return list(dict.fromkeys(run.dataset for run in self.judged))

    def chosen_on(self) -> list[str]:
        """Names of the sets that methods are chosen on, if those are others."""
        return list(dict.fromkeys(r.dataset for r in self.runs if r.dataset not in self.datasets()))

    @property
    def timed(self) -> bool:
        """True if speeds were measured; in batches only counts are."""
        return any(run.tokens_per_second is not None for run in self.runs)

    def of(self, dataset: str) -> list[Run]:
        """Runs of one dataset, in the order they were run."""
        return [run for run in self.runs if run.dataset == dataset]

    def repetitions(self) -> list[Results]:
        """The evaluations that are in here, each by itself, the first one first."""
        alone = [self.model_copy(update={"repeats": []})]
        for repeat in self.repeats:
            measured = []
            for run, columns in zip(self.runs, repeat, strict=True):
                rows = zip(run.generations, *columns.values(), strict=True)
                records = [
                    replace(old, **dict(zip(columns, new, strict=True))) for old, *new in rows
                ]
                measured.append((run, records))
            alone.append(build_results(self.environment, measured))
        return alone


def build_results(
    environment: Environment, measured: Iterable[tuple[Setup, Sequence[PromptRecord]]]
) -> Results:
    """Turn raw records into everything results.json holds.

    `measured` is what was run (another evaluation's run, for example) with its generations; names
    are unique within a dataset. Raises ValueError if methods of a dataset cover other prompts than
    its plain run, or if counts contradict each other.
    """
    rows = {(setup.dataset, setup.name): (setup, records) for setup, records in measured}
    runs = []
    for (dataset, name), (setup, records) in rows.items():
        plain = rows.get((dataset, baseline(setup.method)))
        try:
            metrics = compute_metrics(records, plain and plain[1])
        except ValueError as error:
            raise ValueError(f"{dataset}, {name}: {error}") from error
        settings = {field: getattr(setup, field) for field in Setup.model_fields}
        runs.append(Run(**settings, **dict(metrics), generations=list(records)))
    return Results(schema_version=SCHEMA_VERSION, environment=environment, runs=runs)


def check_metrics(results: Results, path: Path = Path("results.json")) -> None:
    """Refuse results in which a published metric is not what its generations give."""
    for run in results.runs:
        where, over = f"{run.dataset}, {run.name}", baseline(run.method)
        plain = [each.generations for each in results.of(run.dataset) if each.name == over]
        try:
            expected = compute_metrics(run.generations, plain[0] if plain else None)
        except ValueError as error:
            raise ManifestError(
                f"{path} was changed: {where}: unusable generations: {error}; {REMEDY}"
            ) from error
        for name, value in expected:
            if not _same(getattr(run, name), value):
                raise ManifestError(
                    f"{path} was changed: {where}: {name} is {getattr(run, name)} in the file but "
                    f"its generations give {value}; {REMEDY}"
                )
    try:
        results.repetitions()
    except (TypeError, ValueError) as error:
        raise ManifestError(f"{path} was changed: unusable repeats: {error}; {REMEDY}") from error


def write_results(path: Path, results: Results) -> None:
    """Write results.json, whole or not at all."""
    write_json(path, results.model_dump(mode="json"))


def read_results(path: Path) -> Results:
    """Read and validate results.json."""
    # Not the advice to remove a folder that no evaluation made.
    is_ours = (path.parent / "run.json").is_file()
    again = f"remove {path.parent} and run" if is_ours else "give another's, or run"
    if path.exists() and not path.is_file():  # a pipe would be waited for
        raise ManifestError(f"{path} must be a regular file: {again} the evaluation")
    try:
        return Results.model_validate_json(path.read_bytes())
    except FileNotFoundError as error:
        raise ManifestError(
            f"no results at {path}: {again} the evaluation (draftsmith run-eval)"
        ) from error
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(str(part) for part in first["loc"]) or "the file"
        raise ManifestError(
            f"{path} must be a results.json of schema version {SCHEMA_VERSION}: {where}:"
            f" {first['msg']} ({error.error_count()} problems in all); {again} the evaluation again"
        ) from error


def _same(left: Any, right: Any) -> bool:
    """Equal up to the last bits that another numpy build may round differently."""
    if isinstance(left, Mapping) and isinstance(right, Mapping):
        return left.keys() == right.keys() and all(_same(left[k], right[k]) for k in left)
    if isinstance(left, (list, tuple)) and isinstance(right, (list, tuple)):
        return len(left) == len(right) and all(map(_same, left, right))
    if isinstance(left, float) and isinstance(right, float):
        return math.isclose(left, right, rel_tol=1e-9, abs_tol=1e-12)
    return bool(left == right)
