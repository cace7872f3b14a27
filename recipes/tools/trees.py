"""The best draft tree of a pair, along the target's own text (`recipes.papers.trees`).

draftsmith trees ROLLOUTS --target TARGET --draft DRAFT [--budget 32] [--ratio 0.1]
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path

from rich.console import Console

from specdata.config import read_stored
from specdata.errors import ConfigError
from specdata.sampling import SamplingConfig
from specdata.storage.dataset import read_manifest
from specdata.terminal import whole_number

VERIFIERS = {"distinct": "rrs_wor", "iid": "rrs"}
"""How siblings are drawn -> the verifier whose acceptance is searched."""


def add_options(parser: argparse.ArgumentParser) -> None:
    """The command line."""
    add = parser.add_argument
    add("rollouts", type=Path, help="folder of a dataset of rollouts (or labels) of the target")
    add("--target", required=True, help="the model that wrote them")
    add("--draft", required=True, help="the draft")
    add("--budget", type=whole_number, default=32, help="most paths of a tree (default: 32)")
    add("--ratio", type=float, default=0.1, help="t_draft/t_target (default: 0.1)")
    add("--siblings", choices=VERIFIERS, default="distinct", help="how they are drawn")
    add("--rows", type=whole_number, default=32, help="dev rollouts of a prompt set (default: 32)")
    add("--dtype", default="float32", help="of both models (default: float32)")


def main(given: argparse.Namespace) -> int:
    """Print the best tree of each budget; returns the exit status."""
    if given.budget < 1 or not 0.0 <= given.ratio < math.inf:
        raise ConfigError(
            f"--budget must be at least 1 and --ratio at least 0; got {given.budget} and "
            f"{given.ratio:g}"
        )
    settings = read_manifest(given.rollouts)["settings"]
    if "sampling" not in settings:
        raise ConfigError(f"{given.rollouts} does not say how its rollouts were sampled")
    sampling = read_stored(SamplingConfig, settings["sampling"], f"the sampler of {given.rollouts}")
    from eval.analysis.replay import rows_of_split
    from recipes.papers.trees import WIDTHS, acceptance_along, search
    from specdata.models import load_model, revision_of
    from specdata.states_draft import reads_states
    from specdata.storage.dataset import stream_stored

    writer, revision = settings.get("target"), revision_of(given.target)
    if isinstance(writer, dict) and writer.get("revision", revision) != revision:
        raise ConfigError(
            f"--target must be the model that wrote {given.rollouts}, {writer.get('name')}; the "
            f"one in {given.target} is another (contents {writer['revision']} -> {revision})"
        )
    target, draft = (load_model(name, dtype=given.dtype) for name in (given.target, given.draft))
    if reads_states(draft.config):
        raise ConfigError(
            f"{given.draft} reads its target's states, so trees cannot be searched along texts "
            "that are read once: decode with several, as eval.methods"
        )
    acceptance = acceptance_along(
        list(rows_of_split(stream_stored(given.rollouts), given.rollouts, "dev", given.rows)),
        target=target,
        draft=draft,
        sampling=sampling,
        siblings=given.siblings,
        most=max(width for width in WIDTHS if width <= given.budget),
        seed=0,
    )
    trees = search(acceptance, given.budget, given.ratio)
    trees.sort(key=lambda tree: -float(tree["speedup"]))
    console = Console(highlight=False, soft_wrap=True)
    for paths in (width for width in WIDTHS if width <= given.budget):
        best = next(tree for tree in trees if tree["paths"] <= paths)
        tokens = best["block_efficiency"]
        console.print(
            f"at most {paths:>2} paths: {best['widths']}, {best['nodes']} nodes, "
            f"{tokens['value']:.2f} [{tokens['low']:.2f}, {tokens['high']:.2f}] tokens a round, "
            f"{best['speedup']:.2f}x at t_draft/t_target {given.ratio:g}",
            markup=False,
        )
    widths = trees[0]["widths"]
    console.print(
        f"best of {len(trees)}: {widths}; to evaluate it: {{name: tree {widths}, verifier: "
        f"{VERIFIERS[given.siblings]}, drafter: tree, siblings: {given.siblings}, widths: "
        f"[{widths.replace('x', ', ')}]}}",
        markup=False,
    )
    return 0
