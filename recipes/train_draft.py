"""Stage 2: make or take a draft, fine-tune it, and distil it on the target's rollouts.

python recipes/train_draft.py --config FILE.yaml
draftsmith train-draft --config FILE.yaml       # draftsmith launch PROFILE: in several processes
"""

from __future__ import annotations

import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distill.config import DistilConfig, check_layout
from recipes.checks import (
    check_loading,
    check_states,
    check_training_splits,
    has_chat_template,
    named,
    positions_of,
)
from recipes.config import PipelineConfig
from recipes.layout import (
    draft_to_distil,
    folder,
    held_out_setting,
    initial_draft,
    makes_initial_draft,
    sampled,
    template_setting,
)
from recipes.make_logits import check_logits, check_stored_states, made_of, rows_with_logits
from recipes.recipe import Recipe
from recipes.run import Stage, say
from recipes.sizes import draft_size, draft_width, reads_states, sizes_of, source_model
from specdata.config import PromptSet
from specdata.errors import ConfigError
from specdata.loading import Loading
from specdata.prompts.conversations import check_conversations
from specdata.prompts.reading import prompt_inputs

if TYPE_CHECKING:
    from datasets import Dataset


class _OfDraft(Stage):
    """A stage that makes the draft or trains it."""

    sections = ("draft",)

    @property
    def draft(self) -> DistilConfig:
        """Its section."""
        assert self.config.draft is not None
        return self.config.draft

    @property
    def size(self) -> str:
        """The draft."""
        return draft_size(self.config)

    def rollouts(self, split: str) -> Dataset:
        """The rollouts of a split that the draft is trained or measured on."""
        from specdata.storage.dataset import load_stored, of_split

        source = folder(self.config, "rollouts")
        share = self.draft.held_out_share if split == "train" else 0.0
        stored = load_stored(source)
        check_stored_states(self.config, stored)
        return of_split(stored, split, source, held_out_share=share)


class Initial(_OfDraft):
    """Make the draft that training starts from."""

    name = "initial"

    @property
    def is_asked(self) -> bool:
        """True if `draft.init` makes or changes it."""
        return makes_initial_draft(self.config)

    def stored_settings(self) -> dict[str, Any]:
        """The way in which it is made, and of which rollouts its vocabulary is counted."""
        values: dict[str, Any] = {"init": self.draft.init.model_dump(mode="json")}
        values |= sampled(self.config, "target")
        return {**values, **held_out_setting(self.config)}

    @property
    def inputs(self) -> dict[str, str]:
        """The target, its rollouts, and the draft if one is given."""
        rollouts = str(folder(self.config, "rollouts"))
        inputs = {"target": self.config.models.target, "rollouts": rollouts}
        if self.draft.init.kind == "model":
            assert self.config.models.draft is not None  # the configuration's own check
            inputs["draft"] = self.config.models.draft
        return inputs

    def run(self) -> dict[str, Any]:
        """Take layers, or draw weights, or reduce the vocabulary."""
        from distill.initial import make_initial

        config = self.config
        load = config.models.load.target
        return make_initial(
            target=config.models.target,
            draft=config.models.draft if self.draft.init.kind == "model" else None,
            rollouts=self.rollouts("train"),
            out=self.folder / "model",
            config=self.draft.init,
            seed=config.seed,
            states_dtype=config.models.dtype_of("target"),
            # Layers are taken in full precision; where the target does not fit, in memory.
            target_load=Loading(device_map="cpu" if load.is_spread else None),
        )


class Finetuned(_OfDraft):
    """Train the draft on texts."""

    name = "finetuned"

    @property
    def is_asked(self) -> bool:
        """True if there is a section draft.finetune."""
        return self.config.draft is not None and self.draft.finetune is not None

    def stored_settings(self) -> dict[str, Any]:
        """The training, and of rollouts which."""
        draft = self.draft
        assert draft.finetune is not None
        lora = draft.lora.model_dump(mode="json") if draft.lora else None
        values: dict[str, Any] = {"finetune": draft.finetune.model_dump(mode="json"), "lora": lora}
        values["seed"] = self.config.seed
        if not draft.finetune.conversations:
            return values | held_out_setting(self.config)
        return values | template_setting(self.config)

    @property
    def inputs(self) -> dict[str, str]:
        """The models, and conversations or rollouts."""
        assert self.draft.finetune is not None
        inputs = {"target": self.config.models.target, "draft": initial_draft(self.config)}
        if talks := self.draft.finetune.conversations:
            return inputs | prompt_inputs([PromptSet(name, "train", 0) for name in talks])
        return inputs | {"rollouts": str(folder(self.config, "rollouts"))}

    def run(self) -> dict[str, Any]:
        """Fine-tune."""
        from distill.finetune import finetune

        config = self.config
        assert self.draft.finetune is not None
        tuning = self.draft.finetune
        return finetune(
            target=config.models.target,
            draft=initial_draft(config),
            rollouts=None if tuning.conversations else self.rollouts("train"),
            out=self.folder / "model",
            config=tuning,
            lora=self.draft.lora,
            seed=config.seed,
            save_steps=self.draft.save_steps,
            template_variables=config.chat_template_kwargs,
        )

    def show(self, results: dict[str, Any]) -> None:
        """Print what the draft was trained on."""
        split = f", {results['split']:,} of them split" if results["split"] else ""
        apart = "" if results["packed"] else " of one text (in one row this draft would mix texts)"
        say(
            f"  fine-tuned on {results['used']:,} {results['texts']}{split}, in "
            f"{results['rows']:,} rows{apart}: {results['assistant_tokens']:,} of "
            f"{results['tokens']:,} tokens are the assistant's"
        )
        for left_out in results["left_out"]:
            say(f"  left out of {left_out}")
        say(
            f"  loss a token: {results['loss_first']:.3f} in the first steps, "
            f"{results['loss_last']:.3f} in the last of {results['steps']:,}"
        )


