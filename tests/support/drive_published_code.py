"""Use published folders with transformers alone, as a stranger to this project would.

`drive` runs this file by itself, and there our packages cannot be imported. The orders name the
folders (or Hub ids) of a target, drafts and heads, the arguments of each call of `generate`, and
the examples of cards.
"""

import json
import os
import subprocess
import sys
import warnings
from importlib.abc import MetaPathFinder
from pathlib import Path
from types import SimpleNamespace
from typing import Any

OURS = {"specdata", "heads", "distill", "eval", "recipes", "tests", "benchmarks"}


class NotInstalled(MetaPathFinder):
    """This project, for someone who has not installed it."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        if name.partition(".")[0] in OURS:
            raise ModuleNotFoundError(f"No module named {name!r}")


if __name__ == "__main__":
    sys.meta_path.insert(0, NotInstalled())

import torch  # noqa: E402
import transformers  # noqa: E402
from transformers import AutoModel, AutoModelForCausalLM  # noqa: E402


def drive(
    root: Path, orders: dict[str, Any], python: str | Path = sys.executable, **environment: str
) -> dict[str, Any]:
    """Run this file, isolated from the project, in a folder of its own: the answers."""
    given, out = root / "orders.json", root / "answers.json"
    given.write_text(json.dumps(orders))
    done = subprocess.run(
        [python, "-I", __file__, given, out],
        cwd=root,
        env={**os.environ, "HF_MODULES_CACHE": str(root / "modules"), **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    answers: dict[str, Any] = json.loads(out.read_text())
    return answers


class Streamed:
    """A streamer that keeps what it is given."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.ended = False

    def put(self, tokens: torch.Tensor) -> None:
        self.tokens += tokens.flatten().tolist()

    def end(self) -> None:
        self.ended = True


def load(folder: str, **options: Any) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype="auto", **options).eval()


def decode(orders: dict[str, Any], models: dict[str, Any], case: dict[str, Any]) -> Any:
    """Tokens after the prompt, or the error that `generate` raised."""
    arguments = dict(case["arguments"])
    arguments["generator"] = torch.Generator().manual_seed(case["seed"])
    if "attention_mask" in arguments:
        arguments["attention_mask"] = torch.tensor(arguments["attention_mask"])
    if case.get("head"):
        arguments["acceptance_head"] = models[case["head"]]
    if case["draft"]:
        arguments["assistant_model"] = models[case["draft"]]
    streamed = Streamed()
    prompt = torch.tensor(case["prompt"])
    try:
        output = models[case["target"]].generate(
            prompt,
            custom_generate=orders["folder"],
            trust_remote_code=True,
            streamer=streamed,
            **arguments,
        )
    except ValueError as error:
        return f"{type(error).__name__}: {error}"
    assert output[0, : prompt.shape[1]].equal(prompt[0])
    assert streamed.tokens == output[0].tolist()
    assert streamed.ended
    return output[0, prompt.shape[1] :].tolist()


def main() -> None:
    warnings.simplefilter("error")
    orders = json.loads(Path(sys.argv[1]).read_text())
    models = {name: load(folder) for name, folder in orders["models"].items()}
    heads = {
        name: AutoModel.from_pretrained(folder, trust_remote_code=True)
        for name, folder in orders["heads"].items()
    }
    answers = {
        "version": transformers.__version__,
        "heads": {name: [type(head).__name__, head.training] for name, head in heads.items()},
        "tokens": [decode(orders, models | heads, case) for case in orders["cases"]],
    }
    if "drawn" in orders:
        given = {name: torch.tensor(values) for name, values in orders["drawn"].items()}
        drawn = SimpleNamespace(**given, embed=given["embeddings"].__getitem__)
        answers["logits"] = {name: head.logit(drawn) for name, head in heads.items()}
    for code in orders.get("examples", ()):
        exec(compile(code, "a card", "exec"), {})
    if "whole" in orders:
        # A draft that was itself loaded with trust_remote_code=True generates as before.
        whole, plain = load(orders["whole"], trust_remote_code=True), load(orders["whole"])
        target = models[orders["cases"][0]["target"]]
        prompt = torch.tensor(orders["cases"][0]["prompt"])
        options = {"do_sample": False, "max_new_tokens": 12}
        answers["own"] = whole.generate(prompt, **options).tolist()
        answers["plain"] = plain.generate(prompt, **options).tolist()
        answers["assisted"] = target.generate(prompt, assistant_model=whole, **options).tolist()
        answers["unassisted"] = target.generate(prompt, **options).tolist()
    Path(sys.argv[2]).write_text(json.dumps(answers))


if __name__ == "__main__":
    main()
