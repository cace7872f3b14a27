"""Write a draft in a layout of engines.

    draftsmith export DRAFT --out FOLDER [--layout LAYOUT] [--head HEAD] [--target TARGET]

DRAFT is one of `draft.init.layout`, or an imported one. That of a kind whose head engines ask has a
slot for HEAD, of `head.kind: confidence`. If DRAFT is OUTPUT/draft/model of a run that has measured
it, its card is that of `publish`.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from eval.publishing.serving import serving_lines
from recipes.config import RESULTS, PipelineConfig, absolute, build
from recipes.releases import draft_release, for_engines, measurements
from recipes.run import say, stage_record
from specdata.draft_kinds import KINDS, is_for_engines, kind_of
from specdata.errors import ConfigError


def add_options(parser: argparse.ArgumentParser) -> None:
    """The command line."""
    parser.add_argument("folder", type=Path, help="the draft to release")
    parser.add_argument("--out", type=Path, required=True, help="the folder to write")
    parser.add_argument(
        "--layout",
        choices=[layout for kind in KINDS.values() for layout in kind.layouts],
        help="by default the first that the draft's kind has",
    )
    parser.add_argument("--head", type=Path, help="its acceptance head, where engines ask one")
    parser.add_argument("--target", help="its target, if that is not where it was at training")


def main(given: argparse.Namespace) -> int:
    """Write a folder for engines; returns the exit status."""
    from distill.published import config_of, of_layout
    from eval.publishing.release import release_unmeasured
    from specdata.draft_models.draft_vocabulary import SIZE

    settings, run = config_of(given.folder), given.folder.absolute().parents[1]
    if given.out.exists():
        raise ConfigError(f"{given.out} exists: give another --out, or remove it")
    kind = kind_of(settings)
    if not kind.reads_states:
        if is_for_engines(settings):
            raise ConfigError(f"{given.folder} is in a layout of engines: they load it as it is")
        where = "engines load it as it is"
        if given.folder.absolute() == run / "draft" / "model":  # and not the target, say
            released = run / "release" / "draft"
            where = f"is {released}" if released.is_dir() else "draftsmith publish writes"
            where = f"vLLM loads its release, which {where}"
        raise ConfigError(f"{given.folder} is a plain model and needs no other layout: {where}")
    record = of_layout(given.folder, given.target)[1]
    layout: str = given.layout or next(iter(kind.layouts))
    if layout not in kind.layouts or (given.head and not kind.asks_head):
        asked = " or ".join(each.name for each in KINDS.values() if each.asks_head)
        raise ConfigError(
            f"{given.folder} is a draft of layout {kind.name}: --layout must be "
            f"{' or '.join(kind.layouts)}, and --head is for {asked} alone"
        )
    engines = for_engines(given.folder, record.target, layout, given.head)
    if config := _measured_by(run, given.folder, record.target):
        draft_release(config, engines)(out=given.out, results=measurements(config))
    else:
        release_unmeasured(given.folder, given.out, record.target, engines)
    tokens = settings.get(SIZE, settings["vocab_size"])
    say(f"{given.out}: {tokens:,} tokens, taps {record.taps}, for {record.target}")
    lines = serving_lines(str(given.out), record.target, kind, kind.depths(settings))
    say(f"serve    {lines['vLLM']}")
    return 0


def _measured_by(run: Path, draft: Path, target: str) -> PipelineConfig | None:
    """The configuration of the run that made a draft, if it has measured it."""
    if not (run / "eval" / RESULTS).is_file():
        return None
    config = build(stage_record(run / "eval")["config"])
    models = config.models.model_copy(update={"target": target})
    config = config.model_copy(update={"output": str(run), "models": models})
    return config if config.draft and absolute(config.draft_in_use) == absolute(draft) else None
