"""Do two greedy outputs differ because of rounding, or because of a defect?

Greedy decoding takes the largest logit. Forwards over other numbers of tokens round differently,
so where the two largest logits differ by less than that, either token is a correct choice: a tie.
Logits and rounding noise are measured with transformers alone, without our caches and masks, so
that a defect of ours cannot raise the noise that would excuse it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from transformers import DynamicCache, GenerationConfig

from specdata.models import end_ids

# The gap between two logits that each change by the noise changes by twice that; twice again
# because only a few ways of running the model are tried.
NOISE_FACTOR = 4.0
CHUNK = 4


@dataclass(frozen=True, slots=True)
class Choice:
    """One token of a sequence, and how far the model is from choosing it.

    Args:
        position: new tokens before it.
        token: the token.
        logit: its logit, in one forward over all tokens before it.
        best: the token of the largest logit in that forward.
        best_logit: its logit.
        noise: rounding: the largest difference of any token's logit among `ways`.
        ways: that difference for each way of running the model, against the one forward.
        float32_gap: best_logit - logit of these tokens in float32, if that was computed.
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
        """How far the token's logit is below the largest."""
        return self.best_logit - self.logit

    @property
    def tied(self) -> bool:
        """Whether rounding explains the choice."""
        return self.gap <= NOISE_FACTOR * self.noise


@dataclass(frozen=True, slots=True)
class Difference:
    """The first difference between a method's output and plain decoding's.

    Args:
        method: name of the method.
        prompt: which prompt, from 0.
        position: new tokens before the first that differs.
        expected: plain decoding's choice there; None if its output has ended.
        found: the method's; None if its output has ended.
        worst: the token of the method's output from there on whose logit is furthest below the
            largest.
        complete: whether the method's output ends at its first end token or at the budget.
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
        """A tie if rounding explains both choices and all later ones of the method."""
        choices = (self.expected, self.found, self.worst)
        explained = all(choice is not None and choice.tied for choice in choices)
        return "tie" if explained and self.complete else "bug"


def greedy_reference(model: Any, prompt: Tensor, max_new_tokens: int) -> Tensor:
    """New tokens (n,) of transformers' `generate(do_sample=False)` on a prompt (T,); no penalty."""
    ids = prompt.unsqueeze(0).to(model.device)
    config = GenerationConfig(
        do_sample=False,
        max_new_tokens=max_new_tokens,
        eos_token_id=model.generation_config.eos_token_id,
        pad_token_id=model.generation_config.pad_token_id,
        bos_token_id=model.generation_config.bos_token_id,
    )
    output = model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=config)
    new: Tensor = output[0, len(prompt) :].cpu()
    return new


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
    """Compare a method's output with plain decoding's and judge the first difference.

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
        None if the two are equal.
    """
    if list(expected) == list(found):
        return None
    pairs = zip(expected, found, strict=False)
    at = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(expected), len(found)))

    def choice(tokens: Sequence[int], position: int) -> Choice | None:
        if position >= len(tokens):
            return None
        context = [*prompt, *tokens[:position]]
        return _choice(model, context, len(prompt), tokens[position], exact)

    actual = choice(found, at)
    return Difference(
        method,
        number,
        at,
        choice(expected, at),
        actual,
        choice(found, worst) if (worst := _worst(model, prompt, found, at)) != at else actual,
        _complete(found, end_ids(model), max_new_tokens),
        (*prompt, *found[:at]),
    )


def _complete(tokens: Sequence[int], ends: frozenset[int], budget: int) -> bool:
    """Whether new tokens end where they must: at the first end token, or at the budget."""
    early = any(token in ends for token in tokens[:-1])
    return bool(tokens) and not early and (tokens[-1] in ends or len(tokens) == budget)


def _worst(model: Any, prompt: Sequence[int], tokens: Sequence[int], start: int) -> int:
    """The position, from `start` on, whose token's logit is furthest below the largest there."""
    if start >= len(tokens):
        return start
    ids = torch.tensor([[*prompt, *tokens[:-1]]], device=model.device)
    rows = model(input_ids=ids, use_cache=False).logits[0, len(prompt) - 1 + start :].float()
    chosen = torch.tensor(tokens[start:], device=rows.device)
    gaps = rows.amax(-1) - rows.gather(-1, chosen.unsqueeze(-1)).squeeze(-1)
    return start + int(gaps.argmax())


def _choice(model: Any, context: list[int], prompt: int, token: int, exact: Any) -> Choice:
    """Measure the choice of `token` after `context`, of which `prompt` tokens are the prompt."""
    whole = _last_logits(model, [context])
    ways = {
        name: float((_last_logits(model, pieces) - whole).abs().max())
        for name, pieces in _ways(context, prompt).items()
    }
    best = int(whole.argmax())
    float32_gap = None
    if exact is not None:
        row = _last_logits(exact, [context])
        float32_gap = float(row[best] - row[token])
    # Logits that are stored in few bits are equal to their neighbours within one step.
    step = torch.finfo(model.dtype).eps * float(whole[best].abs())
    return Choice(
        len(context) - prompt,
        token,
        float(whole[token]),
        best,
        float(whole[best]),
        max(step, *ways.values()),
        ways,
        float32_gap,
    )


def _ways(tokens: list[int], prompt: int) -> dict[str, list[list[int]]]:
    """Ways of splitting the same tokens into forwards over a cache."""
    head, new = tokens[:prompt], tokens[prompt:]
    ways = {
        "last token alone": [tokens[:-1], tokens[-1:]],
        f"last {CHUNK} together": [tokens[:-CHUNK], tokens[-CHUNK:]],
        f"last {2 * CHUNK} together": [tokens[: -2 * CHUNK], tokens[-2 * CHUNK :]],
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
        texts: how many sequences were compared.
        tokens: new tokens in them.
        differences: one for each sequence that is not identical.
    """

    method: str
    texts: int
    tokens: int
    differences: tuple[Difference, ...]

    def count(self, verdict: Literal["tie", "bug"]) -> int:
        """Sequences with that verdict."""
        return sum(difference.verdict == verdict for difference in self.differences)


def compare_sequences(
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
        exact: the target in float32, to show gaps without rounding; None leaves that out.
        report: called with 1 when a sequence is done.

    Returns:
        One comparison a method, in their order.
    """
    differences: dict[str, list[Difference]] = {name: [] for name in methods}
    tokens = dict.fromkeys(methods, 0)
    for number, prompt in enumerate(prompts):
        expected = greedy_reference(model, prompt, max_new_tokens).tolist()
        report(1)
        for name, decode in methods.items():
            output = decode(prompt).tolist()
            tokens[name] += len(output)
            difference = find_difference(
                model,
                prompt.tolist(),
                expected,
                output,
                max_new_tokens=max_new_tokens,
                method=name,
                number=number,
                exact=exact,
            )
            if difference is not None:
                differences[name].append(difference)
            report(1)
    return [
        Comparison(name, len(prompts), tokens[name], tuple(differences[name])) for name in methods
    ]
