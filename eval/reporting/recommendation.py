"""What to use, by an evaluation: the fastest lossless method, and how many tokens to draft.

One answer to one question, for the page, the terminal and the cards: `answer` says what is fastest
over all prompt sets together, by how much, how sure that is and whether it is exact; `head_*` say
whether asking the head pays, and how well it predicts; `verifier_*` name the best row of the table
of verifiers; `fastest_lengths` has the number of drafted tokens for each engine.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from eval.analysis.prediction import Predictions
from eval.measuring.intervals import Interval
from eval.measuring.pooled import ALL_SETS, PooledRow, fastest, merit, pool
from eval.measuring.results import ENOUGH, Results, VerifierRow
from eval.reporting.rendering import NOT_MEASURED, Section, Table
from eval.reporting.table import conditions
from specdata.errors import ManifestError

FEW_PROMPTS = 24
"""Sets with fewer prompts than this carry a warning."""
WIDE = 0.2
"""So does a speed-up whose interval is wider than this share of its value."""
MOST_NAMED = 3
"""Methods that are named of those that cannot be told apart."""


# --- the fastest method ---


@dataclass(frozen=True, slots=True)
class Answer:
    """The first lines of a report, over all prompt sets together (`eval.measuring.pooled`).

    Args:
        finding: what is fastest and by how much, with intervals.
        head: whether the head pays; empty where no method asks one.
        exactness: whether its text is the target's; empty where there is nothing to say.
        cautions: why not to trust it too far; none if prompts and intervals are as they should be.
    """

    finding: str
    head: str
    exactness: str
    basis: str
    cautions: tuple[str, ...]


def answer(results: Results) -> Answer:
    """What is fastest, and whether the head pays, in a few plain sentences."""
    rows = pool(results)
    best = best_of(rows)
    return Answer(
        _finding(rows, results.environment.batch_size),
        head_sentence(results),
        _exactness(best, rows),
        _basis(results),
        (*undrafted(results), *_cautions(results)),
    )


def best_of(rows: Sequence[PooledRow]) -> PooledRow | None:
    """The lossless drafting method of most tokens a second, or a forward where none is timed."""
    drafting = [row for row in rows if row.method.lossless and row.method.speculates]
    return max(drafting, key=merit, default=None)


def is_wide(speedup: Interval | None) -> bool:
    """True if an interval is wider than WIDE of its value."""
    return speedup is not None and speedup.high - speedup.low > WIDE * speedup.value


def _finding(rows: Sequence[PooledRow], batch: int) -> str:
    """The fastest method that drafts, over the target alone and over transformers' own loop."""
    best, winner = best_of(rows), fastest(rows)
    plain = next((row for row in rows if row.method.decoder == "plain"), None)
    if best is None:
        return f"{'Only the target alone' if plain else 'No lossless method of ours'} was measured."
    if winner is None:
        together = f" ({batch} prompts were decoded together)" if batch > 1 else ""
        tokens = Interval.of(best.rates["block_efficiency"])
        return (
            f"Speeds were not measured{together}: counts alone, which say nothing of the draft's "
            f"cost. Most tokens a forward of the target: {best.name}, {tokens.value:.2f} "
            f"{_within(tokens)}."
        )
    is_theirs = best.method.decoder == "assisted"
    who = f"transformers' own {best.name}" if is_theirs else best.name
    if plain is None:
        text = (
            f"{who} is fastest, {best.speed():.1f} tokens/s; the target alone was not measured, so"
            " there is no speed-up."
        )
    else:
        text = _over_plain(who, best.over(plain, "tokens_per_second"), winner[1])
    rival = best_of([row for row in rows if (row.method.decoder == "assisted") != is_theirs])
    if rival is not None:
        ratio = best.over(rival, "tokens_per_second")
        against = "the best of ours" if is_theirs else "transformers' own loop (eager) at its best"
        told = "" if ratio.low > 1 else "; the two are not told apart"
        text += (
            f" Against {against} ({rival.name}) it is {ratio.value:.2f} times as fast"
            f" {_within(ratio)}{told}."
        )
    return text


def _over_plain(who: str, ratio: Interval, ties: Sequence[PooledRow]) -> str:
    """The best method over the target alone, and the methods that may be as fast."""
    speed = f"{ratio.value:.2f} times its speed {_within(ratio)}."
    if ratio.high < 1:
        return (
            f"Nothing is faster than the target alone: the best method, {who}, is slower, at"
            f" {speed}"
        )
    if ratio.low <= 1:
        return (
            f"No method is shown to be faster than the target alone: the best, {who}, ran at"
            f" {speed}"
        )
    text = f"{who} is fastest: {ratio.value:.2f} times the speed of the target alone"
    text += f" {_within(ratio)}."
    if others := [row.name for row in ties if row.method.speculates]:
        named = ", ".join(others[:MOST_NAMED])
        more = f" and {len(others) - MOST_NAMED} more" if len(others) > MOST_NAMED else ""
        text += f" Not told apart from it: {named}{more}."
    return text


