"""Which draft tree would be best for a run: searched on held-out rollouts, kept beside results."""

from __future__ import annotations

from typing import TYPE_CHECKING

from eval.analysis.tree_results import FOUND, TreeSearch
from recipes.config import PipelineConfig
from recipes.layout import draft_in_use, eval_folder, folder
from recipes.run import finished, say
from specdata.errors import ConfigError, ManifestError
from specdata.sampling import SamplingConfig
from specdata.storage.files import fingerprint
from specdata.storage.manifest import read_manifest

if TYPE_CHECKING:
    from transformers import PreTrainedModel

SPLIT = "dev"
NOT_KEPT = (
    "This evaluation keeps no search for a tree that was made of these models and rollouts: it is "
    "of an earlier version, they have changed, or the search failed. `draftsmith trees` searches."
)
"""Why a report has no tree if nothing stood against a search."""


def why_not_searched(config: PipelineConfig) -> str:
    """Why this run looks for no tree, as a sentence; empty if it does."""
    evaluation, rollouts = config.eval, folder(config, "rollouts")
    if not any(method.drafter == "tree" for method in evaluation.methods):
        return (
            "Shapes are searched for trees that are drawn, and no method of this evaluation draws "
            "one: add one with drafter: tree. A dynamic tree finds its shape while it drafts."
        )
    if config.sampling.temperature == 0:
        return (
            "At temperature 0 the draft has one candidate for a position, so every tree is a chain."
        )
    if evaluation.batch > 1:
        return "With eval.batch above 1 nothing is timed, and a tree is chosen by time."
    if not finished(rollouts):
        return (
            "Trees are searched on held-out rollouts of the target, and this run has none: make "
            "them with make_rollouts.py, with a set of split dev."
        )
    try:
        stored = read_manifest(rollouts)["settings"].get("sampling", {})
    except ManifestError as error:
        return f"Trees are searched on held-out rollouts of the target: {error}."
    if SamplingConfig(**stored) != config.sampling:
        return "The run's rollouts were sampled otherwise than this evaluation samples."
    if not any(wanted.split == SPLIT for wanted in config.rollouts.sets):
        return "The run's rollouts have no set of split dev, and trees are not chosen on others."
    return ""


def known_search(config: PipelineConfig) -> TreeSearch | None:
    """What an evaluation keeps, if it is of this run's rollouts and models as they are."""
    if why_not_searched(config):
        return None
    path = eval_folder(config) / FOUND
    return TreeSearch.read(path, _made_of(config)) if path.is_file() else None


def search(config: PipelineConfig, target: PreTrainedModel, draft: PreTrainedModel) -> None:
    """Search, and keep what is found; nothing if it is there already, or cannot be had.

    Args:
        config: the run.
        target: loaded already.
        draft: likewise.
    """
    if why_not_searched(config) or known_search(config):
        return
    from eval.analysis.tree_search import Pair, search_trees
    from specdata.storage.dataset import load_stored, of_split

    where = folder(config, "rollouts")
    try:
        rows = of_split(load_stored(where), SPLIT, where)
        found = search_trees(
            rows,
            Pair(
                target,
                draft,
                config.sampling,
                config.eval.engine,
                config.eval.max_new_tokens,
                config.seed,
            ),
            eval_folder(config),
            methods=config.eval.methods,
            made_of=_made_of(config),
        )
    except (ConfigError, ValueError) as error:  # what was measured must not be lost for it
        say(f"  no tree was searched: {error}")
        return
    found.write(eval_folder(config) / FOUND)
    say(f"  {found.searched} trees compared in {found.seconds:.0f} s")


def _made_of(config: PipelineConfig) -> dict[str, str | None]:
    """Contents of what a search is made of; the evaluation's own settings decide the rest."""
    return {
        "target": fingerprint(config.models.target),
        "draft": fingerprint(draft_in_use(config)),
        "rollouts": fingerprint(str(folder(config, "rollouts"))),
    }
