"""What several files of tests use of `test_release`."""

import json
from pathlib import Path

from transformers import PreTrainedTokenizerFast

from distill.toy import language_model, train_tokenizer
from eval.measuring.results import Results
from heads import AcceptanceHead
from specdata.storage.files import write_json
from tests.support.synthetic_results import synthetic_results

HIDDEN = 16


def save_llama(
    folder: Path, tokenizer: PreTrainedTokenizerFast, *, seed: int, pad: int = 0, layers: int = 1
) -> None:
    size = len(tokenizer) + pad
    language_model(
        tokenizer, layers=layers, width=HIDDEN, seed=seed, vocabulary=size, positions=128
    ).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def measured_of(results: Results, **folders: Path) -> Results:
    """The same results, of another target, draft or head; methods without one stay without."""
    runs = [
        run.model_copy(
            update={role: getattr(run, role) and str(path) for role, path in folders.items()}
        )
        for run in results.runs
    ]
    return results.model_copy(update={"runs": runs})


def with_transformers(results: Results) -> Results:
    """The same results with fixed lengths of transformers' own loop, as fast as ours were."""
    own = [
        run.model_copy(
            update={
                "method": run.method.replace(
                    decoder="assisted", name=f"transformers K={run.method.deepest}"
                )
            }
        )
        for run in results.runs
        if run.name in {"fixed-4", "fixed-6"}
    ]
    return results.model_copy(update={"runs": [*results.runs, *own]})


class Pair:
    """Folders of a target, a draft and a head, and results that measured them."""

    def __init__(self, root: Path, *, pad: int = 0) -> None:
        self.target, self.draft, self.head = root / "target", root / "draft", root / "head"
        tokenizer = train_tokenizer(["a short text about nothing at all, 0123456789"] * 4, 280)
        save_llama(self.target, tokenizer, seed=0, pad=pad, layers=3)
        asked = self.target / "generation_config.json"
        write_json(asked, {**json.loads(asked.read_text()), "repetition_penalty": 1.1})
        save_llama(self.draft, tokenizer, seed=1)
        AcceptanceHead(
            hidden_size=HIDDEN, depth=1, rejection_weight=6, draft=str(self.draft)
        ).save_pretrained(self.head)
        self.results = measured_of(
            with_transformers(synthetic_results("alpaca", "gsm8k")),
            target=self.target,
            draft=self.draft,
            head=self.head,
        )
