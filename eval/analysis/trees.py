"""Which draft tree suits a pair of models: by held-out text of the target, then by the clock.

    python -m eval.analysis.trees ROLLOUTS --target TARGET --draft DRAFT

Every k-configuration that widens nowhere (MCSD's monotonic rule) with at most 32 paths, and the
best static tree of each size, are compared with chains by what they should take for a token on
this machine; the few that promise most are decoded. How rollouts were sampled, and which target
wrote them, is read from them.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, get_args

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from eval.analysis.replay import rows_of_split
from eval.analysis.tree_results import FOUND, TreeSearch
from eval.runtime.engines import Engine
from specdata.errors import ConfigError, ManifestError
from specdata.sampling import SamplingConfig
from specdata.storage.files import fingerprint
from specdata.storage.manifest import read_manifest
from specdata.terminal import accept_any_text

if TYPE_CHECKING:  # help is shown without torch
    import datasets


def main(
    arguments: Sequence[str] | None = None, program: str = "python -m eval.analysis.trees"
) -> int:
    """Run the command line; returns the exit status."""
    accept_any_text()
    given = _parser(program).parse_args(arguments)
    try:
        found = _run(given)
    except (ConfigError, ManifestError, ValueError, OSError) as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    # The table is wider than the 80 columns that a file or a pipe is taken to have.
    console = Console(highlight=False, width=max(100, Console().width))
    console.print(_table(found))
    timed = found.clocked()
    tree = next(each for each in timed if each.family != "chain")
    console.print(
        f"fastest tree by the clock: {tree.name}; to evaluate it: {{name: tree {tree.name}, "
        f"verifier: {tree.verifier}, drafter: tree, siblings: distinct, widths: {tree.widths}}}",
        soft_wrap=True,
    )
    console.print(f"everything: {given.out / FOUND}", soft_wrap=True)
    return 0


def _run(given: argparse.Namespace) -> TreeSearch:
    from eval.analysis.tree_search import Pair, search_trees
    from specdata.models import load_model
    from specdata.storage.dataset import stream_stored

    sampling = _sampling(given.rollouts, given.target)
    if sampling.temperature == 0:
        raise ConfigError(
            "these rollouts were sampled at temperature 0, where the draft has one candidate for a "
            "position and every tree is a chain: make rollouts at a temperature above 0"
        )
    rows: datasets.Dataset = rows_of_split(
        stream_stored(given.rollouts), given.rollouts, given.split, given.rows
    )
    target, draft = (load_model(name, dtype=given.dtype) for name in (given.target, given.draft))
    pair = Pair(target, draft, sampling, given.engine, given.max_new_tokens, given.seed)
    given.out.mkdir(parents=True, exist_ok=True)
    found = search_trees(rows, pair, given.out, rollouts=given.rows, made_of=_made_of(given))
    found.write(given.out / FOUND)
    return found


def _made_of(given: argparse.Namespace) -> dict[str, str | None]:
    """Contents of what a search is made of, and what else decides the trace that is kept."""
    return {
        "target": fingerprint(given.target),
        "draft": fingerprint(given.draft),
        "rollouts": fingerprint(str(given.rollouts)),
        "rows": f"{given.rows} of {given.split}",
        "draws": f"seed {given.seed}, {given.dtype}",
    }


def _sampling(rollouts: Path, target: str) -> SamplingConfig:
    """How rollouts were sampled. Raises ConfigError if another target wrote them."""
    from specdata.models import revision_of

    stored = read_manifest(rollouts)["settings"]
    if "sampling" not in stored:
        raise ConfigError(f"{rollouts} does not say how its rollouts were sampled")
    wrote, revision = stored.get("target"), revision_of(target)
    if isinstance(wrote, dict) and wrote.get("revision", revision) != revision:
        raise ConfigError(
            f"--target must be the model that wrote {rollouts}, {wrote.get('name')}; the one in "
            f"{target} is another (contents {wrote['revision']} -> {revision})"
        )
    return SamplingConfig(**stored["sampling"])


def _table(found: TreeSearch) -> Table:
    view = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False)
    for column in ("draft", "verifier"):
        view.add_column(column, no_wrap=True)
    for column in ("nodes", "tokens/round", "ms/token", "measured", "speed over the chain"):
        view.add_column(column, no_wrap=True, justify="right")
    rest = [each for each in found.candidates if each.clocked is None]
    for each in [*found.clocked(), *sorted(rest, key=lambda each: each.seconds_per_token)]:
        measured, speed = "", ""
        if each.clocked:
            measured = f"{1000 * each.clocked.seconds_per_token:.2f}"
            if over := each.clocked.speed:
                speed = f"{over.value:.2f} [{over.low:.2f}, {over.high:.2f}]"
        view.add_row(
            each.name,
            each.verifier,
            str(each.nodes),
            f"{each.tokens.value:.2f}",
            f"{1000 * each.seconds_per_token:.2f}",
            measured,
            speed,
        )
    return view


def _parser(program: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=program,
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("rollouts", type=Path, help="folder of a dataset of rollouts (or labels) of the target")
    add("--target", required=True, help="the model that wrote them")
    add("--draft", required=True, help="the draft")
    add("--split", default="dev", help="rows that are read (default: dev)")
    add("--rows", type=int, default=32, help="most rollouts of a prompt set (default: 32)")
    add("--engine", choices=get_args(Engine), default="eager", help="how forwards run")
    add("--dtype", default="float32", help="of both models (default: float32)")
    add("--max-new-tokens", type=int, default=96, help="of a timed prompt (default: 96)")
    add("--seed", type=int, default=0, help="of every draw (default: 0)")
    add("--out", type=Path, default=Path("runs/trees"), help="folder for the trace and the JSON")
    return parser


if __name__ == "__main__":
    sys.exit(main())
