"""Drafts that distillation starts from: other sizes, trained on text; and cuts of the target."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.distill_figures.data import SEED, Data, of_domains
from distill.config import InitConfig, ToyPairConfig
from distill.initial import make_initial
from distill.toy import train_toy_pair
from specdata.storage.files import read_object


@dataclass(frozen=True, slots=True)
class Sized:
    """A Llama that is trained as the demo's base draft is.

    Attributes:
        layers: of it.
        width: its hidden size.
    """

    layers: int
    width: int


@dataclass(frozen=True, slots=True)
class Initial:
    """The results of `distill.initial`.

    Attributes:
        settings: of `draft.init`; of the target two layers.
    """

    settings: Mapping[str, Any] = field(default_factory=dict)


STARTS: Mapping[str, Sized | Initial] = {
    **{
        f"{layers} x {width}": Sized(layers, width)
        for layers, width in ((1, 64), (1, 96), (1, 192), (2, 128))
    },
    "2 of the target's layers, even": Initial({"kind": "target"}),
    **{
        f"1 x 128, {size} tokens": Initial({"kind": "model", "vocabulary": size})
        for size in (512, 1024)
    },
}


def started(start: Sized | Initial, data: Data, rollouts: Mapping[str, int], *, name: str) -> Path:
    """Make a draft to start from, unless that was done, and return its folder.

    Args:
        start: what to make.
        data: the pair.
        rollouts: domain -> training rollouts that tokens are counted on.
        name: of its folder.
    """
    folder = data.run / "starts" / name
    if isinstance(start, Sized):
        folder.mkdir(parents=True, exist_ok=True)
        if not (folder / "target").exists():
            (folder / "target").symlink_to(data.target.resolve())
        config = ToyPairConfig.model_validate(
            {"draft_layers": start.layers, "draft_width": start.width}
        )
        train_toy_pair(folder, config, seed=SEED)
    elif not (folder / "draft").exists():
        settings = dict(start.settings)
        if settings["kind"] == "target":  # its first layer and its last
            last = read_object(data.target / "config.json")["num_hidden_layers"] - 1
            settings["layers"] = [0, last]
        make_initial(
            target=data.target,
            draft=data.draft if settings["kind"] == "model" else None,
            rollouts=of_domains(data.train, rollouts),
            out=folder / "draft",
            config=InitConfig.model_validate(settings),
            seed=SEED,
        )
    return folder / "draft"
