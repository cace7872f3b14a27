"""Write a configuration for a target and a file of prompts.

draftsmith init TARGET --prompts FILE [--draft DRAFT] [--device cuda|cpu] [--out my-pair.yaml]
"""

from __future__ import annotations

import argparse
import hashlib
import json
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from specdata.errors import ConfigError
from specdata.terminal import tell

MINIMAL = """\
output: {output}
models: {models}
sampling: {{temperature: 1.0}}                # how you serve: labels, losses, decoding all use it
rollouts:
  max_new_tokens: 256
  sets:
    - {{name: {train}, split: train, count: 0}}
    - {{name: {dev}, split: dev, count: 0}}
draft: {draft}
head: {{kind: immediate}}                     # null: no head; then leave out its method below
eval:
  max_new_tokens: 128
  sets: [{{name: {test}, split: test, count: 100}}]
  methods: [{{name: plain, decoder: plain}}, {{name: K=4, length: 4}}, {{name: head, stop: head}}]
"""


def split_lines(path: Path) -> dict[str, list[bytes]]:
    """The lines of a JSONL file by split: 10 % dev, 10 % test, the rest train.

    By hash, so that equal lines are one, and a line stays in its split whatever their order.

    Raises:
        ConfigError: if it cannot be read, or has too few lines.
    """
    try:
        lines = {line.strip() for line in path.read_bytes().split(b"\n")} - {b""}
    except OSError as error:
        raise ConfigError(f"prompt file {path} cannot be read: {error.strerror}") from error
    if path.suffix != ".jsonl" or len(lines) < 3:
        raise ConfigError(
            "--prompts must be a .jsonl file of three different lines or more, such as "
            f'{{"prompt": "..."}} or {{"messages": [...]}}; got {path} with {len(lines)}'
        )
    ordered = sorted(lines, key=lambda line: hashlib.sha256(line).digest())
    tenth = max(1, len(ordered) // 10)
    dev, test, train = ordered[:tenth], ordered[tenth : 2 * tenth], ordered[2 * tenth :]
    return {"train": train, "dev": dev, "test": test}


def main(arguments: Sequence[str] | None = None, program: str | None = None) -> int:
    """Run the command; returns the exit status."""
    parser = argparse.ArgumentParser(program, description="Write a configuration.")
    parser.add_argument("target", metavar="TARGET", help="folder or Hub id of the target")
    parser.add_argument("--prompts", required=True, type=Path, help="JSONL file, split in three")
    parser.add_argument("--draft", help="folder or Hub id (default: two layers of the target)")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda", help="where it runs")
    parser.add_argument("--out", type=Path, default=Path("my-pair.yaml"), help="file to write")
    given = parser.parse_args(arguments)
    try:
        splits = split_lines(given.prompts)
        files = {name: given.out.with_name(f"{given.out.stem}-{name}.jsonl") for name in splits}
        if there := [str(path) for path in (given.out, *files.values()) if path.exists()]:
            raise ConfigError(f"{', '.join(there)} is there already: give another --out")
        for name, path in files.items():
            path.write_bytes(b"".join(line + b"\n" for line in splits[name]))
    except Exception as error:  # noqa: BLE001 - raised again if it is a defect
        return tell(error, OSError)
    models = {"target": given.target, **({"draft": given.draft} if given.draft else {})}
    cut = {} if given.draft else {"init": {"kind": "target", "layers": 2}}
    values = {
        "output": f"runs/{given.out.stem}",
        "models": {**models, "dtype": "bfloat16" if given.device == "cuda" else "float32"},
        "draft": {**cut, "objective": "lk_hybrid"},
        **{name: str(path) for name, path in files.items()},
    }
    shown = {name: json.dumps(value, ensure_ascii=False) for name, value in values.items()}  # YAML
    given.out.write_text(MINIMAL.format(**shown), encoding="utf-8")
    counts = ", ".join(f"{len(lines)} {name}" for name, lines in splits.items())
    print(f"wrote {given.out} and its prompts ({counts})")
    print(f"plan     draftsmith pipeline --config {shlex.quote(str(given.out))} --plan")
    return 0


if __name__ == "__main__":
    sys.exit(main())
