"""What if forwards took another time: the counts of one run, priced anew.

By this model a generation takes

    prefill + sum over rounds of t_target(drafted + 1) + t_draft N_forwards + what is beside them,

where t_target(n) is a forward of the target that scores n tokens and N_forwards counts the forwards
of the draft. Counts are those that were recorded; every time is a mean over all methods of a prompt
set, so what is predicted of a method at this machine's own times is a check of the model by the
clock. Speed-up at another ratio r = t_draft / t_target(1) follows by t_draft = r t_target(1) with
all else as measured. What is beside forwards is, as measured in the same run: of each stopping rule
(a head, for one) so much a draft forward, of each drafter and verifier so much a round, and of
transformers' own loop so much a call, a round and a draft forward.

Methods whose stopping depends on the cost keep the lengths that they chose in this run.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Self

import numpy as np
import yaml
from numpy.typing import NDArray
from pydantic import Field, ValidationError, model_validator

from eval.measuring.intervals import Interval, bootstrap_weights, interval
from eval.measuring.records import Strict
from eval.measuring.results import Results, Run
from specdata.errors import ConfigError

Reals = NDArray[np.float64]

POOLED = "all prompt sets"
PAPERS_RATIO = 0.21
"""t_draft / t_target of the pair that the papers' figures are mostly of (Vicuna-7B, 68M draft)."""
RATIOS: Reals = np.geomspace(0.005, 1.0, 231)
"""Where curves are drawn: a hundred points a decade."""


