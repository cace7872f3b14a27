"""How candidates of every rank fare along the target's own text: what a tree is chosen by.

At each position of a rollout, x being the token that the target wrote there, w_r is the
probability, given x, that the candidate of rank r is accepted after those before it were rejected,
and is x. For one candidate that is min(1, q(x)/p(x)).

Under recursive rejection the residual after any number of rejections is (p - t q)+, normalised, for
some t: 0 at first, and t + m(t)/z after a rejection, where m(t) = sum_x (p - t q)+ and z is the
mass of q that is still drawn from (1 with replacement, `rrs`; without, `rrs_wor`, that of the
tokens not yet drawn). What is left of the text's token after r rejections is (p(x) - t q(x))+, so
w_1 + ... + w_r = min(1, t q(x)/p(x)). With replacement that is exact. Without, t depends on which
tokens were drawn and rejected: it is averaged over `DRAWS` seeded sequences of them, drawn from
norm((q - p)+) as they are distributed, everything else in expectation.

Where a verifier does not decide node by node (`block`, `traversal`), the chance that a round
accepts d tokens of the text is computed for a given draft: for a chain it is the running minimum of
the likelihood ratio of q to p, for a tree `traversal_survival`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import datasets
import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file
from torch import Tensor
from transformers import PreTrainedModel

from eval.analysis.static_trees import Reals
from eval.analysis.traces import batches_by_length
from specdata.labels.labeller import Batch, tokens_at_once
from specdata.lm_head import LMHead, find_lm_head
from specdata.probability import SamplingConfig, probabilities, to_vocabulary
from specdata.seeds import generator_for
from specdata.storage.files import atomic_write
from specdata.storage.schema import Rollout

RANKS = 32
"""Candidates of a position that are followed."""
DRAWS = 2
"""Sequences of rejected candidates that acceptance without replacement is averaged over."""
VALUES = 1 << 28
"""Most probabilities of either model that are gone through; rollouts are left out above it."""
VALUES_AT_ONCE = 1 << 21
"""Probabilities that are held at once, but at least `POSITIONS` positions."""
POSITIONS = 16
NOTHING = 1e-12
"""A mass that is only left by rounding."""
Widths = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class TreeTrace:
    """R rollouts of at most N tokens; everything is 0 in the padding.

    Attributes:
        names: (R,) the prompt set of each.
        prompts: (R,) the prompt of each.
        lengths: (R,) its tokens.
        ratio: (R, N) q(x) / p(x) of the text's tokens.
        iid: (R, N, RANKS) w_r of candidates drawn with replacement, under `rrs`.
        distinct: (R, N, RANKS) the same without replacement, under `rrs_wor`.
        traversal: widths of a k-configuration of iid siblings -> (D, R, N) chance that a round
            from there accepts d = 1 .. D tokens under `traversal`.
    """

    names: tuple[str, ...]
    prompts: tuple[str, ...]
    lengths: NDArray[np.int64]
    ratio: Reals
    iid: Reals
    distinct: Reals
    traversal: Mapping[Widths, Reals]

    def chain(self, length: int, *, block: bool) -> Reals:
        """(D, R, N) chance that a chain's first d tokens are accepted, by block or token rule."""
        survived, product = [], np.ones_like(self.ratio)
        alive = np.ones_like(self.ratio)
        for shift in range(length):
            ratio = np.zeros_like(self.ratio)
            ratio[:, : ratio.shape[1] - shift] = self.ratio[:, shift:]
            product = product * (ratio if block else np.minimum(1.0, ratio))
            alive = np.minimum(alive, product)
            survived.append(alive)
        return np.stack(survived)


def make_trace(
    rows: datasets.Dataset,
    *,
    target: PreTrainedModel,
    draft: PreTrainedModel,
    sampling: SamplingConfig,
    seed: int,
    traversal: Sequence[Widths] = (),
) -> TreeTrace:
    """Run both models over rollouts of the target.

    Args:
        rows: rollouts, at least one; those that `VALUES` does not allow are left out, every prompt
            set losing as many.
        target: the model that wrote them.
        draft: the model of q.
        sampling: how they were sampled, and how the draft's candidates are.
        seed: of the sequences of rejected candidates; each rollout's own is made of it.
        traversal: k-configurations that `traversal` is followed on.
    """
    heads = find_lm_head(target), find_lm_head(draft)
    rows = rows.select(_affordable(rows, heads[0].vocabulary))
    lengths = np.array([len(row) for row in rows["completion_ids"]], dtype=np.int64)
    shape = len(rows), int(lengths.max())
    made: dict[str | Widths, Reals] = {"ratio": np.zeros(shape)}
    made |= {name: np.zeros((*shape, RANKS)) for name in ("iid", "distinct")}
    made |= {widths: np.zeros((*shape, len(widths))) for widths in traversal}
    for indices, chosen in batches_by_length(rows, tokens_at_once(*heads)):
        values = _followed(cast("list[Rollout]", chosen), heads, sampling, seed, traversal)
        own = np.repeat(indices, lengths[indices])
        place = np.concatenate([np.arange(lengths[index]) for index in indices])
        for name, found in values.items():
            made[name][own, place] = found.numpy()
    return TreeTrace(
        tuple(rows["dataset"]),
        tuple(rows["example_id"]),
        lengths,
        made["ratio"],
        made["iid"],
        made["distinct"],
        {widths: np.moveaxis(made[widths], -1, 0) for widths in traversal},
    )


