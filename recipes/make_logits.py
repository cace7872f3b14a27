"""Stage 1b: keep the target's largest logits along its rollouts, which later stages read instead.

python recipes/make_logits.py --config FILE.yaml
draftsmith make-logits --config FILE.yaml       # draftsmith launch PROFILE: in several processes
"""

from __future__ import annotations

import sys
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from recipes.config import PipelineConfig, absolute, named
from recipes.models import check_loading, sizes_of
from recipes.recipe import Recipe
from recipes.run import Stage, say, stage_record
from recipes.sizes import PAIR, ROLLOUT_TOKEN, rows_size
from specdata.errors import ConfigError
from specdata.processes import is_main
from specdata.storage.resume import differences
from specdata.terminal import progress

if TYPE_CHECKING:
    from datasets import Dataset

    from specdata.logits.make import ModelLogits
    from specdata.logits.served import ServedLogits


class Logits(Stage):
    """Keep the target's largest logits along the rollouts."""

    name, sections = "logits", ("logits",)

    def stored_settings(self) -> dict[str, Any]:
        """Return its section, and how the target is loaded."""
        return {"logits": self.section.stored_settings(), **self.config.loaded("target")}

    @property
    def inputs(self) -> dict[str, str]:
        """The target and its rollouts."""
        config = self.config
        return {"target": config.models.target, "rollouts": str(config.folder("rollouts"))}

    @property
    def size(self) -> str:
        """The size of as many rows as there are rollouts."""
        # Three numbers a token beside the logits.
        return rows_size(self.config, ROLLOUT_TOKEN + PAIR * self.section.top_logits + 12)

    def check(self) -> None:
        """Refuse a target that cannot be loaded so."""
        check_loading(self.config, "logits")

    def run(self) -> dict[str, Any]:
        """Run the target, or ask its server, along the rollouts."""
        from specdata.logits.make import make_logits
        from specdata.models import load_tokenizer, vocabulary_fingerprint
        from specdata.storage.dataset import load_stored, read_manifest

        config = self.config
        tokenizer = load_tokenizer(config.models.target)
        rollouts = load_stored(config.folder("rollouts"))
        check_rollouts(config, rollouts)
        source = provenance(self, vocabulary_fingerprint(tokenizer))
        with (
            progress(len(rollouts), "logits", "rollout", is_shown=is_main()) as bar,
            ExitStack() as stack,
        ):
            maker, served = _source(config, rollouts, stack)
            make_logits(
                maker,
                rollouts,
                self.folder,
                self.section,
                settings=self.dataset_settings({**source, **served}),
                report=bar.update,
            )
        manifest = read_manifest(self.folder)
        more = {name: manifest["settings"][name] for name in ("top_logits", "vocabulary")}
        return {**manifest["counts"], **more}

    def show(self, results: dict[str, Any]) -> None:
        """Print how many are stored."""
        say(
            f"  {results['top_logits']} of {results['vocabulary']:,} logits stored at each of "
            f"{results['tokens']:,} positions of {results['rows']:,} rollouts"
        )


def _source(
    config: PipelineConfig, rollouts: Dataset, stack: ExitStack
) -> tuple[ModelLogits | ServedLogits, dict[str, Any]]:
    """The source of the logits, and what the manifest says of a server."""
    from specdata.lm_head import find_lm_head
    from specdata.logits.make import ModelLogits
    from specdata.models import load_configs, load_model
    from specdata.prepack import prepacked

    models, settings = config.models, config.logits
    assert settings is not None
    if settings.backend == "transformers":
        target = find_lm_head(load_model(models.target, load=models.loading("target")))
        stack.enter_context(prepacked(target.model))
        count = min(settings.top_logits, target.vocabulary)
        return ModelLogits(target, count), {}
    from specdata.logits.served import ServedLogits, check_lengths
    from specdata.server.client import ServerClient

    client = ServerClient(settings.server, "logits.server")
    stack.callback(client.close)
    served = settings.server.model or models.target
    check_lengths(rollouts, client.check(served))
    vocabulary = load_configs(models.target)[0].get_text_config().vocab_size
    count = min(settings.top_logits, vocabulary)
    source = ServedLogits(client, served, count, vocabulary)
    return source, {"served": served}


def along_rollouts(config: PipelineConfig, draft: str, logits: str | None) -> dict[str, str]:
    """The inputs of a stage that reads both models along the rollouts, or top logits instead."""
    inputs = {"target": config.models.target, "draft": draft}
    inputs["rollouts"] = str(config.folder("rollouts"))
    return {**inputs, "logits": logits} if logits else inputs


