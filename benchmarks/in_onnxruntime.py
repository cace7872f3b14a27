"""A target in ONNX Runtime GenAI on a CPU, greedily in float32, alone and with a plain draft.

    pip install onnxruntime==1.32.0 onnxruntime-genai==0.18.0 onnx==1.23.2 onnx-ir==1.1.0
    python benchmarks/in_onnxruntime.py TARGET DRAFT [--count 16] [--out FILE]

The methods decode each prompt in turns. DRAFT is a release whose vocabulary is the target's.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime  # noqa: F401  GenAI finds its library by it
import onnxruntime_genai as genai
from tqdm import tqdm

from eval.measuring.environment import describe_environment
from eval.measuring.intervals import Interval, resamples
from specdata.config import PromptSet
from specdata.models import load_tokenizer
from specdata.prompts.loading import load_prompts
from specdata.storage.files import write_json

LENGTHS = (0, 2, 4)
"""Tokens to draft; 0 is the target alone."""
NEW = 48
COUNTED = ("rounds", "draft_tokens_accepted", "target_forward_passes")


def converted(source: str, folder: Path) -> dict[str, Any]:
    """Write a model for GenAI, which is to use every core; returns its configuration."""
    command = [sys.executable, "-m", "onnxruntime_genai.models.builder", "-i", source]
    subprocess.run([*command, "-o", str(folder), "-p", "fp32", "-e", "cpu"], check=True)
    file = folder / "genai_config.json"
    config = dict(json.loads(file.read_text()))
    config["model"]["decoder"]["session_options"]["intra_op_num_threads"] = os.cpu_count()
    file.write_text(json.dumps(config))
    return config


def pair(target: str, draft: str, folder: Path) -> tuple[Any, Any]:
    """The target alone, and with the draft."""
    alone, both = folder / "alone", folder / "both"
    config = converted(target, alone)
    shutil.copytree(alone, both, copy_function=lambda a, b: Path(b).symlink_to(a))
    drafting = converted(draft, both / "draft")["model"]["decoder"]
    config["model"] |= {
        "type": "speculative",
        "draft": {**drafting, "filename": f"draft/{drafting['filename']}"},
    }
    (both / "genai_config.json").unlink()
    (both / "genai_config.json").write_text(json.dumps(config))
    return genai.Model(str(alone)), genai.Model(str(both))


def decode(model: Any, prompt: list[int], length: int) -> tuple[float, list[int], dict[str, Any]]:
    """Seconds behind the prompt, new tokens, and GenAI's counts."""
    params = genai.GeneratorParams(model)
    params.set_search_options(do_sample=False, max_length=len(prompt) + NEW, batch_size=1)
    if length:
        params.set_speculative_options(max_draft_tokens=length, min_adaptive_k=0)
    begun = time.perf_counter()
    generator = genai.Generator(model, params)
    generator.append_tokens(np.array([prompt], dtype=np.int32))
    while not generator.is_done():
        generator.generate_next_token()
    seconds = time.perf_counter() - begun
    counts = dict(generator.get_speculative_stats()) if length else {}
    return seconds, [int(token) for token in generator.get_sequence(0)][len(prompt) :], counts


def main() -> None:
    """Convert, decode in turns, print, and write one JSON file."""
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("target")
    options.add_argument("draft")
    options.add_argument("--count", type=int, default=16, help="prompts of each set")
    options.add_argument("--out", type=Path, default=Path("runs/bench/onnxruntime.json"))
    given = options.parse_args()
    names = ("chat-assistant", "chat-maths", "chat-code", "chat-letters")
    sets = [PromptSet(name, "test", given.count) for name in names]
    prompts = [
        list(p.ids) for p in load_prompts(sets, load_tokenizer(given.target), seed=0).prompts
    ]
    seconds = {length: [0.0] * len(prompts) for length in LENGTHS}
    tokens = dict.fromkeys(LENGTHS, 0)
    counts: dict[int, dict[str, float]] = {length: {} for length in LENGTHS}
    same = dict.fromkeys(LENGTHS, 0)
    with tempfile.TemporaryDirectory() as folder:
        alone, both = pair(given.target, given.draft, Path(folder))
        for length in LENGTHS:
            decode(both if length else alone, prompts[0], length)
        for number, prompt in enumerate(tqdm(prompts)):
            texts = {}
            for length in LENGTHS:
                taken, texts[length], stats = decode(both if length else alone, prompt, length)
                seconds[length][number] = taken
                tokens[length] += len(texts[length])
                same[length] += texts[length] == texts[0]
                for name, value in stats.items():
                    if name in COUNTED:
                        counts[length][name] = counts[length].get(name, 0) + value
    draws = resamples(len(prompts), sets=tuple([given.count] * len(names)))
    times = {length: draws @ np.array(taken) for length, taken in seconds.items()}
    rows = []
    for length in LENGTHS:
        speedup = Interval.of(times[0] / times[length])
        row = {"length": length, "speedup": speedup.stored(), "texts_alike": same[length]}
        row |= {"seconds": sum(seconds[length]), "tokens": tokens[length], "counts": counts[length]}
        rows.append(row)
        about = f"{speedup.value:.2f}x [{speedup.low:.2f}, {speedup.high:.2f}]"
        print(f"K={length}: {about}; {same[length]} of {len(prompts)} alike;", counts[length])
    packages = ("onnxruntime", "onnxruntime-genai", "onnx")
    written = {"schema_version": 1, "packages": {name: version(name) for name in packages}}
    written |= {"prompts": len(prompts), "new_tokens": NEW, "rows": rows}
    where = describe_environment(device="cpu", dtype="float32").model_dump(mode="json")
    write_json(given.out, written | {"environment": where})


if __name__ == "__main__":
    main()
