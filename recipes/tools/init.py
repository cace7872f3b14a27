"""Write a configuration for a target and a file of prompts.

draftsmith init TARGET --prompts FILE [--device cuda|cpu] [--out my-pair.yaml]
"""

from __future__ import annotations

import argparse
import codecs
import hashlib
import json
import shlex
from pathlib import Path

from recipes.checks import has_chat_template
from recipes.config import parse
from recipes.pipeline import RECIPE
from recipes.recipe import check_stages
from specdata.config import PromptSet
from specdata.errors import ConfigError

MINIMAL = """\
output: {output}
models: {{target: {target}, dtype: {dtype}}}
sampling: {{temperature: 1.0}}                # how you serve: labels, losses, decoding all use it
rollouts:
  max_new_tokens: 256
  sets: [{{name: {train}, split: train, count: 0}}, {{name: {dev}, split: dev, count: 0}}]
draft: {{init: {{kind: target, layers: 2}}}}    # or models.draft, to begin with a draft of your own
head: {{kind: immediate}}                     # null: no head; then leave out its method below
eval:
  max_new_tokens: 128
  sets: [{{name: {test}, split: test, count: 100}}]
  methods:
    - {{name: plain, decoder: plain}}
    - {{name: block K=4, verifier: block, length: 4}}
    - {{name: cost, verifier: block, stop: cost}}    # asks the head
"""


def add_options(parser: argparse.ArgumentParser) -> None:
    """The command line."""
    parser.add_argument("target", metavar="TARGET", help="folder or Hub id of the target")
    parser.add_argument("--prompts", required=True, type=Path, help="JSONL file, split in three")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda", help="where it runs")
    parser.add_argument("--out", type=Path, default=Path("my-pair.yaml"), help="file to write")


def main(given: argparse.Namespace) -> int:
    """Run the command; returns the exit status."""
    from specdata.prompts.loading import check_sets, dropped

    written: list[Path] = []
    try:
        if given.prompts.exists() and not given.prompts.is_file():  # a pipe would be waited for
            raise ConfigError(f"--prompts must be a regular file; got {given.prompts}")
        if not given.out.name:
            raise ConfigError(f"--out must be a file; got {given.out}")
        whole = given.prompts.read_bytes().removeprefix(codecs.BOM_UTF8)
        lines = {line.strip() for line in whole.split(b"\n")} - {b""}
        if given.prompts.suffix != ".jsonl" or len(lines) < 3:
            raise ConfigError(
                "--prompts must be a .jsonl file of three different lines or more, such as "
                f'{{"prompt": "..."}} or {{"messages": [...]}}; got {given.prompts}'
            )
        check_sets([PromptSet(str(given.prompts), "train", 0)], 0)  # by the file's own name
        # By hash, so that equal lines are one, and a line stays in its split whatever their order.
        ordered = sorted(lines, key=lambda line: hashlib.sha256(line).digest())
        tenth = max(1, len(ordered) // 10)
        dev, test, train = ordered[:tenth], ordered[tenth : 2 * tenth], ordered[2 * tenth :]
        splits = {"train": train, "dev": dev, "test": test}
        files = {name: given.out.with_name(f"{given.out.stem}-{name}.jsonl") for name in splits}
        if there := [str(path) for path in (given.out, *files.values()) if path.exists()]:
            raise ConfigError(f"{', '.join(there)} is there already: give another --out")
        given.out.parent.mkdir(parents=True, exist_ok=True)
        written = [given.out, *files.values()]
        for name, path in files.items():
            path.write_bytes(b"".join(line + b"\n" for line in splits[name]))
        dtype = "bfloat16" if given.device == "cuda" else "float32"
        values = {"output": f"runs/{given.out.stem}", "target": given.target, **files}
        shown = {name: json.dumps(str(value), ensure_ascii=False) for name, value in values.items()}
        given.out.write_text(MINIMAL.format(**shown, dtype=dtype), encoding="utf-8")
        # What a plan would refuse is refused here, and leaves nothing.
        config = parse(["--config", str(given.out)]).config
        check_stages(RECIPE.asked(config))
        first = config.rollouts.sets[:1]  # what is said of one is true of all
        notes = dropped(check_sets(first, 0, has_template=has_chat_template(config)))
    except Exception as error:
        said = str(error)
        for path in written:
            path.unlink(missing_ok=True)
            if path != given.out:
                said = said.replace(str(path), str(given.prompts))  # which is still there
        if isinstance(error, OSError | ConfigError):
            raise ConfigError(said) from error
        raise
    counts = ", ".join(f"{len(lines)} {name}" for name, lines in splits.items())
    print(f"wrote {given.out} and its prompts ({counts})")
    for note in notes:
        print(note)
    print(f"plan     draftsmith pipeline --config {shlex.quote(str(given.out))} --plan")
    return 0
