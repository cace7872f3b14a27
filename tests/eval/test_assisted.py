"""transformers' own assisted generation as a method: a fixed length, or its threshold."""

from typing import Any

import torch

from eval.decode_config import Method
from eval.decoder import DecodeConfig, SpeculativeDecoder
from eval.drafting.stopping.thresholds import Confidence, Fixed
from eval.measuring.assisted import assisted_generate
from eval.measuring.methods import EvalConfig, check_methods
from eval.rounds import Generation
from specdata.config import PromptSet, read_config
from specdata.probability import SamplingConfig
from tests.support.tiny import tiny_llama

SAMPLING = SamplingConfig()


def generated(threshold: float, seed: int, read: list[torch.Tensor] | None = None) -> Generation:
    """A text of a tiny pair; what each forward of the target read is appended to `read`."""
    target, draft = tiny_llama(0, vocab=12).float(), tiny_llama(1, vocab=12).float()
    if read is not None:
        target.register_forward_pre_hook(
            lambda _module, _args, kwargs: read.append(kwargs["input_ids"]), with_kwargs=True
        )
    return assisted_generate(
        target,
        draft,
        torch.tensor([2, 5, 3]),
        length=6,
        threshold=threshold,
        sampling=SAMPLING,
        max_new_tokens=24,
        seed=seed,
    )


def test_its_threshold_ends_drafts_and_without_one_all_have_the_full_length() -> None:
    drafted = {
        threshold: [turn.drafted for seed in range(5) for turn in generated(threshold, seed).rounds]
        for threshold in (0.0, 0.3, 1.0)
    }
    # Others end with the budget or an end token.
    assert drafted[0.0].count(6) > len(drafted[0.0]) / 3
    assert set(drafted[1.0]) <= {0, 1}
    assert 1.0 < sum(drafted[0.3]) / len(drafted[0.3]) < 4.0
    assert len(set(drafted[0.3])) > 2


def test_accepted_tokens_are_those_that_were_drafted_also_where_the_target_ends_the_text() -> None:
    by_target = by_draft = 0
    for seed in range(30):
        read: list[torch.Tensor] = []
        made, start = generated(0.0, seed, read), 0
        for turn, ids in zip(made.rounds, read, strict=True):
            emitted = made.tokens[start : start + turn.emitted].tolist()
            drafted = ids[0, ids.shape[1] - turn.drafted :].tolist()
            assert drafted[: turn.accepted] == emitted[: turn.accepted]
            assert turn.emitted - turn.accepted in (0, 1)
            start += turn.emitted
        last = made.rounds[-1]
        if made.finish == "eos":
            by_target += last.emitted > last.accepted
            by_draft += last.emitted == last.accepted
    assert by_target > 2
    assert by_draft > 2


def test_alone_and_with_a_lookup_of_what_followed_before_it_writes_the_targets_own_text() -> None:
    target, prompt = tiny_llama(0, vocab=12).float(), torch.tensor([2, 5, 3, 7] * 4)
    asked: dict[str, Any] = {"length": 6, "max_new_tokens": 24, "seed": 0}
    asked["sampling"] = SamplingConfig(temperature=0.0)
    alone, looked = (assisted_generate(target, None, prompt, lookup=n, **asked) for n in (0, 3))
    decoder = SpeculativeDecoder.from_config(target, None, DecodeConfig(temperature=0.0))
    expected = decoder.generate(prompt, max_new_tokens=24, generator=torch.Generator())
    assert looked.tokens.tolist() == alone.tokens.tolist() == expected.tokens.tolist()
    assert [(turn.drafted, turn.emitted) for turn in alone.rounds] == [(0, 1)] * 24
    drafted = [turn.drafted for turn in looked.rounds]
    assert drafted[0] == max(drafted) == 3
    assert sum(turn.emitted for turn in looked.rounds) == 24
    assert all(turn.draft_forwards == 0 for turn in looked.rounds)


def test_a_threshold_means_the_rule_of_confidence_and_transformers_own_limit() -> None:
    made, fixed = (
        read_config(Method, {"name": name, "decoder": "assisted", name: value})
        for name, value in (("threshold", 0.4), ("length", 8))
    )
    assert made.stop == Confidence(threshold=0.4, limit=20)
    assert fixed.stop == Fixed(length=8)
    plain = Method(name="plain", decoder="plain")
    both = EvalConfig(sets=[PromptSet("maths", "test", 1)], methods=[plain, made, fixed])
    check_methods(both, SAMPLING, head=False)
