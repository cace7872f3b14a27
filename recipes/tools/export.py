"""Write a draft in EAGLE-3's or DSpark's layout, for engines.

    draftsmith export DRAFT --out FOLDER [--layout eagle3|speculators] [--target TARGET]
    draftsmith export DRAFT --out FOLDER [--layout dspark] [--head HEAD] [--target TARGET]

DRAFT is one of `draft.init.layout: eagle3` or `dspark`, or an imported one. DSpark's has a slot for
HEAD, of `head.kind: confidence`. If DRAFT is OUTPUT/draft/model of a run that has measured it, its
card is that of `publish`.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Literal

from eval.publishing.serving import serving_lines
from recipes.config import RESULTS, PipelineConfig, absolute, build
from recipes.releases import draft_release, for_engines, measurements
from recipes.run import say, stage_record
from specdata.errors import ConfigError


def add_options(parser: argparse.ArgumentParser) -> None:
    """The command line."""
    parser.add_argument("folder", type=Path, help="the draft to release")
    parser.add_argument("--out", type=Path, required=True, help="the folder to write")
    parser.add_argument(
        "--layout",
        choices=("eagle3", "speculators", "dspark"),
        help="by default the draft's own; a draft of eagle3 can be written in speculators', too",
    )
    parser.add_argument("--head", type=Path, help="of DSpark: its acceptance head")
    parser.add_argument("--target", help="its target, if that is not where it was at training")


def main(given: argparse.Namespace) -> int:
    """Write a folder for engines; returns the exit status."""
    from distill.engine_layouts import config_of, of_layout
    from eval.publishing.release import release_unmeasured
    from specdata.draft_models.draft_vocabulary import SIZE
    from specdata.draft_models.states_draft import KEY, is_for_engines

    settings, run = config_of(given.folder), given.folder.absolute().parents[1]
    if given.out.exists():
        raise ConfigError(f"{given.out} exists: give another --out, or remove it")
    if KEY not in settings:
        if is_for_engines(settings):
            raise ConfigError(f"{given.folder} is in a layout of engines: they load it as it is")
        released = run / "release" / "draft"
        where = f"is {released}" if released.is_dir() else "draftsmith publish writes"
        raise ConfigError(
            f"{given.folder} is a plain draft and needs no other layout: vLLM loads its release, "
            f"which {where}"
        )
    record = of_layout(given.folder, given.target)[1]
    own: Literal["eagle3", "dspark"] = "dspark" if record.blocks else "eagle3"
    layout: Literal["eagle3", "speculators", "dspark"] = given.layout or own
    allowed = ("dspark",) if own == "dspark" else ("eagle3", "speculators")
    if layout not in allowed or (given.head and own != "dspark"):
        raise ConfigError(
            f"{given.folder} is a draft of layout {own}: --layout must be {' or '.join(allowed)}, "
            "and --head is for dspark alone"
        )
    engines = for_engines(given.folder, record.target, layout, given.head)
    if config := _measured_by(run, given.folder, record.target):
        draft_release(config, engines)(out=given.out, results=measurements(config))
    else:
        release_unmeasured(given.folder, given.out, record.target, engines)
    tokens = settings.get(SIZE, settings["vocab_size"])
    say(f"{given.out}: {tokens:,} tokens, taps {record.taps}, for {record.target}")
    depths = record.blocks.size if record.blocks else 1
    say(f"serve    {serving_lines(str(given.out), record.target, own, depths)['vLLM']}")
    return 0


def _measured_by(run: Path, draft: Path, target: str) -> PipelineConfig | None:
    """The configuration of the run that made a draft, if it has measured it."""
    if not (run / "eval" / RESULTS).is_file():
        return None
    config = build(stage_record(run / "eval")["config"])
    models = config.models.model_copy(update={"target": target})
    config = config.model_copy(update={"output": str(run), "models": models})
    return config if config.draft and absolute(config.draft_in_use) == absolute(draft) else None
