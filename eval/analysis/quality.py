"""How good a head's probabilities are on held-out labels, and what stopping by them saves.

Rivals are fitted, and settings chosen, on dev rollouts; all are judged on test rollouts, which
neither draft nor head was trained on. The result is one value, `Quality`, kept in a file.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from pydantic import ValidationError

from eval.analysis.choice import DevChoice, choose
from eval.analysis.expectation import Traces
from eval.analysis.prediction import Bin, Ids, Scores, Tokens, reliability, scores
from eval.analysis.replay import fit_rules, replay_rules
from eval.analysis.rivals import HEAD, Replayed, compare, prompt_sets
from eval.drafting.stopping.calibration import Calibration, fit_logistic
from eval.drafting.stopping.margin import UNFITTED
from eval.drafting.stopping.numbers import Network, recorded_numbers
from eval.drafting.stopping.recorded import Reals
from eval.measuring.records import Strict
from eval.measuring.results import Results
from specdata.storage.files import write_json

if TYPE_CHECKING:  # a rerun with nothing to do reads this without torch
    import datasets
    from transformers import PreTrainedModel

    from heads import BaseHead
    from specdata.sampling import SamplingConfig

SCHEMA_VERSION: Literal[1] = 1
KNOWN_BEFORE = ("margin", "logit", "constant")
"""Rivals that predict before a token is drawn."""
QUALITY = "quality.json"
PLACES = (1, 2, 4, 8, 16)
"""Positions in a draft that are looked at."""
ROLLOUTS = 512
"""Most rollouts of a prompt set and split that are read."""
Moment = Literal["before", "drawn", "consumed"]


class PositionScores(Strict):
    """How tokens at the positions `first` to `last`, from 1, are predicted."""

    first: int
    last: int
    scores: Scores


class Prediction(Strict):
    """What predicts acceptance, on one prompt set, and how well.

    Attributes:
        domain: the prompt set; `ALL` for all together.
        predictor: "head", or a rival: "constant" (the mean label of dev), "logit", "margin",
            "numbers", each fitted on dev, or "cumulative" (q of the token itself).
        moment: what is known of the token: "before" it is drawn, when the label is the ex-ante
            sum of min(p, q); "drawn"; or "consumed" by the draft, one drafted token later. Then the
            label is min(1, p/q).
        scores: over all tokens.
        reliability: the bins of its reliability diagram.
        positions: the same scores by position in the rollout.
        places: the same by position in a draft, where drafts begin at every position of a rollout
            and a token counts with the chance that those before it in its draft were accepted.
    """

    domain: str
    predictor: str
    moment: Moment
    scores: Scores
    reliability: list[Bin]
    positions: list[PositionScores]
    places: list[PositionScores]


class Quality(Strict):
    """The whole file.

    Attributes:
        made_of: what it was made of, by name -> contents; see `Quality.read`.
        judged_on: the split that figures are of: test, or dev where labels have no test rollouts,
            so that rivals and settings look better than they are.
        rollouts: split -> how many were read.
        predictions: one for each prompt set, predictor and moment.
        replay: what stopping by the head saves; None if no times were measured.
        choice: what the evaluation's methods cost on dev rollouts; likewise.
    """

    schema_version: Literal[1]
    made_of: dict[str, str | None]
    judged_on: Literal["test", "dev"]
    rollouts: dict[str, int]
    predictions: list[Prediction]
    replay: Replayed | None
    choice: DevChoice | None

    def domains(self) -> list[str]:
        """`ALL` first, if there are several prompt sets, then each."""
        return list(dict.fromkeys(each.domain for each in self.predictions))

    def of(self, domain: str, moment: Moment | None = None) -> list[Prediction]:
        """The predictions of one prompt set, at one moment or at all."""
        return [p for p in self.predictions if p.domain == domain and moment in (None, p.moment)]

    def write(self, path: Path) -> None:
        """Write it, whole or not at all."""
        write_json(path, self.model_dump(mode="json"))

    @classmethod
    def read(cls, path: Path, made_of: Mapping[str, str | None]) -> Quality | None:
        """A stored value; None if there is none that was made of this, by this version."""
        try:
            stored = cls.model_validate_json(path.read_bytes())
        except (FileNotFoundError, ValidationError):
            return None
        return stored if stored.made_of == dict(made_of) else None


def head_quality(
    labels: datasets.Dataset,
    draft: PreTrainedModel,
    head: BaseHead,
    *,
    sampling: SamplingConfig,
    results: Results,
    made_of: Mapping[str, str | None],
) -> Quality | None:
    """Judge a head by labels.

    Args:
        labels: of all splits.
        draft: the draft that made them.
        head: a head of this draft.
        sampling: how the draft's tokens were drawn.
        results: an evaluation of this head, whose times and methods are used.
        made_of: contents of what goes in; stored with the result.

    Returns:
        None if there are no dev rollouts.
    """
    from eval.analysis.traces import acceptance_traces

    rows = {split: _rows(labels, split) for split in ("dev", "test")}
    if not len(rows["dev"]):
        return None
    split = "test" if len(rows["test"]) else "dev"
    traces = {
        name: acceptance_traces(rows[name], draft=draft, sampling=sampling, head=head)
        for name in dict.fromkeys(("dev", split))
    }
    return judged_quality(
        traces["dev"],
        traces.get("test"),
        prompts=rows[split]["example_id"][:],
        names=rows[split]["dataset"][:],
        choice=choose(results, traces["dev"], rows["dev"]["dataset"][:]),
        made_of=made_of,
    )


def judged_quality(
    dev: Traces,
    test: Traces | None,
    *,
    prompts: Sequence[str],
    names: Sequence[str],
    choice: DevChoice | None,
    made_of: Mapping[str, str | None],
) -> Quality:
    """Judge a head by traces that it was recorded in.

    Args:
        dev: what rivals are fitted and settings chosen on.
        test: what is judged on; None judges on dev.
        prompts: which prompt each rollout is of that is judged on.
        names: its prompt set.
        choice: what the methods of an evaluation cost on dev, and the times that it measured.
        made_of: as in `head_quality`.
    """
    judged = dev if test is None else test
    fitted = fit_rules(dev)
    splits = {"dev": dev} if test is None else {"dev": dev, "test": test}
    return Quality(
        schema_version=SCHEMA_VERSION,
        made_of=dict(made_of),
        judged_on="dev" if test is None else "test",
        rollouts={name: len(traces.accept) for name, traces in splits.items()},
        predictions=list(_predictions(dev, judged, fitted, prompts, names)),
        replay=_replayed(dev, judged, fitted, prompts, names, choice),
        choice=choice,
    )


def _rows(labels: datasets.Dataset, split: str) -> datasets.Dataset:
    """The first `ROLLOUTS` of each prompt set in a split."""
    seen: dict[str, int] = {}
    kept = []
    for index, (name, of) in enumerate(zip(labels["dataset"], labels["split"], strict=True)):
        if of == split and seen.get(name, 0) < ROLLOUTS:
            seen[name] = seen.get(name, 0) + 1
            kept.append(index)
    return labels.select(kept)


def _predictions(
    dev: Traces,
    judged: Traces,
    fitted: Mapping[str, Any],
    prompts: Sequence[str],
    names: Sequence[str],
) -> Iterator[Prediction]:
    """Every predictor on every prompt set."""
    inside, predictors = judged.inside, list(_predictors(dev, judged, fitted))
    position = np.broadcast_to(np.arange(inside.shape[1]), inside.shape)
    chances = _chances(judged)
    # Rollouts of one prompt are resampled together.
    numbers = np.unique(prompts, return_inverse=True)[1].astype(np.int64)
    prompt = np.broadcast_to(numbers[:, None], inside.shape)
    for domain, rows in prompt_sets(names).items():
        chosen = inside & rows[:, None]
        for each in predictors:
            values, label = each.predicted[chosen], each.label[chosen]
            tokens = Tokens.of(label, prompt[chosen])
            yield Prediction(
                domain=domain,
                predictor=each.name,
                moment=each.moment,
                scores=scores(tokens, values),
                reliability=reliability(tokens, values),
                positions=list(_by_position(label, prompt[chosen], values, position[chosen])),
                places=[
                    PositionScores(first=place, last=place, scores=_at(each, place, there, prompt))
                    for place, chance in chances.items()
                    if (there := np.where(chosen, chance, 0.0)).any()
                ],
            )


def _chances(judged: Traces) -> dict[int, Reals]:
    """Position in a draft, from 1 -> (R, N) the chance that a token is drafted there and judged."""
    chance, chances = np.where(judged.inside, 1.0, 0.0), {}
    for place in range(1, PLACES[-1] + 1):
        chances[place] = chance
        further = (chance * judged.accept)[:, :-1]  # for the token after it
        chance = np.where(judged.inside, np.pad(further, ((0, 0), (1, 0))), 0.0)
    return {place: chances[place] for place in PLACES}


def _by_position(
    label: Reals, prompt: Ids, predicted: Reals, position: Ids
) -> Iterator[PositionScores]:
    """Positions 1, 2, 3 to 4, 5 to 8 and so on."""
    first, end = 0, int(position.max()) + 1
    while first < end:
        last = min(max(2 * first, first + 1), end)
        chosen = (position >= first) & (position < last)
        judged = scores(Tokens.of(label[chosen], prompt[chosen]), predicted[chosen])
        yield PositionScores(first=first + 1, last=last, scores=judged)
        first = last


def _at(predictor: _Predictor, place: int, chance: Reals, prompt: Ids) -> Scores:
    """Tokens at a position in a draft."""
    chosen = chance > 0.0
    tokens = Tokens.of(predictor.label[chosen], prompt[chosen], chance[chosen])
    return scores(tokens, predictor.at(place)[chosen])


@dataclass(frozen=True, slots=True)
class _Predictor:
    """Predictions and labels, both (R, N).

    Attributes:
        at_places: predictions where they depend on the position in the draft: from 1 on, the last
            for all further ones.
    """

    name: str
    moment: Moment
    predicted: Reals
    label: Reals
    at_places: Sequence[Reals] = ()

    def at(self, place: int) -> Reals:
        """The predictions at a position in a draft."""
        return (
            self.at_places[min(place, len(self.at_places)) - 1]
            if self.at_places
            else self.predicted
        )


def _predictors(dev: Traces, judged: Traces, fitted: Mapping[str, Any]) -> Iterator[_Predictor]:
    """The head at its moments, and its rivals at those at which there is something to predict."""
    head, mean = judged.tokens.head, judged.overlap
    assert head is not None
    ex_post: tuple[tuple[Moment, Reals | None], ...]
    ex_post = ("drawn", head.drawn), ("consumed", head.consumed)
    for moment, logits in ex_post:
        if logits is not None:
            predicted = head.probabilities(logits, calibrated=True)
            yield _Predictor(HEAD, moment, predicted, judged.accept)
    yield from (rivals := _rivals(dev, judged, fitted))
    if head.before is not None and mean is not None:
        yield _Predictor(HEAD, "before", head.probabilities(head.before, calibrated=True), mean)
        for rival in rivals:
            if rival.name in KNOWN_BEFORE:
                yield replace(rival, moment="before", label=mean)


def _rivals(dev: Traces, judged: Traces, fitted: Mapping[str, Any]) -> list[_Predictor]:
    """What needs no head, fitted on dev.

    Along a rollout there is no position in a draft, so the margin has one model for all there.
    """
    from scipy.special import expit

    tokens, inside = judged.tokens, dev.inside
    made: dict[str, Reals] = {}
    places: dict[str, Sequence[Reals]] = {}
    if dev.tokens.margin is not None and tokens.margin is not None:
        margins = dev.tokens.margin[inside]
        pooled = fit_logistic(dev.accept[inside], margins, prior=UNFITTED)
        made["margin"], *places["margin"] = (
            np.asarray(expit(intercept + slope * tokens.margin))
            for intercept, slope in (pooled, *fitted["coefficients"])
        )
    made["logit"] = Calibration(*fitted["calibration"]).accept_all(tokens.q_max)
    made["cumulative"] = tokens.q
    numbers = recorded_numbers(tokens)
    if numbers is not None and "network" in fitted:
        made["numbers"] = Network.read(fitted["network"]).accept(numbers)
    made["constant"] = np.full_like(judged.accept, dev.mean_accept())
    return [
        _Predictor(name, "drawn", predicted, judged.accept, places.get(name, ()))
        for name, predicted in made.items()
    ]


def _replayed(
    dev: Traces,
    judged: Traces,
    fitted: Mapping[str, Any],
    prompts: Sequence[str],
    names: Sequence[str],
    choice: DevChoice | None,
) -> Replayed | None:
    """The head's rule against its rivals, at the times that the evaluation measured."""
    if choice is None:
        return None
    t_d, t_t = choice.draft_seconds, choice.target_seconds
    on_dev, on_judged = (
        replay_rules(traces, fitted, draft_seconds=t_d, target_seconds=t_t)
        for traces in (dev, judged)
    )
    return compare(on_dev, on_judged, prompts, names, draft_seconds=t_d, target_seconds=t_t)
