"""Write a configuration for a target and a file of prompts.

draftsmith init TARGET --prompts FILE [--draft target|states|LAYOUT|NAME] [--device cuda|cpu]

It splits the prompts in three, reads TARGET's generation_config.json and chat template, and leaves
out what the pair cannot do.
"""

from __future__ import annotations

import argparse
import codecs
import dataclasses
import hashlib
import json
import shlex
import sys
from contextlib import suppress
from difflib import get_close_matches
from pathlib import Path

from eval.decode_config import Method
from eval.measuring.intervals import prompts_needed
from recipes.config import PipelineConfig, build, load_yaml, parse
from recipes.models import (
    block_of,
    check_decodable,
    generation_config_of,
    has_chat_template,
    on_this_machine,
    positions_of,
)
from recipes.pipeline import RECIPE
from recipes.recipe import check_stages
from specdata.config import PromptSet
from specdata.drafts import DRAFT_KINDS
from specdata.drafts.kind import DraftKind
from specdata.errors import CacheNotRewindableError, ConfigError
from specdata.prompts.reading import FORMATS
from specdata.sampling import served_sampling
from specdata.sources import hub_source, is_hub_id
from specdata.target_heads import find_head

WRITTEN = """\
output: {output}
models: {{target: {target}, {draft}dtype: {dtype}}}
sampling: {{{sampling}}}   # {source}
rollouts:
  max_new_tokens: {written}
  sets:                                   # count 0: all
    - {{name: {train}, split: train, count: 0{asked}}}
    - {{name: {dev}, split: dev, count: 0{asked}}}
draft: {{{training}}}
head: {head}
eval:
  engine: {engine}
  max_new_tokens: {decoded}
  sets:                                   # dev chooses settings, test judges them
    - {{name: {dev}, split: dev, count: {tried}{asked}}}
    - {{name: {test}, split: test, count: {judged}{asked}}}
  methods:
    - {{name: plain, decoder: plain}}
"""
LENGTHS = (1, 2, 3, 4, 5)
TREES = (
    "{name: tree 4, verifier: traversal, drafter: tree, widths: [4], siblings: distinct}",
    "{name: dynamic tree, verifier: naive, drafter: dynamic_tree, nodes: 5, depth: 4, gain: 0.5}",
    "{name: dynamic tree and lookup, verifier: naive, drafter: dynamic_tree, nodes: 5, depth: 4, "
    "gain: 0.5, lookup: 8}",
)
OWN_LENGTHS = (1, 2, 3)
"""Of the head that a target brings along."""
LOOKUP = "{name: lookup, verifier: naive, drafter: lookup, lookup: 8, match: 2}"
DRAFTS = {"target": DRAFT_KINDS["plain"]} | {
    name: kind for name, kind in DRAFT_KINDS.items() if kind.section and kind.reads_states
}
"""What `--draft` names."""


def add_options(parser: argparse.ArgumentParser) -> None:
    """The command line."""
    add = parser.add_argument
    add("target", metavar="TARGET", help="folder or Hub id of the target")
    add("--prompts", required=True, type=Path, help="file, folder or Hub id, split in three")
    add("--template", help="the prompt's text, where no column is called `prompt`: '{question}'")
    add(
        "--draft",
        default="target",
        metavar="|".join((*DRAFTS, "NAME")),
        help="what the draft is: target (two of its layers, the default), states (a layer that "
        "reads the target's states), a layout (such a draft for engines), or NAME, a folder or Hub "
        "id of a model to begin with",
    )
    add("--device", choices=["cuda", "cpu"], help="where it runs (default: cuda if there is one)")
    add("--out", type=Path, default=Path("my-pair.yaml"), help="file to write")


def _fetch(target: str) -> None:
    """Bring the small files that describe a target from the Hub, if it can be reached."""
    from huggingface_hub import snapshot_download  # here: it is slow to import

    source, revision = hub_source(target)
    files = ["*config.json", "chat_template*", "additional_chat_templates/*"]
    with suppress(OSError, ValueError):  # no Hub id, or not reached: what is known is written
        snapshot_download(source, revision=revision, allow_patterns=files)


