"""Greedy outputs that differ, judged: by rounding, or by a defect.

Greedy decoding takes the largest logit. Forwards over other numbers of tokens round differently,
so where the two largest logits differ by less than that, either token is a correct choice: a tie.
Logits and rounding noise are measured with transformers alone, without our caches and masks, so
that a defect of ours cannot raise the noise that would excuse it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from transformers import DynamicCache

from specdata.cache import cache_argument
from specdata.generation import plain_generation
from specdata.models import end_ids
from specdata.sampling import SamplingConfig

# The gap between two logits that each change by the noise changes by twice that; twice again
# because only a few ways of running the model are tried.
NOISE_FACTOR = 4.0
CHUNK = 4


@dataclass(frozen=True, slots=True)
class Choice:
    """One token of a sequence, and how far the model is from choosing it.

    Args:
        position: new tokens before it.
        logit: its logit, in one forward over all tokens before it.
        noise: rounding: the largest difference of any token's logit among ways of running the
            model over the same tokens.
    """

    position: int
    token: int
    logit: float
    best: int
    best_logit: float
    noise: float

    @property
    def gap(self) -> float:
        """The distance of the token's logit from the largest."""
        return self.best_logit - self.logit

    @property
    def tied(self) -> bool:
        """True if rounding explains the choice."""
        return self.gap <= NOISE_FACTOR * self.noise

    def __str__(self) -> str:
        return (
            f"token {self.token} ({self.gap:.3g} below {self.best} at {self.position}, rounding "
            f"noise {self.noise:.3g})"
        )


@dataclass(frozen=True, slots=True)
class Difference:
    """The first difference between a method's output and plain decoding's.

    Args:
        position: new tokens before the first that differs.
        plain: plain decoding's choice there; None if its output has ended. So with `decoded`.
        worst: the token of the method's output from there on whose logit is furthest below the
            largest.
        complete: whether the method's output ends at its first end token or at the budget.
    """

    position: int
    plain: Choice | None
    decoded: Choice | None
    worst: Choice | None
    complete: bool

    @property
    def verdict(self) -> Literal["tie", "bug"]:
        """A tie if rounding explains both choices and all later ones of the method."""
        choices = (self.plain, self.decoded, self.worst)
        explained = all(choice is not None and choice.tied for choice in choices)
        return "tie" if explained and self.complete else "bug"

    def __str__(self) -> str:
        ends = "" if self.complete else "; it ends neither at the first end token nor at the budget"
        return (
            f"{self.verdict} at new token {self.position}: plain {self.plain or 'has ended'}; "
            f"method {self.decoded or 'has ended'}; worst after that {self.worst or 'none'}{ends}"
        )


def greedy_differences(
    model: Any,
    prompts: Sequence[Tensor],
    decode: Callable[[Tensor], Tensor],
    *,
    max_new_tokens: int,
) -> dict[int, Difference]:
    """Decode prompts, each (T,), greedily and judge what differs from `generate`.

    `decode` is the method: a prompt (T,) -> new tokens (n,). By the number of a prompt, of those
    whose texts are not identical.
    """
    differences = {}
    for number, prompt in enumerate(prompts):
        plain = greedy_reference(model, prompt, max_new_tokens).tolist()
        decoded = decode(prompt).tolist()
        if decoded != plain:
            differences[number] = judge_difference(
                model, prompt.tolist(), plain, decoded, max_new_tokens
            )
    return differences


def greedy_reference(model: Any, prompt: Tensor, max_new_tokens: int) -> Tensor:
    """New tokens (n,) of transformers' `generate(do_sample=False)` on a prompt (T,); no penalty."""
    ids = prompt.unsqueeze(0).to(model.device)
    with plain_generation(model, SamplingConfig(0.0), max_new_tokens=max_new_tokens) as config:
        output = model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=config)
    new: Tensor = output[0, len(prompt) :].cpu()
    return new


@torch.inference_mode()
def judge_difference(
    model: Any,
    prompt: Sequence[int],
    plain: Sequence[int],
    decoded: Sequence[int],
    max_new_tokens: int,
) -> Difference:
    """Judge a method's new tokens that are not plain decoding's, of the same budget."""
    pairs = zip(plain, decoded, strict=False)
    first = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(plain), len(decoded)))
    worst = first
    if first < len(decoded):
        # The position, from there on, whose token's logit is furthest below the largest.
        ids = torch.tensor([[*prompt, *decoded[:-1]]], device=model.device)
        rows = model(input_ids=ids, use_cache=False).logits[0, len(prompt) - 1 + first :].float()
        tokens = torch.tensor(decoded[first:], device=rows.device)
        gaps = rows.amax(-1) - rows.gather(-1, tokens.unsqueeze(-1)).squeeze(-1)
        worst = first + int(gaps.argmax())
    ends = end_ids(model.generation_config)
    early = any(token in ends for token in decoded[:-1])
    ended = bool(decoded) and (decoded[-1] in ends or len(decoded) == max_new_tokens)
    return Difference(
        first,
        _choice(model, prompt, plain, first),
        _choice(model, prompt, decoded, first),
        _choice(model, prompt, decoded, worst),
        ended and not early,
    )


def _choice(
    model: Any, prompt: Sequence[int], tokens: Sequence[int], position: int
) -> Choice | None:
    """Measure the choice of a new token; None where the sequence has ended."""
    if position >= len(tokens):
        return None
    context = [*prompt, *tokens[:position]]
    whole = _last_logits(model, [context])
    # Ways of splitting the same tokens into forwards over a cache.
    head, new = context[: len(prompt)], context[len(prompt) :]
    ways = [[context[:-last], context[-last:]] for last in (1, CHUNK, 2 * CHUNK)]
    ways += [
        [head, *(new[first : first + size] for first in range(0, len(new), size))]
        for size in (1, CHUNK)
    ]
    noise = [float((_last_logits(model, way) - whole).abs().max()) for way in ways]
    best = int(whole.argmax())
    # Logits that are stored in few bits are equal to their neighbours within one step.
    step = torch.finfo(model.dtype).eps * float(whole[best].abs())
    token = tokens[position]
    return Choice(position, token, float(whole[token]), best, float(whole[best]), max(step, *noise))


def _last_logits(model: Any, pieces: Sequence[Sequence[int]]) -> Tensor:
    """Logits (V,) in float32 after all pieces."""
    cache = DynamicCache(config=model.config)
    cached = {cache_argument(model): cache}
    for piece in filter(None, pieces):
        ids = torch.tensor([piece], device=model.device)
        out = model(input_ids=ids, **cached, use_cache=True, logits_to_keep=1)
    row: Tensor = out.logits[0, -1]
    return row if row.dtype == torch.float64 else row.float()
