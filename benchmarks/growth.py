"""How time and memory grow: each work at several sizes.

    python benchmarks/growth.py [--works REGEX] [--most SIZE] [--out FILE]

Each work runs in a process of its own, on one thread, with models of one layer and random weights.
It gives CPU seconds and the peak of the process's memory above what it held when the work began.
Works of prompts and rollouts are stages, from their begin to the first batch or step, begun and
begun again; the processes of one size share a folder, in which each finds what the works before it
have made. Batches are of the demo's pair (`make demo`), and those of economize 0.3.2, if
it can be imported.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import re
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

Work = Callable[[int], Callable[[], object]]
"""Of a size, what is set up, unmeasured -> what is measured."""
WIDTH = 32
DEMO, NEW, DRAFTED = Path(__file__).absolute().parents[1] / "runs/toy", 64, 4
PEERS = os.environ.get("PYTHONPATH", "")


def main() -> None:
    """Measure, print, and write one JSON file."""
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("--works", default="", help="only works whose name matches")
    options.add_argument("--most", type=int, default=100_000, help="only sizes up to this")
    options.add_argument("--out", type=Path, default=Path("runs/bench/growth.json"))
    options.add_argument("--work", nargs=2, help=argparse.SUPPRESS)
    given = options.parse_args()
    if given.work:
        print(json.dumps(spent(WORKS[given.work[0]][0](int(given.work[1])))))
        return
    rows = []
    with tempfile.TemporaryDirectory() as temporary:
        for name, (_, sizes) in WORKS.items():
            is_asked = re.search(given.works, name)
            for size in [each for each in sizes if is_asked and each <= given.most]:
                folder = Path(temporary, f"{name.split()[0]}-{size}")
                folder.mkdir(exist_ok=True)
                rows.append({"work": name, "size": size, "now": measured(name, size, folder)})
                print(f"{name:<28} {size:>9,} {rows[-1]['now']}", flush=True)
    commit = ["git", "describe", "--always", "--dirty"]
    now = subprocess.run(commit, check=True, capture_output=True, text=True).stdout.strip()
    given.out.parent.mkdir(parents=True, exist_ok=True)
    written = {"schema_version": 1, "now": now, "rows": rows}
    given.out.write_text(json.dumps(written, indent=2) + "\n")
    print(f"written: {given.out}")


def measured(name: str, size: int, folder: Path) -> dict[str, float] | None:
    """What a work takes; None if it ends by an error, such as no memory."""
    given = {
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "PYTHONPATH": f"{Path.cwd()}:{PEERS}",
    }
    command = [sys.executable, "-W", "ignore", str(Path(__file__).absolute())]
    done = subprocess.run(
        [*command, "--work", name, str(size)],
        env={**os.environ, **given},
        cwd=folder,
        stdout=subprocess.PIPE,
        check=False,
    )
    return None if done.returncode else dict(json.loads(done.stdout.splitlines()[-1]))


def spent(work: Callable[[], object]) -> dict[str, float]:
    """CPU seconds of a work, megabytes by which the process grew, and tokens if it counts any."""
    held, begun = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
    made = work()
    seconds = time.process_time() - begun
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    found = {"cpu_seconds": round(seconds, 3), "megabytes": round((most - held) / 1024, 1)}
    return found | ({"tokens": made} if isinstance(made, int) else {})


def model(kind: str = "llama", layers: int = 1) -> Any:
    """A model of a layer; Gemma 3's has a window."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    sizes = {"vocab_size": 512, "hidden_size": WIDTH, "intermediate_size": 2 * WIDTH}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": WIDTH // 4}
    config = AutoConfig.for_model(
        kind, **sizes, **heads, num_hidden_layers=layers, max_position_embeddings=2**17
    )
    made = AutoModelForCausalLM.from_config(config, trust_remote_code=False).eval()
    made.generation_config.eos_token_id = None
    return made


def pair(draft: str) -> tuple[Any, Any]:
    """A target and a draft of a kind."""
    import torch

    from distill.config import InitConfig
    from distill.initial import new_draft
    from specdata.drafts.depths import add_masks
    from specdata.drafts.taps import attach

    # Engines cannot be told of a tap behind the last layer.
    target = model("qwen3", layers=2) if draft == "dspark" else model()
    if draft in ("plain", "pard"):
        made = model()
    else:
        layout = None if draft == "states" else draft
        given = {"kind": "states", "taps": [1], "layers": 1, "layout": layout}
        made = copy.deepcopy(new_draft(target, InitConfig.model_validate(given)))
    with torch.no_grad():
        for weight in made.parameters():
            weight.normal_(0, 0.05) if weight.ndim > 1 else weight.fill_(1)
        for name, buffer in made.named_buffers():
            if name in ("d2t", "t2d"):
                buffer.fill_(name == "t2d")
    if draft == "pard":
        add_masks(made, 4, [0])
    elif draft != "plain":
        attach(made, target)
    return target, made.eval()


