"""Every stopping rule by name, and how a rule is read from flat settings.

To add one: write a frozen class with its own parameters, what it needs, and `start`, which returns
what is asked after each drafted token (`rule.py` has the contract, `thresholds.py` the shortest
examples); then add its line to `STOPPING_RULES`. Configuration, decoder, replay, results and report
find the rest in the class: its name, its parameters as keys beside `stop:`, whether it needs a
head, labels or times. Tests drive every entry by the examples of its class.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any

from pydantic import ValidationError
from pydantic_core import InitErrorDetails, PydanticCustomError

from eval.drafting.stopping.cost import Cost
from eval.drafting.stopping.logistic import Logit
from eval.drafting.stopping.recorded import Reals, RecordedTokens
from eval.drafting.stopping.rule import ActiveRule, DraftedToken, StoppingRule
from eval.drafting.stopping.thresholds import Confidence, Cumulative, Entropy, Fixed, HeadThreshold
from specdata.config import nearest

__all__ = ["STOPPING_RULES", "ActiveRule", "DraftedToken", "StoppingRule", "fit_rules", "read_rule"]

STOPPING_RULES: dict[str, type[StoppingRule]] = {
    rule.name: rule
    for rule in (
        Fixed,  # always the same number of tokens
        Confidence,  # the draft's probability of a token is low
        Entropy,  # the draft's distribution is uncertain
        Cumulative,  # the draft's probabilities multiply to little
        Logit,  # a logistic model of the draft's confidence predicts a rejection
        HeadThreshold,  # an acceptance head predicts a rejection (SpecDec++)
        Cost,  # another token costs more than it is expected to save
    )
}
"""Name -> class of every rule that ends chains."""


def read_rule(
    stop: Any, parameters: Mapping[str, Any], *, known: Collection[str], strict: bool
) -> StoppingRule:
    """The rule that flat settings ask for; ValidationError has each mistake under its own key.

    Args:
        stop: the rule's name, or a rule whose parameters are already in it.
        parameters: settings that belong to no other part of the configuration.
        known: names of the settings of other parts, for the hint at an unknown name.
        strict: refuse (ValueError) a parameter that only other rules have. Otherwise it is ignored,
            so that one call can name the parameters of several rules.
    """
    rule = stop if isinstance(stop, StoppingRule) else None
    kind = STOPPING_RULES.get(str(stop)) if rule is None else type(rule)
    if kind is None:
        names = ", ".join(STOPPING_RULES)
        raise _mistakes({"stop": f"unknown stop {stop!r}; choose from {names}"}, {"stop": stop})
    of_rules = {name for each in (*STOPPING_RULES.values(), kind) for name in each.model_fields}
    if unknown := [name for name in parameters if name not in of_rules]:
        keys = [*known, *sorted(of_rules)]
        hints = {name: f"unknown key: {nearest(name, keys)}" for name in unknown}
        raise _mistakes(hints, parameters)
    fields = kind.model_fields if rule is None else ()
    unread = [name for name in parameters if name not in fields]
    if strict and unread:
        raise ValueError(f"stop {kind.name} does not use {', '.join(unread)}")
    return rule or kind.model_validate({n: v for n, v in parameters.items() if n in fields})


def fit_rules(
    rules: Iterable[StoppingRule], tokens: RecordedTokens, accept: Reals
) -> dict[str, Any]:
    """Values of every parameter that a rule needs fitted, each fitted once (`StoppingRule.fit`)."""
    values: dict[str, Any] = {}
    for rule in rules:
        if rule.needs_fit and not values.keys() >= set(rule.fitted):
            values |= rule.fit(tokens, accept)
    return values


def _mistakes(messages: Mapping[str, str], values: Mapping[str, Any]) -> ValidationError:
    """An error with a message for each key, to which pydantic adds where the rule stands."""
    details: list[InitErrorDetails] = [
        {
            "type": PydanticCustomError("value_error", "{message}", {"message": message}),
            "loc": (name,),
            "input": values[name],
        }
        for name, message in messages.items()
    ]
    return ValidationError.from_exception_data("stopping rule", details)