def _exactness(best: PooledRow | None, rows: Sequence[PooledRow]) -> str:
    """Whether the best method's text is the target's, and what biased methods did."""
    text = ""
    if best is not None:
        ours = best.method.decoder == "speculative"
        by = f"the verifier {best.method.verifier}" if ours else "transformers' own verification"
        text = f"It is exact: {by} is proved to leave the target's distribution as it is."
    for row in rows:
        if row.method.lossless:
            continue
        speed, bias = row.value("speedup"), row.rate("total_variation")
        ran = "" if speed is None else f" ran at {speed:.2f} times the target's speed, but"
        text += f" Not exact: {row.name}{ran} changes the target's distribution"
        if bias is not None:
            text += f" (total variation {bias.value:.3f} a token,"
            text += f" 95 % interval {bias.low:.3f} to {bias.high:.3f})"
        text += "."
    return text.strip()


def _basis(results: Results) -> str:
    """On what, with which models and sampler, where."""
    alike = ", and each set counts alike" if len(results.datasets()) > 1 else ""
    return (
        f"{conditions(results)} Every method decoded the same prompts{alike}. Intervals are 95 %,"
        f" paired by prompt; of {len({run.name for run in results.runs})} measured, the fastest is"
        " chosen on the prompts that it is judged on."
    )


def undrafted(results: Results) -> list[str]:
    """The methods whose draft ended before the texts did."""
    found = []
    for row in pool(results):
        all_sets = [each for run in row.runs for each in run.generations]
        if beyond := sum(each.beyond for each in all_sets):
            found.append(
                f"{row.name} drafted nothing in {beyond:,} of {sum(g.rounds for g in all_sets):,}"
                f" rounds: {row.runs[0].draft} has no positions for texts that long."
            )
    return found


def _cautions(results: Results) -> list[str]:
    """Few prompts, and wide intervals."""
    cautions = []
    counts = {name: results.of(name)[0].prompts for name in results.datasets()}
    if few := [f"{name} {count}" for name, count in counts.items() if count < FEW_PROMPTS]:
        cautions.append(
            f"Few prompts ({', '.join(few)}; fewer than {FEW_PROMPTS} a set): intervals over so few"
            " prompts are rough and tend to be too narrow; do not generalise from them."
        )
    wide = [
        f"{run.name} on {run.dataset}"
        for run in results.runs
        if run.speedup is not None and is_wide(Interval(run.speedup, *run.intervals["speedup"]))
    ]
    if wide:
        named = wide[0] if len(wide) == 1 else f"{len(wide)} of {len(results.runs)} speed-ups"
        cautions.append(
            f"Wide intervals ({named}): wider than {100 * WIDE:.0f} % of the value, marked ~ in the"
            " tables; more prompts would narrow them."
        )
    return cautions


def _within(ratio: Interval) -> str:
    return f"(95 % interval {ratio.low:.2f} to {ratio.high:.2f})"


# --- whether the head pays ---


@dataclass(frozen=True, slots=True)
class Rival:
    """The fastest measured method of a kind that asks no head.

    Args:
        kind: its stopping rule ("fixed", ...), "tree" for drafts that branch, or "assisted",
            transformers' own loop, whatever it stops by.
        saved: the share of its time that the head's method saves over all prompt sets, paired by
            prompt; negative where that takes longer.
    """

    kind: str
    method: str
    saved: Interval


@dataclass(frozen=True, slots=True)
class HeadVerdict:
    """Whether a head pays by the clock, on the prompts of an evaluation.

    The fastest method that asks it meets the fastest of each kind that a user could choose
    instead, whatever verifies them. The best of several measurements is favoured by their noise,
    and there are more rivals than heads: "does not pay" is said a little too readily.

    Args:
        rivals: the fixed length first, then from the hardest to beat.
    """

    method: str
    candidates: int
    rivals: tuple[Rival, ...] = ()
    reason: str = ""

    @property
    def hardest(self) -> Rival:
        """The rival that decides.

        Of those that are surely faster, else of those that are not told apart, else of all, the
        one against which it saves least.
        """
        return min(
            self.rivals, key=lambda r: (r.saved.high >= 0.0, r.saved.low > 0.0, r.saved.value)
        )


