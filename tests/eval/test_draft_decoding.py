"""Drafts on states, in masks or blocks: a round drafts as defined, the text stays the target's."""

from collections import Counter
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from distill.drafts.masks import check_masks
from eval.decoder import DecodeConfig, Generation, SpeculativeDecoder
from eval.drafting import drafters
from eval.verifiers import rule
from eval.verifiers.rule import Rng, outcomes
from heads import AcceptanceHead, ImmediateHead
from heads.probe import check_head
from specdata import probability
from specdata.errors import ConfigError
from tests.support.decoder import PROMPT
from tests.support.families import tiny
from tests.support.states_draft import DRAFTED, decoded_as_defined, pair
from tests.support.tiny import joint_distribution

FEW = {"greedy_block", "traversal", "dynamic tree", "lookup, chain"}
# The other verifiers' laws over rounds are those of `test_branching`, whatever a draft reads.
EVERY = [
    *((name, kind) for name in sorted(FEW) for kind in ("states", "masks", "blocks", "mtp")),
    *(
        pytest.param(name, "states", marks=pytest.mark.exhaustive)
        for name in sorted(DRAFTED.keys() - FEW)
    ),
]
# Whole decoders are enumerated in seconds each; a kind's own forwards are those of one draft.
LAWS = [*((name, "states") for name in sorted(FEW)), ("traversal", "masks")]
LAWS += [("greedy_block", "blocks"), ("greedy_block", "mtp"), ("traversal", "short")]


@pytest.mark.parametrize(("name", "kind"), EVERY)
def test_what_is_drafted_depends_on_the_text_and_the_path_alone(name: str, kind: str) -> None:
    """In every round: states of accepted tokens are the target's, and later ones the draft's."""
    tolerance = 1e-6 if kind == "mtp" else 1e-9  # experts are chosen and weighed in float32
    decoded_as_defined(*pair(40, kind), DRAFTED[name], PROMPT, tolerance)


@pytest.mark.parametrize(("name", "kind"), [*LAWS, *EVERY[4 * len(FEW) :]])
def test_the_joint_distribution_over_rounds_is_that_of_plain_sampling(
    name: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By enumeration: the whole decoder is run for every outcome of every draw, over all rounds.

    Of a draft with few positions, too, which the last rounds go on without.
    """
    target, draft = pair(3, kind)
    small: dict[str, Any] = {"nodes": 2, "depth": 2}
    small |= {"widths": (2, 1)} if DRAFTED[name].drafter == "tree" else {}
    small |= {"paths": 2} if DRAFTED[name].drafter == "paths" else {}
    config = DRAFTED[name].model_copy(update=small)
    decoder = SpeculativeDecoder.from_config(target, draft, config)
    text, rounds = torch.tensor(PROMPT) % 3, 0
    length = 3 if config.drafter in {"tree", "paths"} else 4  # these drafts are many

    def decoded(rng: Rng) -> tuple[int, ...]:
        def drawn(probs: Tensor, count: int, _: object) -> list[int]:
            return [rng.categorical(probs.tolist()) for _ in range(count)]

        with monkeypatch.context() as scripted:
            for module in (probability, drafters):
                scripted.setattr(module, "draw_several", drawn)
            scripted.setattr(rule, "GeneratorRng", lambda _: rng)
            out = decoder.generate(text, max_new_tokens=length, generator=torch.Generator())
        nonlocal rounds
        rounds = max(rounds, len(out.rounds))
        return tuple(out.tokens.tolist())

    found: Counter[tuple[int, ...]] = Counter()
    for weight, tokens in outcomes(decoded):
        found[tokens] += weight  # type: ignore[assignment]
    plain = joint_distribution(target, text.tolist(), length, config.sampling)
    assert rounds >= (2 if kind == "short" else 3)
    assert found == pytest.approx(plain, rel=1e-9)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        *((name, "states") for name in sorted(FEW)),
        ("traversal", "masks"),
        ("greedy_block", "blocks"),
        ("traversal", "mtp"),
    ],
)
def test_batches_and_engines_decode_as_one_sequence_does(name: str, kind: str) -> None:
    target, draft = pair(40, kind)
    prompts = [torch.tensor([2, 5, 9 + n, 3][: 1 + n]) for n in range(4)]

    def decoded(engine: Any, size: int | None = None) -> list[list[int]]:
        decoder = SpeculativeDecoder.from_config(target, draft, DRAFTED[name], engine=engine)
        draws = [torch.Generator().manual_seed(n) for n in range(4)]
        if size is None:
            made: Iterable[Generation] = (
                decoder.generate(prompt, max_new_tokens=16, generator=draw)
                for prompt, draw in zip(prompts, draws, strict=True)
            )
        else:
            made = decoder.generate_batch(prompts, max_new_tokens=16, generators=draws, size=size)
        return [out.tokens.tolist() for out in made]

    alone = decoded("eager")
    assert decoded("eager", size=3) == alone
    if kind == "mtp":  # its experts are chosen by the tokens, which no graph can
        return
    assert decoded("captured") == decoded("captured", size=3) == alone


def test_masks_are_of_drafts_and_may_stand_behind_the_last_position() -> None:
    target, draft = pair(40, "masks")
    learnt = tiny("gpt2", 0, n_positions=24, depths=8, pard_token=39)
    check_masks(learnt, 24)
    prompt = torch.tensor(PROMPT)

    def decoded(*models: PreTrainedModel) -> list[int]:
        config = DecodeConfig(temperature=0.0, length=4)
        decoder = SpeculativeDecoder.from_config(*models, config)
        generator = torch.Generator().manual_seed(0)
        room = 24 - len(PROMPT)
        return decoder.generate(prompt, max_new_tokens=room, generator=generator).tokens.tolist()

    plain = decoded(target, draft)
    assert plain == decoded(target, learnt)
    target.config.depths, target.config.pard_token = 3, 39  # as a draft that is decoded itself
    assert plain == decoded(target, draft)


def test_a_head_that_judges_by_the_state_after_a_token_is_refused_where_there_is_none() -> None:
    _, draft = pair(40, "masks")
    check_head(draft, ImmediateHead(hidden_size=16))
    with pytest.raises(ConfigError, match=r"after masks .* there is none"):
        check_head(draft, AcceptanceHead(hidden_size=16))
