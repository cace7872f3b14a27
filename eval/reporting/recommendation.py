"""How well the head predicts, the best verifier, and how many tokens to draft in each engine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from eval.analysis.prediction import Predictions
from eval.measuring.intervals import Interval
from eval.measuring.pooled import ALL_SETS, PooledRow, pool
from eval.measuring.results import ENOUGH, Results, VerifierRow
from eval.reporting.rendering import NOT_MEASURED, Section, Table
from eval.reporting.verdict import fixed_lengths
from specdata.errors import ManifestError

# --- how well acceptance is predicted ---

JUDGES = ("as soon as the token is drawn", "one drafted token later")
"""When a head judges a token, by its lag."""
PREDICTORS = {
    "constant": "the mean label",
    "logit": "logistic of logit max q",
    "cumulative": "q of the token itself",
}
QUALITY_COLUMNS = (
    (
        "AUROC",
        "Chance that an accepted token was given a higher probability than a rejected one; 0.5 is"
        " chance, brackets hold the 95 % bootstrap interval over prompts.",
    ),
    ("KL", "Mean binary KL of label and prediction in nats; lower is better, 0 is perfect."),
    (
        "ECE",
        "Expected calibration error: how far predictions are from the labels of the tokens that"
        " were given them, in 15 bins; lower is better.",
    ),
    ("predicted / accepted", "Mean prediction and mean label."),
)
"""Heading of a column of the table of predictors, and how to read it."""


def head_predictors(predictions: Predictions | None) -> Section | None:
    """The table of what predicts acceptance, and how well."""
    if predictions is None:
        return None
    title = "How well acceptance is predicted"
    if predictions.reason:
        return Section(title, f"Not measured: {predictions.reason}.")
    rows = []
    for each in predictions.predictors:
        judged = each.scores
        cells = tuple(
            NOT_MEASURED if x is None else x.within(3)
            for x in (judged.auroc, judged.kl, judged.ece)
        )
        means = f"{judged.mean_predicted:.3f} / {judged.mean_accept:.3f}"
        name = f"{each.predictor} ({PREDICTORS.get(each.predictor, JUDGES[each.lag])})"
        rows.append((name, (*cells, means)))
    counts = predictions.rollouts
    assert predictions.judged_on is not None
    sentence = (
        f"By the head and what needs none, on {counts[predictions.judged_on]}"
        f" {predictions.judged_on} rollouts of every prompt set, which neither draft nor head was"
        f" trained on; rivals were fitted on {counts['dev']} dev rollouts"
    )
    same = predictions.judged_on == "dev"
    sentence += ", the same: they look better than they are." if same else "."
    return Section(title, sentence, Table(QUALITY_COLUMNS, rows, first="predicted by"))


# --- the best verifier ---


def of_all(rows: Sequence[VerifierRow]) -> list[VerifierRow]:
    """Rows over all prompt sets together."""
    names = {row.dataset for row in rows}
    return [row for row in rows if row.dataset == ALL_SETS or len(names) == 1]


def best_verifier(rows: Sequence[VerifierRow]) -> VerifierRow:
    """The lossless row with the highest predicted speed, or tokens a call without times."""
    lossless = [row for row in of_all(rows) if row.lossless and row.microseconds is not None]
    enough = [row for row in lossless if row.positions >= ENOUGH]
    return max(enough or lossless, key=lambda row: row.speedup or row.expected_tokens.value)


def verifier_sentence(rows: Sequence[VerifierRow]) -> str:
    """The winner, and what it gains over the first verifier of its kind, on the same drafts."""
    lossless = {row.verifier for row in rows if row.lossless}
    winner = best_verifier(rows)
    sure = "is best" if winner.expected_tokens.exists else "has most, over too few prompts to tell"
    sentence = (
        f"Of {len(lossless)} lossless verifiers {winner.name} on {winner.draft_kind} {sure}:"
        f" {winner.expected_tokens.within(2)} tokens a call"
    )
    if winner.gain is None:
        return f"{sentence}; no other is faster on these drafts."
    of_kind = [row for row in of_all(rows) if row.draft_kind == winner.draft_kind]
    (first,) = [row for row in of_kind if row.gain is None]
    sure = "" if winner.gain.low > 0 else " (so few places do not tell them apart)"
    return f"{sentence}; over {first.name} on the same drafts: {winner.gain}{sure}."


def verifier_pays(rows: Sequence[VerifierRow]) -> str:
    """Whether the best row is faster than the target alone, by its times."""
    row = best_verifier(rows)
    speed, tokens = row.speedup or 0.0, row.expected_tokens
    verdict = "so few places cannot tell whether it pays"
    if speed * tokens.low > tokens.value:
        verdict = "it pays"
    elif speed * tokens.high < tokens.value:
        verdict = "it does not pay: drafting costs more than it saves"
    return f"Expected is {speed:.2f}x over the target alone here: {verdict}."


# --- the number of drafted tokens ---

ENGINES = {
    "draftsmith": "speculative",
    "transformers": "assisted",
}
"""Engine -> the decoder under which results hold what was measured with it."""


def fastest_lengths(results: Results) -> dict[str, list[PooledRow]]:
    """Engine -> the fixed lengths that were measured with it, from the fastest; none without times.

    A length that is best in one engine's loop says nothing about another engine, whose draft and
    target cost other shares of a round.
    """
    fixed = fixed_lengths(pool(results)) if results.timed else []
    return {
        engine: [row for row in fixed if row.method.decoder == decoder]
        for engine, decoder in ENGINES.items()
    }


def lengths_table(fastest: Mapping[str, Sequence[PooledRow]]) -> Table:
    """The best length of each engine that was measured."""
    headings = ("best", "tokens/s", "measured")
    rows = [
        (engine, _length_cells(of_engine)) for engine, of_engine in fastest.items() if of_engine
    ]
    return Table([(heading, "") for heading in headings], rows, first="engine")


def _length_cells(rows: Sequence[PooledRow]) -> tuple[str, str, str]:
    method, speed = rows[0].method, Interval.of(rows[0].rates["tokens_per_second"])
    best = f"K = {method.deepest}"
    if method.decoder == "speculative":
        best += f", {method.verifier} verification"
    lengths = sorted({row.method.deepest for row in rows})
    return best, speed.within(1), f"K = {', '.join(map(str, lengths))}"


def longest_measured(results: Results) -> int:
    """The longest fixed length of a chain that was measured on every prompt set."""
    rows = fixed_lengths(pool(results))
    if not rows:
        raise ManifestError(
            "the card of a draft needs a measured draft length: evaluate a method with a fixed"
            " length (stop: fixed) on every prompt set"
        )
    return max(row.method.deepest for row in rows)
