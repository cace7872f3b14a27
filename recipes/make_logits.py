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
from recipes.layout import folder, loaded
from recipes.recipe import CommandLine, Recipe, steps_to_draft
from recipes.run import Stage, Step, say
from recipes.sizes import PAIR, ROLLOUT_TOKEN, rows_size
from specdata.processes import is_main
from specdata.terminal import TokenProgress, progress

if TYPE_CHECKING:
    from collections.abc import Callable

    from datasets import Dataset

    from specdata.labels.labeller import PartDone


class Logits(Stage):
    """Keep the target's largest logits along the rollouts."""

    name, recipe, sections = "logits", "make_logits", ("logits",)

    def decisive(self) -> dict[str, Any]:
        """Its section, and how the target is loaded."""
        assert self.config.logits is not None
        values = {"logits": self.config.logits.decisive(), "dtype": self.config.models.dtype}
        return {**values, **loaded(self.config, "target")}

    @property
    def inputs(self) -> dict[str, str]:
        """The target and its rollouts."""
        rollouts = str(folder(self.config, "rollouts"))
        return {"target": self.config.models.target, "rollouts": rollouts}

    @property
    def size(self) -> str:
        """As many rows as rollouts."""
        assert self.config.logits is not None
        # Three numbers a token beside the logits.
        token = ROLLOUT_TOKEN + PAIR * self.config.logits.top_logits + 12
        return rows_size(self.config, {"": token})

    def check(self) -> None:
        """Refuse a target that cannot be loaded so."""
        check_logits(self.config)

    def run(self) -> dict[str, Any]:
        """Run the target, or ask its server, along the rollouts."""
        from specdata.models import load_tokenizer, vocabulary_fingerprint
        from specdata.storage.dataset import load_stored
        from specdata.storage.manifest import read_manifest

        config = self.config
        tokenizer = load_tokenizer(config.models.target)
        rollouts = load_stored(folder(config, "rollouts"))
        source = made_of(config, vocabulary_fingerprint(tokenizer))
        with progress(len(rollouts), "logits", "rollout", is_shown=is_main()) as bar:
            shown = TokenProgress(bar)
            with ExitStack() as stack:
                make, served = _maker(config, rollouts, shown.part, stack)
                make(
                    rollouts,
                    self.folder,
                    config.logits,
                    settings=self.dataset_settings({**source, **served}),
                    report=shown.update,
                )
        manifest = read_manifest(self.folder)
        kept = {name: manifest["settings"][name] for name in ("top_logits", "vocabulary")}
        return {**manifest["counts"], **kept}

    def show(self, results: dict[str, Any]) -> None:
        """Print how many are kept."""
        say(
            f"  {results['top_logits']} of {results['vocabulary']:,} logits kept at each of "
            f"{results['tokens']:,} positions of {results['rows']:,} rollouts"
        )

    def next(self, line: CommandLine) -> list[Step]:
        """Train or measure."""
        return steps_to_draft(self.config, line)


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


RECIPE = Recipe("Keep the target's largest logits along its rollouts.", (Logits,))

if __name__ == "__main__":
    sys.exit(RECIPE.run())
