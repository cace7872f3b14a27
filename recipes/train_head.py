"""Stage 3: label the rollouts with the draft, then train an acceptance head.

python recipes/train_head.py --config FILE.yaml
draftsmith train-head --config FILE.yaml        # draftsmith launch PROFILE: in several processes
"""

from __future__ import annotations

import itertools
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from recipes.make_logits import (
    along_rollouts,
    check_logits,
    check_rollouts,
    identity,
    provenance,
    rows_with_logits,
)
from recipes.models import (
    check_depths_of,
    check_loading,
    load_draft_in_use,
    load_models,
    shared_tokenizer,
)
from recipes.recipe import Recipe
from recipes.run import Stage, say
from recipes.sizes import PAIR, rows_size
from specdata.errors import ConfigError
from specdata.processes import is_main
from specdata.terminal import progress


class Labels(Stage):
    """Label the rollouts with the draft in use."""

    name, sections = "labels", ("labels",)

    @property
    def is_configured(self) -> bool:
        """True if a head learns from them."""
        return self.config.head is not None

    def stored_settings(self) -> dict[str, Any]:
        """Return its section, and how both models are sampled."""
        labels, config = self.section.model_dump(mode="json"), self.config
        return {"labels": labels, **config.sampled("target", "draft"), **config.held_out_setting}

    @property
    def inputs(self) -> dict[str, str]:
        """The pair, the rollouts, and top logits instead of the target's own."""
        return along_rollouts(self.config, self.config.draft_in_use, self.section.logits)

    @property
    def size(self) -> str:
        """The size of as many rows as rollouts, or as are held out for the head."""
        labels = self.section
        is_drawn = self.config.sampling.temperature > 0 and not labels.greedy
        further = (labels.draws - 1) * is_drawn
        # An id, a drafted id and eight numbers.
        share = self.config.held_out_share or 1.0
        return rows_size(self.config, 40 + PAIR * further, share)

    def check(self) -> None:
        """Refuse labels that cannot be made."""
        self.config.rollouts.check_splits()
        check_loading(self.config, "labels")
        check_depths_of(self.config)
        if logits := self.section.logits:
            check_logits(self.config, "labels.logits", logits, bound=self.section.bound)

    def run(self) -> dict[str, Any]:
        """Run target and draft along the rollouts, in every process."""
        config = self.config
        from specdata.labels.make import load_labels, make_labels, mean_overlap
        from specdata.models import vocabulary_fingerprint
        from specdata.storage.columns import arrow_table
        from specdata.storage.dataset import is_held_out, load_stored
        from specdata.top_logits import TopLogits

        # 1. The rollouts that the draft did not learn from, if some were held out.
        tokenizer = shared_tokenizer(config.models.target, config.draft_in_use)
        rollouts = load_stored(config.folder("rollouts"))
        check_rollouts(config, rollouts)
        if share := config.held_out_share:
            splits = arrow_table(rollouts, "split", "example_id").to_pydict().values()
            rollouts = rollouts.select(
                [
                    index
                    for index, (split, example) in enumerate(zip(*splits, strict=True))
                    if split != "train" or is_held_out(example, share)
                ]
            )
        # 2. The draft, and the target or its top logits.
        source = provenance(self, vocabulary_fingerprint(tokenizer))
        target: Any
        if logits := self.section.logits:
            rows = rows_with_logits(config, logits, "labels.logits", source, rollouts)
            target, draft = TopLogits.of(Path(logits)), load_draft_in_use(config)
        else:
            rows, (target, draft) = rollouts, load_models(config)
        # 3. The labels, shard by shard.
        with progress(len(rollouts), "labels", "rollout", is_shown=is_main()) as bar:
            count = make_labels(
                target,
                draft,
                rows,
                self.folder,
                self.section,
                sampling=config.sampling,
                seed=config.seed,
                settings=self.dataset_settings({**source, "draft": identity(config.draft_in_use)}),
                report=bar.update,
            )
        acceptance = mean_overlap(load_labels(self.folder, config.sampling))
        return {"rows": count, "acceptance": acceptance}

    def show(self, results: dict[str, Any]) -> None:
        """Print the draft's acceptance."""
        shares = (f"{name} {share:.3f}" for name, share in results["acceptance"].items())
        how = " (upper bounds where not exact)" * self.section.bound
        say(f"  acceptance{how} of the draft along {', '.join(shares)}")


class Head(Stage):
    """Train the acceptance head on the labels."""

    name, sections = "head", ("head",)
    size = "the head"

    @property
    def folder(self) -> Path:
        """output/head, unless head.folder says otherwise."""
        return self.config.head_folder

    @property
    def remedy(self) -> str:
        """The advice to train into another folder."""
        beside = (self.config.folder(f"head-{n}") for n in itertools.count(2))
        other = next(each.name for each in beside if not each.exists())
        return (
            f"train another head beside it with --head.folder {other} (which is measured into "
            f"eval{other.removeprefix('head')}), {super().remedy}"
        )

    def stored_settings(self) -> dict[str, Any]:
        """Return its section, and how the draft is loaded."""
        values = {"head": self.section.stored_settings(), "seed": self.config.seed}
        return {**values, **self.config.held_out_setting, **self.config.loaded("draft")}

    @property
    def inputs(self) -> dict[str, str]:
        """The draft and the labels."""
        config = self.config
        return {"draft": config.draft_in_use, "labels": str(config.folder("labels"))}

    def check(self) -> None:
        """Refuse more draws than the labels hold, and a tracker that is not there."""
        if self.section.draws > (held := self.config.labels.draws):
            raise ConfigError(
                f"head.draws must be at most labels.draws, which is how many the labels hold; got "
                f"{self.section.draws} and {held}: raise labels.draws, or lower it"
            )
        if self.section.report_to != "none":
            from heads.prepared import check_tracker  # here: it needs torch

            check_tracker(self.section.report_to)

    def run(self) -> dict[str, Any]:
        """Train it, in every process."""
        config = self.config
        from heads.train import train_head
        from specdata.labels.make import load_labels
        from specdata.storage.dataset import of_split

        source = config.folder("labels")
        labels = load_labels(source, config.sampling)
        result = train_head(
            draft=load_draft_in_use(config),
            train=of_split(
                labels,
                "train",
                source,
                held_out_share=config.held_out_share,
                wants_held_out=True,
            ),
            dev=of_split(labels, "dev", source),
            out=self.folder / "model",
            config=self.section,
            seed=config.seed,
            sampling=config.sampling,
        )
        return asdict(result)

    def show(self, results: dict[str, Any]) -> None:
        """Print how well the head predicts held-out labels."""
        after = results["after"]
        shown = ", ".join(
            f"{name} {after[name]:.3f}"
            for name in ("kl", "kl_constant", "auroc", "ece")
            if after[name] is not None  # AUROC needs accepted and rejected tokens
        )
        say(
            f"  on {after['tokens']} held-out labels: {shown} (kl: lower is better, kl_constant is"
            " the mean label's; auroc: .5 is chance, 1 tells accepted tokens from rejected ones;"
            " ece: how far predictions are off)"
        )


RECIPE = Recipe("Train an acceptance head.", (Labels, Head))

if __name__ == "__main__":
    sys.exit(RECIPE.run())
