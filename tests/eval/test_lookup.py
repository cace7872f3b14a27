"""A lookup is what followed the text's last tokens where they stood before, and costs no draft."""

from __future__ import annotations

import random

import pytest
import torch

from eval.decoder import DecodeConfig
from eval.drafting.lookup import LookupDrafter
from eval.runtime.batches import drive
from tests.support.branching import greedy_rounds
from tests.support.tiny import END


def expected(text: list[int], count: int, match: int) -> list[int]:
    """The definition: the latest earlier place, and a repetition that goes on."""
    places = [at for at in range(match, len(text)) if text[at - match : at] == text[-match:]]
    copied = list(text)
    while places and len(copied) < len(text) + count:
        copied.append(copied[places[-1] + len(copied) - len(text)])
        if copied[-1] == END:
            break
    return copied[len(text) :]


@pytest.mark.parametrize("match", [1, 2, 3])
def test_a_lookup_is_what_followed_the_latest_occurrence_of_the_last_tokens(match: int) -> None:
    """While the text grows, within the room, up to an end token, and after another text."""
    draws, found = random.Random(match), 0
    drafter = LookupDrafter(4, match, 5, torch.device("cpu"), frozenset([END]), None)
    for _ in range(20):
        drafter.reset()
        text = [draws.choice((0, 2, 3, 4))]
        while len(text) < 24:
            text += draws.choices(range(5), k=draws.randint(1, 3))
            for room in (0, 2, 9):
                tree = drive(drafter.propose(text, room, torch.Generator())).checked()
                assert tree.token_list == expected(text, min(4, room), match)
                assert tree.kind == "chain"
                found += len(tree) > 1
            drafter.accept([])
    assert found > 20


def test_greedy_text_is_that_of_generate_and_lookups_save_rounds() -> None:
    lookup = {"lookup": 4, "match": 1, "temperature": 0.0}
    alone = greedy_rounds(DecodeConfig("naive", drafter="lookup", **lookup))
    assert alone < 4 * 24
    chain = DecodeConfig("token", length=2, temperature=0.0)
    assert greedy_rounds(chain.replace(**lookup)) < greedy_rounds(chain)
