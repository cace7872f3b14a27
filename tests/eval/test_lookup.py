"""A lookup is what followed the text's last tokens where they stood before, and costs no draft."""

import random
from typing import Any

import pytest
import torch

from eval.decoder import DecodeConfig, SpeculativeDecoder
from eval.drafting.lookup import LookupDrafter
from eval.runtime.batches import drive
from tests.support.block_draft import block_draft
from tests.support.branching import greedy_rounds
from tests.support.families import tiny
from tests.support.tiny import END, tiny_llama


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


LOOKUP = DecodeConfig("naive", drafter="lookup", lookup=4, temperature=0.0)
TREE = DecodeConfig("naive", drafter="dynamic_tree", nodes=4, depth=3, lookup=4, temperature=0.0)
PAIR = DecodeConfig("token", length=2, lookup=4, temperature=0.0)
PLACED = ("bloom", "mpt", "minimax_m3_vl_text")
NO_TREES = (*PLACED, pytest.param("qwen3_next", marks=pytest.mark.slow))


def looked_up(target: Any, draft: Any, config: DecodeConfig) -> None:
    """Whether a text that repeats itself is looked up in the first round, and goes on as plain."""
    target.generation_config.eos_token_id = None
    prompt, texts = torch.tensor([5, 6, 7, 8] * 14), []
    for each in (DecodeConfig(temperature=0.0), config):
        decoder = SpeculativeDecoder.from_config(target, draft if each is config else None, each)
        texts.append(decoder.generate(prompt, max_new_tokens=24, generator=torch.Generator()))
    assert texts[0].tokens.tolist() == texts[1].tokens.tolist()
    assert texts[1].rounds[0].drafted == 4


@pytest.mark.parametrize("kind", NO_TREES)
def test_what_reads_no_tree_is_given_lookups(kind: str) -> None:
    looked_up(tiny(kind, 2, layers=4), None, LOOKUP)


@pytest.mark.parametrize("config", [TREE, PAIR], ids=["tree", "chain"])
@pytest.mark.parametrize("kind", ["gpt2", "blocks"])
def test_lookups_are_as_long_as_asked_for_whatever_a_draft_reads(
    kind: str, config: DecodeConfig
) -> None:
    """A draft of fewer positions than the text has, and one in blocks, on the target's states."""
    target = tiny_llama(2, vocab=40, layers=3)
    gpt2 = tiny("gpt2", 1, n_positions=32, n_embd=16)
    looked_up(target, gpt2 if kind == "gpt2" else block_draft(target, size=3), config)
