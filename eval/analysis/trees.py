"""The search for a draft tree (MCSD, arXiv:2401.06706, section 4.2), along held-out text.

    draftsmith trees ROLLOUTS --target TARGET --draft DRAFT [--budget 32] [--ratio 0.1]

A k-configuration k_1 x k_2 x ... gives every node at depth d - 1 k_d children. The search compares
all with k_d in {1, 2, 4, 8, 16, 32} that widen nowhere (the monotonic rule) and whose product, the
paths of the tree, is within a budget. None of them is decoded: the target's own text decides.

Let x be text that was sampled from p. Under recursive rejection the residual after any number of
rejections is (p - t q)+, normalised, for some t: 0 at first, and t + m(t)/z after a rejection,
where m(t) = sum_x (p - t q)+ and z is the mass of q that is still drawn from (1 with replacement,
`rrs`; without, `rrs_wor`, that of the tokens not yet drawn). What is left of the text's token after
k rejections is (p(x) - t q(x))+, so one of the first k candidates is accepted and is that token
with probability A_k = min(1, t q(x)/p(x)) given the text. With replacement that is exact. Without,
t depends on which tokens were drawn and rejected: they are drawn from norm((q - p)+), once a
position, by a seeded generator.

A round that starts at some position accepts at least d tokens of the text with probability
v_d = A_{k_1} A_{k_2} ... A_{k_d}, each at its own position. Every lossless verifier continues as p
does from where it stands, so the next round starts d + 1 tokens on with probability
v_d - v_{d+1}, and the expected number of rounds of a text follows from left to right.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, cast, get_args

import numpy as np
from numpy.typing import NDArray
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from eval.analysis.replay import rows_of_split
from eval.measuring.intervals import Interval, resamples
from specdata.errors import ConfigError
from specdata.sampling import SamplingConfig
from specdata.storage.manifest import read_manifest
from specdata.terminal import accept_any_text, tell, whole_number

if TYPE_CHECKING:  # help is shown without torch
    import datasets
    from torch import Tensor
    from transformers import PreTrainedModel

    from specdata.storage.schema import Rollout

Reals = NDArray[np.float64]
Siblings = Literal["iid", "distinct"]
VERIFIER: Mapping[Siblings, str] = {"iid": "rrs", "distinct": "rrs_wor"}
WIDTHS = (1, 2, 4, 8, 16, 32)
DEEPEST = 8
"""Most levels of a tree."""
VALUES_AT_ONCE = 1 << 21
"""Probabilities that are held at once, but of at least `POSITIONS` positions."""
POSITIONS = 16
NOTHING = 1e-12
"""A mass that is only left by rounding."""


@dataclass(frozen=True, slots=True)
class Acceptance:
    """The outcome of candidates along R rollouts of at most N tokens; 0 in the padding.

    Attributes:
        prompts: (R,) the prompt of each.
        lengths: (R,) its tokens.
        of: k -> (R, N) A_k, the chance that one of k candidates is accepted and is the text's.
    """

    prompts: Sequence[str]
    lengths: NDArray[np.int64]
    of: Mapping[int, Reals]

    def rounds(self, widths: Sequence[int]) -> Reals:
        """(R,) rounds that each text takes in expectation."""
        reached = np.ones_like(self.of[1])
        prefix_acceptance = []  # v_d of a round that starts at each position
        for depth, width in enumerate(widths):
            here = np.zeros_like(reached)
            here[:, : max(0, here.shape[1] - depth)] = self.of[width][:, depth:]
            reached = reached * here
            prefix_acceptance.append(reached)
        return expected_rounds(np.stack(prefix_acceptance), self.lengths)


@dataclass(frozen=True, slots=True)
class Candidate:
    """A k-configuration and what it is expected to emit.

    Attributes:
        widths: k_1, k_2, ...
        tokens: a round, the bonus token included.
        speedup: over plain decoding, a level taking so much of the target's forward.
    """

    widths: tuple[int, ...]
    tokens: Interval
    speedup: float

    @property
    def paths(self) -> int:
        """Leaves."""
        return int(np.prod(self.widths))

    @property
    def nodes(self) -> int:
        """Drafted nodes, N."""
        return int(np.cumprod(self.widths).sum())

    @property
    def name(self) -> str:
        """Its widths, such as 4x2x1x1."""
        return "x".join(map(str, self.widths))


def k_configurations(budget: int, depth: int = DEEPEST) -> Iterator[tuple[int, ...]]:
    """Every k-configuration of `WIDTHS` that widens nowhere, of at most `budget` paths."""

    def continued(widths: tuple[int, ...], paths: int) -> Iterator[tuple[int, ...]]:
        if widths:
            yield widths
        if len(widths) < depth:
            for width in WIDTHS:
                if width <= (widths[-1] if widths else budget) and paths * width <= budget:
                    yield from continued((*widths, width), paths * width)

    yield from continued((), 1)


def expected_rounds(prefix_acceptance: Reals, lengths: NDArray[np.int64]) -> Reals:
    """(R,) rounds that texts take in expectation.

    Args:
        prefix_acceptance: (D, R, N) v_d of rounds that start at each position.
        lengths: (R,) tokens of each text; those that are accepted beyond it end it.
    """
    depth, rollouts, width = prefix_acceptance.shape
    reached = np.concatenate([np.ones((1, rollouts, width)), prefix_acceptance])
    # Of a round at a position: that it accepts d tokens and no more, d = 0 .. D.
    ends = reached - np.concatenate([prefix_acceptance, np.zeros((1, rollouts, width))])
    starts = np.zeros((rollouts, width + depth + 1))  # the chance that a round starts here
    starts[:, 0] = 1.0
    for position in range(width):
        starts[:, position] *= position < lengths
        here = starts[:, position]
        starts[:, position + 1 : position + depth + 2] += here[:, None] * ends[:, :, position].T
    return np.asarray(starts[:, :width].sum(axis=1))


def scales(p: Tensor, q: Tensor, uniforms: Tensor | None, most: int) -> Tensor:
    """The t of the residual (p - t q)+ after k = 1 .. `most` candidates, at C positions.

    Args:
        p: (C, V) the target's distributions, float64.
        q: (C, V) the draft's.
        uniforms: (C, most - 1) in [0, 1), which draw the candidates that are rejected without
            replacement; None for candidates drawn with replacement.
        most: the largest k.

    Returns:
        (C, most), rising.
    """
    import torch

    remaining, t = q.clone(), torch.zeros_like(q[:, :1])
    found = []
    for k in range(most):
        residual = (p - t * q).clamp(min=0.0)
        mass, left = (each.sum(dim=-1, keepdim=True) for each in (residual, remaining))
        can = (mass > NOTHING) & (left > NOTHING)
        t = torch.where(can, t + mass / left.clamp(min=NOTHING), t)
        found.append(t)
        if uniforms is not None and k + 1 < most:
            rejected = (mass * remaining - left * residual).clamp(min=0.0).cumsum(dim=-1)
            point = uniforms[:, k, None] * rejected[:, -1:]
            drawn = torch.searchsorted(rejected, point, right=True).clamp(max=q.shape[-1] - 1)
            remaining.scatter_(-1, drawn, 0.0)
    return torch.cat(found, dim=-1)


def accepted(p: Tensor, q: Tensor, tokens: Tensor, uniforms: Tensor | None, most: int) -> Tensor:
    """A_k at C positions for k = 1 .. `most`, given the text's token: (C, most), rising.

    Args:
        p: (C, V) the target's distributions.
        q: (C, V) the draft's.
        tokens: (C,) of the text.
        uniforms: as for `scales`.
        most: the largest k.
    """
    import torch

    p, q = (each.double() / each.double().sum(dim=-1, keepdim=True) for each in (p, q))
    p_x, q_x = (each.gather(-1, tokens.unsqueeze(-1)) for each in (p, q))
    q_over_p = torch.where(p_x > 0, q_x / p_x, 0.0)  # p is 0 there by rounding only
    return (scales(p, q, uniforms, most) * q_over_p).clamp(max=1.0)


def acceptance_along(
    rows: datasets.Dataset,
    *,
    target: PreTrainedModel,
    draft: PreTrainedModel,
    sampling: SamplingConfig,
    siblings: Siblings,
    most: int,
    seed: int,
) -> Acceptance:
    """Run both models over rollouts of the target.

    Args:
        rows: rollouts, at least one.
        target: the model that wrote them.
        draft: the model of q.
        sampling: how they were sampled, and how the draft's candidates are.
        siblings: how candidates of a position are drawn.
        most: the largest width.
        seed: of the rejected candidates; each rollout's own is made of it.
    """
    import torch

    from eval.analysis.traces import batches_by_length
    from specdata.labels.labeller import Batch, tokens_at_once
    from specdata.lm_head import find_lm_head
    from specdata.probability import probabilities, to_vocabulary
    from specdata.sampling import generator_for

    heads = find_lm_head(target), find_lm_head(draft)
    size = heads[0].vocabulary
    step = max(POSITIONS, VALUES_AT_ONCE // size)
    lengths = np.array([len(row) for row in rows["completion_ids"]], dtype=np.int64)
    made = np.zeros((len(rows), int(lengths.max()), most))
    for indices, chosen in batches_by_length(rows, tokens_at_once(*heads)):
        with torch.inference_mode():
            batch = Batch.of(cast("list[Rollout]", chosen), seed, 0, heads[0].model.device)
            both = [batch.states(head).to(batch.row.device) for head in heads]
            tokens = torch.cat([torch.tensor(row["completion_ids"]) for row in chosen])
            drawn = [
                torch.rand(
                    len(row["completion_ids"]),
                    most - 1,
                    generator=generator_for(
                        seed, "trees", row["example_id"], row["sample"], row.get("turn", 0)
                    ),
                    dtype=torch.float64,
                )
                for row in chosen
            ]
            tokens, uniforms = (each.to(both[0].device) for each in (tokens, torch.cat(drawn)))
            pieces = []
            for start in range(0, len(tokens), step):
                here = slice(start, start + step)
                p, q = (
                    probabilities(to_vocabulary(head.logits(states[here]), size), sampling)
                    for head, states in zip(heads, both, strict=True)
                )
                own = uniforms[here] if siblings == "distinct" else None
                pieces.append(accepted(p, q, tokens[here], own, most).cpu())
        own_lengths = lengths[indices].tolist()
        for index, values in zip(indices, torch.split(torch.cat(pieces), own_lengths), strict=True):
            made[index, : len(values)] = values.numpy()
    of = {k: made[..., k - 1] for k in WIDTHS if k <= most}
    return Acceptance(list(rows["example_id"]), lengths, of)


def search(acceptance: Acceptance, budget: int, ratio: float) -> list[Candidate]:
    """Every k-configuration of at most `budget` paths, the fastest first.

    Args:
        acceptance: along held-out text.
        budget: most paths.
        ratio: t_draft / t_target; a round is taken to cost one forward of the target and one of
            the draft for each level.
    """
    _, group = np.unique(acceptance.prompts, return_inverse=True)
    weights = resamples(int(group.max()) + 1)
    emitted = weights @ np.bincount(group, acceptance.lengths)
    found = []
    for widths in k_configurations(budget):
        tokens = Interval.of(emitted / (weights @ np.bincount(group, acceptance.rounds(widths))))
        found.append(Candidate(widths, tokens, tokens.value / (1.0 + ratio * len(widths))))
    return sorted(found, key=lambda each: -each.speedup)


def main(arguments: Sequence[str] | None = None, program: str = "draftsmith trees") -> int:
    """Run the command line; returns the exit status."""
    accept_any_text()
    given = _parser(program).parse_args(arguments)
    try:
        found = _run(given)
    except Exception as error:  # noqa: BLE001 - raised again if it is a defect
        return tell(error)
    best = found[0]
    # The fastest of each budget, and of chains, which have one path.
    budgets = [budget for budget in WIDTHS if budget <= given.budget]
    shown = [next(each for each in found if each.paths <= budget) for budget in budgets]
    view = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False)
    view.add_column("most paths", justify="right")
    view.add_column("widths", no_wrap=True)
    for column in ("nodes", "tokens/round", f"speed-up at {given.ratio:g}"):
        view.add_column(column, no_wrap=True, justify="right")
    for budget, each in zip(budgets, shown, strict=True):
        tokens = f"{each.tokens.value:.2f} [{each.tokens.low:.2f}, {each.tokens.high:.2f}]"
        view.add_row(str(budget), each.name, str(each.nodes), tokens, f"{each.speedup:.2f}x")
    console = Console(highlight=False)
    console.print(view)
    console.print(
        f"best of {len(found)}: {best.name}; to evaluate it: {{name: tree {best.name}, verifier: "
        f"{VERIFIER[given.siblings]}, drafter: tree, siblings: {given.siblings}, "
        f"widths: {list(best.widths)}}}",
        soft_wrap=True,
    )
    return 0


def _run(given: argparse.Namespace) -> list[Candidate]:
    from specdata.models import load_model
    from specdata.storage.dataset import stream_stored

    if given.budget < 1 or not given.ratio >= 0.0:
        raise ConfigError(
            f"--budget must be at least 1 and --ratio at least 0; got {given.budget} and "
            f"{given.ratio:g}"
        )
    sampling = _sampling(given)
    if sampling.temperature == 0:
        raise ConfigError(
            "these rollouts were sampled at temperature 0, where the draft has one candidate for a "
            "position and every tree is a chain: make rollouts at a temperature above 0"
        )
    rows = rows_of_split(stream_stored(given.rollouts), given.rollouts, given.split, given.rows)
    target, draft = load_model(given.target, dtype=given.dtype), _draft(given)
    acceptance = acceptance_along(
        rows,
        target=target,
        draft=draft,
        sampling=sampling,
        siblings=given.siblings,
        most=max(width for width in WIDTHS if width <= given.budget),
        seed=given.seed,
    )
    return search(acceptance, given.budget, given.ratio)


def _draft(given: argparse.Namespace) -> PreTrainedModel:
    """The draft; refused if what it drafts does not follow from a text alone."""
    from specdata.models import load_model
    from specdata.states_draft import states_input

    draft: PreTrainedModel = load_model(given.draft, dtype=given.dtype)
    if states_input(draft) is not None:
        raise ConfigError(
            f"{given.draft} reads its target's states, so trees cannot be searched along texts "
            "that are read once: decode with several, as eval.methods"
        )
    return draft


def _sampling(given: argparse.Namespace) -> SamplingConfig:
    """How the rollouts were sampled; a target that did not write them is refused."""
    from specdata.models import revision_of

    stored = read_manifest(given.rollouts)["settings"]
    if "sampling" not in stored:
        raise ConfigError(f"{given.rollouts} does not say how its rollouts were sampled")
    wrote, revision = stored.get("target"), revision_of(given.target)
    if isinstance(wrote, dict) and wrote.get("revision", revision) != revision:
        raise ConfigError(
            f"--target must be the model that wrote {given.rollouts}, {wrote.get('name')}; the one "
            f"in {given.target} is another (contents {wrote['revision']} -> {revision})"
        )
    return SamplingConfig(**stored["sampling"])


def _parser(program: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=program,
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("rollouts", type=Path, help="folder of a dataset of rollouts (or labels) of the target")
    add("--target", required=True, help="the model that wrote them")
    add("--draft", required=True, help="the draft")
    add("--budget", type=whole_number, default=32, help="most paths of a tree (default: 32)")
    add("--ratio", type=float, default=0.1, help="t_draft/t_target (default: 0.1)")
    add("--siblings", choices=get_args(Siblings), default="distinct", help="how they are drawn")
    add("--split", default="dev", help="rows that are read (default: dev)")
    add("--rows", type=whole_number, default=32, help="most rollouts of a prompt set (default: 32)")
    add("--dtype", default="float32", help="of both models (default: float32)")
    add("--seed", type=whole_number, default=0, help="of the rejected candidates (default: 0)")
    return parser


if __name__ == "__main__":
    sys.exit(main())