def decoding(size: int, draft: str = "", target: str = "llama", **method: Any) -> Any:
    """Eight tokens after a prompt."""
    import torch

    from eval.decoder import DecodeConfig, SpeculativeDecoder

    made, drafter = pair(draft) if draft else (model(target), None)
    decoder = SpeculativeDecoder.from_config(made, drafter, DecodeConfig(**method))
    draw = torch.Generator().manual_seed(0)

    def decode(prompt: Any) -> None:
        decoder.generate(prompt, max_new_tokens=8, generator=draw)

    decode(torch.arange(8))
    return partial(decode, torch.arange(size) * 7919 % 512)


def generating(size: int, target: str) -> Any:
    """The same by transformers' `generate`."""
    import torch

    made = model(target)

    def generate(prompt: Any) -> None:
        mask = torch.ones_like(prompt)
        made.generate(prompt, attention_mask=mask, max_new_tokens=8, do_sample=True)

    generate(torch.arange(8)[None])
    return partial(generate, torch.arange(size)[None] * 7919 % 512)


def demo_prompts(size: int) -> list[Any]:
    """Prompts of the demo's rollouts."""
    import torch
    from pyarrow import parquet

    files = sorted((DEMO / "rollouts").glob("*.parquet"))
    rows = parquet.read_table(files, columns=["prompt_ids"])["prompt_ids"].to_pylist()
    return [torch.tensor(rows[number % len(rows)]) for number in range(size)]


