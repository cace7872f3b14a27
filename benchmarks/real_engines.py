"""The target of `make real` in an engine, alone and with drafts of the same 512 rollouts.

    python -m benchmarks.real_engines ENGINE MODEL [--float32] [--draft NAME=FOLDER ...]

ENGINE is a llama-server, in llama.cpp's tree and beside its llama-quantize, or a Python with vLLM
or OpenVINO in it (docs/engines.md; `make real-engines`). For OpenVINO drafts learn from all
rollouts of MODEL. Run again, it goes on where it ended. With --draft nothing is trained: NAME is
eagle3, plain or dspark, and FOLDER a draft, but for OpenVINO as exported, a plain one's release.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

from benchmarks.engines import FIRST_PORT, to_gguf, tree_of
from eval.measuring.methods import SERVED
from eval.measuring.pooled import pool
from eval.measuring.results import read_results
from recipes.config import RESULTS

PLAIN = "{name: plain, decoder: plain}"
ALONE = (
    f"{{name: {SERVED}, decoder: server, url: 'http://127.0.0.1:{FIRST_PORT}', "
    "served_model: target}"
)
BEGIN = {
    "eagle3": "{kind: states, layers: 1, layout: eagle3, vocabulary: 8192}",
    "dspark": "{kind: states, layers: 1, layout: dspark, block: 7, vocabulary: 8192, "
    "taps: [2, 15, 27]}",
}
"""`draft.init` of the drafts that read the target's states."""
TRAINING = {
    "eagle3": ["--head", "null"],
    "dspark": ["--draft.learning_rate", "1.5e-3", "--head", "{kind: confidence, epochs: 6}"],
}
"""What else differs from the model's configuration."""
OPENVINO = {"eagle3": (1, 2, 3, 4), "plain": (2,)}
"""Tokens to draft at most."""
VLLM = {"plain": "draft_model", "eagle3": "eagle3"}
"""Their names in vLLM."""
LLAMA_CPP = {"plain": "draft-simple", "eagle3": "draft-eagle3", "dspark": "draft-dspark"}
"""Their names in llama.cpp."""
LENGTHS = {"plain": (2, 4), "eagle3": (2, 4), "dspark": (2, 4, 7)}
"""Tokens to draft at most."""
HEADS = ((2, 0.5), (2, 0.7), (4, 0.5), (4, 0.7))
"""Tokens to draft at most, and the head's least probability; chosen on dev for each weights."""
LOOKUPS = ((2, 4), (3, 7))
"""Tokens to look up, and to draft at most; chosen like it."""


def run(*command: object) -> None:
    """Run a script or module with this Python; end with its status if it fails."""
    if status := subprocess.run([sys.executable, *map(str, command)], check=False).returncode:
        raise SystemExit(status)


def sets(split: str, count: int) -> list[dict[str, Any]]:
    """So many prompts of every domain."""
    domains = ("assistant", "maths", "code", "letters")
    return [{"name": f"chat-{name}", "split": split, "count": count} for name in domains]


def asked(split: str, count: int) -> list[str]:
    """The option that evaluates on them."""
    return ["--eval.sets", json.dumps(sets(split, count))]


def measure(engine: str, options: list[str | Path], rows: dict[str, Any]) -> None:
    """Evaluate the target with each draft, by name, beside the target alone."""
    serve = [f"--serve={name}={json.dumps(settings)}" for name, settings in rows.items()]
    run("benchmarks/engines.py", engine, *options, *serve)


def in_vllm(
    python: str, drafts: dict[str, Path], options: list[str | Path], *, lengths: Sequence[int]
) -> None:
    """Both drafts at both temperatures, beside plain decoding of ours."""
    options = [*options, "--eval.methods", f"[{PLAIN}]"]
    at_one = ["--sampling.temperature", "1", "--sampling.top_p", "1"]
    for folder, sampling, drawn in (
        ("eval-engines", [], {}),
        ("eval-engines-t1", at_one, {"draft_sample_method": "probabilistic"}),
    ):
        rows = {}
        for name, length in (("plain", 2), *(("eagle3", each) for each in lengths)):
            settings = {"method": VLLM[name], "model": str(drafts[name]), **drawn}
            rows[f"{name} K={length}"] = {**settings, "num_speculative_tokens": length}
        measure(python, [*options, *sampling, "--eval.folder", folder, *asked("test", 8)], rows)


