"""Stage 1: complete prompts with the target (after training the embedded pair, for the toy).

python recipes/make_rollouts.py --config FILE.yaml
draftsmith make-rollouts --config FILE.yaml     # draftsmith launch PROFILE: in several processes
"""

from __future__ import annotations

import sys
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from recipes.config import PipelineConfig, absolute, named
from recipes.models import (
    check_loading,
    check_room,
    check_shared,
    has_chat_template,
    positions_of,
    shared_tokenizer,
    sizes_of,
    width_of,
)
from recipes.recipe import Recipe
from recipes.run import Stage, finished, say
from recipes.sizes import ROLLOUT_TOKEN, rows_size
from specdata.config import checked_taps
from specdata.errors import ConfigError
from specdata.processes import is_main, process_count
from specdata.prompts.reading import is_remote, prompt_inputs
from specdata.sampling import early_end_words
from specdata.storage.files import PROGRESS
from specdata.terminal import progress

if TYPE_CHECKING:
    from specdata.rollouts.backend import Backend


class Pair(Stage):
    """Train the embedded pair."""

    name, sections = "pair", ("toy",)
    size = "target and draft"

    def stored_settings(self) -> dict[str, Any]:
        """Return its section and the seed."""
        return {"toy": self.section.model_dump(mode="json"), "seed": self.config.seed}

    @property
    def inputs(self) -> dict[str, str]:
        """Nothing: its texts are embedded."""
        return {}

    def check(self) -> None:
        """Refuse models that are elsewhere, and several processes."""
        models = self.config.models
        for name, path in (("target", models.target), ("draft", models.draft)):
            place = self.folder / name
            if path is None or absolute(path) != absolute(place):
                raise ConfigError(
                    f"with a toy section, models.{name} must be {place}, got {path or 'none'}: "
                    "change it, or set toy to null and use your own pair"
                )
        if process_count() > 1 and not finished(self.folder):  # its Trainer would wait for others
            raise ConfigError(
                "the embedded pair is trained by one process: run python recipes/make_rollouts.py "
                f"once before starting {process_count()} processes"
            )

    def run(self) -> dict[str, Any]:
        """Train both."""
        from distill.toy import train_toy_pair

        train_toy_pair(self.folder, self.section, seed=self.config.seed)
        return {}


