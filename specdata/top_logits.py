"""The target's largest logits, stored so that another sampler or draft needs no new target pass."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pyarrow.compute as pc
import torch
from datasets import Dataset
from torch import Tensor

from specdata.errors import ConfigError
from specdata.probability import SamplingConfig, likely, nucleus, probabilities
from specdata.storage.columns import arrow_parts
from specdata.storage.dataset import read_manifest
from specdata.storage.schema import TOP_LOGITS

logger = logging.getLogger(__name__)

LOGIT_COLUMNS = TOP_LOGITS.names
# Largest share of positions that may be left out because their distributions are not decided. They
# are no random ones, and leaving out a share of them moves a mean acceptance by up to that share.
MOST_UNDECIDED = 0.05
# Rows whose positions are looked at together.
CHECKED_AT_ONCE = 64
# Logits that differ by less may be equal.
ROUNDING = 1e-4


@dataclass(frozen=True, slots=True)
class TopLogits:
    """The number N = `count` of the target's logits, of V, that a dataset holds a position."""

    count: int
    vocabulary: int

    @classmethod
    def of(cls, folder: Path) -> TopLogits:
        """The top logits that a stored dataset holds, by its manifest."""
        stored = read_manifest(folder)["settings"]
        if not stored.get("top_logits"):
            raise ConfigError(
                f"{folder} keeps no target logits: name a dataset of stage logits "
                "(draftsmith make-logits)"
            )
        return cls(stored["top_logits"], stored["vocabulary"])

    def distributions(
        self, sampling: SamplingConfig, *, bound: bool = False
    ) -> TopLogitDistributions:
        """The target's distributions under a sampler; raises ConfigError as that class does."""
        return TopLogitDistributions(self.count, self.vocabulary, sampling, bound)


def logits_of(rows: Dataset) -> Dataset:
    """The top logits of rows alone, read as tensors; see `top_logit_columns`."""
    names = [name for name in LOGIT_COLUMNS if name in rows.column_names]
    return rows.select_columns(names).with_format("torch")


def top_logit_columns(row: Mapping[str, Any], count: int, positions: int) -> dict[str, Tensor]:
    """The top logits of one rollout's first tokens: (C, N) or (C, 1) columns.

    Of a row of `logits_of`, or the same as lists; `positions` is C, counted from its completion's
    first token on.
    """
    wide = {"top_ids", "top_logits"}
    return {
        name: torch.as_tensor(row[name]).view(-1, count if name in wide else 1)[:positions]
        for name in LOGIT_COLUMNS
        if name in row
    }