def in_llama_cpp(
    server: str, target: str, drafts: dict[str, Path], options: list[str | Path], out: Path
) -> None:
    """All drafts with 16-bit and 8-bit weights, greedily and as the target's card says."""
    files, folders = out / "gguf", []
    chosen: dict[str, list[str]] = {}
    files.mkdir(exist_ok=True)
    for name, model in {"target": target, **drafts}.items():
        made = [files / f"{name}-{weights}.gguf" for weights in ("f16", "q8_0")]
        to_gguf(server, str(model), target, made[0], "f16")
        subprocess.run([Path(server).with_name("llama-quantize"), *made, "q8_0"], check=True)
    for temperature, weights in product(("0", "0.2"), ("f16", "q8_0")):
        served = {
            name: {"spec-type": kind, "spec-draft-model": str(files / f"{name}-{weights}.gguf")}
            for name, kind in LLAMA_CPP.items()
            if name in drafts
        }
        fixed = {
            f"{name} K={length}": {**draft, "spec-draft-n-max": length}
            for name, draft in served.items()
            for length in LENGTHS[name]
        }
        heads = {
            f"dspark K={length} P={least}": {
                **fixed[f"dspark K={length}"],
                "spec-draft-p-min": least,
            }
            for length, least in HEADS * ("dspark" in served)
        }
        lookups = {
            f"lookup {size} K={length}": {
                "spec-type": "ngram-simple",
                "spec-ngram-simple-size-n": size,
                "spec-ngram-simple-size-m": length,
            }
            for size, length in LOOKUPS
        }
        given = [*options, "--gguf", files / f"target-{weights}.gguf"]
        # No decoding of ours, and short texts: an evaluation of 64 prompts in twenty minutes.
        given += ["--eval.methods", f"[{ALONE}]", "--eval.max_new_tokens", "48"]
        given += ["--sampling.temperature", temperature]
        folder = f"eval-llama-{weights}-t{temperature}"
        if weights not in chosen:
            dev = [*given, "--eval.folder", f"{folder}-dev", *asked("dev", 4)]
            measure(server, dev, heads | lookups)
            rows = pool(read_results(out / f"{folder}-dev" / RESULTS))
            speed = {row.name: row.speed() for row in rows}
            groups = [each for each in (heads, lookups) if each]
            chosen[weights] = [max(group, key=speed.__getitem__) for group in groups]
        test = [*given, "--eval.folder", folder, *asked("test", 16)]
        measure(server, test, fixed | {name: (heads | lookups)[name] for name in chosen[weights]})
        folders.append(out / folder)
    run("benchmarks/table.py", *folders, "--beside")


def in_openvino(
    python: str, target: str, drafts: dict[str, Path], options: list[str | Path], out: Path
) -> None:
    """The drafts with weights of 32 and of 8 bits, greedily, beside lookup in the prompt."""
    folders = []
    options = [*options, "--eval.methods", f"[{ALONE}]", "--eval.max_new_tokens", "48"]
    options += ["--sampling.temperature", "0"]
    for weights in ("fp32", "int8"):
        made, rows = out / "openvino" / weights, {}
        for name, draft in drafts.items():
            if not (made / name).exists():
                write = [draft, "--target", target, "--out", made / name, "--for", "openvino"]
                write += ["--int8"] * (weights == "int8")
                run("-m", "recipes.command", "export", "--python", python, *write)
            for length in OPENVINO[name]:
                row = {"draft": str(made / name / "draft"), "length": length}
                rows[f"{name} K={length}"] = row
        for size, length in LOOKUPS:
            rows[f"lookup {size} K={length}"] = {"match": size, "length": length}
        folders.append(out / f"eval-openvino-{weights}")
        alone = made / next(iter(drafts)) / "target"
        given = [*options, "--openvino", alone, "--eval.folder", folders[-1].name]
        measure(python, [*given, *asked("test", 16)], rows)
    run("benchmarks/table.py", *folders, "--beside")


def has_openvino(python: str) -> bool:
    """Whether GenAI is installed beside a Python."""
    command = "import importlib.util as u, sys; sys.exit(not u.find_spec('openvino_genai'))"
    return not subprocess.run([python, "-c", command], check=False).returncode