class Machine(Strict):
    """A table of forward times of another machine, or of another pair of models.

    Times between the entries are interpolated linearly and go on along the last slope; a table of
    one entry says that they do not depend on the number of tokens.

    Attributes:
        name: what the table is called.
        target: tokens that a forward of the target reads -> its seconds; 1 is needed.
        draft: the same of the draft, the drawing of a token included; 1 is needed.
        overhead: seconds of a round beside its forwards, also of plain decoding.
    """

    name: str = Field(min_length=1)
    target: dict[int, float]
    draft: dict[int, float]
    overhead: float = Field(default=0.0, ge=0.0)

    @model_validator(mode="after")
    def _check(self) -> Self:
        for role in ("target", "draft"):
            table: dict[int, float] = getattr(self, role)
            if 1 not in table or min(table) < 1 or min(table.values()) <= 0.0:
                raise ValueError(
                    f"{role} maps numbers of tokens, 1 among them, to positive seconds of a forward"
                    f" that reads so many; got {table}"
                )
        return self

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read a JSON or YAML file with these fields.

        Raises:
            ConfigError: if the file is missing, or is not such a table.
        """
        form = "name, target: {tokens: seconds}, draft: {tokens: seconds}, overhead: seconds"
        try:
            # By JSON, in which numbers of tokens are names and numbers stay numbers.
            given = json.dumps(yaml.safe_load(path.read_text(encoding="utf-8")))
            return cls.model_validate_json(given)
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            where = ".".join(str(part) for part in first["loc"]) or "the file"
            raise ConfigError(
                f"{path} must be a table of forward times ({form}): {where}: {first['msg']}"
            ) from error
        except (OSError, UnicodeDecodeError, yaml.YAMLError, TypeError) as error:
            raise ConfigError(
                f"{path} must be a JSON or YAML file of forward times ({form}): {error}"
            ) from error


@dataclass(frozen=True, slots=True)
class Priced:
    """The prompts of a method; its seconds are `fixed + ratio * unit`. Every array is (P,).

    Attributes:
        run: a run of the method; of several prompt sets the first.
        tokens: emitted.
        fixed: seconds that do not depend on the draft's.
        unit: seconds of the draft's forwards if one took as long as the target's of one token.
        ratio: t_draft / t_target where the counts were recorded.
        clock: seconds that were measured.
        sizes: prompts of each set, in the order of the arrays.
    """

    run: Run
    tokens: Reals
    fixed: Reals
    unit: Reals
    ratio: Reals
    clock: Reals
    sizes: tuple[int, ...]

    @classmethod
    def of(cls, run: Run, counts: _Counts, *, fixed: Reals, unit: Reals, ratio: float) -> Priced:
        """One prompt set at one ratio."""
        prompts = len(counts.tokens)
        ratios = np.full(prompts, ratio)
        return cls(run, counts.tokens, fixed, unit, ratios, counts.seconds, (prompts,))

    def seconds(self, ratio: float | None = None) -> Reals:
        """(P,) at another ratio; None is the own one."""
        return self.fixed + (self.ratio if ratio is None else ratio) * self.unit

    def followed_by(self, other: Priced) -> Priced:
        """The prompts of both."""
        return Priced(
            self.run,
            np.concatenate([self.tokens, other.tokens]),
            np.concatenate([self.fixed, other.fixed]),
            np.concatenate([self.unit, other.unit]),
            np.concatenate([self.ratio, other.ratio]),
            np.concatenate([self.clock, other.clock]),
            self.sizes + other.sizes,
        )

    def per_token(self, seconds: Reals, *, resampled: bool = False) -> Reals:
        """Seconds of an emitted token, the sets counting alike (`eval.measuring.pooled`).

        Args:
            seconds: (P,) of these prompts.
            resampled: return bootstrap resamples of the prompts of each set, too.

        Returns:
            (1,), or (1 + RESAMPLES,) with the prompts as they are first.
        """
        total, start = np.zeros(1), 0
        for seed, size in enumerate(self.sizes):
            own = slice(start, start + size)
            weights = _weights(size, seed) if resampled else np.ones((1, size))
            total = total + (weights @ seconds[own]) / (weights @ self.tokens[own])
            start += size
        return np.asarray(total / len(self.sizes))


@dataclass(frozen=True, slots=True)
class WhatIf:
    """Every method of a prompt set, or of all, as a function of the cost ratio.

    Attributes:
        plain: the target alone.
        methods: the others, in the order they were run.
    """

    plain: Priced
    methods: tuple[Priced, ...]

    @property
    def ratio(self) -> float:
        """t_draft / t_target here, the mean over prompt sets."""
        firsts = np.cumsum((0, *self.plain.sizes[:-1]))
        return float(self.plain.ratio[firsts].mean())

    def speedup(self, method: Priced, ratio: float | None = None) -> Interval:
        """Predicted speed over plain decoding, with its paired interval over prompts.

        Forward times are held: the interval is that of the counts.

        Args:
            method: one of `methods`.
            ratio: t_draft / t_target; None is this machine's own.
        """
        return self._speedup(method, method.seconds(ratio), self.plain.seconds(ratio))

    def clocked(self, method: Priced) -> Interval:
        """The same by the clock."""
        return self._speedup(method, method.clock, self.plain.clock)

    def agrees(self, method: Priced) -> bool:
        """Whether the prediction at this machine's ratio lies in the clock's interval."""
        clock = self.clocked(method)
        return clock.low <= self.speedup(method).value <= clock.high

    def curve(self, method: Priced, ratios: Reals = RATIOS) -> Reals:
        """Predicted speed-ups at (R,) ratios."""
        per_token = method.per_token(method.fixed) + ratios * method.per_token(method.unit)
        return np.asarray(self._plain_seconds / per_token)

    def break_even(self, method: Priced) -> float:
        """The ratio at which a method is as fast as the target alone; below it, it is faster.

        Below 0 it never is; infinite for a method without forwards of the draft.
        """
        left = self._plain_seconds - float(method.per_token(method.fixed)[0])
        unit = float(method.per_token(method.unit)[0])
        return left / unit if unit > 0 else float(np.copysign(np.inf, left))

    def fastest(self, ratio: float | None = None) -> Priced:
        """The fastest lossless method at a ratio, which may be plain."""
        lossless = [self.plain, *(each for each in self.methods if each.run.lossless)]
        return min(lossless, key=lambda each: float(each.per_token(each.seconds(ratio))[0]))

    def winners(self, ratios: Reals = RATIOS) -> list[tuple[Priced, float, float]]:
        """Who is the fastest lossless method from which ratio to which, by ascending ratio."""
        lossless = [self.plain, *(each for each in self.methods if each.run.lossless)]
        best = np.stack([self.curve(each, ratios) for each in lossless]).argmax(axis=0)
        found: list[tuple[Priced, float, float]] = []
        for number, ratio in zip(best.tolist(), ratios.tolist(), strict=True):
            if found and found[-1][0] is lossless[number]:
                found[-1] = lossless[number], found[-1][1], ratio
            else:
                found.append((lossless[number], ratio, ratio))
        return found

    @property
    def _plain_seconds(self) -> float:
        """Of a token."""
        return float(self.plain.per_token(self.plain.fixed)[0])

    def _speedup(self, method: Priced, seconds: Reals, plain: Reals) -> Interval:
        theirs = self.plain.per_token(plain, resampled=True)
        value, *resamples = theirs / method.per_token(seconds, resampled=True)
        return Interval(float(value), *interval(np.array(resamples)))


@cache
def _weights(prompts: int, seed: int) -> Reals:
    """(1 + RESAMPLES, prompts): all prompts once first."""
    return np.vstack([np.ones(prompts), bootstrap_weights(prompts, seed)])


def what_if(results: Results) -> dict[str, WhatIf]:
    """Each prompt set, and all together if there are several, at other cost ratios.

    Returns:
        By prompt set, `POOLED` first; empty if these results cannot tell: they were not timed, are
        of a version that did not record what forwards took by tokens, hold several generations of a
        prompt, or a prompt set has no plain run, no draft or only one round a prompt.
    """
    return _of_sets(results, _as_measured)


def memory_bound(results: Results) -> dict[str, WhatIf]:
    """The same if verifying cost what one token costs, and nothing were beside forwards.

    The papers' model (Leviathan et al. 2023, Theorem 3.8): a generation takes N_target + r
    N_forwards forwards of the target, the prompt's own left out. By prompt set as `what_if`.
    """

    def priced(times: _Times, run: Run, counts: _Counts) -> Priced:
        unit = counts.forwards if run.drafter else np.zeros_like(counts.tokens)
        return Priced.of(run, counts, fixed=counts.rounds, unit=unit, ratio=times.ratio)

    return _of_sets(results, priced)


def on_machine(results: Results, machine: Machine) -> dict[str, WhatIf]:
    """The same with the forward times of another machine, at its own ratio.

    What a stopping rule or a tree adds to a step of the draft is taken in proportion to the step,
    and transformers' loop to cost nothing beside forwards. By prompt set as `what_if`.
    """
    step = machine.draft[1]
    ratio = step / machine.target[1]

    def priced(times: _Times, run: Run, counts: _Counts) -> Priced:
        target = seconds_at(machine.target, counts.prompt_tokens + counts.first_drafted)
        target += counts.later @ seconds_at(machine.target, counts.sizes)
        drafting = np.zeros_like(target)
        if run.drafter:
            steps = counts.forwards - 1.0
            if run.drafter != "transformers":
                beside = times.beside_forwards(run, counts) / times.draft
                steps += np.maximum(beside, 0.0)
            drafting = seconds_at(machine.draft, counts.prompt_tokens) + steps * step
            drafting = np.where(counts.forwards > 0, drafting, 0.0)
        fixed = target + machine.overhead * counts.rounds
        return Priced.of(run, counts, fixed=fixed, unit=drafting / ratio, ratio=ratio)

    return _of_sets(results, priced)


def seconds_at(table: Mapping[int, float], tokens: Reals) -> Reals:
    """Times of forwards of any numbers of tokens, by a table of some.

    Linear between entries and along the last slope beyond them, never falling there.
    """
    sizes = np.array(sorted(table), dtype=np.float64)
    seconds = np.array([table[size] for size in sorted(table)])
    slope = 0.0
    if len(sizes) > 1:
        slope = max(0.0, float((seconds[-1] - seconds[-2]) / (sizes[-1] - sizes[-2])))
    beyond = slope * np.maximum(tokens - sizes[-1], 0.0)
    return np.asarray(np.interp(tokens, sizes, seconds) + beyond)


def _of_sets(
    results: Results, price: Callable[[_Times, Run, _Counts], Priced]
) -> dict[str, WhatIf]:
    """`price` maps times, run and counts to what the run takes; see `what_if`."""
    found: dict[str, WhatIf] = {}
    for dataset in results.datasets():
        runs = results.of(dataset)
        plain = results.plain(dataset)
        if plain is None or not results.timed or not _recorded(runs):
            return {}
        prompts = list(dict.fromkeys(each.prompt_id for each in plain.generations))
        counted = {run.method: _Counts.of(run, prompts) for run in runs}
        times = _Times.measured(runs, counted)
        if times is None:
            return {}
        priced = {run.method: price(times, run, counted[run.method]) for run in runs}
        alone = priced.pop(plain.method)
        found[dataset] = WhatIf(alone, tuple(priced.values()))
    return {POOLED: _pooled(list(found.values())), **found} if len(found) > 1 else found


def _recorded(runs: Sequence[Run]) -> bool:
    """Whether all of them recorded what is needed, once a prompt."""
    return all(
        len({each.prompt_id for each in run.generations}) == len(run.generations)
        and all(each.prompt_tokens > 0 for each in run.generations)
        for run in runs
    )


def _pooled(sets: Sequence[WhatIf]) -> WhatIf:
    """All prompts of all sets; of methods that every set has."""
    plain, *others = (each.plain for each in sets)
    for other in others:
        plain = plain.followed_by(other)
    methods = []
    for method in sets[0].methods:
        name, joined = method.run.method, method
        same = [[m for m in each.methods if m.run.method == name] for each in sets[1:]]
        if all(same):
            for (other,) in same:
                joined = joined.followed_by(other)
            methods.append(joined)
    return WhatIf(plain, tuple(methods))


@dataclass(frozen=True, slots=True)
class _Counts:
    """What a run recorded of each prompt; (P,) unless said otherwise."""

    tokens: Reals
    rounds: Reals
    drafting_rounds: Reals  # that drafted anything
    forwards: Reals  # of the draft
    prompt_tokens: Reals
    first_drafted: Reals
    first_forwards: Reals
    first_target: Reals  # seconds, as all below
    first_draft: Reals
    later: Reals  # (P, sizes) rounds after the first
    later_target: Reals  # (P, sizes)
    draft: Reals
    target: Reals
    seconds: Reals

    @property
    def sizes(self) -> Reals:
        """(sizes,) tokens that the target scored."""
        return np.arange(1.0, self.later.shape[1] + 1)

    @classmethod
    def of(cls, run: Run, prompts: Sequence[str]) -> _Counts:
        """Of prompts in this order."""
        by_prompt = {each.prompt_id: each for each in run.generations}
        each = [by_prompt[prompt] for prompt in prompts]
        sizes = max(1, *(len(e.later_rounds) for e in each))
        later, later_target = np.zeros((2, len(each), sizes))
        for number, e in enumerate(each):
            later[number, : len(e.later_rounds)] = e.later_rounds
            later_target[number, : len(e.later_rounds)] = e.later_target_seconds
        drafted = np.array([e.n_draft for e in each]) - later @ np.arange(sizes)

        def column(name: str) -> Reals:
            return np.array([getattr(e, name) for e in each], dtype=np.float64)

        return cls(
            tokens=column("tokens"),
            rounds=column("rounds"),
            drafting_rounds=later[:, 1:].sum(axis=1) + (drafted > 0),
            forwards=column("draft_forwards"),
            prompt_tokens=column("prompt_tokens"),
            first_drafted=drafted,
            first_forwards=column("first_draft_forwards"),
            first_target=column("first_target_seconds"),
            first_draft=column("first_draft_seconds"),
            later=later,
            later_target=later_target,
            draft=column("draft_seconds"),
            target=column("target_seconds"),
            seconds=column("seconds"),
        )


@dataclass(frozen=True, slots=True)
class _Times:
    """What everything took on the machine of the results, in seconds, on one prompt set.

    Attributes:
        chain: tokens -> a forward of the target that scores them, of chains and of plain decoding.
        branching: the same of drafts with several paths.
        draft: a forward of the draft, drawing and a fixed length's stopping included.
        chain_round: beside them, drafting a chain.
        rules: beside them, a forward of the draft under a stopping rule; see `_rule`.
        rounds: a round beside draft and target, by drafter and verifier.
        loop: a call, a round and a draft forward of transformers, beside forwards.
        target_prefill: (P,) what the target's first forward takes longer than a later one.
        draft_prefill: (P,) the same of the draft.
    """

    chain: dict[int, float]
    branching: dict[int, float]
    draft: float
    chain_round: float
    rules: dict[str, float]
    rounds: dict[tuple[str | None, str | None], float]
    loop: Reals
    target_prefill: Reals
    draft_prefill: Reals

    @property
    def ratio(self) -> float:
        """t_draft / t_target."""
        return self.draft / self.chain[1]

    @classmethod
    def measured(cls, runs: Sequence[Run], counts: Mapping[str, _Counts]) -> _Times | None:
        """None if there is nothing to measure them on."""
        ours = [run for run in runs if run.drafter != "transformers"]
        chains = [counts[run.method] for run in ours if run.drafter in (None, "chain")]
        trees = [counts[run.method] for run in ours if run.drafter not in (None, "chain")]
        chain, branching = _table(chains), _table(trees)
        steps = _draft_times(ours, counts)
        if 1 not in chain or steps is None:
            return None
        draft, chain_round = steps
        nothing = np.zeros(len(next(iter(counts.values())).tokens))
        times = cls(chain, branching, draft, chain_round, {}, {}, np.zeros(3), nothing, nothing)
        times = replace(times, rules=times._rules(ours, counts), rounds=_rounds(ours, counts))
        times = replace(
            times,
            target_prefill=_mean(
                [
                    counts[run.method].first_target - times._first_drafts(run, counts[run.method])
                    for run in ours
                ]
            ),
            draft_prefill=_mean(
                [times._first_draft(run, counts[run.method]) for run in ours if run.drafter]
            ),
        )
        return replace(times, loop=times._fit_loop(runs, counts))

    def table(self, run: Run) -> dict[int, float]:
        """Of the target's forwards of a run."""
        return (run.branching and self.branching) or self.chain

    def target(self, run: Run, counts: _Counts) -> Reals:
        """(P,) of the target in all."""
        later = counts.later @ seconds_at(self.table(run), counts.sizes)
        return self.target_prefill + self._first_drafts(run, counts) + later

    def beside_forwards(self, run: Run, counts: _Counts) -> Reals:
        """(P,) of drafting, beside the draft's forwards themselves."""
        chain = self.chain_round * counts.drafting_rounds if run.drafter == "chain" else 0.0
        return np.asarray(chain + self.rules.get(_rule(run), 0.0) * counts.forwards)

    def _first_drafts(self, run: Run, counts: _Counts) -> Reals:
        """(P,) of the target's first forward: what it takes longer for what was drafted."""
        first = seconds_at(self.table(run), counts.first_drafted + 1)
        return np.asarray(first - self.chain[1])

    def _first_draft(self, run: Run, counts: _Counts) -> Reals:
        """(P,) of the first draft, what it took longer than another; NaN if there was none."""
        drafted = counts.first_forwards > 0
        chain = self.chain_round if run.drafter == "chain" else 0.0
        steps = (self.draft + self.rules[_rule(run)]) * counts.first_forwards
        return np.where(drafted, counts.first_draft - chain - steps, np.nan)

    def _rules(self, ours: Sequence[Run], counts: Mapping[str, _Counts]) -> dict[str, float]:
        seconds: dict[str, float] = {}
        forwards: dict[str, float] = {}
        for run in ours:
            if not run.drafter:
                continue
            each, rule = counts[run.method], _rule(run)
            later = float((each.forwards - each.first_forwards).sum())
            drafting = float((each.drafting_rounds - (each.first_drafted > 0)).sum())
            known = self.draft * later + (run.drafter == "chain") * self.chain_round * drafting
            took = float((each.draft - each.first_draft).sum())
            seconds[rule] = seconds.get(rule, 0.0) + took - known
            forwards[rule] = forwards.get(rule, 0.0) + later
        return {rule: seconds[rule] / n if n else 0.0 for rule, n in forwards.items()}

    def _fit_loop(self, runs: Sequence[Run], counts: Mapping[str, _Counts]) -> Reals:
        """Least squares of what calls took beside forwards, no time below 0."""
        parts, seconds = [], []
        for run in runs:
            if run.drafter == "transformers":
                each = counts[run.method]
                known = self.target(run, each) + self.draft_prefill + self.draft * each.forwards
                parts.append(_loop_parts(each))
                seconds.append(each.seconds - known)
        if not parts:
            return np.zeros(3)
        from scipy.optimize import nnls

        return np.asarray(nnls(np.concatenate(parts), np.concatenate(seconds))[0])


