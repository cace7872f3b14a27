"""Whether the rows of results.json are those that were measured: what an edited file shows first.

Metrics are derived again from the counts (`eval.measuring.results.check_metrics`). Here names and
settings of the rows are compared with the registry of verifiers and, where the records of the
prompts lie beside the file, with the methods and the sampling that those were measured with.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from eval.measuring.methods import MethodConfig, rewritten
from eval.verifiers import VERIFIERS
from specdata.errors import ManifestError
from specdata.storage.resume import read_record

if TYPE_CHECKING:
    from eval.measuring.results import Results, Run


def remedy(path: Path) -> str:
    """What to do about a results.json that was changed: an imperative without a full stop."""
    return f"remove {path} and run the evaluation again, which makes it of the prompts' records"


def check_rows(results: Results, path: Path) -> None:
    """Refuse rows whose names or settings were changed after they were measured.

    Args:
        results: as they were read.
        path: the file; records of prompts are looked for beside it.

    Raises:
        ManifestError: naming the first row that differs, and what to do.
    """
    for run in results.runs:
        expected = run.verifier is None or (
            VERIFIERS[run.verifier].lossless if run.verifier in VERIFIERS else run.lossless
        )
        if run.lossless != expected:
            _refuse(path, run, f"lossless is {run.lossless}, and for its verifier it is {expected}")
    settings = _measured_settings(path.parent / "prompts")
    measured = settings.get("methods")
    if not measured or not isinstance(measured, Mapping):
        return
    for dataset in results.datasets():
        names = [run.method for run in results.of(dataset)]
        if sorted(names) != sorted(measured):
            changed = ", ".join(repr(name) for name in sorted({*names} ^ {*measured}))
            raise ManifestError(
                f"{path} was changed: the methods of {dataset} are not those in the records of its "
                f"prompts, they differ in {changed or 'how often one is named'}; {remedy(path)}"
            )
    sampling = _sampling(settings)
    for run in results.runs:
        method = _method(measured[run.method])
        for name, value in (sampling | (method.columns() if method else {})).items():
            if getattr(run, name) != value:
                _refuse(path, run, f"{name} is {getattr(run, name)!r}, measured was {value!r}")


def check_names(results: Results, names: Mapping[str, str | None], path: Path) -> None:
    """Refuse rows that name other models than were measured.

    Args:
        results: as they were read.
        names: what the evaluation called "target", "draft" and "head".
        path: the file, for the message.

    Raises:
        ManifestError: naming the first row that differs, and what to do.
    """
    for run in results.runs:
        is_plain, needs_head = run.stop is None, run.rule is not None and run.rule.needs_head
        # A rule that can use a head may have been measured without one.
        possible = {
            "target": [names["target"]],
            "draft": [None if is_plain else names["draft"]],
            "head": [names["head"]] if needs_head else [None, names["head"]],
        }
        for role, expected in possible.items():
            if (name := getattr(run, role)) not in expected:
                _refuse(path, run, f"{role} is {name!r}, measured was {expected[-1]!r}")


def _measured_settings(folder: Path) -> Mapping[str, Any]:
    """What the records of prompts say they were measured with; empty if there are none."""
    record = next(iter(sorted(folder.glob("*.json"))), None)
    if record is None:
        return {}
    stored = read_record(record, ("settings",), "remove it, and run the evaluation again")
    return rewritten(stored["settings"])


def _sampling(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The column of that name as it follows from the settings; empty if they lack a part."""
    stored = settings.get("sampling")
    shared = {name: settings[name] for name in ("max_new_tokens", "seed") if name in settings}
    if not isinstance(stored, Mapping) or len(shared) < 2:
        return {}
    return {"sampling": {**stored, **shared}}


def _method(settings: Any) -> MethodConfig | None:
    """A method as it is read today; None if it cannot be."""
    try:
        return MethodConfig.model_validate(settings)
    except (ValidationError, ValueError):
        return None


def _refuse(path: Path, run: Run, what: str) -> None:
    raise ManifestError(f"{path} was changed: {run.dataset}, {run.method}: {what}; {remedy(path)}")
