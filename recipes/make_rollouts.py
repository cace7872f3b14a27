"""Stage 1: complete prompts with the target (after training the embedded pair, for the toy).

python recipes/make_rollouts.py --config FILE.yaml
draftsmith make-rollouts --config FILE.yaml     # draftsmith launch PROFILE: in several processes
"""

from __future__ import annotations

import sys
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, Any

from recipes.checks import check_kept, check_rollouts, is_shared
from recipes.config import PipelineConfig
from recipes.layout import by_content, folder, pair_stage, rollouts_stage
from recipes.next_steps import after_rollouts
from recipes.recipe import Recipe
from recipes.run import Stage, finished, made_as_asked, run_stage, say
from specdata.errors import ConfigError
from specdata.processes import is_main, process_count
from specdata.terminal import TokenProgress, progress

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from specdata.rollouts.backend import Backend


def stages(config: PipelineConfig) -> list[Stage]:
    """What this recipe does."""
    return [*([pair_stage(config)] if config.toy else []), rollouts_stage(config)]


def main(config: PipelineConfig) -> dict[str, Any]:
    """Train the toy pair if asked, then make the rollouts with every process there is.

    Raises:
        ConfigError: if settings contradict each other, or several processes would train the pair.
    """
    if not made_as_asked(rollouts_stage(config)):
        check_rollouts(config)
    if config.toy and process_count() > 1 and not finished(folder(config, "pair")):
        # Its Trainer would wait for the others, which have nothing to train.
        raise ConfigError(
            "the embedded pair is trained by one process: run python recipes/make_rollouts.py once "
            f"before starting {process_count()} processes"
        )
    if toy := config.toy:

        def train() -> dict[str, Any]:
            from distill.toy import train_toy_pair

            train_toy_pair(folder(config, "pair"), toy, seed=config.seed)
            return {}

        run_stage(pair_stage(config), config, train)
    counts = run_stage(rollouts_stage(config), config, partial(_rollouts, config))
    say(f"  {counts['rows']} completions, {counts['tokens']} tokens; ended by {counts['finish']}")
    if counts["rows"] < counts["asked"]:
        say(
            f"  {counts['asked'] - counts['rows']} later turns left out: their conversations had "
            "grown longer than the context"
        )
    return counts


def _rollouts(config: PipelineConfig) -> dict[str, Any]:
    from specdata.models import check_shared_vocabulary, load_tokenizer

    tokenizer = load_tokenizer(config.models.target)
    # Found out now rather than after hours of sampling.
    if config.models.draft is not None:
        check_shared_vocabulary(tokenizer, load_tokenizer(config.models.draft))
    with ExitStack() as stack:
        return _complete(config, tokenizer, *_backend(config, stack))


def _complete(
    config: PipelineConfig,
    tokenizer: PreTrainedTokenizerBase,
    backend: Backend,
    identity: dict[str, Any],
    limit: int,
) -> dict[str, Any]:
    from specdata.models import vocabulary_fingerprint
    from specdata.prompts.loading import dropped, load_prompts
    from specdata.rollouts.make import Dialogue, make_rollouts, turns_asked
    from specdata.storage.manifest import read_manifest

    stage, wanted = rollouts_stage(config), config.rollouts
    longest = limit - wanted.max_new_tokens
    if longest < 1:
        raise ConfigError(
            f"rollouts.max_new_tokens is {wanted.max_new_tokens}, but the target takes "
            f"{limit} tokens, prompt included: lower it"
        )
    loaded = load_prompts(wanted.sets, tokenizer, seed=config.seed, max_tokens=longest)
    if not loaded.prompts:
        raise ConfigError("rollouts.sets must hold at least one prompt")
    check_kept(config, loaded.report)
    for line in dropped(loaded.report):
        say(f"  {line}")
    made_of = {
        "target": identity,
        "tokenizer": vocabulary_fingerprint(tokenizer),
        "prompts": loaded.report,
    }
    settings = by_content(stage.settings.extended(made_of))
    asked = turns_asked(loaded.prompts, wanted.samples)
    with progress(asked, "rollouts", "row", is_shown=is_main()) as bar:
        shown = TokenProgress(bar)
        make_rollouts(
            backend,
            loaded.prompts,
            stage.folder,
            wanted,
            dialogue=Dialogue(tokenizer, longest),
            settings=settings,
            report=shown.update,
            part_done=shown.part,
            together=is_shared(config, "rollouts"),
        )
    counts = read_manifest(stage.folder)["counts"]
    return {**counts, "asked": asked, "prompts": loaded.report}


def _backend(config: PipelineConfig, stack: ExitStack) -> tuple[Backend, dict[str, Any], int]:
    """What completes, what the model is, and how many tokens it takes."""
    from specdata.models import load_generation, load_model, positions, revision_of
    from specdata.rollouts.backend import TransformersBackend
    from specdata.rollouts.vllm import VllmBackend

    models, wanted = config.models, config.rollouts
    identity: dict[str, Any] = {"name": models.target, "backend": wanted.backend}
    if wanted.backend == "vllm":
        described, ends = load_generation(models.target)
        served = wanted.vllm.model or models.target
        server = VllmBackend(
            wanted.vllm,
            served,
            config.sampling,
            max_new_tokens=wanted.max_new_tokens,
            ends=ends,
            seed=config.seed,
        )
        stack.callback(server.close)
        limit = min(positions(described), server.check() or sys.maxsize)
        identity |= {"served": served}
        backend: Backend = server
    else:
        model = load_model(models.target, load=models.loading("target"))
        described, limit = model.config, positions(model.config)
        backend = TransformersBackend(
            model,
            config.sampling,
            wanted.max_new_tokens,
            wanted.batch_size,
            config.seed,
            keep_states=wanted.keep_states,
        )
    identity["revision"] = revision_of(models.target)
    return backend, identity, limit


RECIPE = Recipe(
    main,
    stages,
    "Complete prompts with the target.",
    ("toy", "rollouts"),
    after_rollouts,
    check_rollouts,
)

if __name__ == "__main__":
    sys.exit(RECIPE.run())
