"""How preparing a training grows with its data: this build beside an earlier one.

    python benchmarks/growth_data.py [--base COMMIT] [--rows 10000 100000] [--out FILE]

CPU seconds and peak memory of a process of one thread, on a one-layer pair with random weights:
rows stored in shards of 64, and stages from their begin to the first step of a training, begun and
begun again. Each build reads what it has written itself.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.busy import earlier, with_code_of

WORKS = ("shards", "draft", "draft again", "head", "head again")


def main() -> None:
    """Measure, print, and write one JSON file."""
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("--base", default="ed09b47c", help="the earlier build's commit")
    options.add_argument("--rows", type=int, nargs="+", default=[10_000, 100_000])
    options.add_argument("--works", nargs="+", default=WORKS)
    options.add_argument("--out", type=Path, default=Path("runs/bench/growth_data.json"))
    options.add_argument("--work", nargs=3, help=argparse.SUPPRESS)
    given = options.parse_args()
    if given.work:
        work, rows, folder = given.work
        print(json.dumps(measured(work.split()[0], int(rows), Path(folder))))
        return
    measures: list[dict[str, Any]] = []
    with earlier(given.base) as base, tempfile.TemporaryDirectory() as folder:
        for rows in given.rows:
            for work in given.works:
                for name, tree in {"base": base, "now": Path.cwd()}.items():
                    out = f"{folder}/{name}-{rows}"
                    command = [sys.executable, "-W", "ignore", str(Path(__file__).absolute())]
                    done = subprocess.run(
                        [*command, "--work", work, str(rows), out],
                        check=True,
                        env=with_code_of(tree) | {"OMP_NUM_THREADS": "1"},
                        cwd=tree,
                        stdout=subprocess.PIPE,
                    )
                    told = json.loads(done.stdout.splitlines()[-1])
                    measures.append({"work": work, "rows": rows, "build": name, **told})
                    print(measures[-1], flush=True)
    given.out.parent.mkdir(parents=True, exist_ok=True)
    given.out.write_text(json.dumps({"base": given.base, "measures": measures}, indent=1) + "\n")


class FirstStepError(Exception):
    """The training begins."""


def measured(work: str, rows: int, folder: Path) -> dict[str, float]:
    """CPU seconds of one work, and the process's largest memory in MB."""
    import distill.trainer
    import heads.train
    from recipes import train_draft, train_head
    from recipes.config import parse

    def begins(*_: Any, **__: Any) -> None:
        raise FirstStepError

    distill.trainer.DistilTrainer.compute_loss = begins
    heads.train.Training.step = begins  # type: ignore[method-assign]
    models = {f"--models.{role}": f"{folder}/pair/{role}" for role in ("target", "draft")}
    given = {"--toy": "null", "--output": str(folder), **models}
    if work != "draft":
        given["--draft"] = "null"
    config = parse([word for pair in given.items() for word in pair]).config
    if work == "shards":
        make_pair(folder / "pair")
    begun = time.process_time()
    if work == "shards":
        fill(config, rows)
    else:
        recipe = {"draft": train_draft, "head": train_head}[work].RECIPE
        with suppress(FirstStepError):
            recipe.main(config)
    seconds = time.process_time() - begun
    megabytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3
    return {"cpu_seconds": round(seconds, 2), "peak_megabytes": round(megabytes)}


def make_pair(folder: Path) -> None:
    """Write a target and a draft of one layer."""
    from distill.toy import language_model, save_tokenizer, train_tokenizer
    from distill.training import save_model
    from specdata.toy.corpus import corpus

    tokenizer = train_tokenizer(corpus(seed=0, examples_per_family=20), 320)
    for name in ("target", "draft"):
        save_model(language_model(tokenizer, layers=1, width=16, seed=0), folder / name)
        save_tokenizer(tokenizer, folder / name)


def fill(config: Any, rows: int) -> None:
    """Store rollouts and labels of 40 + 60 tokens, one in 500 of split dev, as their stages do."""
    from recipes.make_rollouts import Rollouts
    from recipes.run import run_stage
    from recipes.train_head import Labels
    from specdata.storage.dataset import fill_dataset
    from specdata.storage.resume import Settings
    from specdata.storage.schema import LABELS, ROLLOUTS

    def shard(start: int) -> list[dict[str, Any]]:
        each = {"dataset": "maths", "sample": 0, "turn": 0, "finish": "length"}
        each |= {"prompt_ids": [*range(5, 45)], "completion_ids": [*range(5, 65)]}
        each |= {name: [*range(5, 65)] if name == "draft_ids" else [0.5] * 60 for name in more}
        return [
            each | {"example_id": f"{index:016x}", "split": "train" if index % 500 else "dev"}
            for index in range(start, min(start + 64, rows))
        ]

    for kind, schema in ((Rollouts, ROLLOUTS), (Labels, LABELS)):
        more = [name for name in schema.names if name not in ROLLOUTS.names]

        def run(self: Any, schema: Any = schema) -> dict[str, Any]:
            parts = [partial(shard, start) for start in range(0, rows, 64)]
            settings = Settings({"sampling": asdict(config.sampling)})
            fill_dataset(self.folder, schema, settings, parts, lambda _: None)
            return {"acceptance": {}}

        run_stage(type("Stored", (kind,), {"run": run})(config))


if __name__ == "__main__":
    main()