class Rollouts(Stage):
    """Complete the prompts with the target."""

    name, sections = "rollouts", ("rollouts",)

    @property
    def is_configured(self) -> bool:
        """True if something is trained."""
        return bool(self.config.toy or self.config.draft or self.config.head)

    @property
    def splits(self) -> set[str]:
        """The splits that are trained on."""
        return {"train", "dev"} if self.config.draft or self.config.head else set()

    def stored_settings(self) -> dict[str, Any]:
        """Return its section, and how the target is sampled."""
        return {"rollouts": self.section.stored_settings(), **self.config.sampled("target")}

    @property
    def inputs(self) -> dict[str, str]:
        """The target and files of prompts."""
        return {"target": self.config.models.target, **prompt_inputs(self.section.sets)}

    @property
    def size(self) -> str:
        """Completions, tokens and bytes."""
        rollouts, models = self.config.rollouts, self.config.models
        width = width_of(sizes_of(self.config, models.target)) or 0
        state = width * (4 if models.dtype_of("target") == "float32" else 2)
        text = rows_size(self.config, ROLLOUT_TOKEN + state * rollouts.store_states)
        if rollouts.store_taps:
            tapped = 2 * len(rollouts.store_taps) * (width + 2)
            text += f"; taps: {tapped:,} bytes more a token, those of prompts included"
        return text

    def check(self) -> None:
        """Refuse prompts, lengths and loadings that cannot be used."""
        from specdata.prompts.loading import check_kept, check_sets

        config, rollouts = self.config, self.config.rollouts
        if not rollouts.sets:
            raise ConfigError(
                "rollouts.sets must name at least one prompt set, such as "
                "{name: instruct, split: train, count: 512}; got []"
            )
        if layers := sizes_of(config, config.models.target).get("num_hidden_layers"):
            with named("rollouts.store_taps"):
                checked_taps(rollouts.store_taps or [], layers)
        if rollouts.samples > 1 and config.sampling.temperature == 0:
            raise ConfigError(
                f"rollouts.samples is {rollouts.samples}, but at temperature 0 every sample of a "
                "prompt is the same: set samples to 1, or a temperature above 0"
            )
        check_loading(config, "rollouts")
        target = config.models.target
        check_room("rollouts", rollouts.max_new_tokens, target, positions_of(config, target))
        check_shared(config, config.given_models)
        report = check_sets(
            rollouts.sets,
            config.seed,
            here_alone=True,
            has_template=has_chat_template(config),
            folder=self.folder / PROGRESS,
        )
        unread = {each.split for each in rollouts.sets if is_remote(each)}
        check_kept(report, sorted(self.splits - unread))

    def run(self) -> dict[str, Any]:
        """Complete with every process there is."""
        from specdata.models import end_ids, load_configs, vocabulary_fingerprint
        from specdata.prompts.loading import check_kept, dropped, load_prompts
        from specdata.rollouts.make import Dialogue, make_rollouts, turns_asked
        from specdata.storage.dataset import read_manifest

        config, rollouts = self.config, self.config.rollouts
        # 1. The tokenizers, now rather than after hours of sampling.
        tokenizer = shared_tokenizer(*config.given_models)
        with ExitStack() as stack:
            # 2. The target, here or behind a server, and the room that it leaves for prompts.
            backend, identity, limit, vocabulary = _backend(config, stack)
            check_room("rollouts", rollouts.max_new_tokens, config.models.target, limit)
            if words := early_end_words(tokenizer, end_ids(load_configs(config.models.target)[1])):
                say(words)
            longest = limit - rollouts.max_new_tokens
            if config.logits and config.logits.backend == "vllm":
                longest -= 1  # a server is asked for one token more than a text has
            # 3. The prompts that fit.
            loaded = load_prompts(
                rollouts.sets,
                tokenizer,
                seed=config.seed,
                max_tokens=longest,
                vocabulary=vocabulary,
                template_variables=config.chat_template_kwargs,
                folder=self.folder / PROGRESS,
            )
            check_kept(loaded.report, sorted(self.splits))
            for line in dropped(loaded.report):
                say(f"  {line}")
            # 4. The completions, shard by shard.
            made_of = {"target": identity, "tokenizer": vocabulary_fingerprint(tokenizer)}
            settings = self.dataset_settings({**made_of, "prompts": loaded.report})
            asked = turns_asked(loaded.prompts, rollouts.samples)
            with progress(asked, "rollouts", "completion", is_shown=is_main()) as bar:
                make_rollouts(
                    backend,
                    loaded.prompts,
                    self.folder,
                    rollouts,
                    dialogue=Dialogue(tokenizer, longest, vocabulary),
                    settings=settings,
                    report=bar.update,
                )
            counts = read_manifest(self.folder)["counts"]
            return {**counts, "asked": asked, "prompts": loaded.report}

    def show(self, results: dict[str, Any]) -> None:
        """Print how many there are."""
        rows, tokens, ends = (results[name] for name in ("rows", "tokens", "finish"))
        say(f"  {rows} completions, {tokens} tokens; ended by {ends}")
        if (left := results["asked"] - rows) > 0:
            say(
                f"  {left} later turns left out: their conversations had grown longer than the "
                "context, had tokens that the target has no row for, or the template refused them"
            )


def _backend(config: PipelineConfig, stack: ExitStack) -> tuple[Backend, dict[str, Any], int, int]:
    """The backend that completes, the model's identity, how many tokens it takes and knows."""
    from specdata.models import end_ids, load_configs, load_model, positions, revision_of
    from specdata.rollouts.backend import TransformersBackend
    from specdata.rollouts.vllm import VllmBackend
    from specdata.server.client import ServerClient

    models, rollouts = config.models, config.rollouts
    identity: dict[str, Any] = {"name": models.target, "backend": rollouts.backend}
    if rollouts.backend == "vllm":
        described, generation = load_configs(models.target)
        served = rollouts.vllm.model or models.target
        client = ServerClient(rollouts.vllm, "rollouts.vllm")
        stack.callback(client.close)
        limit = min(positions(described), client.check(served) or sys.maxsize)
        identity |= {"served": served}
        backend: Backend = VllmBackend(
            client=client,
            model=served,
            sampling=config.sampling,
            max_new_tokens=rollouts.max_new_tokens,
            ends=end_ids(generation),
            vocabulary=described.get_text_config().vocab_size,
            seed=config.seed,
        )
    else:
        model = load_model(models.target, load=models.loading("target"))
        described, limit = model.config, positions(model.config)
        backend = TransformersBackend(
            model,
            config.sampling,
            rollouts.max_new_tokens,
            rollouts.batch_size,
            config.seed,
            store_states=rollouts.store_states,
            store_taps=rollouts.store_taps or (),
        )
    identity["revision"] = revision_of(models.target)
    return backend, identity, limit, described.get_text_config().vocab_size


RECIPE = Recipe("Complete prompts with the target.", (Pair, Rollouts))

if __name__ == "__main__":
    sys.exit(RECIPE.run())