def top_logits(logits: Tensor, count: int) -> dict[str, Tensor]:
    """Return the top count = N of logits (C, V) and a summary of the others, all float32.

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
    """The target's distributions from N = `count` top logits of V, or a refusal (ConfigError).

    Exact, up to the float32 of what is stored:

    - any sampler if N >= V;
    - min_p above 0 without top_p at any temperature, where no token outside reaches it;
    - temperature 0, and 0 < top_k <= N at any temperature, with any top_p, unless a logit outside
      equals the smallest that counts, as many do in bfloat16;
    - temperature 1 with top_p < 1 and no top_k, where the nucleus, or what min_p leaves of it, lies
      inside the N.

    Other positions are not decided: losses, labels and measures leave them out, and `check_decided`
    counts them.

    A bound, only if asked for: temperature 1 without top_k or top_p. p is exact inside the N; the
    rest of its mass is given to the tokens outside in proportion to q, as if they were one token.
    That can only bring p closer to q: the overlap is an upper bound, and so is the mean of min(1,
    p/q) over drafted tokens outside.

    Everything else is refused: the mass outside is not known at another temperature.
    """

    count: int
    vocabulary: int
    sampling: SamplingConfig
    bound: bool = False

    def __post_init__(self) -> None:
        if self._decides is not None:
            return
        ways = "run the target itself, or keep more logits"
        if self.sampling.temperature == 1.0 and not self.sampling.truncates:
            ways = f"allow a bound, {ways}"
        raise ConfigError(
            f"{self.count} top logits of {self.vocabulary} do not give the target's distributions "
            f"at temperature {self.sampling.temperature}, top_k {self.sampling.top_k}, top_p "
            f"{self.sampling.top_p}, min_p {self.sampling.min_p}: {ways}; exact are temperature 0, "
            f"top_k of 1 to {self.count}, top_p below 1 at temperature 1, and min_p without top_p"
        )

    @property
    def _decides(self) -> Literal["places", "min_p", "nucleus", "bound"] | None:
        """What decides p: the places of tokens among the N, or else what keeps to them."""
        sampling, limited = self.sampling, 0 < self.sampling.top_k < self.vocabulary
        within = limited and sampling.top_k <= self.count
        if within or self.count >= self.vocabulary or sampling.temperature == 0.0:
            return "places"
        if sampling.min_p > 0.0 and sampling.top_p == 1.0:
            return "min_p"
        if sampling.temperature != 1.0:
            return None
        if sampling.top_p < 1.0 and not limited:
            return "nucleus"
        return "bound" if self.bound and not sampling.truncates else None

    @property
    def is_exact(self) -> bool:
        """True if p is exact wherever it is given, rather than in part a bound."""
        return self._decides != "bound"

    def distribution(self, top: Mapping[str, Tensor], q: Tensor) -> Tensor:
        """Return p, (C, V), from columns as of `top_logits` (each (C, N) or (C, 1)).

        Some distribution where the top logits do not decide it (`decided`).
        """
        ids, logits = top["top_ids"].long(), top["top_logits"]
        if self._decides in ("places", "min_p"):
            return _spread(probabilities(logits, self.sampling), ids, q)
        total = log_total(top)
        chances = (logits - total).exp()
        if self._decides == "nucleus":
            kept = nucleus(chances, self.sampling.top_p)
            return _spread(likely(kept, self.sampling.min_p), ids, q)
        outside = q.scatter(-1, ids, 0.0)
        share = outside / outside.sum(-1, keepdim=True).clamp(min=torch.finfo(q.dtype).tiny)
        return _spread(chances, ids, q) + share * (top["rest_logit"] - total).exp()

    def decided(self, top: Mapping[str, Tensor]) -> Tensor:
        """True where columns as of `distribution` decide it at each position, (C,)."""
        logits, after, sampling = top["top_logits"], top["next_logit"], self.sampling
        if not self.is_exact:
            return torch.ones_like(after, dtype=torch.bool).squeeze(-1)
        # Nothing outside reaches min_p: where rounding might decide, it is not said.
        far = sampling.temperature * math.log(sampling.min_p) if sampling.min_p else -math.inf
        none_outside = after < logits[:, :1] + far - ROUNDING
        if self._decides == "places":  # of the last one that can have a probability
            last = 1 if sampling.temperature == 0.0 else sampling.top_k or self.vocabulary
            least = logits[:, min(last, logits.shape[-1]) - 1, None]
            none_outside |= (least > after) | after.isneginf()
        elif self._decides == "nucleus":
            chances = (logits - log_total(top)).exp().masked_fill(logits <= after, 0.0)
            none_outside |= chances.sum(-1, keepdim=True) >= sampling.top_p
        return none_outside.squeeze(-1)


def check_decided(rows: Dataset, *laws: TopLogitDistributions) -> list[int]:
    """Count the positions of rows at which each of `laws` is not decided; what is not 0 is logged.

    Rows with the columns of `LOGIT_COLUMNS` are read once, without the target or a draft.
    """
    undecided, positions = [0] * len(laws), 0
    for _, part in arrow_parts(rows, *logits_of(rows).column_names, at_once=CHECKED_AT_ONCE):
        lists = zip(part.column_names, part.columns, strict=True)
        row = {name: pc.list_flatten(column).to_numpy().copy() for name, column in lists}
        top = top_logit_columns(row, laws[0].count, len(row["rest_logit"]))
        positions += len(top["rest_logit"])
        for place, each in enumerate(laws):
            undecided[place] += int((~each.decided(top)).sum())
    for each, count in zip(laws, undecided, strict=True):
        why = "an equal logit" if each._decides == "places" else "what min_p and the nucleus keep"
        issue = (
            f"{each.count} top logits do not decide the target's distribution at {count} of "
            f"{positions} positions ({why} is outside)"
        )
        if count > MOST_UNDECIDED * positions:
            raise ConfigError(
                f"{issue}, more than a share of {MOST_UNDECIDED:g}: run the target itself, or keep "
                "more logits"
            )
        if count:
            logger.warning("%s: they are left out", issue)
    return undecided


def log_total(top: Mapping[str, Tensor]) -> Tensor:
    """Log of the sum of exp over the whole vocabulary, (C, 1), from columns of `top_logits`."""
    return torch.logaddexp(top["top_logits"].logsumexp(-1, keepdim=True), top["rest_logit"])


def _spread(chances: Tensor, ids: Tensor, like: Tensor) -> Tensor:
    """(C, N) probabilities of ids -> (C, V)."""
    return torch.zeros_like(like, dtype=chances.dtype).scatter_(-1, ids, chances)
