"""The embedded pair, its distilled draft, and labelled rollouts of the three domains."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.embedded import DEMO, make_demo
from heads import BaseHead
from recipes import make_rollouts, train_head
from recipes.config import PipelineConfig, build
from recipes.layout import folder
from recipes.run import finished
from specdata.labels.make import load_labels
from specdata.models import load_model
from specdata.sampling import SamplingConfig
from specdata.storage.dataset import of_split

if TYPE_CHECKING:
    import datasets
    from transformers import PreTrainedModel

    from heads.config import HeadConfig

DOMAINS = ("instruct", "maths", "code")
DEMO_PAIR = DEMO / "pair"
SEED = 0
MAX_NEW_TOKENS = 96


@dataclass(frozen=True, slots=True)
class Data:
    """The data that heads are trained and judged on.

    Attributes:
        config: of the run that made it.
        target: name of the target.
        draft: the draft, frozen.
        sampling: how tokens are served.
        train: labelled rows of all domains.
        dev: the same, for choosing settings.
        test: the same, for judging them.
    """

    config: PipelineConfig
    target: str
    draft: PreTrainedModel
    sampling: SamplingConfig
    train: datasets.Dataset
    dev: datasets.Dataset
    test: datasets.Dataset


def prepare(
    *,
    run: Path,
    pair: Path,
    draft: Path,
    counts: Mapping[str, Mapping[str, int]],
    draws: int,
    greedy: bool,
    head: HeadConfig,
) -> Data:
    """Make what is missing.

    Args:
        run: folder of rollouts, labels and heads.
        pair: folder of the target; without it the demo's first stages are run.
        draft: folder of the distilled draft; likewise.
        counts: split -> domain -> prompts.
        draws: drafted tokens a position of the training rollouts.
        greedy: label the draft's likeliest tokens.
        head: the shipped head, for `train_shipped`.
    """
    if not draft.exists() and pair == DEMO_PAIR:
        make_demo()
    sets = [
        {"name": name, "split": split, "count": count}
        for split, of_split_ in counts.items()
        for name, count in of_split_.items()
    ]
    config = build(
        {
            "output": str(run),
            "seed": SEED,
            "models": {"target": str(pair / "target"), "draft": str(draft)},
            "rollouts": {"max_new_tokens": MAX_NEW_TOKENS, "sets": sets},
            "labels": {"draws": draws, "greedy": greedy},
            "head": head.model_dump(mode="json"),
            # Nothing is evaluated by the recipe; a configuration has to say what would be.
            "eval": {"sets": sets[-1:], "methods": [{"name": "plain", "decoder": "plain"}]},
        }
    )
    make_rollouts.RECIPE.main(config)
    if not finished(folder(config, "labels")):
        train_head.RECIPE.main(config)
    labels = load_labels(folder(config, "labels"), config.sampling)
    train, dev, test = (
        of_split(labels, split, folder(config, "labels")) for split in ("train", "dev", "test")
    )
    return Data(
        config=config,
        target=config.models.target,
        draft=load_model(config.models.draft, dtype="float32", target=config.models.target),
        sampling=config.sampling,
        train=train,
        dev=dev,
        test=test,
    )


def train_shipped(data: Data) -> BaseHead:
    """The head as the recipe trains it, on all training rows."""
    train_head.RECIPE.main(data.config)
    return BaseHead.from_pretrained(folder(data.config, "head") / "model").eval()


def of_domains(rows: datasets.Dataset, counts: Mapping[str, int]) -> datasets.Dataset:
    """The first so many rows of each domain, in the order of their ids: (domain -> rows)."""
    chosen = []
    names, ids = rows["dataset"], rows["example_id"]
    for domain, count in counts.items():
        of_it = [index for index, name in enumerate(names) if name == domain]
        # Stored rows are sorted by the length of their prompts; the hashes of prompts are not.
        chosen += sorted(of_it, key=lambda index: str(ids[index]))[:count]
    return rows.select(sorted(chosen))
