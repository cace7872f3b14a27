"""Every stopping rule with every verifier of chains: the exact law of a round, by enumeration.

Target and draft are tables over three tokens. Every draft that a rule can end with is followed with
its probability, verified exactly, and completed by the target; the sum must be the target's own
joint distribution. Rules that learn while they decode have learned something first.
"""

from collections.abc import Iterator
from itertools import product
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

from eval.drafting.stopping import STOPPING_RULES, ActiveRule, DraftedToken, StoppingRule
from eval.drafts import DraftTree
from eval.rounds import Round
from eval.verifiers import VERIFIERS
from heads import BaseHead, ImmediateHead
from heads.config import DEFAULT_FEATURES, HEAD_KINDS

V, DEEPEST, WIDTH = 3, 3, 8
Path = tuple[int, ...]
Law = dict[Path, float]

ADAPTIVE = [
    name
    for name, spec in VERIFIERS.items()
    if "chain" in spec.takes and spec.lossless and not spec.residual_persists
]
Case = tuple[StoppingRule, str]
"""A rule, and the kind of head that it is given: "" for none."""


def every_case() -> dict[str, Case]:
    """Every rule's own examples, with every kind of head if it reads one."""
    made: dict[str, Case] = {}
    for kind in STOPPING_RULES.values():
        for number, example in enumerate(kind.examples):
            rule = kind.model_validate(example)
            for head in HEAD_KINDS if rule.reads_head else ("",):
                made[f"{kind.name}-{number}-{head}".rstrip("-")] = rule, head
    return made


CASES = every_case()


def tables(seed: int, sharpness: float) -> dict[Path, Tensor]:
    """A distribution (V,) after each of the paths of at most `DEEPEST` tokens; some have zeros."""
    generator = torch.Generator().manual_seed(seed)
    made = {}
    for depth in range(DEEPEST + 1):
        for path in product(range(V), repeat=depth):
            logits = sharpness * torch.randn(V, generator=generator, dtype=torch.float64)
            if torch.rand(1, generator=generator) < 0.2:
                logits[torch.randint(V, (1,), generator=generator)] = -torch.inf
            made[path] = logits.softmax(dim=0)
    return made


P, Q = tables(0, 1.2), tables(2, 1.5)
STATES = {
    path: torch.randn(WIDTH, generator=torch.Generator().manual_seed(sum(path))) for path in Q
}
EMBEDDINGS = torch.randn(V, WIDTH, generator=torch.Generator().manual_seed(3))


def head_of(kind: str) -> BaseHead | None:
    if not kind:
        return None
    torch.manual_seed({"specdec++": 5, "immediate": 39, "confidence": 2}.get(kind, 0))
    settings: dict[str, dict[str, Any]] = {
        "specdec++": {"depth": 1, "rejection_weight": 6.0},
        "immediate": {"width": 8, "depth": 1},
        "confidence": {"rejection_weight": 6.0},
    }
    made = HEAD_KINDS[kind].load()
    reads = {"reads": DEFAULT_FEATURES} if "reads" in made.settings() else {}
    head: Any = made(hidden_size=WIDTH, **reads, **settings.get(kind, {}))
    if isinstance(head, ImmediateHead):
        for layer in head.vectors.values():
            torch.nn.init.normal_(cast(nn.Linear, layer).weight)
    torch.nn.init.normal_(head.output.weight, std=1.5)
    return head.eval()


def at_work(case: Case) -> ActiveRule:
    """The rule after some rounds: what learns while decoding has learned."""
    rule = case[0].start(head_of(case[1]))
    for turn in range(24):
        length, path = 1 + turn % DEEPEST, (turn % V, (turn // 2) % V, (turn // 3) % V)
        rule.begin()
        should_stop = rule.should_stop
        for depth in range(length):
            should_stop(drafted(path[:depth], path[depth]))
        accepted = (5 * turn) % (length + 1)
        rule.observe(Round(length, length, accepted, accepted + 1, length, 0.0, 0.0, 0.0))
    return rule


def drafted(path: Path, token: int) -> DraftedToken:
    return DraftedToken(token, Q[path], STATES[path], EMBEDDINGS.__getitem__)


def drafts(rule: ActiveRule, *, drop: bool = False) -> Iterator[tuple[Path, float]]:
    """Every draft that a rule can end with, and its probability.

    Args:
        rule: the rule, asked as the drafter asks it.
        drop: leave out the token with which the rule ended the draft, which no drafter does.
    """
    pending: list[tuple[Path, float]] = [((), 1.0)]
    while pending:
        path, weight = pending.pop()
        rule.begin()
        should_stop, ended = rule.should_stop, False
        for depth in range(len(path)):
            ended = should_stop(drafted(path[:depth], path[depth]))
        if drop and ended and len(path) > 1:
            yield path[:-1], weight
            continue
        ended = ended or len(path) == min(DEEPEST, rule.longest)
        if ended:
            yield path, weight
            continue
        chances = enumerate(Q[path].tolist())
        pending += [((*path, token), weight * chance) for token, chance in chances if chance]


def emitted(rule: ActiveRule, verifier: str, *, drop: bool = False) -> tuple[Law, set[int]]:
    """The law of the first `DEEPEST` + 1 tokens, and the lengths of the drafts."""
    law, lengths, spec = dict[Path, float](), set[int](), VERIFIERS[verifier]
    verify = spec.make(**spec.grid[0])
    for path, weight in drafts(rule, drop=drop):
        lengths.add(len(path))
        rows = torch.stack([Q[path[:depth]] for depth in range(len(path))])
        target = torch.stack([P[path[:depth]] for depth in range(len(path) + 1)])
        verdict = verify(DraftTree.chain(torch.tensor(path), rows), target)
        for accepted, stop in enumerate(verdict.stop.tolist()):
            for token, chance in enumerate(verdict.bonus[accepted].tolist() if stop else ()):
                complete((*path[:accepted], token), weight * stop * chance, law)
    return law, lengths


def complete(path: Path, weight: float, law: Law) -> None:
    """Add a path's continuations by plain sampling from the target."""
    if weight == 0.0:
        return
    if len(path) > DEEPEST:
        law[path] = law.get(path, 0.0) + weight
        return
    for token, chance in enumerate(P[path].tolist()):
        complete((*path, token), weight * chance, law)


def distance(law: Law) -> float:
    """Total variation from the target's own law."""
    plain: Law = {}
    complete((), 1.0, plain)
    return 0.5 * sum(abs(law.get(p, 0.0) - plain.get(p, 0.0)) for p in {*law, *plain})


@pytest.mark.parametrize("case", CASES)
def test_a_round_emits_the_targets_law_with_every_verifier_that_takes_such_chains(
    case: str,
) -> None:
    rule = at_work(CASES[case])
    for verifier in ADAPTIVE:
        law, lengths = emitted(rule, verifier)
        assert distance(law) < 1e-12, verifier
    assert len(lengths) > 1 or not CASES[case][0].adaptive, "drafts must have several lengths"


@pytest.mark.parametrize("name", ["confidence", "cumulative", "head", "cost"])
def test_dropping_the_token_that_was_seen_changes_the_law(name: str) -> None:
    """These rules read the drawn token, so the token they would drop is a biased one."""
    rule = STOPPING_RULES[name].model_validate(STOPPING_RULES[name].examples[0])
    law, _ = emitted(at_work((rule, "immediate" if rule.reads_head else "")), "token", drop=True)
    assert distance(law) > 0.005
