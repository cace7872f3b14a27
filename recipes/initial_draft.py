"""Stage 2 until distillation: make or take a draft, and fine-tune it (`train_draft.py` goes on)."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Any

from distill.config import DistilConfig, FinetuneConfig, check_layout
from recipes.config import named
from recipes.make_logits import check_rollouts
from recipes.models import has_chat_template, kind_in, positions_of, sizes_of, source_model
from recipes.run import Stage, say
from specdata.config import PromptSet
from specdata.errors import ConfigError
from specdata.loading import Loading
from specdata.prompts.conversations import check_conversations
from specdata.prompts.reading import prompt_inputs
from specdata.target_heads import find_head, local_folder

if TYPE_CHECKING:
    from datasets import Dataset


class OfDraft(Stage):
    """A stage that makes the draft or trains it."""

    sections = ("draft",)
    size = "the draft"

    @property
    def draft(self) -> DistilConfig:
        """The section `draft`."""
        draft: DistilConfig = self.section
        return draft

    def check_states(self) -> None:
        """Refuse trainings that a draft on its target's states cannot have. Raises ConfigError."""
        if kind_in(self.config).reads_states:
            with named("draft"):
                self.draft.check_states("models.draft, which reads its target's states")

    def rollouts(self, split: str) -> Dataset:
        """The rollouts of a split that the draft is trained or measured on."""
        from specdata.storage.dataset import load_stored, of_split

        source = self.config.folder("rollouts")
        share = self.draft.held_out_share if split == "train" else 0.0
        stored = load_stored(source)
        check_rollouts(self.config, stored)
        return of_split(stored, split, source, held_out_share=share)


class Initial(OfDraft):
    """Make the draft that training starts from."""

    name = "initial"

    @property
    def is_configured(self) -> bool:
        """True if `draft.init` makes or changes it."""
        return self.config.makes_initial_draft

    def stored_settings(self) -> dict[str, Any]:
        """The way in which it is made, and of which rollouts its vocabulary is counted."""
        init, config = self.draft.init.model_dump(mode="json"), self.config
        return {"init": init, **config.sampled("target"), **config.held_out_setting}

    @property
    def inputs(self) -> dict[str, str]:
        """The target, its rollouts, and the draft if one is given."""
        models, rollouts = self.config.models, str(self.config.folder("rollouts"))
        inputs = {"target": models.target, "rollouts": rollouts}
        if self.draft.init.kind == "model" and models.draft:
            inputs["draft"] = models.draft
        return inputs

    def check(self) -> None:
        """Refuse a draft that cannot be made, as far as is known here."""
        config, init, target = self.config, self.draft.init, self.config.models.target
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
                        f"rollouts.store_taps is {stored} and the draft reads {taps}: the target "
                        "would read the rollouts again in every pass; store all that the draft "
                        "reads, or leave store_taps out"
                    )
        unread = () if init.kind == "mtp" else (ValueError, OSError)
        with named("draft.init"), suppress(*unread):
            if local_folder(target):
                tensors, family = len((head := find_head(target)).of_head), head.model_type
                say(f"  {target} brings a head along: {tensors} tensors ({family})")
        if init.vocabulary is None:
            return
        source = str(config.models.draft) if init.kind == "model" else target
        sizes = sizes_of(config, source)
        if (had := sizes.get("draft_vocab_size")) is not None:
            raise ConfigError(
                f"{source} can propose {had} tokens already: leave draft.init.vocabulary out, or "
                "give the draft that it was made of"
            )
        if init.vocabulary > sizes.get("vocab_size", init.vocabulary):
            raise ConfigError(
                f"draft.init.vocabulary must be at most {sizes['vocab_size']}, the vocabulary of "
                f"{source}, got {init.vocabulary}"
            )

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


class Finetuned(OfDraft):
    """Train the draft on texts."""

    name = "finetuned"

    @property
    def tuning(self) -> FinetuneConfig:
        """The section `draft.finetune`."""
        assert self.draft.finetune is not None  # or it is not asked for
        return self.draft.finetune

    @property
    def is_configured(self) -> bool:
        """True if there is a section draft.finetune."""
        return self.config.draft is not None and self.draft.finetune is not None

    def stored_settings(self) -> dict[str, Any]:
        """The training, and of rollouts which."""
        lora, config = self.draft.lora, self.config
        return {
            "finetune": self.tuning.model_dump(mode="json"),
            "lora": lora.model_dump(mode="json") if lora else None,
            "freeze_embeddings": self.draft.freeze_embeddings,
            "seed": config.seed,
            **(config.template_setting if self.tuning.conversations else config.held_out_setting),
        }

    @property
    def inputs(self) -> dict[str, str]:
        """The models, and conversations or rollouts."""
        inputs = {"target": self.config.models.target, "draft": self.config.initial_draft}
        if talks := self.tuning.conversations:
            return inputs | prompt_inputs([PromptSet(name, "train", 0) for name in talks])
        return inputs | {"rollouts": str(self.config.folder("rollouts"))}

    def check(self) -> None:
        """Refuse conversations that cannot be trained on, and rows longer than a draft's context.

        Of conversations on the Hub only the names are checked.
        """
        self.check_states()
        config, talks = self.config, self.tuning.conversations
        with named("draft.finetune.conversations"):
            check_conversations(talks, config.seed, here_alone=True)
        if talks and has_chat_template(config) is False:
            raise ConfigError(
                f"draft.finetune.conversations are rendered with the target's chat template, and "
                f"{config.models.target} has none: save one beside its tokenizer "
                "(chat_template.jinja; recipes/configs/vicuna.jinja is Vicuna's), take a target "
                "that was tuned to chat, or leave conversations out to train on the target's "
                "rollouts"
            )
        # A draft that is made has the context of what it is made of, a fresh one its target's.
        is_fresh = self.draft.init.kind == "fresh"
        source = config.models.target if is_fresh else source_model(config)
        if (limit := positions_of(config, source)) is not None:
            self.tuning.check_context(limit, source)

    def run(self) -> dict[str, Any]:
        """Fine-tune."""
        from distill.finetune import finetune

        config = self.config
        return finetune(
            target=config.models.target,
            draft=config.initial_draft,
            rollouts=None if self.tuning.conversations else self.rollouts("train"),
            out=self.folder / "model",
            config=self.tuning,
            lora=self.draft.lora,
            seed=config.seed,
            save_steps=self.draft.save_steps,
            template_variables=config.chat_template_kwargs,
            freeze_embeddings=self.draft.freeze_embeddings,
        )

    def show(self, results: dict[str, Any]) -> None:
        """Print what the draft was trained on."""
        split = f", {results['split']:,} of them split" if results["split"] else ""
        say(
            f"  fine-tuned on {results['used']:,} {results['texts']}{split}, in "
            f"{results['rows']:,} rows: {results['assistant_tokens']:,} of "
            f"{results['tokens']:,} tokens are the assistant's"
        )
        for left_out in results["left_out"]:
            say(f"  left out of {left_out}")
        say(
            f"  loss a token: {results['loss_first']:.3f} in the first steps, "
            f"{results['loss_last']:.3f} in the last of {results['steps']:,}"
        )
