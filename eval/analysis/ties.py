"""Is a greedy text that differs from another a matter of rounding, or of a defect?

Greedy decoding takes the largest logit. Forwards over other numbers of tokens round differently,
so where the two largest logits lie closer than that, either may be written and both are right: a
tie. What is judged is measured with transformers alone, none of our caches and masks, so that a
defect of ours cannot excuse itself as noise.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from transformers import DynamicCache, GenerationConfig

from specdata.models import end_ids

# Two logits that each move by the noise close twice of it; as much again because few ways of
# running the model are tried.
NOISE_FACTOR = 4.0
CHUNK = 4


@dataclass(frozen=True, slots=True)
class Choice:
    """One token of a text, and how far the model is from choosing it.

    Args:
        position: new tokens before it.
        token: what was written.
        logit: its logit, in one forward over the whole text before it.
        best: the token of the largest logit in that forward.
        best_logit: its logit.
        noise: rounding: the largest difference of any token's logit among `ways`.
        ways: that difference for each way of running the model, against the one forward.
        float32_gap: best_logit - logit of these tokens in float32, if that was to be had.
    """

    position: int
    token: int
    logit: float
    best: int
    best_logit: float
    noise: float
    ways: Mapping[str, float]
    float32_gap: float | None = None

    @property
    def gap(self) -> float:
        """What the token's logit lacks to the largest."""
        return self.best_logit - self.logit

    @property
    def tied(self) -> bool:
        """Whether rounding explains the choice."""
        return self.gap <= NOISE_FACTOR * self.noise


@dataclass(frozen=True, slots=True)
class Difference:
    """How a text departs from plain decoding.

    Args:
        method: what wrote the text.
        prompt: which prompt, from 0.
        position: new tokens before the first that differs.
        expected: plain decoding's choice there; None if its text has ended.
        found: the method's; None if its text has ended.
        worst: the token of the method's text from there on that lacks most to the model's choice.
        complete: whether the method's text ends at its first end token or at the budget.
        context: (n,) ids of prompt and new tokens before the difference.
    """

    method: str
    prompt: int
    position: int
    expected: Choice | None
    found: Choice | None
    worst: Choice | None
    complete: bool
    context: tuple[int, ...]

    @property
    def verdict(self) -> Literal["tie", "bug"]:
        """A tie if rounding explains both choices, and everything the method wrote after."""
        choices = (self.expected, self.found, self.worst)
        explained = all(one is not None and one.tied for one in choices)
        return "tie" if explained and self.complete else "bug"


def greedy_reference(model: Any, prompt: Tensor, max_new_tokens: int) -> Tensor:
    """The text (n,) of transformers' `generate(do_sample=False)`, without any penalty."""
    ids = prompt.unsqueeze(0).to(model.device)
    config = GenerationConfig(
        do_sample=False,
        max_new_tokens=max_new_tokens,
        eos_token_id=model.generation_config.eos_token_id,
        pad_token_id=model.generation_config.pad_token_id,
        bos_token_id=model.generation_config.bos_token_id,
    )
    text = model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=config)
    found: Tensor = text[0, len(prompt) :].cpu()
    return found


@torch.inference_mode()
def find_difference(
    model: Any,
    prompt: Sequence[int],
    expected: Sequence[int],
    found: Sequence[int],
    *,
    max_new_tokens: int,
    method: str = "",
    number: int = 0,
    exact: Any = None,
) -> Difference | None:
    """Compare a method's text with plain decoding's and judge the first place that differs.

    Args:
        model: the target.
        prompt: token ids.
        expected: new tokens of plain decoding.
        found: new tokens of the method.
        max_new_tokens: the budget of both.
        method: name for the result.
        number: number of the prompt for the result.
        exact: the target in float32, to show the gap without rounding; None leaves that out.

    Returns:
        None if the texts are equal.
    """
    if list(expected) == list(found):
        return None
    pairs = zip(expected, found, strict=False)
    at = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(expected), len(found)))

    def judge(text: Sequence[int], position: int) -> Choice | None:
        if position >= len(text):
            return None
        return _judge(model, [*prompt, *text[:position]], len(prompt), text[position], exact)

    theirs = judge(found, at)
    return Difference(
        method,
        number,
        at,
        judge(expected, at),
        theirs,
        judge(found, worst) if (worst := _worst(model, prompt, found, at)) != at else theirs,
        _complete(found, end_ids(model), max_new_tokens),
        (*prompt, *found[:at]),
    )


