"""A few prompts with the text that methods made of them: which drafted tokens were accepted."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from eval.measuring.results import Results, Run
from eval.measuring.samples import RoundText, Sample, Samples, SampleText

MOST_METHODS = 3
"""Methods whose text of a prompt is shown."""
MOST_TOKENS = 240
"""Tokens of a text that are shown, to the end of their round."""
PROMPT_BEGIN, PROMPT_END = 1400, 600
"""Characters of a long prompt that are shown of its begin and of its end."""
TITLE = 80
"""Characters of a prompt in the line that opens it."""
UNSEEN = "\N{REPLACEMENT CHARACTER}"
"""Stands for a discarded token that has no text of its own, such as a part of a character."""

Fate = Literal["accepted", "added", "discarded"]


@dataclass(frozen=True, slots=True)
class ShownToken:
    """One token.

    Args:
        fate: what became of it: a drafted one that was "accepted" or "discarded", or one that the
            target "added".
        text: as it is shown. The texts of accepted and added tokens, in order, are the decoded
            text.
    """

    fate: Fate
    text: str


@dataclass(frozen=True, slots=True)
class ShownRound:
    """One round.

    Args:
        title: its counts in words.
        tokens: accepted, then discarded, then the one that the target added, if any.
    """

    title: str
    tokens: tuple[ShownToken, ...]


@dataclass(frozen=True, slots=True)
class ShownText:
    """What one method made of a prompt.

    Args:
        method: its name.
        counts: what became of its drafted tokens, a sentence.
        rounds: those that are shown.
        is_whole: whether these are all of the text.
    """

    method: str
    counts: str
    rounds: tuple[ShownRound, ...]
    is_whole: bool


@dataclass(frozen=True, slots=True)
class ShownPrompt:
    """One prompt.

    Args:
        title: its begin, in one line.
        prompt: its text, a long one without its middle.
        texts: of each method that is shown.
    """

    title: str
    prompt: str
    texts: tuple[ShownText, ...]


def drill_down(samples: Samples, results: Results) -> dict[str, list[ShownPrompt]]:
    """Data set -> its prompts; a set without samples is left out."""
    shown = {}
    for dataset in results.datasets():
        methods = _shown_methods(results.of(dataset))
        if prompts := [_prompt(sample, methods) for sample in samples.of(dataset)]:
            shown[dataset] = prompts
    return shown


def _shown_methods(runs: list[Run]) -> list[str]:
    """The best lossless method, the best with a head, and the best fixed length, each once."""
    drafting = [run for run in runs if run.lossless and run.drafter is not None]
    drafting.sort(key=lambda r: (r.tokens_per_second or 0.0, r.block_efficiency), reverse=True)
    ours = [run for run in drafting if run.drafter == "chain"]
    best = drafting[:1]
    best += [run for run in ours if run.head is not None][:1]
    best += [run for run in ours if run.fixed_length][:1]
    best += [run for run in ours if not run.fixed_length][:1]
    return list(dict.fromkeys(run.method for run in best))[:MOST_METHODS]


def _prompt(sample: Sample, methods: list[str]) -> ShownPrompt:
    text = sample.prompt
    flat = " ".join(text.split())
    if len(text) > PROMPT_BEGIN + PROMPT_END:
        left_out = len(text) - PROMPT_BEGIN - PROMPT_END
        between = f"\n[… {left_out:,} characters …]\n"
        text = text[:PROMPT_BEGIN] + between + text[-PROMPT_END:]
    return ShownPrompt(
        flat if len(flat) <= TITLE else flat[: TITLE - 1] + "…",
        text,
        tuple(_text(name, sample.methods[name]) for name in methods if name in sample.methods),
    )


def _text(method: str, text: SampleText) -> ShownText:
    drafted = sum(len(each.accepted) + len(each.discarded) for each in text.rounds)
    accepted = sum(len(each.accepted) for each in text.rounds)
    emitted = accepted + sum(each.added is not None for each in text.rounds)
    rounds: list[ShownRound] = []
    tokens = 0
    for number, each in enumerate(text.rounds, 1):
        if tokens >= MOST_TOKENS:
            break
        rounds.append(_round(number, each))
        tokens += len(rounds[-1].tokens)
    counts = (
        f"{len(text.rounds)} rounds, {drafted} tokens drafted, {accepted} of them accepted:"
        f" {emitted / max(1, len(text.rounds)):.2f} tokens a round"
    )
    whole = text.is_whole and len(rounds) == len(text.rounds)
    return ShownText(method, counts, tuple(rounds), whole)


def _round(number: int, text: RoundText) -> ShownRound:
    drafted = len(text.accepted) + len(text.discarded)
    title = f"Round {number}: {drafted} drafted, {len(text.accepted)} accepted"
    if text.added is not None:
        title += ", and one more token" if text.is_bonus else ", one corrected by the target"
    tokens = [ShownToken("accepted", piece) for piece in text.accepted]
    tokens += [ShownToken("discarded", _visible(piece)) for piece in text.discarded]
    if text.added is not None:
        tokens.append(ShownToken("added", text.added))
    return ShownRound(title, tuple(tokens))


def _visible(text: str) -> str:
    """A discarded token's text in one line: it must not break the lines of the text around it."""
    return text.replace("\r", "").replace("\n", "⏎").replace("\t", "⇥") or UNSEEN
