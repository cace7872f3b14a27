"""Stage 1: complete prompts with the target (after training the embedded pair, for the toy).

accelerate launch recipes/make_rollouts.py --config recipes/configs/toy.yaml
"""

from __future__ import annotations

import sys
from typing import Any

from tqdm import tqdm

from distill.toy import train_toy_pair
from recipes.config import PipelineConfig
from recipes.layout import folder, pair_stage, rollouts_stage
from recipes.run import Stage, cli, finished, is_main, processes, run_stage, wait_for
from specdata.errors import ConfigError
from specdata.models import check_length, load_model, load_tokenizer
from specdata.prompts import load_prompts
from specdata.rollouts import make_rollouts
from specdata.vocabulary import check_shared_vocabulary, fingerprint


def stages(config: PipelineConfig) -> list[Stage]:
    """What this recipe does."""
    return [*([pair_stage(config)] if config.toy else []), rollouts_stage(config)]


def main(config: PipelineConfig) -> dict[str, Any]:
    """Train the toy pair if asked, then make the rollouts. One process does the work."""
    if config.toy and processes() > 1 and not finished(folder(config, "pair")):
        # Its Trainer would wait for the others, which have nothing to train.
        raise ConfigError(
            "the embedded pair is trained by one process: run python recipes/make_rollouts.py once "
            f"before starting {processes()} processes"
        )
    if not is_main():
        wait_for(folder(config, "rollouts"))
        return {}
    if toy := config.toy:

        def train() -> dict[str, Any]:
            train_toy_pair(folder(config, "pair"), toy, seed=config.seed)
            return {}

        run_stage(pair_stage(config), config, train)
    return run_stage(rollouts_stage(config), config, lambda: _rollouts(config))


def _rollouts(config: PipelineConfig) -> dict[str, Any]:
    models, stage = config.models, rollouts_stage(config)
    tokenizer = load_tokenizer(models.target)
    # Found out now rather than after hours of sampling.
    check_shared_vocabulary(tokenizer, load_tokenizer(models.draft))
    prompts = load_prompts(config.rollouts.sets, tokenizer, seed=config.seed).prompts
    target = load_model(models.target, dtype=models.dtype)
    if not prompts:
        raise ConfigError("rollouts.sets must name at least one prompt set")
    longest = max(len(prompt.ids) for prompt in prompts)
    check_length(target, longest + config.rollouts.max_new_tokens)
    settings = {**stage.settings, "target": models.target, "tokenizer": fingerprint(tokenizer)}
    with tqdm(total=len(prompts), desc="rollouts", unit="prompt", file=sys.stderr) as bar:
        rows = make_rollouts(
            target,
            prompts,
            stage.folder,
            config.rollouts,
            sampling=config.sampling,
            seed=config.seed,
            settings=settings,
            report=bar.update,
        )
    return {"rows": rows, "asked": sum(entry.count for entry in config.rollouts.sets)}


if __name__ == "__main__":
    sys.exit(cli(main, stages, "Complete prompts with the target."))
