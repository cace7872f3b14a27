"""Task scores of texts against their prompts' references.

A lossless method has the target's scores, up to the luck of sampling; a biased one need not. A text
is scored when its prompt is measured, and the score kept in its record.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Literal

from specdata.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from specdata.prompts.prompt import Prompt

ScoreName = Literal["rougeL", "bleu", "exact_match"]
PACKAGES = {"rougeL": "rouge_score", "bleu": "sacrebleu"}
_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")


def can_score(name: str) -> bool:
    """True if what a score needs is installed."""
    return name not in PACKAGES or find_spec(PACKAGES[name]) is not None


def check_scores(names: Sequence[str]) -> None:
    """Raise ConfigError unless what these scores need is installed."""
    for name in names:
        if not can_score(name):
            raise ConfigError(
                f"the score {name!r} needs {PACKAGES[name]}, which is not installed: pip install "
                "'.[scores]', or take it out of eval.scores"
            )


def check_references(names: Sequence[str], prompts: Iterable[Any], sets: Sequence[str]) -> None:
    """Raise ConfigError if scores are asked for and no prompt of these sets has a `reference`."""
    if names and not any(getattr(prompt, "reference", None) for prompt in prompts):
        raise ConfigError(
            f"eval.scores {', '.join(names)} compare texts with references, and no prompt of "
            f"{', '.join(sets)} has one: give rows a column `reference`, name theirs (`reference: "
            "'{column}'`), or take the scores out"
        )


def text_score(name: str, text: str, reference: str) -> float:
    """A score of a text against a reference, in [0, 1].

    By its name: "rougeL" (F-measure with stemming, `rouge_score`), "bleu" (sentence BLEU,
    `sacrebleu`), or "exact_match": the number after "####", or else the last number, of both are
    equal, as of gsm8k's answers; of references without a number the whole text.
    """
    if name == "rougeL":
        from rouge_score.rouge_scorer import RougeScorer

        return float(RougeScorer([name], use_stemmer=True).score(reference, text)[name].fmeasure)
    if name == "bleu":
        from sacrebleu import sentence_bleu

        return float(sentence_bleu(text, [reference]).score) / 100
    numbers = [_NUMBER.findall(each.split("####")[-1])[-1:] for each in (text, reference)]
    if not all(numbers):
        return float(text.strip() == reference.strip())
    return float(len({float(last.replace(",", "")) for (last,) in numbers}) == 1)


class Scorer:
    """The task scores of an evaluation's texts.

    A prompt without a reference has none. Raises ConfigError if no prompt has a reference.
    """

    def __init__(
        self, names: Sequence[str], prompts: Sequence[Prompt], tokenizer: PreTrainedTokenizerBase
    ) -> None:
        check_references(names, prompts, list(dict.fromkeys(each.dataset for each in prompts)))
        self._names = names
        self._tokenizer = tokenizer

    def scores(self, prompt: Prompt, new: Sequence[int]) -> dict[str, float]:
        """Name -> score of the new tokens after a prompt."""
        if not prompt.reference:
            return {}
        text = self._tokenizer.decode(new, skip_special_tokens=True).strip()
        return {name: text_score(name, text, prompt.reference) for name in self._names}
