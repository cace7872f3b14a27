"""The target of `make real` in vLLM, alone and with drafts of the same rollouts (docs/engines.md).

    python benchmarks/real_engines.py VLLM MODEL [--float32]      # make real-engines

VLLM is a Python with vLLM in it. EAGLE-3's layout and a plain draft: none is trained for longer
than `make real` trains. Run again, it goes on where it ended.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
from pathlib import Path

DOMAINS = ("assistant", "maths", "code", "letters")
SETS = [f"{{name: chat-{name}, split: test, count: 8}}" for name in DOMAINS]
PLAIN = "{name: plain, decoder: plain}"
EAGLE3 = "{kind: states, layers: 1, layout: eagle3, vocabulary: 8192}"


def run(*command: str | Path) -> None:
    """Run a script or module with this Python; end with its status if it fails."""
    if status := subprocess.run([sys.executable, *map(str, command)], check=False).returncode:
        raise SystemExit(status)


def main() -> None:
    """Train the drafts, write them for vLLM, and measure at both temperatures."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0], allow_abbrev=False)
    parser.add_argument("vllm", help="a Python with vLLM")
    parser.add_argument("model", help="smollm2-135m or gemma-3-270m")
    parser.add_argument("--float32", action="store_true", help="as `make real` without bfloat16")
    given = parser.parse_args()
    model, served = given.model, Path("runs") / f"{given.model}-served"
    config = ["--config", f"recipes/configs/{model}.yaml"]
    dtype = ["--models.dtype", "float32"] if given.float32 else []
    training = ["--draft.precision", "float32", "--draft.optimizer", "adamw"]
    training = [*dtype, *(training if given.float32 else [])]

    def beside_rollouts(name: str) -> Path:
        """A folder whose rollouts are those of `make real`."""
        (served / name).mkdir(parents=True, exist_ok=True)
        rollouts = served / name / "rollouts"
        rollouts.unlink(missing_ok=True)
        rollouts.symlink_to(Path("../..") / model / "rollouts")
        return served / name

    folder = beside_rollouts("eagle3")
    options = [*config, *training, "--output", folder, "--draft.init", EAGLE3, "--head", "null"]
    options += ["--draft.epochs", "2" if given.float32 else "3", "--draft.held_out_share", "0"]
    run("recipes/train_draft.py", *options)
    export, made = folder / "export", (folder / "draft" / "run.json").stat().st_mtime
    if not export.exists() or export.stat().st_mtime <= made:
        shutil.rmtree(export, ignore_errors=True)
        run("-m", "recipes.command", "export", folder / "draft" / "model", "--out", export)

    plain = beside_rollouts("plain")
    options = ["--config", f"recipes/configs/{model}-plain.yaml", *training, "--output", plain]
    options += ["--draft.epochs", "0.4", "--eval.sets", "[{name: chat-maths, count: 2}]"]
    run("recipes/pipeline.py", *options, "--eval.methods", f"[{PLAIN}, {{name: K=2, length: 2}}]")

    release = plain / "release" / "draft"
    options = [*config, *dtype, "--output", served, "--models.draft", release]
    options += ["--draft", "null", "--head", "null", "--eval.methods", f"[{PLAIN}]"]
    options += ["--eval.sets", f"[{', '.join(SETS)}]"]
    at_one = ["--sampling.temperature", "1", "--sampling.top_p", "1"]
    for folder_name, sampling, drawn in (
        ("eval-engines", [], {}),
        ("eval-engines-t1", at_one, {"draft_sample_method": "probabilistic"}),
    ):
        serve = []
        longest = 1 if given.float32 else 2
        rows = [("plain", "draft_model", release, 2), ("eagle3", "eagle3", export, longest)]
        for name, method, draft, length in rows:
            speculative = {"method": method, "model": str(draft), "num_speculative_tokens": length}
            serve += ["--serve", f"{name} K={length}={json.dumps(speculative | drawn)}"]
        of_folder = ["--eval.folder", folder_name, *sampling]
        run("benchmarks/engines.py", given.vllm, *options, *of_folder, *serve)


if __name__ == "__main__":
    main()