def provenance(stage: Stage, tokenizer: str) -> dict[str, Any]:
    """The settings that labels and top logits are made of, beside the draft.

    The main process has hashed the rollouts for the run.json of a stage that is at work.
    """
    models = stage.config.models
    return {
        "target": identity(models.target),
        "tokenizer": tokenizer,
        "rollouts": stage_record(stage.folder)["inputs"]["rollouts"],
        "dtype": models.dtype,
    }


def identity(name: str) -> dict[str, str]:
    """A model's name, and its commit on the Hub or what its folder holds."""
    from specdata.models import revision_of

    return {"name": name, "revision": revision_of(name)}


def rows_with_logits(
    config: PipelineConfig, logits: str, key: str, source: dict[str, Any], rollouts: Dataset
) -> Dataset:
    """The rows of a dataset with top logits that belong to some of this run's rollouts.

    `key` is the setting that names it, `source` what it must have been made of (`made_of`).
    """
    from specdata.storage.dataset import load_stored, read_manifest
    from specdata.top_logits import TopLogits

    stored = dict(read_manifest(Path(logits))["settings"])
    stored |= stored.get("load", {}).get("target", {})
    load = config.models.loading("target")
    source = {**source, "dtype": load.dtype}
    stored_source = {name: stored.get(name) for name in source}
    if changed := differences(stored_source, source, ("target.name",)):
        raise ConfigError(
            f"{key} {logits} was made of other rollouts or by another target: leave it out, or "
            "name one of the same. Stored -> this run's:\n  " + "\n  ".join(changed)
        )
    TopLogits.of(Path(logits))
    rows = load_stored(Path(logits))
    places = {name: place for place, name in enumerate(_names(rows))}
    names = _names(rollouts)
    if missing := sum(name not in places for name in names):
        raise ConfigError(
            f"{key} {logits} lacks {missing} of {len(names)} rollouts that are needed (labels of a "
            "run with draft.held_out_share hold only that share): make one of all rollouts with "
            "draftsmith make-logits"
        )
    return rows.select([places[name] for name in names])


def _names(rows: Dataset) -> list[tuple[Any, ...]]:
    """The identity of the rows of one dataset."""
    from specdata.storage.columns import arrow_table

    columns = arrow_table(rows, "example_id", "sample", "turn").to_pydict().values()
    return list(zip(*columns, strict=True))


def check_rollouts(config: PipelineConfig, rows: Dataset) -> None:
    """Refuse rollouts that another target wrote; with states, also one in other precision."""
    from specdata.models import revision_of
    from specdata.storage.dataset import read_manifest
    from specdata.storage.schema import TARGET_STATES, TARGET_TAPS

    source, models = config.folder("rollouts"), config.models
    made = dict(read_manifest(source)["settings"])
    made |= made.get("load", {}).get("target", {})
    written, revision = made.get("target", {}).get("revision"), revision_of(models.target)
    stored: dict[str, Any] = {"target": {"revision": written}}
    now: dict[str, Any] = {"target": {"revision": revision}}
    # Not of rollouts from elsewhere, nor of a Hub id whose commit is not known yet.
    if written is None or revision == models.target:
        stored = now = {}
    if {*TARGET_STATES.names, *TARGET_TAPS.names} & {*rows.column_names}:
        stored, now = stored | {"dtype": made["dtype"]}, now | {"dtype": models.dtype_of("target")}
    if changed := differences(stored, now):
        raise ConfigError(
            f"{source} is of another target, or holds its states in another models.dtype: restore "
            "it, or make the rollouts again. Stored -> this run's:\n  " + "\n  ".join(changed)
        )


def check_logits(config: PipelineConfig, key: str, logits: str, *, bound: bool) -> None:
    """Refuse top logits that a stage cannot learn from, as far as is known. Raises ConfigError."""
    from specdata.top_logits import TopLogits  # here: it needs torch

    made_here = absolute(logits) == absolute(config.folder("logits")) and config.logits
    if not made_here and not Path(logits).is_dir():
        raise ConfigError(
            f"{key} must be a folder with top target logits, and {logits} is none: make it with "
            "draftsmith make-logits (section logits), or leave it out"
        )
    with named(key):
        if not made_here:
            stored = TopLogits.of(Path(logits))
        elif (size := sizes_of(config, config.models.target).get("vocab_size")) is None:
            return  # not known yet
        else:
            stored = TopLogits(min(made_here.top_logits, size), size)
        stored.distributions(config.sampling, bound=bound)


RECIPE = Recipe("Keep the target's largest logits along its rollouts.", (Logits,))

if __name__ == "__main__":
    sys.exit(RECIPE.run())