def _as_measured(times: _Times, run: Run, counts: _Counts) -> Priced:
    """Everything but the draft's forwards as this machine takes it."""
    fixed = times.target(run, counts)
    unit = np.zeros_like(fixed)
    if run.drafter:
        drafting = times.draft_prefill + times.draft * counts.forwards
        unit = np.where(counts.forwards > 0, drafting, 0.0) / times.ratio
    if run.drafter == "transformers":
        fixed = fixed + _loop_parts(counts) @ times.loop
    else:
        beside = times.beside_forwards(run, counts) if run.drafter else 0.0
        fixed = fixed + beside + times.rounds[run.drafter, run.verifier] * counts.rounds
    return Priced.of(run, counts, fixed=fixed, unit=unit, ratio=times.ratio)


def _loop_parts(counts: _Counts) -> Reals:
    """(P, 3) calls, rounds and draft forwards."""
    return np.stack([np.ones_like(counts.rounds), counts.rounds, counts.forwards], axis=1)


SHAPES = ("widths", "paths", "path_drafts", "nodes", "depth")
"""Parameters of drafts with several candidates for a position."""


def _rule(run: Run) -> str:
    """Methods that share what a draft forward takes beside the draft's own: one rule, one shape."""
    shape = {name: run.parameters.get(name) for name in SHAPES}
    return f"{run.drafter} {run.stop} {run.head} {shape}"


