"""Write a draft in a layout of engines.

    draftsmith export DRAFT --out FOLDER [--head HEAD] [--target TARGET]
    draftsmith export DRAFT --out FOLDER --for openvino [--int8] [--target TARGET]
    draftsmith export DRAFT --out FOLDER --into TARGET

DRAFT is one of `draft.init.layout`, or an imported one. That of a kind whose head engines ask has a
slot for HEAD, of `head.kind: confidence`. If DRAFT is OUTPUT/draft/model of a run that has measured
it, its card is that of `publish`.

With --into, DRAFT is a target's head (`draft.init.kind: mtp`), its release, or a target that brings
one along. FOLDER is then TARGET with this head, as engines load it; TARGET's weights are linked.

OpenVINO GenAI loads models that were converted: FOLDER/target and FOLDER/draft, of a draft in
EAGLE-3's layout (DRAFT or its release) or a plain one. A Python that has OpenVINO does it
(`recipes.in_openvino`).
"""

from __future__ import annotations

import argparse
import subprocess
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from eval.publishing.serving import serving_lines
from recipes import in_openvino
from recipes.config import RESULTS, PipelineConfig, absolute
from recipes.releases import draft_release, for_engines, measurements
from recipes.run import RUN, say, stored_config
from recipes.tools.import_ import import_draft
from specdata.drafts import DRAFT_KINDS, is_for_engines, kind_of
from specdata.errors import ConfigError
from specdata.sources import config_of

OPENVINO = ".venv-openvino/bin/python"
"""That of `make .venv-openvino/installed`."""


def add_options(parser: argparse.ArgumentParser) -> None:
    """The command line."""
    parser.add_argument("folder", type=Path, help="the draft to release")
    parser.add_argument("--out", type=Path, required=True, help="the folder to write")
    parser.add_argument("--head", type=Path, help="its acceptance head, where engines ask one")
    parser.add_argument("--target", help="its target, if that is not where it was at training")
    parser.add_argument("--into", metavar="TARGET", help="of a head: the target that gets it")
    add = parser.add_argument_group("OpenVINO GenAI").add_argument
    add("--for", dest="engine", choices=["openvino"], help="the engine that models are made for")
    add("--int8", action="store_true", help="weights of 8 bits (default: of 32)")
    add("--python", default=OPENVINO, help=f"one that has OpenVINO (default: {OPENVINO})")


def main(args: argparse.Namespace) -> int:
    """Write a folder for engines; returns the exit status."""
    from distill.head_files import write_into
    from distill.published import read_engine_draft
    from eval.publishing.release import release_unmeasured
    from specdata.drafts.draft_vocabulary import SIZE

    settings, run = config_of(args.folder), args.folder.absolute().parents[1]
    if args.out.exists():
        raise ConfigError(f"{args.out} exists: give another --out, or remove it")
    kind, made_by = kind_of(settings), _made_by(run, args.folder)
    if args.into:
        if args.head or args.target or args.engine:
            raise ConfigError("--into takes neither --head, --target nor --for: leave them out")
        write_into(args.folder, args.into, args.out)
        say(f"{args.out}: {args.into} with the head of {args.folder}")
        say(f"serve    {serving_lines(str(args.out), str(args.out), DRAFT_KINDS['mtp'])['vLLM']}")
        return 0
    if made_by and not args.target:
        args.target = made_by.models.target  # as it is called from here
    if args.engine:
        if args.head:
            raise ConfigError("--for openvino takes no --head: leave it out")
        return _for_openvino(args, settings)
    if args.int8:
        raise ConfigError("--int8 is for --for openvino")
    if not kind.reads_states:
        if is_for_engines(settings):
            raise ConfigError(f"{args.folder} is in a layout of engines: they load it as it is")
        where = "engines load it as it is"
        if args.folder.absolute() == run / "draft" / "model":  # and not the target, say
            released = run / "release" / "draft"
            where = f"is {released}" if released.is_dir() else "draftsmith publish writes"
            where = f"vLLM loads its release, which {where}"
        raise ConfigError(f"{args.folder} is a plain model and needs no other layout: {where}")
    record = read_engine_draft(args.folder, args.target)[1]
    if args.head and not kind.engine_head:
        asked = " or ".join(each.name for each in DRAFT_KINDS.values() if each.engine_head)
        raise ConfigError(
            f"{args.folder} is a draft of layout {kind.name}, and --head is for {asked} alone"
        )
    engines = for_engines(args.folder, record.target, args.head)
    if made_by and (run / "eval" / RESULTS).is_file():
        models = made_by.models.model_copy(update={"target": record.target})
        config = made_by.model_copy(update={"models": models})
        draft_release(config, engines)(out=args.out, results=measurements(config))
    else:
        release_unmeasured(args.folder, args.out, record.target, engines)
    tokens = settings.get(SIZE, settings["vocab_size"])
    say(f"{args.out}: {tokens:,} tokens, taps {record.taps}, for {record.target}")
    lines = serving_lines(str(args.out), record.target, kind, kind.depths(settings))
    if kind.served.in_target:
        say(f"write    {lines['draftsmith']}")
    say(f"serve    {lines['vLLM']}")
    return 0


