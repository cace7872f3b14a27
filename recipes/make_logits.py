"""Stage 1b: keep the target's largest logits along its rollouts, which later stages read instead.

python recipes/make_logits.py --config FILE.yaml
draftsmith make-logits --config FILE.yaml       # draftsmith launch PROFILE: in several processes
"""

from __future__ import annotations

import sys
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, Any

from recipes.caches import made_of
from recipes.checks import check_logits, is_shared
from recipes.config import PipelineConfig
from recipes.layout import by_content, folder, logits_stage
from recipes.next_steps import after_logits
from recipes.recipe import Recipe
from recipes.run import Stage, made_as_asked, need, run_stage, say
from specdata.errors import ConfigError
from specdata.processes import is_main
from specdata.terminal import TokenProgress, progress

if TYPE_CHECKING:
    from collections.abc import Callable

    from datasets import Dataset

    from specdata.labels.labeller import PartDone


def stages(config: PipelineConfig) -> list[Stage]:
    """What this recipe does. Raises ConfigError without a logits section."""
    if config.logits is None:
        raise ConfigError("this configuration has no logits section, so there are none to keep")
    return [logits_stage(config)]


def main(config: PipelineConfig) -> dict[str, Any]:
    """Keep the logits, and print how many."""
    (stage,) = stages(config)
    if not made_as_asked(stage):
        check_logits(config)
    need(folder(config, "rollouts"), "make_rollouts.py")
    counts = run_stage(stage, config, partial(_keep, config, stage))
    say(
        f"  {counts['top_logits']} of {counts['vocabulary']:,} logits kept at each of "
        f"{counts['tokens']:,} positions of {counts['rows']:,} rollouts"
    )
    return counts


def _keep(config: PipelineConfig, stage: Stage) -> dict[str, Any]:
    from specdata.models import load_tokenizer, vocabulary_fingerprint
    from specdata.storage.dataset import load_stored
    from specdata.storage.manifest import read_manifest

    tokenizer = load_tokenizer(config.models.target)
    rollouts = load_stored(folder(config, "rollouts"))
    source = made_of(config, vocabulary_fingerprint(tokenizer))
    with progress(len(rollouts), "logits", "rollout", is_shown=is_main()) as bar:
        shown = TokenProgress(bar)
        with ExitStack() as stack:
            make, served = _maker(config, rollouts, shown.part, stack)
            make(
                rollouts,
                stage.folder,
                config.logits,
                settings=by_content(stage.settings.extended({**source, **served})),
                report=shown.update,
            )
    manifest = read_manifest(stage.folder)
    kept = {name: manifest["settings"][name] for name in ("top_logits", "vocabulary")}
    return {**manifest["counts"], **kept}


def _maker(
    config: PipelineConfig, rollouts: Dataset, part_done: PartDone, stack: ExitStack
) -> tuple[Callable[..., int], dict[str, Any]]:
    """What makes the dataset, and what its manifest says of a server."""
    from specdata.logits.make import logits_of_model, make_logits
    from specdata.models import load_generation, load_model

    models, wanted = config.models, config.logits
    assert wanted is not None
    if wanted.backend == "transformers":
        target = load_model(models.target, load=models.loading("target"))
        together = is_shared(config, "logits")
        return partial(logits_of_model, target, part_done=part_done, together=together), {}
    from specdata.logits.served import ServedLogits, check_lengths
    from specdata.server.client import ServerClient

    client = ServerClient(wanted.server, "logits.server")
    stack.callback(client.close)
    served = wanted.server.model or models.target
    check_lengths(rollouts, client.check(served))
    vocabulary = load_generation(models.target)[0].get_text_config().vocab_size
    count = min(wanted.top_logits, vocabulary)
    source = ServedLogits(client, wanted.backend, served, count, vocabulary, part_done)
    return partial(make_logits, source), {"served": served}


RECIPE = Recipe(
    main,
    stages,
    "Keep the target's largest logits along its rollouts.",
    ("logits",),
    after_logits,
    check_logits,
)

if __name__ == "__main__":
    sys.exit(RECIPE.run())
