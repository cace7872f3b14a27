"""samples.json: the text of a few prompts, and which of its tokens each method drafted.

The tokens are kept with the records of a prompt, so an interrupted evaluation loses none. Texts are
made of them once all prompts are done, so that a report needs no tokenizer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from pydantic import ValidationError

from eval.measuring.records import RoundTokens, Strict, record_file
from specdata.errors import ManifestError
from specdata.storage.files import write_json
from specdata.storage.resume import read_record

if TYPE_CHECKING:
    from eval.rounds import Generation
    from specdata.prompts.loading import Prompt

SAMPLES = "samples.json"
SCHEMA_VERSION: Literal[1] = 1
PER_SET = 3
"""Prompts of each set whose text is kept: its first."""
MOST_TOKENS = 512
"""Tokens of a generation whose text is kept, to the end of their round."""
CONTEXT = 8
"""Tokens that discarded ones are decoded after: their text depends on what precedes them."""

Decode = Callable[[Sequence[int]], str]
"""Token ids to text, special tokens included."""


class RoundText(Strict):
    """The text of one round.

    Attributes:
        accepted: text of each accepted token; empty for one that only begins a character.
        added: text of the token that the target added; None if an accepted token ended the text.
        discarded: text of each drafted token that was not accepted, in draft order.
        is_bonus: whether the deepest drafted token was accepted, so that `added` corrects nothing.
    """

    accepted: list[str]
    added: str | None
    discarded: list[str]
    is_bonus: bool


class SampleText(Strict):
    """What one method made of one prompt.

    Attributes:
        rounds: in order, at most `MOST_TOKENS` tokens of them.
        is_whole: whether these are all rounds.
    """

    rounds: list[RoundText]
    is_whole: bool

    @property
    def text(self) -> str:
        """The continuation."""
        return "".join("".join([*each.accepted, each.added or ""]) for each in self.rounds)


class Sample(Strict):
    """One prompt.

    Attributes:
        dataset: name of its set.
        prompt_id: as in the records.
        prompt: its text.
        methods: method -> what it made of it; the target alone is left out.
    """

    dataset: str
    prompt_id: str
    prompt: str
    methods: dict[str, SampleText]


class Samples(Strict):
    """The whole file."""

    schema_version: Literal[1]
    samples: list[Sample]

    def of(self, dataset: str) -> list[Sample]:
        """Those of one set."""
        return [sample for sample in self.samples if sample.dataset == dataset]


def shown_prompts(prompts: Sequence[Prompt]) -> list[Prompt]:
    """The first prompts of each set."""
    sets: dict[str, list[Prompt]] = {}
    for prompt in prompts:
        sets.setdefault(prompt.dataset, []).append(prompt)
    return [prompt for some in sets.values() for prompt in some[:PER_SET]]


def round_tokens(generation: Generation) -> list[RoundTokens]:
    """The tokens of each round of a generation."""
    emitted, start, rounds = generation.tokens.tolist(), 0, []
    for each in generation.rounds:
        end = start + each.emitted
        rounds.append(RoundTokens(list(each.tokens), emitted[start:end], each.accepted, each.depth))
        start = end
    return rounds


def make_samples(prompts: Sequence[Prompt], folder: Path, decode: Decode) -> Samples:
    """Texts of the prompts whose tokens were kept; none of an evaluation that kept none.

    Args:
        prompts: of the evaluation; those without a record are left out.
        folder: of the evaluation.
        decode: the tokenizer's, with special tokens and as it is.

    Raises:
        ManifestError: if a prompt's record is damaged.
    """
    samples = []
    for prompt in shown_prompts(prompts):
        path = record_file(folder / "prompts", prompt)
        if not path.is_file():
            continue
        remedy = "remove it, and run again"
        kept = read_record(path, (), remedy).get("tokens", {})
        try:
            rounds = {
                name: [RoundTokens(**each) for each in stored] for name, stored in kept.items()
            }
            methods = {name: _text(each, prompt.ids, decode) for name, each in rounds.items()}
        except (AttributeError, TypeError, ValueError) as error:
            raise ManifestError(f"{path} is damaged ({error!r}): {remedy}") from error
        if methods:
            text = decode(prompt.ids)
            samples.append(
                Sample(
                    dataset=prompt.dataset,
                    prompt_id=prompt.example_id,
                    prompt=text,
                    methods=methods,
                )
            )
    return Samples(schema_version=SCHEMA_VERSION, samples=samples)


def _text(rounds: Sequence[RoundTokens], prompt: Sequence[int], decode: Decode) -> SampleText:
    """The text of a generation, round by round."""
    shown: list[RoundTokens] = []
    tokens: list[int] = []
    for each in rounds:
        if len(tokens) >= MOST_TOKENS:
            break
        shown.append(each)
        tokens += each.emitted
    texts = pieces(tokens, decode)
    made, start = [], 0
    for each in shown:
        context = [*prompt, *tokens[: start + each.accepted]][-CONTEXT:]
        texts_here = texts[start : start + len(each.emitted)]
        made.append(
            RoundText(
                accepted=texts_here[: each.accepted],
                added=texts_here[each.accepted] if len(texts_here) > each.accepted else None,
                discarded=pieces([*context, *_discarded(each)], decode)[len(context) :],
                is_bonus=each.accepted == each.depth,
            )
        )
        start += len(each.emitted)
    return SampleText(rounds=made, is_whole=len(shown) == len(rounds))


def _discarded(tokens: RoundTokens) -> list[int]:
    """Drafted tokens but those that were accepted; of equal ones in a tree, the first stay."""
    left = list(tokens.drafted)
    for token in tokens.emitted[: tokens.accepted]:
        left.remove(token)
    return left


def pieces(tokens: Sequence[int], decode: Decode) -> list[str]:
    """The text that each token adds: together they are the text of all tokens, whatever they are.

    A token that only begins a character adds nothing; the one that completes it adds it.
    """
    whole, ends = decode(tokens), [0]
    for count in range(1, len(tokens)):
        so_far, end = decode(tokens[:count]), ends[-1]
        while so_far[end : end + 1] and so_far[: end + 1] == whole[: end + 1]:
            end += 1
        ends.append(end)
    ends += [len(whole)] * bool(tokens)
    return [whole[start:end] for start, end in pairwise(ends)]


def write_samples(path: Path, samples: Samples) -> None:
    """Write samples.json, whole or not at all."""
    write_json(path, samples.model_dump(mode="json"))


def read_samples(path: Path) -> Samples | None:
    """The samples of an evaluation; None if there is no such file, or it cannot be read."""
    try:
        return Samples.model_validate_json(path.read_bytes())
    except (FileNotFoundError, ValidationError):
        return None