def _for_openvino(args: argparse.Namespace, settings: dict[str, Any]) -> int:
    """Write a target and its draft as GenAI loads them; returns the exit status."""
    from distill.engine_layouts import LAYOUTS
    from distill.published import read_engine_draft, write
    from specdata.drafts.draft_vocabulary import SIZE
    from specdata.models import load_configs
    from specdata.storage.files import atomic_folder

    draft, target = args.folder, args.target
    command = [args.python, in_openvino.__file__, "convert", *["--int8"] * args.int8]
    with ExitStack() as closing:
        if is_for_engines(settings) and target:  # a release: read, and written as GenAI takes it
            draft = Path(closing.enter_context(TemporaryDirectory())) / "imported"
            import_draft(args.folder, target, draft)
            settings = config_of(draft)
        if (kind := kind_of(settings)).reads_states:
            record = read_engine_draft(draft, target)[1]
            target, taps = record.target, record.taps
            flags = asdict(record.kind_record) if "eagle3" in kind.layouts else {kind.name: True}
            if wrong := [name for name, value in flags.items() if value]:
                raise ConfigError(
                    f"{args.folder} must be of EAGLE-3's layout without norms of its own, all that "
                    f"OpenVINO GenAI computes, and has {', '.join(wrong)}"
                )
            if len(taps) != 3 or taps[0] == 0:
                raise ConfigError(
                    f"OpenVINO GenAI reads the states before three layers, the first of which is "
                    f"not layer 0; {args.folder} has taps {taps}"
                )
            command += ["--taps", *map(str, taps)]
            ours, draft = draft, Path(closing.enter_context(TemporaryDirectory()))
            write(LAYOUTS[kind.name], ours, draft, target=target)
        elif not target:
            what = "is in a layout of engines" if is_for_engines(settings) else "is a plain draft"
            raise ConfigError(f"{draft} {what}: give its --target")
        elif settings.get(SIZE):
            raise ConfigError(
                f"{draft} has a vocabulary of its own: give its release, which draftsmith publish "
                "writes with all tokens"
            )
        elif (size := load_configs(target)[0].get_text_config().vocab_size) != (
            found := settings.get("vocab_size")
        ):
            raise ConfigError(f"{draft} must have the {size} tokens of {target}, and has {found}")
        folder = closing.enter_context(atomic_folder(args.out))
        command += ["--", str(folder), str(target), str(draft)]
        try:
            done = subprocess.run(command, capture_output=True, text=True, check=False)
        except OSError as error:
            raise ConfigError(
                f"--python must be one that has OpenVINO (make .venv-openvino/installed): {error}"
            ) from error
        if done.returncode:
            reason = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]  # no traceback
            raise ConfigError(f"{args.python} could not convert: {reason}")
    lengths = f"--draft {args.out}/draft --length 3"
    say(f"{args.out}: target and draft")
    say(f"serve    {args.python} {in_openvino.__file__} serve {args.out}/target {lengths}")
    return 0


def _made_by(run: Path, draft: Path) -> PipelineConfig | None:
    """The configuration of the run that made a draft, and of its evaluation if there is one."""
    if not (run / "draft" / RUN).is_file():
        return None
    config = stored_config(run / ("eval" if (run / "eval" / RESULTS).is_file() else "draft"))
    return config if config.draft and absolute(config.draft_in_use) == absolute(draft) else None