def _of_target(args: argparse.Namespace) -> dict[str, str]:
    """Find what is written of the target and of its device."""
    import torch  # here: it is heavy

    device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    processor = Path("/proc/cpuinfo")
    has_bfloat16 = processor.is_file() and "bf16" in processor.read_text(encoding="utf-8")
    generation, source = generation_config_of(args.target), "as you serve"
    if generation:
        source = "of its generation_config.json, as vLLM serves it"
    sampling = {"temperature": 1.0, **served_sampling(generation)}
    return {
        "dtype": "bfloat16" if device == "cuda" or has_bfloat16 else "float32",
        "engine": "captured" if device == "cpu" else "eager",
        "sampling": ", ".join(f"{key}: {value}" for key, value in sampling.items()),
        "source": source,
    }


def _lengths(limit: int | None) -> dict[str, str]:
    """How long completions may be, of a target with so many positions: half are the prompt's."""
    room = sys.maxsize if limit is None else limit // 2
    return {"written": str(min(256, room)), "decoded": str(min(128, room))}


def _methods(config: PipelineConfig) -> list[str]:
    """The ways of decoding that this pair can do, beside the target alone."""

    def can(*methods: str) -> bool:
        asked = [Method.model_validate(load_yaml(each)) for each in methods]
        section = config.eval.model_copy(update={"methods": asked})
        try:
            check_decodable(config.model_copy(update={"eval": section}))
        except (ConfigError, CacheNotRewindableError):
            return False
        return True

    most = block_of(config) or max(LENGTHS)
    methods = [f"{{name: K={n}, verifier: block, length: {n}}}" for n in LENGTHS if n <= most]
    with suppress(ConfigError):
        find_head(config.models.target)
        its_head = "mtp: true, verifier: block"
        methods += [f"{{name: mtp K={n}, {its_head}, length: {n}}}" for n in OWN_LENGTHS]
    methods += TREES if can(*TREES) else ()
    methods.append("{name: cost without head, verifier: block, stop: cost, head: false}")
    if config.head:
        methods.append("{name: cost, verifier: block, stop: cost}   # asks the head")
    return [*methods, *([LOOKUP] if can(LOOKUP) else ())]


def _kind(draft: str) -> DraftKind | None:
    """The kind of a draft to make; None of a draft that is named. Raises ConfigError."""
    near = get_close_matches(draft, DRAFTS, n=1)
    if near and draft not in DRAFTS and not Path(draft).exists():
        raise ConfigError(f"--draft {draft}: did you mean {near[0]!r}?")
    return DRAFTS.get(draft)


def _lines(source: Path) -> tuple[set[bytes], list[str]]:
    """The different rows of prompts as JSON lines, and of rows that cannot be read, why."""
    from specdata.prompts.reading import read_rows

    is_hub = is_hub_id(str(source)) and source.suffix not in FORMATS and not source.exists()
    if not (source.is_file() or source.is_dir() or is_hub):  # a pipe would be waited for
        raise ConfigError(f"--prompts must be a file that is there; got {source}")
    lines: set[bytes] = set()
    unreadable: list[str] = []
    if source.suffix == ".jsonl" and source.is_file():  # as they are
        whole = source.read_bytes().removeprefix(codecs.BOM_UTF8)
        lines = {line.strip() for line in whole.split(b"\n")} - {b""}
    elif source.suffix in FORMATS or not source.is_file():
        for _, row in read_rows(PromptSet(str(source), "train", 0), 0):
            if isinstance(row, str):
                unreadable.append(row)
            else:
                lines.add(json.dumps(row, default=str).encode())
    if len(lines) < 3:
        raise ConfigError(
            f"--prompts must be a file ({', '.join(FORMATS)}), folder or Hub id of three different "
            f'rows or more, such as {{"prompt": "..."}} or {{"messages": [...]}}; got {source}'
        )
    return lines, unreadable


