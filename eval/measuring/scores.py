"""Scores of texts: task scores against a prompt's reference, and the reward of a reward model.

A lossless method has the target's scores, up to the luck of sampling; a biased one need not. A text
is scored when its prompt is measured, and the score kept in its record.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Literal

from specdata.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from specdata.prompts.prompt import Prompt

ScoreName = Literal["rougeL", "bleu", "exact_match"]
REWARD = "reward"
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
    """The scores of an evaluation's texts: task scores, and a reward model's if one is named.

    A prompt without a reference has no task score. Raises ConfigError if none has a reference, or
    the reward model, one for sequence classification, cannot be loaded.
    """

    def __init__(
        self,
        names: Sequence[str],
        prompts: Sequence[Prompt],
        tokenizer: PreTrainedTokenizerBase,
        reward_model: str | None,
    ) -> None:
        if names and not any(prompt.reference for prompt in prompts):
            sets = ", ".join(dict.fromkeys(prompt.dataset for prompt in prompts))
            raise ConfigError(
                f"eval.scores {', '.join(names)} compare texts with references, and no prompt of "
                f"{sets} has one: give rows a column `reference`, name theirs (`reference: "
                "'{column}'`), or take the scores out"
            )
        self._names = names
        self._tokenizer = tokenizer
        self._judge: Any = None
        if reward_model is not None:
            from specdata.models import load_reward_model

            self._judge, self._judges = load_reward_model(reward_model)

    def scores(self, prompt: Prompt, new: Sequence[int]) -> dict[str, float]:
        """Name -> score of the new tokens after a prompt."""
        text = self._tokenizer.decode(new, skip_special_tokens=True).strip()
        scores = {} if self._judge is None else {REWARD: self._reward(prompt, text)}
        if prompt.reference:
            scores |= {name: text_score(name, text, prompt.reference) for name in self._names}
        return scores

    def _reward(self, prompt: Prompt, text: str) -> float:
        """The reward of a prompt's answer: the model's one logit, or that of its last label."""
        import torch

        is_chat = bool(prompt.messages and self._judges.chat_template)
        if is_chat:
            answer = {"role": "assistant", "content": text}
            chat = [*prompt.messages, answer]
            whole = self._judges.apply_chat_template(chat, tokenize=False)
        else:
            whole = f"{self._tokenizer.decode(prompt.ids, skip_special_tokens=True)} {text}"
        inputs = self._judges(  # a chat template writes special tokens itself
            whole, return_tensors="pt", truncation=True, add_special_tokens=not is_chat
        ).to(self._judge.device)
        with torch.inference_mode():
            return float(self._judge(**inputs).logits[0, -1])
