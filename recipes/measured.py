"""results.json of a run, read and compared with what the run recorded when it was measured."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from eval.measuring.results import Results, read_results
from eval.measuring.row_checks import check_names
from recipes.config import PipelineConfig
from recipes.layout import eval_folder
from recipes.run import stage_record

RESULTS = "results.json"


def measured_results(config: PipelineConfig) -> Results:
    """The results of this run's evaluation.

    Raises:
        LostResultsError: if they are missing or damaged.
        ManifestError: if names or settings in them are not those that were measured.
    """
    here = eval_folder(config)
    results = read_results(here / RESULTS)
    if names := names_then(here):
        check_names(results, names, here / RESULTS)
    return results


def names_then(folder: Path) -> dict[str, str | None]:
    """How an evaluation called its models when it was measured; empty if its run.json lacks it.

    The run, or a model, may have been moved since; its results keep the names.
    """
    config: Any = stage_record(folder).get("config")
    try:
        output, models = Path(config["output"]), config["models"]
        trained = {
            name: str(output / name / "model") if config.get(name) else None
            for name in ("draft", "head")
        }
        draft = trained["draft"] or models["draft"]
        return {"target": models["target"], "draft": draft, "head": trained["head"]}
    except (KeyError, TypeError, AttributeError):  # a record that other code wrote
        return {}