def loaded(folder: str) -> Any:
    """A model of the demo."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(DEMO / folder, trust_remote_code=False).eval()


def batch(size: int) -> Callable[[], int]:
    """Sequences side by side."""
    import torch

    from eval.decoder import DecodeConfig, SpeculativeDecoder

    decoder = SpeculativeDecoder.from_config(
        loaded("pair/target"),
        loaded("draft/model"),
        DecodeConfig(length=DRAFTED),
        engine="captured",
    )

    def decode(new: int) -> int:
        draws = [torch.Generator().manual_seed(seed) for seed in range(size)]
        prompts = demo_prompts(size)
        outs = decoder.generate_batch(prompts, max_new_tokens=new, generators=draws, size=size)
        return sum(len(out.tokens) for out in outs)

    decoder.warm_up()
    decode(4)
    return partial(decode, NEW)


def economize(size: int) -> Callable[[], int]:
    """The same by economize, whose draws are other ones of the same distribution."""
    from economize import DecodeConfig, TopPSampler, apply
    from economize.techniques.draft_model import DraftModelConfig

    target = loaded("pair/target")
    model = apply(target, DraftModelConfig(model=str(DEMO / "draft/model")))
    config = DecodeConfig(cycle_length=DRAFTED + 1, verifier="rejection")
    ends = (target.generation_config.eos_token_id,)

    def decode(new: int) -> int:
        sampler = TopPSampler(temperature=1.0, seed=0)
        prompts = demo_prompts(size)
        outs = model.decode_batch(prompts, new, decoding=config, selector=sampler, stop=ends)
        return sum(len(out.tokens) for out in outs)

    decode(4)
    return partial(decode, NEW)


def training(size: int, draft: str) -> Any:
    """Forward and backward of two steps, by one text whose last three quarters are learnt."""
    import torch
    from datasets import Dataset

    from distill.config import DistilConfig
    from distill.distillation import draft_trainer
    from specdata.sampling import SamplingConfig

    def row(length: int) -> dict[str, list[int]]:
        ids = (torch.arange(length) * 7919 % 512).tolist()
        return {"prompt_ids": ids[: length // 4], "completion_ids": ids[length // 4 :]}

    (target, made), rows = pair(draft), Dataset.from_list([row(32), row(size)])
    settings = DistilConfig.model_validate({"batch_size": 1, "report_to": []})
    given = target, made, rows, Path("work"), settings, SamplingConfig(), 0
    trainer: Any = draft_trainer(*given)
    trainer.objective.train()

    def step(number: int, place: int) -> None:
        batch = trainer.data_collator([trainer.train_dataset[place]])
        trainer.objective(batch, number)[0].backward()
        made.zero_grad()

    step(0, 0)

    def two() -> None:
        for number in range(2):
            step(number, 1)

    return two


class BegunError(Exception):
    """The first batch, or the first step, begins."""


def begin(*_: Any, **__: Any) -> None:
    """Stand for a batch or a step."""
    raise BegunError


def given(*options: str) -> Any:
    """The configuration of a run in this folder, without what these options do not ask for."""
    from recipes.config import parse

    models = [word for role in ("target", "draft") for word in (f"--models.{role}", f"pair/{role}")]
    return parse(["--toy", "null", "--output", "run", *models, *options]).config


def make_pair() -> Any:
    """Write a target and a draft of one layer; returns their tokenizer."""
    from distill.toy import language_model, save_tokenizer, train_tokenizer
    from distill.training import save_model
    from specdata.toy.corpus import corpus

    tokenizer = train_tokenizer(corpus(seed=0, examples_per_family=200), 2048)
    for name in ("target", "draft"):
        made = language_model(tokenizer, layers=1, width=16, seed=0)
        save_model(made, Path("pair", name))
        save_tokenizer(tokenizer, Path("pair", name))
    return tokenizer


def prompting(size: int) -> Any:
    """Prompts of about 300 tokens, up to the first batch of rollouts."""
    import random

    from recipes import make_rollouts
    from specdata.rollouts.backend import TransformersBackend
    from specdata.toy.corpus import corpus

    if not Path("prompts.jsonl").is_file():
        tokenizer, draw = make_pair(), random.Random(0)
        words = " ".join(corpus(seed=1, examples_per_family=200)).split()
        each = 300 * len(words) // len(tokenizer(" ".join(words))["input_ids"])
        texts = (" ".join(draw.choices(words, k=each)) for _ in range(size))
        lines = (json.dumps({"prompt": text}) for text in texts)
        Path("prompts.jsonl").write_text("\n".join(lines))
    TransformersBackend.complete = begin  # type: ignore[method-assign,assignment]
    sets = "[{name: prompts.jsonl, split: train, count: 0}]"
    config = given("--draft", "null", "--head", "null", "--rollouts.sets", sets)
    return partial(to_its_begin, make_rollouts.RECIPE, config)


def to_its_begin(recipe: Any, config: Any) -> None:
    """Run a recipe up to its first batch or step."""
    try:
        recipe.main(config)
    except BegunError:
        pass
    else:
        raise RuntimeError("nothing begins: all is made")


def storing(size: int) -> Any:
    """Rollouts and labels of 40 + 60 tokens, one in 500 of split dev, in shards of 64."""
    from recipes.make_rollouts import Rollouts
    from recipes.run import run_stage
    from recipes.train_head import Labels
    from specdata.storage.dataset import fill_dataset
    from specdata.storage.resume import Settings
    from specdata.storage.schema import LABELS, ROLLOUTS

    make_pair()
    config = given("--draft", "null")

    def shard(schema: Any, start: int) -> list[dict[str, Any]]:
        more = [name for name in schema.names if name not in ROLLOUTS.names]
        each = {"dataset": "maths", "sample": 0, "turn": 0, "finish": "length"}
        each |= {"prompt_ids": [*range(5, 45)], "completion_ids": [*range(5, 65)]}
        each |= {name: [*range(5, 65)] if name == "draft_ids" else [0.5] * 60 for name in more}
        return [
            each | {"example_id": f"{index:016x}", "split": "train" if index % 500 else "dev"}
            for index in range(start, min(start + 64, size))
        ]

    def run(self: Any, schema: Any) -> dict[str, Any]:
        parts = [partial(shard, schema, start) for start in range(0, size, 64)]
        settings = Settings({"sampling": asdict(config.sampling)})
        fill_dataset(self.folder, schema, settings, parts, lambda _: None)
        return {"acceptance": {}}

    def store() -> None:
        for kind, schema in ((Rollouts, ROLLOUTS), (Labels, LABELS)):
            stage = type("Stored", (kind,), {"run": lambda self, schema=schema: run(self, schema)})
            run_stage(stage(config))

    return store


def beginning(size: int, what: str) -> Any:
    """A training on stored rollouts, up to its first step."""
    import heads.train
    from distill.distillation import DistilTrainer
    from recipes import train_draft, train_head

    DistilTrainer.compute_loss = begin  # type: ignore[method-assign,assignment]
    heads.train.Training.step = begin  # type: ignore[method-assign,assignment]
    if what == "draft":
        return partial(to_its_begin, train_draft.RECIPE, given())
    return partial(to_its_begin, train_head.RECIPE, given("--draft", "null"))


LENGTHS = (2_000, 8_000, 16_000, 32_000)
TREE: dict[str, Any] = {"drafter": "tree", "verifier": "traversal", "widths": (2, 2, 1)}
PROMPTS, ROWS = (10_000, 100_000, 1_000_000), (20_000, 100_000, 1_000_000)
CHAIN: dict[str, Any] = {"verifier": "block", "length": 4}
WORKS: dict[str, tuple[Work, tuple[int, ...]]] = {
    "decode chain": (partial(decoding, draft="plain", **CHAIN), LENGTHS),
    "decode tree": (partial(decoding, draft="plain", **TREE), LENGTHS),
    "decode eagle3": (partial(decoding, draft="eagle3", **CHAIN), LENGTHS),
    "decode eagle3 tree": (partial(decoding, draft="eagle3", **TREE), LENGTHS),
    "decode windows": (partial(decoding, target="gemma3_text"), LENGTHS),
    "generate": (partial(generating, target="llama"), LENGTHS),
    "generate windows": (partial(generating, target="gemma3_text"), LENGTHS[:3]),
    "batch": (batch, (16, 64)),
    "batch, economize": (economize, (16, 64, 256)),
    **{
        f"train {kind}": (partial(training, draft=kind), (2_048, 8_192))
        for kind in ("plain", "eagle3", "states", "dspark", "pard")
    },
    "prompts": (prompting, PROMPTS),
    "prompts again": (prompting, PROMPTS),
    "rollouts stored": (storing, ROWS),
    **{
        f"rollouts to a {what}{again}": (partial(beginning, what=what), ROWS)
        for what in ("draft", "head")
        for again in ("", " again")
    },
}


if __name__ == "__main__":
    main()
