"""Whether a draft tree would pay: the finding, its table and its drawing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from eval.analysis.tree_results import Candidate, TreeSearch
from eval.measuring.intervals import Interval
from eval.measuring.results import Results, Run
from eval.reporting.rendering import NOT_MEASURED

if TYPE_CHECKING:  # a report is described without it
    from matplotlib.axes import Axes

# Heading of a column, and how to read it.
TREE_COLUMNS = (
    ("verifier", "The acceptance rule; siblings of trees are drawn without replacement."),
    ("nodes", "Drafted tokens that the target scores in one forward."),
    (
        "expected tokens a round",
        "Along held-out text of the target, exactly but for the candidates that are drawn without"
        " replacement; traversal is shown with the figures of rrs_wor. Brackets: 95 % bootstrap"
        " interval over prompts.",
    ),
    (
        "predicted ms a token",
        "The time of such a round, fitted to a few shapes that were timed, over these tokens.",
    ),
    ("measured tokens a round", "Of the short list, which was decoded."),
    ("measured ms a token", "The wall time of decoding it, prefill included."),
    ("speed over the chain", "Tokens a second over those of the chain that was decoded beside it."),
)
AGREEMENT_COLUMNS = ("expected tokens a round", "measured")
TITLE = "Tokens a round against nodes"
CAPTION = (
    "Higher is better, further left is cheaper. A static tree may give every node another number of"
    " children; of each number of nodes it is the best by Sequoia's dynamic programme. Only drafts"
    " that emit more than every smaller one of their kind are drawn."
)
LOOKS = {
    "chain": ("#0072B2", "o"),
    "k-configuration": ("#CC79A7", "D"),
    "static tree": ("#8E4585", "d"),
}
"""As chains and trees look in `eval.reporting.charts`."""
NAMES = {
    "chain": "chain",
    "k-configuration": "k-configuration",
    "static tree": "best static tree",
}
NODES = 40
"""Most nodes that are drawn."""


@dataclass(frozen=True, slots=True)
class TreeRow:
    """A draft in the table; its cells are in the order of `TREE_COLUMNS`."""

    name: str
    cells: tuple[str, ...]
    is_best: bool


@dataclass(frozen=True, slots=True)
class AgreementRow:
    """What a method was expected to emit a round, and did."""

    dataset: str
    method: str
    cells: tuple[str, str]


def tree_rows(search: TreeSearch) -> list[TreeRow]:
    """Every draft that is shown: those that were timed, fastest first, then by prediction."""
    rest = sorted(
        (each for each in search.candidates if each.clocked is None),
        key=lambda each: each.seconds_per_token,
    )
    timed = search.clocked()
    return [
        TreeRow(f"{NAMES[each.family]} {each.name}", _cells(each), index == 0 and bool(timed))
        for index, each in enumerate([*timed, *rest])
    ]


def headline(search: TreeSearch) -> str:
    """The finding in one sentence or two."""
    chain = next(each for each in search.clocked() if each.family == "chain")
    trees = [each for each in search.clocked() if each.family != "chain"]
    best = trees[0]
    assert best.clocked is not None
    assert best.clocked.speed is not None
    low, high = best.clocked.speed.low, best.clocked.speed.high
    speed = f"{best.clocked.speed.value:.2f}x [{low:.2f}, {high:.2f}] its speed"
    name = f"{best.name} under {best.verifier}"
    against = f"the chain {chain.name} under {chain.verifier}"
    if low > 1.0:
        return f"A tree pays: {name} decodes faster than {against}, {speed}."
    if high < 1.0:
        return f"No tree pays here: the fastest, {name}, is slower than {against}, {speed}."
    return f"The fastest tree, {name}, is not told apart from {against}: {speed}."


def widest(search: TreeSearch) -> str:
    """What the best static tree adds, and what it would need."""
    static = search.best("static tree")
    best = search.best("k-configuration")
    return (
        f"Of {search.searched} k-configurations that widen nowhere {best.name} is predicted to be"
        f" the fastest, {_ms(best.seconds_per_token)} ms a token; the best static tree"
        f" ({static.name}), found by dynamic programming and not decoded here, would take"
        f" {_ms(static.seconds_per_token)} ms."
    )


def basis(search: TreeSearch) -> str:
    """What the figures rest on."""
    shares = ", ".join(
        f"{k}: {search.accepted['distinct'][k - 1]:.3f} ({search.accepted['iid'][k - 1]:.3f})"
        for k in (1, 2, 4, 8, 16, 32)
    )
    return (
        f"{search.positions} tokens of {search.rollouts} dev rollouts, and prompts of these for"
        f" what was timed. One of k candidates without (with) replacement is accepted at a"
        f" position with probability {shares}. Times of rounds are fitted to"
        f" {100 * search.times.largest_error:.0f} % or better. The search took"
        f" {search.seconds:.0f} s."
    )


def agreement_rows(search: TreeSearch, results: Results) -> list[AgreementRow]:
    """Expected and measured tokens a round of the evaluation's methods."""
    runs: dict[tuple[str, str], Run] = {(run.dataset, run.method): run for run in results.runs}
    return [
        AgreementRow(
            each.dataset,
            each.method,
            (
                _with_interval(each.tokens),
                _with_interval(Interval(run.block_efficiency, *run.intervals["block_efficiency"])),
            ),
        )
        for each in search.predictions
        if (run := runs.get((each.dataset, each.method))) is not None
    ]


def draw_frontier(axes: Axes, search: TreeSearch) -> None:
    """Tokens a round against nodes, a line a family."""
    for family, steps in search.frontier.items():
        colour, marker = LOOKS[family]
        shown = [step for step in steps if step[0] <= NODES]
        axes.plot(
            [nodes for nodes, _ in shown],
            [tokens for _, tokens in shown],
            color=colour,
            marker=marker,
            markersize=4,
            label=NAMES[family],
        )
    axes.set_xlabel("drafted nodes")
    axes.set_ylabel("expected tokens a round")


def described(search: TreeSearch) -> str:
    """The drawing in words."""
    parts = [
        f"{NAMES[family]} "
        + " ".join(f"{nodes}: {tokens:.2f}" for nodes, tokens in steps if nodes <= NODES)
        for family, steps in search.frontier.items()
    ]
    return "Values: " + "; ".join(parts) + "."


def _cells(candidate: Candidate) -> tuple[str, ...]:
    clocked = candidate.clocked
    cells = (
        candidate.verifier,
        str(candidate.nodes),
        _with_interval(candidate.tokens),
        _ms(candidate.seconds_per_token),
    )
    if clocked is None:
        return (*cells, NOT_MEASURED, NOT_MEASURED, NOT_MEASURED)
    speed = NOT_MEASURED if clocked.speed is None else f"{_with_interval(clocked.speed)}"
    return (*cells, _with_interval(clocked.tokens), _ms(clocked.seconds_per_token), speed)


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:.2f}"


def _with_interval(estimate: Interval) -> str:
    return f"{estimate.value:.2f} [{estimate.low:.2f}, {estimate.high:.2f}]"