def main(args: argparse.Namespace) -> int:
    """Run the command; returns the exit status."""
    from specdata.prompts.loading import check_sets, dropped

    written: list[Path] = []
    try:
        if not args.out.name:
            raise ConfigError(f"--out must be a file; got {args.out}")
        prompts = PromptSet(str(args.prompts), "train", 0, template=args.template)
        lines, unreadable = _lines(args.prompts)
        check_sets([prompts], 0)  # by the file's own name
        # By hash, so that equal lines are one, and a line stays in its split whatever their order.
        ordered = sorted(lines, key=lambda line: hashlib.sha256(line).digest())
        part = max(1, len(ordered) // 10, min(16, len(ordered) // 4))  # few say nothing
        dev, test, train = ordered[:part], ordered[part : 2 * part], ordered[2 * part :]
        splits = {"train": train, "dev": dev, "test": test}
        files = {name: args.out.with_name(f"{args.out.stem}-{name}.jsonl") for name in splits}
        if existing := [str(path) for path in (args.out, *files.values()) if path.exists()]:
            raise ConfigError(f"{', '.join(existing)} must not be there yet: give another --out")
        args.out.parent.mkdir(parents=True, exist_ok=True)
        written = [args.out, *files.values()]
        for name, path in files.items():
            path.write_bytes(b"".join(line + b"\n" for line in splits[name]))
        if not on_this_machine(args.target):
            _fetch(args.target)
        kind = _kind(args.draft)
        training = kind.section if kind else "objective: lk_hybrid"
        head = kind.engine_head if kind and kind.layouts else "immediate"
        names = {
            **{"output": f"runs/{args.out.stem}", "target": args.target, "draft": args.draft},
            **{"template": args.template, **files},
        }
        values = {key: json.dumps(str(each), ensure_ascii=False) for key, each in names.items()}
        values["draft"] = "" if args.draft in DRAFTS else f"draft: {values['draft']}, "
        values["asked"] = f", template: {values['template']}" if args.template else ""
        values |= {
            **{"tried": str(min(32, part)), "judged": str(min(64, part)), "training": training},
            **{"head": f"{{kind: {head}}}" if head else "null"},
        }
        values |= _of_target(args) | _lengths(None)
        config = build(load_yaml(WRITTEN.format(**values)))
        values |= _lengths(positions_of(config, args.target))
        has_template, one = has_chat_template(config), config.rollouts.sets[:1]  # true of all
        if "as_text" in check_sets(one, 0, has_template=has_template)[0]:
            values["asked"] += ", chat: true"
        text = WRITTEN.format(**values) + "".join(f"    - {each}\n" for each in _methods(config))
        args.out.write_text(text, encoding="utf-8")
        # What a plan would refuse is refused here, and leaves nothing.
        config = parse([str(args.out)]).config
        check_stages(RECIPE.stages_of(config))
        tests = [dataclasses.replace(config.eval.sets[-1], count=0)]  # its dev is the rollouts'
        report = check_sets([*config.rollouts.sets, *tests], 0, has_template=has_template)
        notes = dropped(report)
        notes += [f"{len(unreadable)} rows are left out: {unreadable[0]}"] if unreadable else []
    except Exception as error:
        message = str(error)
        for path in written:
            path.unlink(missing_ok=True)
            if path != args.out:
                message = message.replace(str(path), str(args.prompts))  # which is still there
        if isinstance(error, OSError | ConfigError):
            message = message.replace("give a `template` such as", "give --template, such as")
            raise ConfigError(message) from error
        raise
    few = ["too few of test for a verdict"] if report[-1]["kept"] < prompts_needed(1) else []
    counts = ", ".join([*(f"{len(lines)} {name}" for name, lines in splits.items()), *few])
    print(f"wrote {args.out} and its prompts ({counts})")
    for note in notes:
        print(note)
    if not on_this_machine(args.target):
        print(
            f"{args.target} is neither here nor reached on the Hub: set sampling as you serve it, "
            "and if it chats, add chat: true to each set of texts"
        )
    print(f"plan     draftsmith pipeline {shlex.quote(str(args.out))} --plan")
    return 0