def main() -> None:
    """Train the drafts, write them for the engine, and measure."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0], allow_abbrev=False)
    parser.add_argument("engine", help="a llama-server, or a Python with vLLM or OpenVINO")
    parser.add_argument("model", help="smollm2-135m")
    parser.add_argument("--float32", action="store_true", help="as `make real` without bfloat16")
    parser.add_argument("--draft", action="append", default=[], help="NAME=FOLDER, trained before")
    given = parser.parse_args()
    model, out = given.model, Path("runs") / f"{given.model}-served"
    is_llama = Path(given.engine).name == "llama-server"
    if is_llama:  # not after half an hour of training
        tree_of(given.engine)
        if not (quantize := Path(given.engine).with_name("llama-quantize")).exists():
            raise SystemExit(f"{quantize} must be built, too")
    is_openvino = not is_llama and has_openvino(given.engine)
    if is_openvino:
        out = Path("runs") / f"{model}-openvino"
    config = ["--config", f"recipes/configs/{model}.yaml"]
    dtype = ["--models.dtype", "float32" if given.float32 else "bfloat16"]
    training = [*dtype, *(["--draft.precision", "float32"] if given.float32 else [])]
    drafts = {
        name: Path(folder) for name, _, folder in (each.partition("=") for each in given.draft)
    }
    if not drafts:
        drafts = trained(model, out, config, training, is_llama=is_llama, is_long=is_openvino)
    options = [*config, *dtype, "--output", out, "--models.draft", [*drafts.values()][-1]]
    options += ["--draft", "null", "--head", "null"]
    if is_llama:
        in_llama_cpp(given.engine, f"runs/{model}/target", drafts, options, out)
    elif is_openvino:
        in_openvino(given.engine, f"runs/{model}/target", drafts, options, out)
    else:
        in_vllm(given.engine, drafts, options, lengths=(1,) if given.float32 else (2, 3))


def trained(
    model: str,
    out: Path,
    config: list[str],
    training: list[str],
    *,
    is_llama: bool,
    is_long: bool,
) -> dict[str, Path]:
    """The drafts by name, of two passes of 512 rollouts, or `is_long` of three of all of them."""
    training = [*training, "--draft.held_out_share", "0"]
    if not is_long:
        learnt = sets("train", 171)[:3]  # the last domain is never trained on
        learnt[-1]["count"] = 170
        training += ["--rollouts.sets", json.dumps([*learnt, *sets("dev", 48)])]
    run("recipes/make_rollouts.py", *config, *training, "--output", out, "--head", "null")
    training += ["--draft.epochs", "3" if is_long else "2"]

    def beside_rollouts(name: str) -> Path:
        """A folder with these rollouts."""
        (out / name).mkdir(exist_ok=True)
        rollouts = out / name / "rollouts"
        rollouts.unlink(missing_ok=True)
        rollouts.symlink_to(Path("../rollouts"))
        return out / name

    drafts = {}
    for name in ("eagle3", "dspark")[: 1 + is_llama]:
        folder = beside_rollouts(name)
        options = [*config, *training, "--output", folder, "--draft.init", BEGIN[name]]
        options += TRAINING[name]
        run("recipes/train_draft.py", *options)
        head = []
        if name == "dspark":
            run("recipes/train_head.py", *options, "--labels.greedy", "true")
            head = ["--head", folder / "head" / "model"]
        drafts[name] = folder / "export"
        if is_long:
            drafts[name] = folder / "draft" / "model"  # it is converted later
            continue
        shutil.rmtree(drafts[name], ignore_errors=True)
        made = [folder / "draft" / "model", "--out", drafts[name], *head]
        run("-m", "recipes.command", "export", *made)

    plain = beside_rollouts("plain")
    options = ["--config", f"recipes/configs/{model}-plain.yaml", *training, "--output", plain]
    options += ["--eval.sets", "[{name: chat-maths, count: 2}]"]
    run("recipes/pipeline.py", *options, "--eval.methods", f"[{PLAIN}, {{name: K=2, length: 2}}]")
    return {**drafts, "plain": plain / "release" / "draft"}


if __name__ == "__main__":
    main()
