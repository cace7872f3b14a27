"""Stage 3: label the rollouts with the draft, then train an acceptance head.

python recipes/train_head.py --config FILE.yaml
draftsmith train-head --config FILE.yaml        # draftsmith launch PROFILE: in several processes
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

from recipes.checks import check_loading, check_states, check_training_splits, is_shared
from recipes.layout import (
    draft_in_use,
    folder,
    head_folder,
    held_out_setting,
    held_out_share,
    load_draft_in_use,
    loaded,
    sampled,
)
from recipes.make_logits import (
    check_logits,
    check_stored_states,
    identity,
    made_of,
    rows_with_logits,
)
from recipes.recipe import Recipe
from recipes.run import Stage, say
from recipes.sizes import PAIR, rows_size
from specdata.processes import is_main
from specdata.terminal import progress


class Labels(Stage):
    """Label the rollouts with the draft in use."""

    name, sections = "labels", ("labels",)

    @property
    def is_asked(self) -> bool:
        """True if a head learns from them."""
        return self.config.head is not None

    def stored_settings(self) -> dict[str, Any]:
        """Its section, and how both models are sampled."""
        values: dict[str, Any] = {"labels": self.config.labels.model_dump(mode="json")}
        values |= sampled(self.config, "target", "draft")
        return {**values, **held_out_setting(self.config)}

    @property
    def inputs(self) -> dict[str, str]:
        """The pair, the rollouts, and top logits instead of the target's own."""
        inputs = {
            "target": self.config.models.target,
            "draft": draft_in_use(self.config),
            "rollouts": str(folder(self.config, "rollouts")),
        }
        logits = self.config.labels.logits
        return {**inputs, "logits": logits} if logits else inputs

    @property
    def size(self) -> str:
        """As many rows as rollouts, but of the prompts held out for the head if there are any."""
        labels = self.config.labels
        is_drawn = self.config.sampling.temperature > 0 and not labels.greedy
        further = (labels.draws - 1) * is_drawn
        # An id, a drafted id and eight numbers.
        share = held_out_share(self.config) or 1.0
        return rows_size(self.config, 40 + PAIR * further, share)

    def check(self) -> None:
        """Refuse labels that cannot be made."""
        check_training_splits(self.config)
        check_loading(self.config, "labels")
        check_states(self.config)
        if (logits := self.config.labels.logits) and self.config.head:
            check_logits(self.config, "labels.logits", logits, bound=self.config.labels.bound)

    def run(self) -> dict[str, Any]:
        """Run target and draft along the rollouts, in every process."""
        config = self.config
        import numpy as np

        from specdata.draft_models.states_draft import states_input
        from specdata.draft_models.taps import attach
        from specdata.labels.make import load_labels, make_labels, mean_overlap
        from specdata.models import (
            check_shared_vocabulary,
            load_model,
            load_tokenizer,
            positions,
            vocabulary_fingerprint,
        )
        from specdata.storage.columns import arrow_table, list_lengths
        from specdata.storage.dataset import is_held_out, load_stored, read_manifest
        from specdata.top_logits import TopLogits

        models, draft_name = config.models, draft_in_use(config)
        tokenizer = load_tokenizer(models.target)
        check_shared_vocabulary(tokenizer, load_tokenizer(draft_name))
        draft = load_draft_in_use(config)
        rollouts = load_stored(folder(config, "rollouts"))
        check_stored_states(config, rollouts)
        if share := held_out_share(config):
            splits = arrow_table(rollouts, "split", "example_id").to_pydict().values()
            rollouts = rollouts.select(
                [
                    index
                    for index, (split, example) in enumerate(zip(*splits, strict=True))
                    if split != "train" or is_held_out(example, share)
                ]
            )
        source = made_of(self, vocabulary_fingerprint(tokenizer))
        make: Callable[..., int]
        if logits := config.labels.logits:
            rows = rows_with_logits(config, logits, "labels.logits", source, rollouts)
            make = partial(make_labels, TopLogits.of(Path(logits)), draft, rows)
        else:
            target = load_model(models.target, load=models.loading("target"))
            if states_input(draft) is not None:
                attach(draft, target)
            tensor_parallel = is_shared(config, "labels")
            make = partial(make_labels, target, draft, rollouts, tensor_parallel=tensor_parallel)
        with progress(len(rollouts), "labels", "rollout", is_shown=is_main()) as bar:
            rows = make(
                self.folder,
                config.labels,
                sampling=config.sampling,
                seed=config.seed,
                settings=self.dataset_settings({**source, "draft": identity(draft_name)}),
                report=bar.update,
            )
        prompts, completions = list_lengths(rollouts, "prompt_ids", "completion_ids")
        asked, room = int(completions.sum()), positions(draft.config) - prompts
        readable = int(np.minimum(completions, room.clip(0)).sum())
        undecided = readable - read_manifest(self.folder)["counts"]["tokens"]
        counts = {"beyond": asked - readable, "undecided": undecided}
        labels = load_labels(self.folder, config.sampling)
        return {"rows": rows, "acceptance": mean_overlap(labels), **counts}

    def show(self, results: dict[str, Any]) -> None:
        """Print the draft's acceptance."""
        shares = (f"{name} {share:.3f}" for name, share in results["acceptance"].items())
        say(f"  acceptance of the draft along {', '.join(shares)}")
        if beyond := results.get("beyond"):
            say(f"  {beyond} tokens have no label: the draft has no positions for them")


class Head(Stage):
    """Train the acceptance head on the labels."""

    name, sections = "head", ("head",)

    @property
    def folder(self) -> Path:
        """output/head, unless head.folder says otherwise."""
        return head_folder(self.config)

    @property
    def remedy(self) -> str:
        """Another folder."""
        beside = (folder(self.config, f"head-{n}") for n in count(2))
        other = next(each.name for each in beside if not each.exists())
        return (
            f"train another head beside it with --head.folder {other} (which is measured into "
            f"eval{other.removeprefix('head')}), {super().remedy}"
        )

    def stored_settings(self) -> dict[str, Any]:
        """Its section, and how the draft is loaded."""
        assert self.config.head is not None
        values: dict[str, Any] = {
            "head": self.config.head.stored_settings(),
            "seed": self.config.seed,
        }
        values |= {"dtype": self.config.models.dtype, **held_out_setting(self.config)}
        return {**values, **loaded(self.config, "draft")}

    @property
    def inputs(self) -> dict[str, str]:
        """The draft and the labels."""
        return {"draft": draft_in_use(self.config), "labels": str(folder(self.config, "labels"))}

    @property
    def size(self) -> str:
        """A small network."""
        return "the head"

    def run(self) -> dict[str, Any]:
        """Train it, in every process."""
        config = self.config
        from heads.train import train_head
        from specdata.labels.make import load_labels
        from specdata.storage.dataset import of_split

        assert config.head is not None
        labels = load_labels(folder(config, "labels"), config.sampling)
        result = train_head(
            draft=load_draft_in_use(config),
            train=of_split(
                labels,
                "train",
                folder(config, "labels"),
                held_out_share=held_out_share(config),
                wants_held_out=True,
            ),
            dev=of_split(labels, "dev", folder(config, "labels")),
            out=self.folder / "model",
            config=config.head,
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
