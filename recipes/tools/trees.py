"""Search for the best draft tree along held-out text of the target (`eval.analysis.trees`).

draftsmith trees ROLLOUTS --target TARGET --draft DRAFT [--budget 32] [--ratio 0.1]
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, get_args

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from eval.analysis.replay import rows_of_split
from eval.analysis.trees import VERIFIER, WIDTHS, Candidate, Siblings, acceptance_along, search
from specdata.errors import ConfigError
from specdata.sampling import SamplingConfig
from specdata.storage.manifest import read_manifest
from specdata.terminal import whole_number

if TYPE_CHECKING:  # help is shown without torch
    from transformers import PreTrainedModel


def add_options(parser: argparse.ArgumentParser) -> None:
    """The command line."""
    add = parser.add_argument
    add("rollouts", type=Path, help="folder of a dataset of rollouts (or labels) of the target")
    add("--target", required=True, help="the model that wrote them")
    add("--draft", required=True, help="the draft")
    add("--budget", type=whole_number, default=32, help="most paths of a tree (default: 32)")
    add("--ratio", type=float, default=0.1, help="t_draft/t_target (default: 0.1)")
    add("--siblings", choices=get_args(Siblings), default="distinct", help="how they are drawn")
    add("--split", default="dev", help="rows that are read (default: dev)")
    add("--rows", type=whole_number, default=32, help="most rollouts of a prompt set (default: 32)")
    add("--dtype", default="float32", help="of both models (default: float32)")
    add("--seed", type=whole_number, default=0, help="of the rejected candidates (default: 0)")


def main(given: argparse.Namespace) -> int:
    """Run the command line; returns the exit status."""
    trees = _run(given)
    best = trees[0]
    # The fastest of each budget, and of chains, which have one path.
    budgets = [budget for budget in WIDTHS if budget <= given.budget]
    shown = [next(each for each in trees if each.paths <= budget) for budget in budgets]
    view = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False)
    view.add_column("most paths", justify="right")
    view.add_column("widths", no_wrap=True)
    for column in ("nodes", "tokens/round", f"speed-up at {given.ratio:g}"):
        view.add_column(column, no_wrap=True, justify="right")
    for budget, each in zip(budgets, shown, strict=True):
        tokens = f"{each.tokens.value:.2f} [{each.tokens.low:.2f}, {each.tokens.high:.2f}]"
        view.add_row(str(budget), each.name, str(each.nodes), tokens, f"{each.speedup:.2f}x")
    console = Console(highlight=False)
    console.print(view)
    console.print(
        f"best of {len(trees)}: {best.name}; to evaluate it: {{name: tree {best.name}, verifier: "
        f"{VERIFIER[given.siblings]}, drafter: tree, siblings: {given.siblings}, "
        f"widths: {list(best.widths)}}}",
        soft_wrap=True,
    )
    return 0


def _run(given: argparse.Namespace) -> list[Candidate]:
    from specdata.models import load_model
    from specdata.storage.dataset import stream_stored

    if given.budget < 1 or not given.ratio >= 0.0:
        raise ConfigError(
            f"--budget must be at least 1 and --ratio at least 0; got {given.budget} and "
            f"{given.ratio:g}"
        )
    sampling = _sampling(given)
    if sampling.temperature == 0:
        raise ConfigError(
            "these rollouts were sampled at temperature 0, where the draft has one candidate for a "
            "position and every tree is a chain: make rollouts at a temperature above 0"
        )
    rows = rows_of_split(stream_stored(given.rollouts), given.rollouts, given.split, given.rows)
    target, draft = load_model(given.target, dtype=given.dtype), _draft(given)
    acceptance = acceptance_along(
        rows,
        target=target,
        draft=draft,
        sampling=sampling,
        siblings=given.siblings,
        most=max(width for width in WIDTHS if width <= given.budget),
        seed=given.seed,
    )
    return search(acceptance, given.budget, given.ratio)


def _draft(given: argparse.Namespace) -> PreTrainedModel:
    """The draft; refused if what it drafts does not follow from a text alone."""
    from specdata.models import load_model
    from specdata.states_draft import states_input

    draft: PreTrainedModel = load_model(given.draft, dtype=given.dtype)
    if states_input(draft) is not None:
        raise ConfigError(
            f"{given.draft} reads its target's states, so trees cannot be searched along texts "
            "that are read once: decode with several, as eval.methods"
        )
    return draft


def _sampling(given: argparse.Namespace) -> SamplingConfig:
    """How the rollouts were sampled; a target that did not write them is refused."""
    from specdata.models import revision_of

    stored = read_manifest(given.rollouts)["settings"]
    if "sampling" not in stored:
        raise ConfigError(f"{given.rollouts} does not say how its rollouts were sampled")
    wrote, revision = stored.get("target"), revision_of(given.target)
    if isinstance(wrote, dict) and wrote.get("revision", revision) != revision:
        raise ConfigError(
            f"--target must be the model that wrote {given.rollouts}, {wrote.get('name')}; the one "
            f"in {given.target} is another (contents {wrote['revision']} -> {revision})"
        )
    return SamplingConfig(**stored["sampling"])
