"""The embedded pair, and its target's rollouts of the three domains."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.embedded import make_demo
from benchmarks.head_figures.data import DEMO_PAIR, DOMAINS, MAX_NEW_TOKENS, SEED, of_domains
from recipes import make_rollouts
from recipes.config import PipelineConfig, build
from recipes.layout import folder
from specdata.sampling import SamplingConfig
from specdata.storage.dataset import load_stored, of_split

if TYPE_CHECKING:
    import datasets

__all__ = ["DEMO_PAIR", "DOMAINS", "MAX_NEW_TOKENS", "SEED", "Data", "of_domains", "prepare"]


@dataclass(frozen=True, slots=True)
class Data:
    """The data that drafts are trained and judged on.

    Attributes:
        run: folder of all that is made.
        pair: folder of the target and the undistilled draft.
        sampling: how tokens are served.
        train: rollouts of all domains.
        dev: the same, for what distillation measures itself.
        test: the same, for judging.
    """

    run: Path
    pair: Path
    sampling: SamplingConfig
    train: datasets.Dataset
    dev: datasets.Dataset
    test: datasets.Dataset

    @property
    def target(self) -> Path:
        """Folder of the target."""
        return self.pair / "target"

    @property
    def draft(self) -> Path:
        """Folder of the undistilled draft."""
        return self.pair / "draft"


def prepare(*, run: Path, pair: Path, counts: Mapping[str, Mapping[str, int]]) -> Data:
    """Make what is missing.

    Args:
        run: folder of rollouts and drafts.
        pair: folder of target and draft; without the demo's, the demo's first stage is run.
        counts: split -> domain -> prompts.
    """
    if not pair.exists() and pair == DEMO_PAIR:
        make_demo("make_rollouts")
    sets = [
        {"name": name, "split": split, "count": count}
        for split, of_split_ in counts.items()
        for name, count in of_split_.items()
    ]
    config: PipelineConfig = build(
        {
            "output": str(run),
            "seed": SEED,
            "models": {"target": str(pair / "target"), "draft": str(pair / "draft")},
            "rollouts": {"max_new_tokens": MAX_NEW_TOKENS, "sets": sets},
            # Nothing is evaluated by the recipe; a configuration has to say what would be.
            "eval": {"sets": sets[-1:], "methods": [{"name": "plain", "decoder": "plain"}]},
        }
    )
    make_rollouts.RECIPE.main(config)
    source = folder(config, "rollouts")
    rollouts = load_stored(source)
    train, dev, test = (of_split(rollouts, split, source) for split in ("train", "dev", "test"))
    return Data(run, pair, config.sampling, train, dev, test)
