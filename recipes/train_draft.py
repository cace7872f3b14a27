"""Stage 2: make or take a draft, fine-tune it, and distil it on the target's rollouts.

python recipes/train_draft.py --config FILE.yaml
draftsmith train-draft --config FILE.yaml       # draftsmith launch PROFILE: in several processes
"""

from __future__ import annotations

import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from recipes.initial_draft import Finetuned, Initial, OfDraft
from recipes.make_logits import along_rollouts, check_logits, provenance, rows_with_logits
from recipes.models import check_depths_of, check_loading, draft_width, positions_of
from recipes.recipe import Recipe
from recipes.run import say
from specdata.errors import ConfigError


class Draft(OfDraft):
    """Distil the draft on the rollouts."""

    name = "draft"

    def stored_settings(self) -> dict[str, Any]:
        """The training, and how the target is sampled."""
        return {"draft": self.draft.stored_settings(), **self.config.sampled("target")}

    @property
    def inputs(self) -> dict[str, str]:
        """The models, the rollouts, and top logits instead of the target's own."""
        return along_rollouts(self.config, self.config.draft_to_distil, self.draft.logits)

    def check(self) -> None:
        """Refuse a draft that cannot be distilled."""
        config, draft = self.config, self.draft
        config.rollouts.check_splits()
        check_depths_of(config)
        check_loading(config, "draft")
        self.check_states()
        if not self.is_made:  # later stages may be launched otherwise
            draft.check_engine()
        if draft.lora and draft.init.kind == "fresh":
            raise ConfigError(
                "draft.lora trains adapters beside frozen weights, and those of draft.init.kind "
                "fresh are random: leave out draft.lora, or start from a model or from layers of "
                "the target"
            )
        if draft.lora and (width := draft_width(config)) is not None:
            draft.lora.check_width(width)
        if draft.report_to:
            from transformers.integrations import get_available_reporting_integrations

            if missing := {*draft.report_to} - {*get_available_reporting_integrations()}:
                raise ConfigError(
                    f"draft.report_to names {', '.join(sorted(missing))}, which is not installed "
                    "here: install it, or take it out"
                )
        if config.models.draft and draft.init.kind == "model":
            limit = positions_of(config, config.models.draft)
            new = config.rollouts.max_new_tokens
            if limit is not None and limit < (draft.max_length or sys.maxsize) and limit <= new:
                raise ConfigError(
                    f"{config.models.draft} has positions for {limit} tokens, and rollouts may be "
                    f"longer (rollouts.max_new_tokens {new}): set draft.max_length to {limit} or "
                    "less, to learn from their beginnings"
                )
        if draft.logits:
            check_logits(config, "draft.logits", draft.logits, bound=True)

    def run(self) -> dict[str, Any]:
        """Distil, on the target's distributions or on top logits."""
        from distill.distillation import distil
        from specdata.models import load_tokenizer, vocabulary_fingerprint
        from specdata.top_logits import TopLogits

        config = self.config
        train, dev = (self.rollouts(split) for split in ("train", "dev"))
        top_logits = None
        if logits := self.draft.logits:
            tokenizer = vocabulary_fingerprint(load_tokenizer(config.models.target))
            source = provenance(self, tokenizer)
            train, dev = (
                rows_with_logits(config, logits, "draft.logits", source, rows)
                for rows in (train, dev)
            )
            top_logits = TopLogits.of(Path(logits))
        result = distil(
            target=config.models.target,
            draft=config.draft_to_distil,
            train=train,
            dev=dev,
            top_logits=top_logits,
            out=self.folder / "model",
            config=self.draft,
            sampling=config.sampling,
            seed=config.seed,
            teacher_load=config.models.loading("target"),
        )
        return asdict(result)

    def show(self, results: dict[str, Any]) -> None:
        """Print the acceptance before and after."""
        before, after = results["acceptance_before"], results["acceptance_after"]
        if results["steps"] == 0:
            say(f"  acceptance on held-out rollouts: {after:.3f}; not distilled (draft.epochs 0)")
            return
        shown = f"{before:.3f} before, {after:.3f} after distillation"
        say(f"  acceptance on held-out rollouts: {shown}")
        if results["is_bound"]:
            say("  (upper bounds: all tokens whose logits draft.logits does not keep count as one)")
        say(f"  best: the weights after step {results['best_step']} of {results['steps']}")


RECIPE = Recipe("Distil the draft on the target's rollouts.", (Initial, Finetuned, Draft))

if __name__ == "__main__":
    sys.exit(RECIPE.run())
