"""One text a prompt set, and who wrote each of its tokens: a look at it comes before the figures.

Acceptance is as high on garbage as on answers, and no figure shows a wrong chat template.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from eval.decode_config import Method
from eval.measuring.pooled import pool
from eval.measuring.records import Text
from eval.measuring.results import Results
from eval.reporting.verdict import best_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from specdata.prompts.prompt import Prompt

LINES, CHARACTERS = 10, 800
"""Most of a text, and most of each end of a prompt, that are shown."""


@dataclass(frozen=True, slots=True)
class SampledText:
    """A prompt and what was written after it, special tokens included.

    Attributes:
        pieces: of the text, each with who wrote it: "target", "draft" or "lookup".
    """

    dataset: str
    method: str
    prompt: str
    pieces: Sequence[tuple[str, str]]


def sampled_texts(
    results: Results,
    stored: Sequence[tuple[Prompt, Mapping[str, Text]]],
    tokenizer: PreTrainedTokenizerBase,
) -> list[SampledText]:
    """The texts of the best method that drafts, or else of the first method there is."""
    best = best_of(pool(results))
    method = best.method if best else results.runs[0].method
    found = []
    for prompt, texts in stored:
        if method.name in texts and prompt.dataset in results.datasets():
            start = _decoded(prompt.ids, tokenizer)
            if len(start) > 2 * CHARACTERS:
                start = f"{start[:CHARACTERS]} … {start[-CHARACTERS:]}"
            pieces = [*_cut(_written(method, texts[method.name], tokenizer))]
            found.append(SampledText(prompt.dataset, method.name, start, pieces))
    return found


def _written(
    method: Method, text: Text, tokenizer: PreTrainedTokenizerBase
) -> Iterator[tuple[str, str]]:
    """The text in pieces, each of one writer; a character of several tokens is the last one's."""
    end, shown = 0, ""
    for accepted, emitted, forwards in text.rounds:
        drafter = "draft" if method.uses_draft and (forwards or not method.lookup) else "lookup"
        for count, who in ((accepted, drafter), (emitted - accepted, "target")):
            end += count
            new = _decoded(text.tokens[:end], tokenizer)
            if count and (end == len(text.tokens) or not new.endswith("\N{REPLACEMENT CHARACTER}")):
                yield new[len(shown) :], who
                shown = new


def _cut(pieces: Iterator[tuple[str, str]]) -> Iterator[tuple[str, str]]:
    """The first lines."""
    lines, characters = LINES, CHARACTERS
    for text, who in pieces:
        shown = "\n".join(text.split("\n")[:lines])[:characters]
        yield shown, who
        lines, characters = lines - shown.count("\n"), characters - len(shown)
        if shown != text:
            yield " …", "target"
            return


def _decoded(ids: Sequence[int], tokenizer: PreTrainedTokenizerBase) -> str:
    return str(tokenizer.decode([*ids], clean_up_tokenization_spaces=False))
