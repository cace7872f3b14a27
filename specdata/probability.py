"""The one place where logits become probabilities and where p and q are compared.

p is always the target's distribution, q always the draft's. Everything is float32 or wider: half
precision loses the small probabilities on which acceptance depends. Both distributions go through
the same `probabilities`, because a token is verified against the distribution it was drawn from.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import threshold

from specdata.block_verification import residual as residual
from specdata.errors import NotFiniteError
from specdata.sampling import SamplingConfig as SamplingConfig

# Stands for the token of a row that is no distribution, because a logit is NaN or infinite.
NO_TOKEN = -1

# Logits this far below the largest, over the temperature, are those of probability 0.
LEAST_LOGIT = -80.0
BELOW_ONE = 1 - 1e-15
# Vocabularies of at least this many tokens are summed in blocks to draw one token.
SUMMED_IN_BLOCKS, BLOCK_WIDTH = 8192, 256
# Less mass than this beyond top_p may be rounding.
SPARE_MASS = 1e-5
# Probabilities whose running sums are made at once on a CPU: in float64, they stay in its cache.
SUMMED_AT_ONCE = 1 << 17
# So many distributions are those of a draft: on a GPU they are sorted whole, which reads nothing.
SORTED_WHOLE = 64


def probabilities(logits: Tensor, sampling: SamplingConfig) -> Tensor:
    """Return the distribution that tokens are drawn from: temperature, top-k, top-p, min-p.

    (..., V) logits of any float type -> (..., V), float32 (float64 if the logits are); rows sum to
    1, or to NaN where the largest logit is NaN or infinite, so that who draws from a row sees it. p
    and q must have the same sampling.
    """
    logits = logits if logits.dtype == torch.float64 else logits.float()
    if sampling.temperature == 0.0:
        best = logits.argmax(dim=-1, keepdim=True)  # the first of equal maxima, as in generate()
        largest = logits.gather(-1, best)
        return torch.zeros_like(logits).scatter_(-1, best, largest - largest + 1.0)
    if sampling.temperature != 1.0:
        # Shifting first keeps a tiny temperature from overflowing to inf - inf.
        logits = (logits - logits.amax(dim=-1, keepdim=True)).div_(sampling.temperature)
        # Of less than e^-80 of the likeliest's probability nothing is kept: denormal numbers, of
        # which a low temperature makes many, take a CPU three times as long.
        logits = threshold(logits, LEAST_LOGIT, float("-inf"), inplace=True)
    if 0 < sampling.top_k < logits.shape[-1]:
        kth = logits.topk(sampling.top_k, dim=-1).values[..., -1:]
        logits = logits.masked_fill(logits < kth, float("-inf"))
    probs = logits.softmax(dim=-1)
    if sampling.top_p < 1.0:
        probs = nucleus(probs, sampling.top_p)
    return likely(probs, sampling.min_p)


def likely(probs: Tensor, min_p: float) -> Tensor:
    """Drop tokens of less than a share min_p of the likeliest's probability, and normalise.

    (..., V) -> (..., V); rows may miss mass, as long as the likeliest token is there.
    """
    if min_p == 0.0:
        return probs
    kept = probs.masked_fill(probs < min_p * probs.amax(dim=-1, keepdim=True), 0.0)
    return kept / kept.sum(dim=-1, keepdim=True)


def nucleus(probs: Tensor, top_p: float) -> Tensor:
    """Keep the smallest set of most likely tokens whose mass reaches top_p, and normalise.

    (..., V) -> (..., V); rows may miss mass, as long as what is there reaches top_p.
    """
    size = probs.shape[-1]
    rows = probs.reshape(-1, size)
    # Sorting a large vocabulary takes as long as a small model's forward. Tokens below the bound
    # have less than half of the mass that may be left out, so they stand behind the nucleus. Where
    # rounding might decide, the bound is 0.
    if read_waits(rows) and len(rows) <= SORTED_WHOLE:
        return _nucleus_of_sorted(rows, top_p).view(probs.shape)
    spare = rows.sum(dim=-1, keepdim=True) - top_p
    bound = torch.where(spare > SPARE_MASS, spare / (2 * size), 0.0)
    is_likely = (rows >= bound).flatten()
    if read_waits(rows):
        found = is_likely.nonzero().squeeze(-1)
    else:  # NumPy finds a few among many faster
        found = torch.from_numpy(np.flatnonzero(is_likely.numpy()))
    row, values = found // size, rows.flatten()[found]
    counts = torch.bincount(row, minlength=len(rows))
    place = torch.arange(len(row), device=row.device) - (counts.cumsum(0) - counts)[row]
    likely = rows.new_zeros(len(rows), int(counts.max()) if len(rows) else 0)
    likely[row, place] = values.detach()
    ordered, index = likely.sort(dim=-1, descending=True, stable=True)
    # A token stays while the mass before it is below top_p, so the best one always stays.
    outside = ordered.cumsum(dim=-1) - ordered >= top_p
    stays = ~torch.zeros_like(outside).scatter_(-1, index, outside)[row, place]
    kept = torch.zeros_like(rows).flatten().index_put_((found[stays],), values[stays])
    kept = kept.view(probs.shape)
    total = kept.sum(dim=-1, keepdim=True)
    # Memory that was just written is not asked for again: in a large vocabulary that takes longer.
    return kept / total if kept.requires_grad else kept.div_(total)


def _nucleus_of_sorted(rows: Tensor, top_p: float) -> Tensor:
    """The `nucleus` of (n, V) by sorting all tokens: how many are likely need not be known."""
    ordered, index = rows.sort(dim=-1, descending=True, stable=True)
    outside = ordered.cumsum(dim=-1) - ordered >= top_p
    kept = rows.masked_fill(torch.zeros_like(outside).scatter_(-1, index, outside), 0.0)
    return kept / kept.sum(dim=-1, keepdim=True)


def to_vocabulary(logits: Tensor, size: int) -> Tensor:
    """Fit a draft's logits (..., V') to the target's vocabulary, (..., size).

    Embedding matrices of one family are padded to different sizes. Ids that only the target has
    get probability 0 from the draft; ids that only the draft has are never drafted.
    """
    missing = size - logits.shape[-1]
    if missing <= 0:
        return logits[..., :size]
    return torch.nn.functional.pad(logits, (0, missing), value=float("-inf"))


def inverse_cdf(probs: Tensor, uniform: Tensor) -> Tensor:
    """Map uniforms (...) in [0, 1) to tokens of (..., V) non-negative weights.

    (...) ids, int64, never of probability 0; NO_TOKEN in a row whose sum is no positive number.
    """
    return inverse_cdfs(probs, uniform.unsqueeze(-1)).squeeze(-1)


def drawn_tokens(logits: Tensor, sampling: SamplingConfig, uniform: Tensor) -> Tensor:
    """The tokens that uniforms choose: `inverse_cdf` of the `probabilities` of logits.

    (B, V) logits and (B,) uniforms -> (B,) ids; NO_TOKEN in a row of logits that are not finite.
    """
    at_once = len(logits) if logits.device.type != "cpu" else _rows_at_once(logits.shape[-1])
    if len(logits) <= at_once:
        return inverse_cdf(probabilities(logits, sampling), uniform)
    # A few rows stay in the processor's cache from one operation to the next: three times as fast.
    return torch.cat(
        [
            inverse_cdf(probabilities(rows, sampling), chosen)
            for rows, chosen in zip(
                torch.split(logits, at_once), torch.split(uniform, at_once), strict=True
            )
        ]
    )


def inverse_cdfs(probs: Tensor, uniforms: Tensor) -> Tensor:
    """The `inverse_cdf` of any number of uniforms a row: (..., V), (..., S) -> (..., S)."""
    at_once = _rows_at_once(probs.shape[-1])
    if probs.device.type != "cpu" or probs.dim() != 2 or len(probs) <= at_once:
        return _inverse_cdfs(probs, uniforms)
    pieces = [slice(start, start + at_once) for start in range(0, len(probs), at_once)]
    return torch.cat([_inverse_cdfs(probs[piece], uniforms[piece]) for piece in pieces])


def _rows_at_once(vocabulary: int) -> int:
    return max(1, SUMMED_AT_ONCE // vocabulary)


def _inverse_cdfs(probs: Tensor, uniforms: Tensor) -> Tensor:
    cdf = probs.cumsum(dim=-1, dtype=torch.float64)
    total = cdf[..., -1:]
    # Rounding may lift u * total to total itself; stay below it.
    points = torch.minimum(uniforms.double() * total, total * BELOW_ONE)
    tokens = torch.searchsorted(cdf, points, right=True).clamp_(max=probs.shape[-1] - 1)
    return torch.where(total > 0, tokens, NO_TOKEN)


def read_waits(values: Tensor) -> bool:
    """True if to read a number is to wait for a device, so that several are read at once."""
    return values.device.type != "cpu"


def draw(probs: Tensor, generator: torch.Generator) -> Tensor:
    """Draw one token a row: (..., V) -> (...). One uniform is used for each row."""
    uniform = torch.rand(
        probs.shape[:-1], generator=generator, dtype=torch.float64, device=generator.device
    )
    return inverse_cdf(probs, uniform.to(probs.device, non_blocking=True))


def draw_one(probs: Tensor, generator: torch.Generator) -> int:
    """Draw one token from one distribution (V,): what `draw` returns; NotFiniteError for none."""
    return draw_several(probs, 1, generator)[0]


def draw_several(probs: Tensor, count: int, generator: torch.Generator) -> list[int]:
    """Draw `count` independent tokens from one distribution (V,).

    They are what `draw` returns for as many equal rows, up to rounding: over a large vocabulary,
    blocks are summed in the distribution's own precision. It is written apart from `draw` because
    a small draft's forward takes no longer than `draw` does.
    """
    if read_waits(probs):
        return [_drawn(token) for token in draw(probs.expand(count, -1), generator).tolist()]
    uniforms = torch.rand(
        count, generator=generator, dtype=torch.float64, device=generator.device
    ).tolist()
    if len(probs) < SUMMED_IN_BLOCKS or len(probs) % BLOCK_WIDTH:
        return [_invert(probs.cumsum(dim=-1, dtype=torch.float64), uniform) for uniform in uniforms]
    # Sums of blocks first: a running sum over a large vocabulary takes twice as long.
    blocks = probs.reshape(-1, BLOCK_WIDTH)
    ends = blocks.sum(dim=-1).cumsum(dim=-1, dtype=torch.float64)
    total, tokens = _mass(ends), []
    for uniform in uniforms:
        block = _invert(ends, uniform)
        before = float(ends[block - 1]) if block else 0.0
        share = (uniform * total - before) / (float(ends[block]) - before)
        inside = blocks[block].cumsum(dim=-1, dtype=torch.float64)
        tokens.append(block * BLOCK_WIDTH + _invert(inside, max(0.0, share)))
    return tokens


def draw_and_read(
    probs: Tensor, generator: torch.Generator, numbers: Callable[[Tensor], Tensor] | None
) -> tuple[int, tuple[float, ...] | None]:
    """Draw one token from one distribution (V,), and what is to be known of it in the same read.

    `numbers` gives (m,) numbers of a token (1,). They come with what `draw_one` returns; None where
    they can be read later as well.
    """
    if numbers is None or not read_waits(probs):
        return draw_one(probs, generator), None
    token = draw(probs, generator).view(1)
    drawn, *read = torch.cat([token.double(), numbers(token.clamp(min=0)).double()]).tolist()
    return _drawn(drawn), tuple(read)


def _drawn(token: float) -> int:
    if token == NO_TOKEN:
        raise NotFiniteError
    return int(token)


def _mass(cdf: Tensor) -> float:
    """The last of running sums (n,)."""
    total = float(cdf[-1])
    if not total > 0:
        raise NotFiniteError
    return total


def _invert(cdf: Tensor, uniform: float) -> int:
    """The first index at which running sums (n,) exceed a share of the last, which is never 0."""
    total = _mass(cdf)
    # Rounding may lift u * total to total itself; stay below it.
    return int(torch.searchsorted(cdf, min(uniform * total, total * BELOW_ONE), right=True))


def accept_probability(p: Tensor, q: Tensor) -> Tensor:
    """min(1, p/q) for the probabilities p and q of drafted tokens (so q > 0), same shape."""
    return (p / q).clamp(max=1.0)


def overlap(p: Tensor, q: Tensor) -> Tensor:
    """sum_x min(p, q) = 1 - TV(p, q): (..., V) -> (...), the acceptance of one drafted token."""
    return torch.minimum(p, q).sum(dim=-1)


def entropy(probs: Tensor) -> Tensor:
    """Shannon entropy in nats, (..., V) -> (...)."""
    nats: Tensor = torch.special.entr(probs).sum(dim=-1)
    return nats
