"""Every verifier compared: the best one in a sentence, the table, and the section of a page."""

from __future__ import annotations

from collections.abc import Sequence

from eval.measuring.pooled import ALL_SETS
from eval.measuring.results import ENOUGH, Results, VerifierRow
from eval.reporting.rendering import NOT_MEASURED, Section, Table

COLUMNS = (
    (
        "tokens per target call",
        "Expected: the verifier is enumerated, not sampled,"
        " on drafts that all verifiers of the kind share, at places where its rounds start.",
    ),
    (
        "over the first",
        "Its tokens per target call over those of the first verifier of the kind, at the same"
        " places. Where the interval holds 0, the difference is noise.",
    ),
    (
        "places",
        f"Drafts on which it was enumerated; slow ones on fewer; !: fewer than {ENOUGH}, too few.",
    ),
    (
        "ceiling",
        "The best tokens per target call at the places of the row: of siblings the optimum of all"
        " lossless rules (a proved bound), of chains what block verification reaches.",
    ),
    (
        "reached",
        "Accepted tokens over those of the ceiling. On chains only a biased verifier passes 100 %;"
        " on siblings the luck of the drafts can. Not given for too few places.",
    ),
    ("one takes", "Median time of one sampled verification."),
    (
        "predicted",
        "Speed-up over the target alone, from the run's times of a round, a forward of the draft, a"
        " drafted node and a verification.",
    ),
)


def of_all(rows: Sequence[VerifierRow]) -> list[VerifierRow]:
    """Rows over all prompt sets together."""
    names = {row.dataset for row in rows}
    return [row for row in rows if row.dataset == ALL_SETS or len(names) == 1]


def best_verifier(rows: Sequence[VerifierRow]) -> VerifierRow:
    """The lossless row with the highest predicted speed, or untimed the most expected tokens."""
    lossless = [row for row in of_all(rows) if row.lossless]
    enough = [row for row in lossless if row.positions >= ENOUGH]
    return max(enough or lossless, key=lambda row: row.speedup or row.expected_tokens.value)


def verifier_sentence(rows: Sequence[VerifierRow]) -> str:
    """The winner, and what it gains over the first verifier of its kind, on the same drafts."""
    lossless, winner = {row.verifier for row in rows if row.lossless}, best_verifier(rows)
    sure = "is best" if winner.expected_tokens.exists else "has most, over too few prompts to tell"
    sentence = (
        f"Of {len(lossless)} lossless verifiers {winner.name} on {winner.draft_kind} {sure}:"
        f" {winner.expected_tokens.within(2)} tokens per target call"
    )
    if winner.gain is None:
        return f"{sentence}; no other is faster on these drafts."
    of_kind = [row for row in of_all(rows) if row.draft_kind == winner.draft_kind]
    (first,) = [row for row in of_kind if row.gain is None]
    unsure = "" if winner.gain.low > 0 else " (so few places do not tell them apart)"
    return f"{sentence}; over {first.name} on the same drafts: {winner.gain}{unsure}."


def verifier_pays(rows: Sequence[VerifierRow]) -> str:
    """Say whether the best row is faster than the target alone, by its times."""
    row = best_verifier(rows)
    speed, tokens = row.speedup or 0.0, row.expected_tokens
    pays = "so few places cannot tell whether it pays"
    if speed * tokens.low > tokens.value:
        pays = "it pays"
    elif speed * tokens.high < tokens.value:
        pays = "it does not pay: drafting costs more than it saves"
    return f"Expected is {speed:.2f}x over the target alone here: {pays}."


def section(results: Results) -> Section | None:
    """The section of a page; None without a table."""
    if not (rows := results.verifiers):
        return None
    return Section("Every verifier", verifier_sentence(rows), verifiers_table(rows))


def verifiers_table(rows: Sequence[VerifierRow]) -> Table:
    """The rows of all prompt sets."""
    return Table(
        COLUMNS,
        [
            (f"{row.draft_kind}: {row.name}{' †' * (not row.lossless)}", _cells(row))
            for row in of_all(rows)
        ],
        first="draft and verifier",
        note="† biased: changes the target's distribution."
        " Some verifiers' tokens per target call (greedy block's) are measured by decoding only.",
    )


def _cells(row: VerifierRow) -> list[str]:
    """The figures of a row in the order of `COLUMNS`."""
    gain, share = NOT_MEASURED, row.share_of_ceiling
    if row.gain is not None:
        ends = row.gain.value, row.gain.low, row.gain.high
        value, low, high = (f"{100 * x:+.1f}" for x in ends)
        gain = f"{value} %" + f" [{low}, {high}]" * row.gain.exists
    return [
        row.expected_tokens.within(2),
        gain,
        f"{row.positions:,}" + " !" * (row.positions < ENOUGH),
        NOT_MEASURED if row.ceiling is None else f"{row.ceiling:.2f}",
        f"{100 * share:.1f} %" if share and row.positions >= ENOUGH else NOT_MEASURED,
        f"{row.microseconds:,.0f} µs",
        NOT_MEASURED if row.speedup is None else f"{row.speedup:.2f}x",
    ]