def _table(counts: Sequence[_Counts]) -> dict[int, float]:
    """Tokens -> mean seconds of the target's later forwards that scored so many."""
    longest = max((each.later.shape[1] for each in counts), default=0)
    rounds, seconds = np.zeros((2, longest))
    for each in counts:
        rounds[: each.later.shape[1]] += each.later.sum(axis=0)
        seconds[: each.later.shape[1]] += each.later_target.sum(axis=0)
    return {n + 1: float(seconds[n] / rounds[n]) for n in range(longest) if rounds[n]}


def _draft_times(ours: Sequence[Run], counts: Mapping[str, _Counts]) -> tuple[float, float] | None:
    """Seconds of a draft forward, and of a chain's round beside them; None if none was run.

    Least squares over the prompts of chains of fixed length, if there are any.
    """
    drafting = [run for run in ours if run.drafter]
    chosen = (
        [run for run in drafting if run.drafter == "chain" and run.fixed_length]
        or [run for run in drafting if run.drafter == "chain"]
        or drafting
    )
    each = [counts[run.method] for run in chosen]
    if not each:
        return None
    forwards = np.concatenate([c.forwards - c.first_forwards for c in each])
    rounds = np.concatenate([c.drafting_rounds - (c.first_drafted > 0) for c in each])
    seconds = np.concatenate([c.draft - c.first_draft for c in each])
    if forwards.sum() == 0 or seconds.sum() <= 0:
        return None
    parts = np.stack([forwards, rounds], axis=1)
    if chosen[0].drafter == "chain" and np.linalg.matrix_rank(parts) == 2:
        from scipy.optimize import nnls

        draft, chain_round = map(float, nnls(parts, seconds)[0])
        if draft > 0:
            return draft, chain_round
    return float(seconds.sum() / forwards.sum()), 0.0


def _rounds(
    ours: Sequence[Run], counts: Mapping[str, _Counts]
) -> dict[tuple[str | None, str | None], float]:
    """By drafter and verifier, seconds of a round beside draft and target."""
    sums: dict[tuple[str | None, str | None], Reals] = {}
    for run in ours:
        each = counts[run.method]
        beside = each.seconds - each.draft - each.target
        own = np.array([beside.sum(), each.rounds.sum()])
        key = run.drafter, run.verifier
        sums[key] = sums.get(key, np.zeros(2)) + own
    return {key: float(seconds / rounds) for key, (seconds, rounds) in sums.items()}


def _mean(values: Sequence[Reals]) -> Reals:
    """(P,) over several; what is not known is left out, 0 where nothing is."""
    stacked = np.stack(values)
    known = ~np.isnan(stacked)
    return np.asarray(np.where(known, stacked, 0.0).sum(axis=0) / known.sum(axis=0).clip(1))
