"""Fixed draft lengths: which of them must be measured before one may be called the best.

A method is surely the best only beside the next lengths: with a gap on one side, a length in it may
be faster than all that were measured. An evaluation with a dev set finds them there.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from eval.decode_config import Method
from eval.measuring.intervals import LEAST_COVERAGE, coverage
from eval.measuring.methods import EvalConfig
from eval.measuring.pooled import PooledRow, fastest, merit, pool
from eval.measuring.results import Results

LONGEST_ASKED = 64
"""Tokens beyond which no length is suggested."""
FIRST_LENGTHS = (1, 2, 3, 4, 6)
"""What is suggested where no length is fixed."""
STEPS = 3
"""Longer lengths that dev measures at once."""


def fixed_lengths(rows: Sequence[PooledRow]) -> list[PooledRow]:
    """The lossless chains of a fixed length, from the best."""
    return sorted((row for row in rows if is_fixed(row.method)), key=merit, reverse=True)


def undecided(ranked: Sequence[PooledRow]) -> list[PooledRow]:
    """Of rows from the best, those that are not surely slower than it."""
    speed = "tokens_per_second"
    return [row for row in ranked if row is ranked[0] or row.over(ranked[0], speed).high >= 1]


def is_fixed(method: Method) -> bool:
    """Whether it is a lossless chain of a fixed length, of the draft."""
    return (
        not method.mtp
        and method.lossless
        and not method.branches
        and method.fixed_length is not None
    )


def family(method: Method) -> tuple[str, str, str]:
    """What methods share that differ in their length alone."""
    return method.decoder, method.verifier, str(sorted(method.verifier_args.items()))


def following(length: int) -> int:
    """The longest length that is still next to this one: one more, from 4 on half as long again."""
    return length + 1 if length < 4 else -(-3 * length // 2)


def finds_lengths(config: EvalConfig) -> bool:
    """Whether an evaluation looks for the best length itself: several are listed, and dev sets."""
    listed = Counter(family(method) for method in config.methods if is_fixed(method))
    compares = config.batch == 1 and any(number > 1 for number in listed.values())
    splits = {each.split == "dev" for each in config.sets}
    return compares and splits == {True, False}


def lengths_to_measure(
    results: Results, steps: int = 1, measured: Sequence[Method] = ()
) -> list[Method]:
    """Methods without which the best fixed length is not known, named as those beside them.

    Every length that is not surely slower than the best needs a next shorter one, unless it is 1,
    and a next longer one, unless the draft can propose no more, among those of its own decoder and
    verifier. Where dev chooses methods it is asked, if it has prompts enough to tell. Beyond the
    longest so many `steps` are asked for at once. `measured` were, too, beside those of `results`.
    """
    chosen_on = results.chosen_on()
    prompts = tuple(results.of(name)[0].prompts for name in chosen_on)
    rows = pool(results, chosen_on if coverage(prompts) >= LEAST_COVERAGE else ())
    limits = [row.runs[0].longest_draft or LONGEST_ASKED for row in rows]
    limits += [int(row.runs[0].sampling.get("max_new_tokens") or LONGEST_ASKED) - 1 for row in rows]
    most, fixed = max(1, min(LONGEST_ASKED, *limits)), fixed_lengths(rows)
    if not fixed:
        first = Method(name="K=4")
        return [first.replace(name=f"K={k}", length=k) for k in FIRST_LENGTHS if k <= most]
    known = [*measured, *(run.method for run in results.runs)]
    taken = {each.name for each in known}
    wanted: dict[tuple[str | int, ...], Method] = {}

    def want(method: Method, length: int) -> None:
        """Ask for a method with another length, once."""
        before, found, after = method.name.rpartition(str(method.deepest))
        name = f"{before}{length}{after}" if found else method.name
        while name in taken:
            name += f" K={length}"
        new = method.replace(name=name, length=length)
        if wanted.setdefault((*family(method), length), new) is new:
            taken.add(name)

    for row in undecided(fixed):
        method, length = row.method, row.method.deepest
        alike = [each for each in known if is_fixed(each) and family(each) == family(method)]
        others = {each.deepest for each in alike}
        shorter = [k for k in range(1, length) if following(k) >= length]
        longer = range(length + 1, min(most, following(length)) + 1)
        if shorter and others.isdisjoint(shorter):
            want(method, shorter[0])
        if longer and others.isdisjoint(longer):
            want(method, reach := longer[-1])
            for _ in range(steps - 1) if length == max(others) else ():
                want(method, reach := min(most, following(reach)))
    return list(wanted.values())


def next_round(results: Results, measured: Sequence[Method]) -> list[Method]:
    """What dev measures next, in turns: lengths that are missing, beside what may be the best.

    None if no length is missing. `results` are of the last round. What is surely slower in it than
    the best method, or a fixed length than the best one, is decided.
    """
    if not (missing := lengths_to_measure(results, STEPS, measured)):
        return []
    rows = pool(results)
    best, ties = fastest(rows) or (rows[0], rows)
    again = {row.name for row in (best, *ties, *undecided(fixed_lengths(rows)))}
    beside = [row.method for row in rows if row.name in again or row.method.decoder == "plain"]
    return beside + missing
