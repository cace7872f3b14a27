"""A pair of tiny random models with one tokenizer, made in a second, and rollouts for them."""

from itertools import islice
from pathlib import Path

from datasets import Dataset

from distill.toy import language_model, save_tokenizer, train_tokenizer
from distill.training import save_model
from specdata.models import load_tokenizer
from specdata.toy.corpus import corpus, examples

VOCABULARY = 320


def random_pair(folder: Path) -> None:
    """Write `folder/target` (2 layers, width 32) and `folder/draft` (1 layer, width 16)."""
    texts = corpus(seed=0, examples_per_family=20, library_characters=2_000)
    tokenizer = train_tokenizer(texts, VOCABULARY)
    for seed, (name, layers, width) in enumerate((("target", 2, 32), ("draft", 1, 16))):
        model = language_model(tokenizer, layers=layers, width=width, seed=seed)
        save_model(model, folder / name)
        save_tokenizer(tokenizer, folder / name)


def measured_only(pair: Path, out: Path) -> list[str]:
    """Options of a run that trains nothing and decodes without drafts, unless told more."""
    models = [f"--models.{role}={pair / role}" for role in ("target", "draft")]
    nothing = ["--toy", "null", "--draft", "null", "--head", "null"]
    methods = "--eval.methods=[{name: plain, decoder: plain}]"
    return ["--output", str(out), *models, *nothing, methods]


def texts_of(pair: Path, count: int, seed: int) -> Dataset:
    """Rollouts of arithmetic: `count` rows with `prompt_ids` and `completion_ids`."""
    tokenizer = load_tokenizer(str(pair / "target"))
    rows = [
        {
            "prompt_ids": tokenizer(example.prompt)["input_ids"],
            "completion_ids": [*tokenizer(example.completion)["input_ids"], tokenizer.eos_token_id],
        }
        for example in islice(examples("maths", seed), count)
    ]
    return Dataset.from_list(rows)