def _complete(text: Sequence[int], ends: frozenset[int], budget: int) -> bool:
    """Whether a text ends where it must: at its first end token, or at the budget."""
    early = any(token in ends for token in text[:-1])
    return bool(text) and not early and (text[-1] in ends or len(text) == budget)


def _worst(model: Any, prompt: Sequence[int], text: Sequence[int], start: int) -> int:
    """The position, from `start` on, whose token lacks most to the largest logit there."""
    if start >= len(text):
        return start
    ids = torch.tensor([[*prompt, *text[:-1]]], device=model.device)
    rows = model(input_ids=ids, use_cache=False).logits[0, len(prompt) - 1 + start :].float()
    chosen = torch.tensor(text[start:], device=rows.device)
    lacks = rows.amax(-1) - rows.gather(-1, chosen.unsqueeze(-1)).squeeze(-1)
    return start + int(lacks.argmax())


def _judge(model: Any, text: list[int], prompt: int, token: int, exact: Any) -> Choice:
    whole = _last_logits(model, [text])
    ways = {
        name: float((_last_logits(model, pieces) - whole).abs().max())
        for name, pieces in _ways(text, prompt).items()
    }
    best = int(whole.argmax())
    gap32 = None
    if exact is not None:
        row = _last_logits(exact, [text])
        gap32 = float(row[best] - row[token])
    # Logits that are stored in few bits are equal to their neighbours within one step.
    step = torch.finfo(model.dtype).eps * float(whole[best].abs())
    return Choice(
        len(text) - prompt,
        token,
        float(whole[token]),
        best,
        float(whole[best]),
        max(step, *ways.values()),
        ways,
        gap32,
    )


def _ways(text: list[int], prompt: int) -> dict[str, list[list[int]]]:
    """The same text fed to a cache in other pieces."""
    head, new = text[:prompt], text[prompt:]
    ways = {
        "last token alone": [text[:-1], text[-1:]],
        f"last {CHUNK} together": [text[:-CHUNK], text[-CHUNK:]],
        f"last {2 * CHUNK} together": [text[: -2 * CHUNK], text[-2 * CHUNK :]],
        "token by token": [head, *([token] for token in new)],
        f"{CHUNK} at a time": [
            head,
            *(new[first : first + CHUNK] for first in range(0, len(new), CHUNK)),
        ],
    }
    return {name: [piece for piece in pieces if piece] for name, pieces in ways.items()}


def _last_logits(model: Any, pieces: Sequence[Sequence[int]]) -> Tensor:
    """Logits (V,) in float32 after all pieces."""
    cache = DynamicCache(config=model.config)
    for piece in pieces:
        ids = torch.tensor([piece], device=model.device)
        out = model(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
    row: Tensor = out.logits[0, -1]
    return row if row.dtype == torch.float64 else row.float()


@dataclass(frozen=True, slots=True)
class Comparison:
    """One method against plain decoding.

    Args:
        method: its name.
        texts: how many were compared.
        tokens: new tokens in them.
        differences: of the texts that are not identical.
    """

    method: str
    texts: int
    tokens: int
    differences: tuple[Difference, ...]

    def count(self, verdict: Literal["tie", "bug"]) -> int:
        """Texts with that verdict."""
        return sum(one.verdict == verdict for one in self.differences)


def compare(
    model: Any,
    prompts: Sequence[Tensor],
    methods: Mapping[str, Callable[[Tensor], Tensor]],
    *,
    max_new_tokens: int,
    exact: Any = None,
    report: Callable[[int], object] = lambda done: None,
) -> list[Comparison]:
    """Decode prompts greedily with every method and judge what differs from `generate`.

    Args:
        model: the target.
        prompts: each (T,) int64.
        methods: what decodes a prompt greedily: (T,) -> new tokens (n,).
        max_new_tokens: the budget that the methods have.
        exact: the target in float32, for the figures only.
        report: called with 1 when a text is done.

    Returns:
        One comparison a method, in their order.
    """
    found: dict[str, list[Difference]] = {name: [] for name in methods}
    tokens = dict.fromkeys(methods, 0)
    for number, prompt in enumerate(prompts):
        expected = greedy_reference(model, prompt, max_new_tokens).tolist()
        report(1)
        for name, decode in methods.items():
            text = decode(prompt).tolist()
            tokens[name] += len(text)
            difference = find_difference(
                model,
                prompt.tolist(),
                expected,
                text,
                max_new_tokens=max_new_tokens,
                method=name,
                number=number,
                exact=exact,
            )
            if difference is not None:
                found[name].append(difference)
            report(1)
    return [Comparison(name, len(prompts), tokens[name], tuple(found[name])) for name in methods]
