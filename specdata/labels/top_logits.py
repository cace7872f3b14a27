"""The target's largest logits, kept so that another sampler or draft needs no new target pass."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from specdata.errors import ConfigError
from specdata.probability import SamplingConfig, nucleus, probabilities


def top_logits(logits: Tensor, count: int) -> dict[str, Tensor]:
    """Return what is kept of logits (C, V), all float32: count = N of them and a summary.

    Returns:
        top_ids: (C, N) ids of the N largest, in falling order, equal ones by id.
        top_logits: (C, N) their logits.
        rest_logit: (C,) log of the sum of exp over all others; -inf if there are none.
        next_logit: (C,) the largest of the others; -inf if there are none.
    """
    logits = logits.float()
    ids = logits.topk(count, dim=-1).indices.sort(dim=-1).values
    values, order = logits.gather(-1, ids).sort(dim=-1, descending=True, stable=True)
    others = logits.scatter(-1, ids, float("-inf"))
    return {
        "top_ids": ids.gather(-1, order),
        "top_logits": values,
        "rest_logit": others.logsumexp(dim=-1),
        "next_logit": others.amax(dim=-1),
    }


@dataclass(frozen=True, slots=True)
class TopLogitDistributions:
    """The target's distributions from N kept logits, or a refusal.

    Exact, up to the float32 of what is kept:
    - any sampler if N >= V;
    - temperature 0, and 0 < top_k <= N at any temperature, with any top_p. Refused where a logit
      outside equals the smallest that counts, because which of them is kept is arbitrary;
    - temperature 1 with top_p < 1 and no top_k, where the nucleus lies inside the N; refused with
      the number of positions where it does not.

    A bound, only if asked for: temperature 1 without top_k or top_p. p is exact inside the N; the
    rest of its mass is known and is given to the tokens outside in proportion to q, as if they
    were one token. That can only bring p closer to q: the overlap is an upper bound, and so is the
    mean of min(1, p/q) over drafted tokens outside. The drafted tokens themselves are exact.

    Everything else is refused: the mass outside is not known at another temperature.

    Attributes:
        count: N.
        vocabulary: V.
        sampling: the sampler that tokens are served with.
        bound: whether a bound will do.

    Raises:
        ConfigError: for a sampler that is neither exact nor an allowed bound.
    """

    count: int
    vocabulary: int
    sampling: SamplingConfig
    bound: bool = False

    def __post_init__(self) -> None:
        if self._inside or self._nucleus or (self._plain and self.bound):
            return
        ways = "make the labels with the target, or keep more logits"
        if self._plain:
            ways = f"allow a bound, {ways}"
        raise ConfigError(
            f"{self.count} kept logits of {self.vocabulary} do not give the target's distributions "
            f"at temperature {self.sampling.temperature}, top_k {self.sampling.top_k}, top_p "
            f"{self.sampling.top_p}: {ways}; exact are temperature 0, top_k of 1 to {self.count}, "
            "and top_p below 1 at temperature 1"
        )

    @property
    def _limited(self) -> bool:
        """Whether top-k takes anything away."""
        return 0 < self.sampling.top_k < self.vocabulary

    @property
    def _inside(self) -> bool:
        """Whether every token with a probability is among the N, whatever the logits."""
        limited = self._limited and self.sampling.top_k <= self.count
        return self.count >= self.vocabulary or self.sampling.temperature == 0.0 or limited

    @property
    def _nucleus(self) -> bool:
        sampling = self.sampling
        return sampling.temperature == 1.0 and sampling.top_p < 1.0 and not self._limited

    @property
    def _plain(self) -> bool:
        sampling = self.sampling
        return sampling.temperature == 1.0 and sampling.top_p == 1.0 and not self._limited

    def distribution(self, kept: Mapping[str, Tensor], q: Tensor) -> Tensor:
        """Return p, (C, V), from columns as of `top_logits` (each (C, N) or (C, 1)).

        Raises:
            ConfigError: if at some position the kept logits do not decide the distribution.
        """
        ids, logits, after = kept["top_ids"].long(), kept["top_logits"], kept["next_logit"]
        if self._inside:
            decided = (logits[:, self._last, None] > after) | after.isneginf()
            self._check(decided, "an equal logit is outside")
            return _spread(probabilities(logits, self.sampling), ids, q)
        total = torch.logaddexp(logits.logsumexp(-1, keepdim=True), kept["rest_logit"])
        chances = (logits - total).exp()
        if self._nucleus:
            surely = chances.masked_fill(logits <= after, 0.0).sum(-1, keepdim=True)
            self._check(surely >= self.sampling.top_p, "the nucleus reaches outside")
            return _spread(nucleus(chances, self.sampling.top_p), ids, q)
        outside = q.scatter(-1, ids, 0.0)
        share = outside / outside.sum(-1, keepdim=True).clamp(min=torch.finfo(q.dtype).tiny)
        return _spread(chances, ids, q) + share * (kept["rest_logit"] - total).exp()

    @property
    def _last(self) -> int:
        """The place, among the N, of the last one that can have a probability."""
        if self.sampling.temperature == 0.0:
            return 0
        return (self.sampling.top_k if self._limited else self.vocabulary) - 1

    def _check(self, fine: Tensor, why: str) -> None:
        if bad := int((~fine).sum()):
            raise ConfigError(
                f"{self.count} kept logits do not decide the target's distribution at {bad} of "
                f"{fine.numel()} positions looked at ({why}): make the labels with the target, or "
                "keep more logits"
            )


def _spread(chances: Tensor, ids: Tensor, like: Tensor) -> Tensor:
    """(C, N) probabilities of ids -> (C, V)."""
    return torch.zeros_like(like, dtype=chances.dtype).scatter_(-1, ids, chances)
