"""Expected tokens of a round, read off the target's text: exact where every text is enumerated."""

from typing import get_args

import pytest
import torch
from torch import Tensor

from eval.verifiers import VERIFIERS
from specdata.expected_tokens import Verification, expected_tokens, log_ratios
from tests.support.oracles import (
    Prefix,
    TabularModel,
    chain_drafts,
    continuations,
    random_model,
    target_rows,
)

END = 0
VERIFICATIONS = get_args(Verification)


def ratios_of(text: Prefix, p: TabularModel, q: TabularModel) -> Tensor:
    """(1, T) log ratios of a text's tokens."""
    p_at, q_at = (
        torch.stack([model[text[:place]][token] for place, token in enumerate(text)])
        for model in (p, q)
    )
    return log_ratios(p_at, q_at).unsqueeze(0)


def estimate(text: Prefix, p: TabularModel, q: TabularModel, k: int, how: Verification) -> float:
    """Of a round that starts with the text's first token."""
    emitted = expected_tokens(ratios_of(text, p, q), torch.tensor([len(text)]), k, how)
    return float(emitted[0, 0])


def texts(p: TabularModel, limit: int) -> list[tuple[float, Prefix]]:
    """Every text of the target: up to an end token, or as long as it may be."""
    merged: dict[Prefix, float] = {}
    for weight, tokens in continuations(p, limit):
        text = tokens[: tokens.index(END) + 1] if END in tokens else tokens
        merged[text] = merged.get(text, 0.0) + weight
    return [(weight, text) for text, weight in merged.items()]


@pytest.mark.parametrize("verification", VERIFICATIONS)
@pytest.mark.parametrize("zeros", [0.0, 0.4])
@pytest.mark.parametrize("k", [1, 2, 4])
def test_its_mean_over_the_targets_texts_is_what_rounds_of_the_verifier_emit(
    verification: Verification, zeros: float, k: int
) -> None:
    """A draft ends with an end token, after which nothing is emitted, and before the limit.

    Also where the draft cannot propose what the target writes, and the other way round.
    """
    limit = 4
    p, q = random_model(3, limit, 21, zeros), random_model(3, limit, 22, zeros)
    estimated = sum(
        weight * estimate(text, p, q, k, verification) for weight, text in texts(p, limit)
    )
    emitted = 0.0
    ends = chain_drafts(q, min(k, limit - 1), lambda drafted: drafted[-1:] == (END,))
    for weight, tree in ends:
        verdict = VERIFIERS[verification].make()(tree, target_rows(tree, p))
        for accepted, chance in enumerate(verdict.stop.tolist()):
            has_ended = accepted > 0 and tree.token_list[accepted - 1] == END
            emitted += weight * chance * (accepted + 1 - has_ended)
    assert estimated == pytest.approx(emitted, abs=1e-12)


def test_tokens_that_one_model_gives_nothing() -> None:
    p, q = torch.tensor([0.5, 0.5, 0.0, 0.0]), torch.tensor([0.25, 0.0, 0.5, 0.0])
    ratios = log_ratios(p, q)
    assert ratios[:2].tolist() == [pytest.approx(-0.6931472), float("-inf")]
    assert ratios[2:].tolist() == [0.0, float("-inf")]  # written at the edge of a truncation
    for how in VERIFICATIONS:
        emitted = expected_tokens(ratios.roll(1).unsqueeze(0), torch.tensor([4]), 3, how)
        assert emitted.isfinite().all()
        assert float(emitted[0, 0]) == 1  # nothing is accepted after what cannot be proposed