def head_verdict(results: Results) -> HeadVerdict | None:
    """The head of an evaluation, judged by the clock; None if no method asks one.

    Compared are lossless methods that were measured on every prompt set.
    """
    rows = [row for row in pool(results) if row.method.lossless and row.method.speculates]
    heads = [row for row in rows if row.runs[0].head is not None]
    if not heads:
        return None
    head = max(heads, key=merit)
    if not results.timed:
        return HeadVerdict(head.name, len(heads), reason="speeds were not measured")
    kinds: dict[str, list[PooledRow]] = {}
    for row in rows:
        if row.runs[0].head is None:
            is_theirs = row.method.decoder == "assisted"
            kind = "tree" if row.method.branches else row.method.stop.name
            kinds.setdefault("assisted" if is_theirs else kind, []).append(row)
    if "fixed" not in kinds:
        return HeadVerdict(head.name, len(heads), reason="no fixed length was measured")
    rivals = []
    for kind, of_kind in kinds.items():
        rival = max(of_kind, key=PooledRow.speed)
        ratio = head.over(rival, "tokens_per_second")
        saved = Interval(*(1.0 - 1.0 / x for x in (ratio.value, ratio.low, ratio.high)))
        rivals.append(Rival(kind, rival.name, saved))
    rivals.sort(key=lambda rival: (rival.kind != "fixed", rival.saved.value))
    return HeadVerdict(head.name, len(heads), tuple(rivals))


def head_sentence(results: Results) -> str:
    """Whether the head pays, with the rival that decides it; empty where no method asks one.

    It pays if it surely saves time over every rival, and does not if it surely loses to one;
    "surely" is a 95 % interval that does not hold 0.
    """
    if (verdict := head_verdict(results)) is None:
        return ""
    if verdict.reason:
        return f"Whether the head pays was not measured: {verdict.reason}."
    rival = verdict.hardest
    begins = "The head pays"
    if rival.saved.high < 0.0:
        begins = "The head does not pay"
    elif rival.saved.low <= 0.0:
        begins = "So few prompts cannot tell whether the head pays"
    slower = " (negative: slower)" if rival.saved.value < 0.0 else ""
    return f"{begins}: {verdict.method} saves {rival.saved} over {rival.method}{slower}."


def head_rivals(results: Results) -> Section | None:
    """The table of rivals of the head."""
    verdict = head_verdict(results)
    if verdict is None or not verdict.rivals:
        return None
    names = {r: "fixed length" if r.kind == "fixed" else r.kind for r in verdict.rivals}
    several = f", the fastest of {verdict.candidates} that ask the head" * (verdict.candidates > 1)
    table = Table(
        [("time saved", ""), ("over", "")],
        [(name, (str(r.saved), r.method)) for r, name in names.items()],
        first="the fastest",
        note=f"Wall time on the evaluation's prompts of {verdict.method}{several}, against the"
        " fastest measured of each kind that asks none. Brackets hold 95 % intervals; negative"
        " means that the head takes longer, green that it surely takes less.",
        wins=[name for r, name in names.items() if r.saved.low > 0.0],
    )
    return Section("Does the head pay?", head_sentence(results), table)


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
    sentence = (
        f"Of {len(lossless)} lossless verifiers {winner.name} on {winner.draft_kind} is best:"
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
    fixed = sorted(_fixed_lengths(results) if results.timed else [], key=PooledRow.speed)[::-1]
    return {
        engine: [row for row in fixed if row.method.decoder == decoder]
        for engine, decoder in ENGINES.items()
    }


def lengths_table(fastest: Mapping[str, Sequence[PooledRow]]) -> Table:
    """The best length of each engine that was measured, against its next best."""
    headings = ("best", "tokens/s", "measured", "against the next best")
    rows = [
        (engine, _length_cells(of_engine)) for engine, of_engine in fastest.items() if of_engine
    ]
    return Table([(heading, "") for heading in headings], rows, first="engine")


def _length_cells(rows: Sequence[PooledRow]) -> tuple[str, str, str, str]:
    method, speed = rows[0].method, Interval.of(rows[0].rates["tokens_per_second"])
    best, against = f"K = {method.deepest}", NOT_MEASURED
    if method.decoder == "speculative":
        best += f", {method.verifier} verification"
    if rows[1:]:
        ratio = rows[0].over(rows[1], "tokens_per_second")
        against = f"{ratio.within(2, 'x')} {rows[1].name}"
        against += ": not told apart" if ratio.low <= 1.0 else ""
    lengths = sorted({row.method.deepest for row in rows})
    return best, speed.within(1), f"K = {', '.join(map(str, lengths))}", against


def longest_measured(results: Results) -> int:
    """The longest fixed length of a chain that was measured on every prompt set."""
    rows = _fixed_lengths(results)
    if not rows:
        raise ManifestError(
            "the card of a draft needs a measured draft length: evaluate a method with a fixed"
            " length (stop: fixed) on every prompt set"
        )
    return max(row.method.deepest for row in rows)


def _fixed_lengths(results: Results) -> list[PooledRow]:
    """Each lossless chain of a fixed length that was measured on every prompt set."""
    return [
        row
        for row in pool(results)
        if row.method.lossless and row.method.fixed_length and not row.method.branches
    ]