class Draft(_OfDraft):
    """Distil the draft on the rollouts."""

    name = "draft"

    def stored_settings(self) -> dict[str, Any]:
        """The training, and how the target is sampled."""
        return {"draft": self.draft.stored_settings(), **sampled(self.config, "target")}

    @property
    def inputs(self) -> dict[str, str]:
        """The models, the rollouts, and top logits instead of the target's own."""
        inputs = {
            "target": self.config.models.target,
            "draft": draft_to_distil(self.config),
            "rollouts": str(folder(self.config, "rollouts")),
        }
        logits = self.draft.logits
        return {**inputs, "logits": logits} if logits else inputs

    def check(self) -> None:
        """Refuse a draft that cannot be made, fine-tuned or distilled."""
        check_training_splits(self.config)
        check_states(self.config)
        config, draft = self.config, self.config.draft
        if draft is None:
            return
        check_loading(config, "draft")
        if reads_states(config):
            with named("draft"):
                draft.check_states("models.draft, which reads its target's states")
        check_finetuning(config, draft)
        check_initial(config, draft)
        check_lora(config, draft)
        if draft.report_to:
            from distill.callbacks import reporters  # here: it needs torch

            reporters(draft.report_to, Path())
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
            source = made_of(self, tokenizer)
            train, dev = (
                rows_with_logits(config, logits, "draft.logits", source, rows)
                for rows in (train, dev)
            )
            top_logits = TopLogits.of(Path(logits))
        result = distil(
            target=config.models.target,
            draft=draft_to_distil(config),
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


def check_initial(config: PipelineConfig, draft: DistilConfig) -> None:
    """Refuse a draft that `draft.init` cannot make, as far as is known here. Raises ConfigError."""
    init, target = draft.init, config.models.target
    if init.kind in ("target", "states"):
        sizes = sizes_of(config, target)
        layers = sizes.get("num_hidden_layers", sizes.get("n_layer"))
        if layers is not None:
            init.layers_of(layers, target)
        if init.kind == "states" and layers is not None:
            check_layout(init.layout, sizes.get("model_type"), target)
            with named("draft.init"):
                taps = init.taps_of(layers)
            stored = config.rollouts.store_taps
            if stored and not {*taps} <= {*stored}:
                raise ConfigError(
                    f"rollouts.store_taps is {stored} and the draft reads {taps}: the target would "
                    "read the rollouts again in every pass; store all that the draft reads, or "
                    "leave store_taps out"
                )
    if init.vocabulary is None:
        return
    source = config.models.draft if init.kind == "model" else target
    sizes = sizes_of(config, str(source))
    if (had := sizes.get("draft_vocab_size")) is not None:
        raise ConfigError(
            f"{source} can propose {had} tokens already: leave draft.init.vocabulary out, or give "
            "the draft that it was made of"
        )
    size = sizes.get("vocab_size")
    if size is not None and init.vocabulary > size:
        raise ConfigError(
            f"draft.init.vocabulary must be at most {size}, the vocabulary of {source}, got "
            f"{init.vocabulary}"
        )


def check_lora(config: PipelineConfig, draft: DistilConfig) -> None:
    """Refuse adapters that cannot be trained, or would train nothing. Raises ConfigError."""
    if (lora := draft.lora) is None:
        return
    if draft.init.kind == "fresh":
        raise ConfigError(
            "draft.lora trains adapters beside frozen weights, and those of draft.init.kind fresh "
            "are random: leave out draft.lora, or start from a model or from layers of the target"
        )
    if (width := draft_width(config)) is not None:
        lora.check_width(width)


def check_finetuning(config: PipelineConfig, draft: DistilConfig) -> None:
    """Refuse conversations that cannot be trained on, and rows longer than a draft's context.

    Of conversations on the Hub only the names are checked. Raises ConfigError.
    """
    if (tuning := draft.finetune) is None:
        return
    with named("draft.finetune.conversations"):
        check_conversations(tuning.conversations, config.seed, here_alone=True)
    if tuning.conversations and has_chat_template(config) is False:
        raise ConfigError(
            f"draft.finetune.conversations are rendered with the target's chat template, and "
            f"{config.models.target} has none: save one beside its tokenizer (chat_template.jinja; "
            "recipes/configs/vicuna.jinja is Vicuna's), take a target that was tuned to chat, or "
            "leave conversations out to train on the target's rollouts"
        )
    # A draft that is made has the context of what it is made of, a fresh one its target's.
    source = config.models.target if draft.init.kind == "fresh" else source_model(config)
    if (limit := positions_of(config, source)) is not None:
        tuning.check_context(limit, source)


RECIPE = Recipe("Distil the draft on the target's rollouts.", (Initial, Finetuned, Draft))

if __name__ == "__main__":
    sys.exit(RECIPE.run())
