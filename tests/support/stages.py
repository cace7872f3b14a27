"""What several files of tests use of `test_stages`."""

from typing import Any

from eval.measuring.results import read_results
from recipes.config import PipelineConfig, parse
from recipes.run import Stage
from specdata.storage.files import fingerprint

CONFIG: dict[str, Any] = {
    "output": "out",
    "models": {"target": "out/pair/target", "draft": "out/pair/draft"},
    "toy": {
        "vocab_size": 512,
        "examples_per_family": 20,
        "library_characters": 20000,
        "target_layers": 2,
        "target_width": 32,
        "target_steps": 20,
        "draft_width": 32,
        "draft_steps": 20,
        "save_steps": 10,
    },
    "rollouts": {
        "max_new_tokens": 16,
        "shard_size": 8,
        "sets": [
            {"name": "instruct", "split": "train", "count": 16},
            {"name": "instruct", "split": "dev", "count": 8},
        ],
    },
    "logits": {"top_logits": 4, "shard_size": 8},
    "draft": {
        "init": {"kind": "model", "vocabulary": 300},
        "finetune": {"epochs": 1, "max_length": 32, "batch_size": 8},
        "epochs": 1,
        "save_steps": 2,
        "batch_size": 4,
    },
    "labels": {"shard_size": 8},
    "head": {"depth": 1, "epochs": 2, "batch_size": 8, "save_steps": 2},
    "eval": {
        "verifier_seconds": 0.1,
        "max_new_tokens": 8,
        "sets": [{"name": "instruct", "split": "test", "count": 2}],
        "methods": [
            {"name": "plain", "decoder": "plain"},
            {"name": "K=3", "length": 3},
            {"name": "head", "stop": "head", "threshold": 0.5},
        ],
    },
}


def configuration(*more: str) -> PipelineConfig:
    return parse(["--config", "pair.yaml", *more]).config


def result(stage: Stage) -> dict[str, Any]:
    """The results of a stage: contents of datasets and weights, counts of an evaluation."""
    if stage.name == "eval":
        runs = read_results(stage.folder / "results.json").runs
        return {f"{run.name} {run.dataset}": (run.tokens, run.n_target) for run in runs}
    weights = [*stage.folder.rglob("*.parquet"), *stage.folder.rglob("model.safetensors")]
    found = weights or {*stage.folder.glob("*.json")} - {stage.folder / "run.json"}
    return {str(path.relative_to(stage.folder)): fingerprint(str(path)) for path in found}