def _affordable(rows: datasets.Dataset, vocabulary: int) -> list[int]:
    """Indices of as many rollouts of each prompt set as `VALUES` allows, at least one of each."""
    of_set: dict[str, list[int]] = {}
    for index, name in enumerate(rows["dataset"]):
        of_set.setdefault(name, []).append(index)
    left = VALUES // vocabulary
    lengths = [len(row) for row in rows["completion_ids"]]
    kept: list[int] = []
    for turn in range(max(map(len, of_set.values()))):
        now = [indices[turn] for indices in of_set.values() if turn < len(indices)]
        left -= sum(lengths[index] for index in now)
        if kept and left < 0:
            break
        kept += now
    return sorted(kept)


@torch.inference_mode()
def _followed(
    rows: Sequence[Rollout],
    heads: tuple[LMHead, LMHead],
    sampling: SamplingConfig,
    seed: int,
    traversal: Sequence[Widths],
) -> dict[str | Widths, Tensor]:
    """Every value of a trace at the completions of rows, in one line: (N, ...)."""
    batch = Batch.of(rows, seed, 1, heads[0].model.device)
    both = [batch.states(head).to(batch.row.device) for head in heads]
    tokens = torch.tensor([token for row in rows for token in row["completion_ids"]])
    tokens = tokens.to(batch.row.device)
    uniforms = torch.cat([_uniforms(row, seed) for row in rows]).to(batch.row.device)
    size = heads[0].vocabulary
    step = max(POSITIONS, VALUES_AT_ONCE // size)
    ahead = max((len(widths) for widths in traversal), default=1) - 1
    pieces: list[dict[str | Widths, Tensor]] = []
    for start in range(0, len(tokens), step):
        stop = min(start + step, len(tokens))
        seen = slice(start, stop + ahead)
        p, q = (
            probabilities(to_vocabulary(head.logits(states[seen]), size), sampling)
            for head, states in zip(heads, both, strict=True)
        )
        along = Excess.of(p, q, tokens[seen])
        here = along[: stop - start]
        found: dict[str | Widths, Tensor] = {
            widths: traversal_survival(along, batch.row[seen], widths, stop - start)
            for widths in traversal
        }
        found["ratio"] = here.q_over_p
        found["iid"] = iid_ranks(here)
        found["distinct"] = distinct_ranks(here, uniforms[start:stop])
        pieces.append({name: values.cpu() for name, values in found.items()})
    return {name: torch.cat([piece[name] for piece in pieces]) for name in pieces[0]}


def _uniforms(row: Rollout, seed: int) -> Tensor:
    """(C, DRAWS, RANKS) in [0, 1) of a rollout."""
    key = ("tree trace", row["example_id"], row["sample"], row.get("turn", 0))
    size = (len(row["completion_ids"]), DRAWS, RANKS)
    return torch.rand(size, generator=generator_for(seed, *key), dtype=torch.float64)


@dataclass(frozen=True, slots=True)
class Excess:
    """m(t) = sum_x (p(x) - t q(x))+ at C positions for any t, by tokens in the order of p/q.

    Attributes:
        ratio: (C, V) p/q, rising; infinite where q is 0.
        p_before: (C, V + 1) sum of p over the first j tokens in that order.
        q_before: (C, V + 1) the same of q.
        q_over_p: (C,) q/p of the text's own tokens; 0 where p is 0, which only rounding brings
            about.
    """

    ratio: Tensor
    p_before: Tensor
    q_before: Tensor
    q_over_p: Tensor

    @classmethod
    def of(cls, p: Tensor, q: Tensor, tokens: Tensor) -> Excess:
        """Of distributions p and q, (C, V), and the text's tokens, (C,)."""
        p, q = (each.double() / each.double().sum(dim=-1, keepdim=True) for each in (p, q))
        ratio, order = torch.where(p > 0, p / q, 0.0).sort(dim=-1)
        p_before, q_before = (
            torch.nn.functional.pad(each.gather(-1, order).cumsum(dim=-1), (1, 0))
            for each in (p, q)
        )
        p_x, q_x = (each.gather(-1, tokens.unsqueeze(-1)).squeeze(-1) for each in (p, q))
        return cls(ratio, p_before, q_before, torch.where(p_x > 0, q_x / p_x, 0.0))

    def __getitem__(self, chosen: slice | Tensor) -> Excess:
        """Those of some positions."""
        return Excess(
            self.ratio[chosen], self.p_before[chosen], self.q_before[chosen], self.q_over_p[chosen]
        )

    def below(self, t: Tensor) -> Tensor:
        """(C, S) how many tokens have a ratio of at most t (C, S)."""
        return torch.searchsorted(self.ratio, t.contiguous(), right=True)

    def mass(self, t: Tensor) -> Tensor:
        """(C, S) m(t)."""
        j = self.below(t)
        p_above = self.p_before[:, -1:] - self.p_before.gather(-1, j)
        q_above = self.q_before[:, -1:] - self.q_before.gather(-1, j)
        return (p_above - t * q_above).clamp(min=0.0)

    def accepted(self, t: Tensor) -> Tensor:
        """(C, S) chance, given the text, that its token was accepted before t was reached."""
        return (t * self.q_over_p.unsqueeze(-1)).clamp(max=1.0)


def iid_ranks(excess: Excess, ranks: int = RANKS) -> Tensor:
    """w_r of candidates drawn independently and verified by recursive rejection (`rrs`).

    Returns:
        (C, ranks).
    """
    t = torch.zeros(len(excess.ratio), 1, dtype=torch.float64, device=excess.ratio.device)
    reached = [t]
    for _ in range(ranks):
        t = t + excess.mass(t)
        reached.append(t)
    return excess.accepted(torch.cat(reached, dim=-1)).diff(dim=-1)


def distinct_ranks(excess: Excess, uniforms: Tensor) -> Tensor:
    """w_r of candidates drawn without replacement (`rrs_wor`), averaged over S sequences of them.

    Args:
        excess: of C positions.
        uniforms: (C, S, ranks) in [0, 1), which draw the candidates that are rejected.

    Returns:
        (C, ranks); for each sequence the sum over r is at most 1.
    """
    total = torch.zeros(uniforms.shape[0], uniforms.shape[2], dtype=torch.float64)
    total = total.to(excess.ratio.device)
    for each in uniforms.unbind(1):
        total += _distinct_ranks(excess, each)
    return total / uniforms.shape[1]


def _distinct_ranks(excess: Excess, uniforms: Tensor) -> Tensor:
    """Of one sequence a position; uniforms (C, ranks)."""
    count, ranks = uniforms.shape
    t = uniforms.new_zeros(count, 1)
    mass, left = torch.ones_like(t), torch.ones_like(t)  # m(t), and z
    reached = [t]
    drawn = torch.full((count, 0), 0, dtype=torch.long, device=t.device)  # in the order of p/q
    for rank in range(ranks):
        can = (mass > NOTHING) & (left > NOTHING)
        after = torch.where(can, t + mass / left.clamp(min=NOTHING), t)
        reached.append(after)
        if rank + 1 < ranks:
            found = _draw_rejected(excess, drawn, t, after, mass, left, uniforms[:, rank, None])
            left = left - excess.q_before.gather(-1, found + 1) + excess.q_before.gather(-1, found)
            drawn = torch.cat([drawn, found], dim=-1)
            t, mass = after, excess.mass(after)
    return excess.accepted(torch.cat(reached, dim=-1)).diff(dim=-1)


def _draw_rejected(
    excess: Excess,
    drawn: Tensor,
    t: Tensor,
    after: Tensor,
    mass: Tensor,
    left: Tensor,
    uniforms: Tensor,
) -> Tensor:
    """Draw from (q/z - (p - t q)+/m)+, without the tokens that are drawn already: (C, 1).

    By inverse CDF: running sums of p and q in the order of p/q give that of the density, from which
    those of the drawn tokens, all of them below t, are taken off.
    """
    q_drawn = excess.q_before.gather(-1, drawn + 1) - excess.q_before.gather(-1, drawn)
    first = excess.below(t)
    p_first, q_first = excess.p_before.gather(-1, first), excess.q_before.gather(-1, first)

    def summed(j: Tensor) -> Tensor:
        """The density's sum, times m z, over the first j tokens, none of them above `after`."""
        p_j, q_j = excess.p_before.gather(-1, j), excess.q_before.gather(-1, j)
        removed = torch.where(drawn < j, q_drawn, 0.0).sum(dim=-1, keepdim=True)
        kept = torch.where(j > first, p_j - p_first - t * (q_j - q_first), 0.0)
        return mass * (q_j - removed) - left * kept

    last = excess.below(after)
    point = uniforms * summed(last)
    low, high = torch.zeros_like(last), (last - 1).clamp(min=0)
    for _ in range(excess.ratio.shape[-1].bit_length()):  # the first token that lifts it above
        middle = (low + high) // 2
        above = summed(middle + 1) > point
        low, high = torch.where(above, low, middle + 1), torch.where(above, middle, high)
        low = torch.minimum(low, high)
    return high


def traversal_survival(along: Excess, row: Tensor, widths: Widths, starts: int) -> Tensor:
    """The chance, given the text, that traversal verification accepts d tokens from a position.

    A node that is tested with share a is on the accepted path with probability a, whatever hangs
    below it (`eval.verifiers.traversal`). Its children are tested against c (p - t q)+ with c = a
    and t = 0 first; a rejection adds 1/c to t, and lowers the share. With iid siblings this depends
    on nothing that was drawn, so all nodes that may hold the text's first d tokens are followed.

    Args:
        along: of consecutive positions.
        row: (C,) which text each position is of.
        widths: of a k-configuration of depth D.
        starts: rounds start at the first so many positions; C may be D - 1 larger.

    Returns:
        (starts, D) for d = 1 .. D, 0 where the text ends.
    """
    ones = torch.ones(starts, 1, dtype=torch.float64, device=row.device)
    level = [(ones, ones)]  # of each node: chance that it is there and tested, and its share
    survived = []
    for depth, width in enumerate(widths):
        place = torch.arange(starts, device=row.device) + depth
        inside = (place < len(row)) & (row[place.clamp(max=len(row) - 1)] == row[:starts])
        here = along[place.clamp(max=len(row) - 1)]
        q_over_p = torch.where(inside, here.q_over_p, 0.0).unsqueeze(-1)
        children = []
        for there, share in level:
            tested, scale, t = there, share, torch.zeros_like(share)
            mass = here.mass(t)
            for _ in range(width):
                # c (p - t q)+ / q of the text's token, at most 1.
                excess = (1.0 - t * q_over_p).clamp(min=0.0)
                below = torch.where(
                    scale * excess < q_over_p, scale * excess / q_over_p.clamp(min=1e-300), 1.0
                )
                children.append((tested * q_over_p, below))
                t = t + 1.0 / scale.clamp(min=NOTHING)
                rest, before = here.mass(t), scale * mass
                after = scale * rest
                tested = tested * (1.0 - before + after).clamp(0.0, 1.0)
                left = after / (after + 1.0 - before).clamp(min=NOTHING)
                scale = torch.where(rest > NOTHING, left / rest.clamp(min=NOTHING), 0.0)
                tested = torch.where(scale > 0.0, tested, 0.0)
                mass = rest
        level = children
        survived.append(torch.stack([there * share for there, share in level]).sum(dim=0))
    return torch.cat(survived, dim=-1)


def write_trace(path: Path, trace: TreeTrace, made_of: Mapping[str, str | None]) -> None:
    """Keep a trace, with the contents of what it was made of."""
    about = {
        "made_of": dict(made_of),
        "names": trace.names,
        "prompts": trace.prompts,
        "traversal": list(trace.traversal),
    }
    arrays = {name: getattr(trace, name) for name in ("ratio", "iid", "distinct")}
    arrays |= {f"traversal {at}": each for at, each in enumerate(trace.traversal.values())}
    stored = {name: np.ascontiguousarray(each, dtype=np.float32) for name, each in arrays.items()}
    with atomic_write(path) as temporary:
        save_file({**stored, "lengths": trace.lengths}, temporary, {"about": json.dumps(about)})


def read_trace(path: Path, made_of: Mapping[str, str | None]) -> TreeTrace | None:
    """A stored trace; None if there is none that was made of this."""
    try:
        with safe_open(path, "numpy") as file:
            about = json.loads(file.metadata()["about"])
            stored = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (FileNotFoundError, SafetensorError, KeyError, TypeError):
        return None
    if about["made_of"] != dict(made_of):
        return None
    followed = [tuple(widths) for widths in about["traversal"]]
    known = {name: stored[name].astype(np.float64) for name in ("ratio", "iid", "distinct")}
    return TreeTrace(
        tuple(about["names"]),
        tuple(about["prompts"]),
        stored["lengths"],
        **known,
        traversal={
            widths: stored[f"traversal {at}"].astype(np.float64)
            for at, widths in enumerate(followed)
        },
    )
