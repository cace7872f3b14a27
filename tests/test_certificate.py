"""The certificate of exactness: sound decoders get it, a wrong one does not."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from torch import Tensor

from eval.analysis.certificate import (
    BINS,
    DEVIATION,
    LEVEL,
    POWER,
    Certificate,
    Certified,
    certify,
    enumerate_verifier,
    two_sample_test,
    ways,
)
from eval.decode_config import DecodeConfig
from eval.measuring.experiment import Artefacts
from eval.measuring.methods import EvalConfig, MethodConfig
from eval.runtime.model import CachedModel
from eval.verifiers.rule import Candidates, Rng, Verifier, walk
from recipes.certify import main
from recipes.config import build
from recipes.layout import CERTIFICATE
from recipes.run_eval import RECIPE
from specdata.prompts.config import PromptSet
from specdata.sampling import SamplingConfig
from tests.synthetic_results import ENVIRONMENT
from tests.test_branching import CASES
from tests.tiny import tiny_llama

PROMPTS = [[2 + start, 5, start + 7] for start in range(6)]


@pytest.mark.parametrize("name", CASES)
def test_every_lossless_verifier_is_exact_at_positions_of_a_pair(name: str) -> None:
    config = CASES[name]
    pair = (CachedModel(tiny_llama(seed), 4) for seed in (0, 1))
    found = enumerate_verifier(config, *pair, [[2, 3], [3, 2, 0]], likeliest=2)
    assert (found.drafts, found.outcomes) == (config.kind, 3)
    assert found.total_variation < DEVIATION


def accepts_too_much(p: Tensor, candidates: Candidates, rng: Rng) -> int | Tensor:
    """A defect: token verification with the chance of acceptance doubled."""
    if rng.bernoulli(2 * candidates.p[0] / candidates.q[0]):
        return 0
    residual = (p - candidates.distributions[0]).clamp(min=0)
    return residual / residual.sum()


class Lenient(DecodeConfig):
    def make_verifier(self) -> Verifier:
        return replace(super().make_verifier(), rule=walk(accepts_too_much))


class LenientMethod(MethodConfig):
    def decoding(self, sampling: SamplingConfig) -> DecodeConfig:
        return Lenient(**super().decoding(sampling).model_dump())


def certified(*methods: MethodConfig) -> Certificate:
    pair = (tiny_llama(seed, vocab=40) for seed in (0, 1))
    return certify(
        Artefacts(*pair, None, {"target": "big", "draft": "small", "head": None}),
        methods,
        PROMPTS,
        SamplingConfig(),
        ENVIRONMENT,
        texts=100,
        max_new_tokens=16,
        seed=0,
    )


@pytest.mark.slow
def test_a_decoder_that_accepts_too_much_fails_and_a_sound_one_does_not() -> None:
    """Enumerated and sampled; of greedy texts doubled acceptance changes nothing."""
    uno = MethodConfig(name="uno", verifier="biased_uno", verifier_args={"epsilon": 0.5})
    found = certified(
        MethodConfig(name="sound"),
        MethodConfig(name="block", verifier="block", stop="confidence"),
        LenientMethod(name="wrong"),
        uno,
    )
    sound, block, wrong, biased = found.methods
    for each in (sound, block):
        assert each.is_exact
        assert each.greedy is not None
        assert each.greedy.identical == len(PROMPTS)
    assert not wrong.is_exact
    assert wrong.enumerated.total_variation > 0.05
    assert wrong.sampled is not None
    assert wrong.sampled.p_value < LEVEL
    assert not found.is_kept
    assert "NOT EXACT: wrong (total variation" in found.sentence
    assert not biased.is_exact
    assert not biased.lossless
    assert f"Biased: uno (total variation {biased.enumerated.total_variation:.3g}" in found.sentence
    kept = found.model_copy(update={"methods": [sound, block, biased]})
    assert kept.is_kept, "a verifier that is said to be biased breaks no promise"
    assert kept.sentence.startswith("Exact: token (chain), block (chain).")
    assert Certificate.model_validate_json(found.model_dump_json()) == found


def test_a_bias_of_the_stated_size_is_seen_with_the_stated_power() -> None:
    """The hardest bias of that size: it moves every cell alike."""
    rng, cells, pairs = np.random.default_rng(0), BINS**2, 4000
    uniform = np.full(cells, 1 / cells)

    def rejected(law: Sequence[float], rounds: int = 400) -> float:
        draws = [rng.multinomial(pairs, each, rounds).astype(float) for each in (law, uniform)]
        tests = (two_sample_test(*both) for both in zip(*draws, strict=True))
        return float(np.mean([test.p_value < LEVEL for test in tests]))

    bias = two_sample_test(pairs * uniform, pairs * uniform).visible_bias
    assert rejected(uniform) < 0.01
    moved = uniform * (1 + 2 * bias * np.where(np.arange(cells) % 2, 1, -1))
    assert 0.5 * np.abs(moved - uniform).sum() == pytest.approx(bias)
    assert rejected(moved) == pytest.approx(POWER, abs=0.05)


def test_each_form_of_draft_verifier_and_stopping_rule_is_certified_once() -> None:
    methods = [
        MethodConfig(name="plain", decoder="plain"),
        MethodConfig(name="K=2", length=2),
        MethodConfig(name="K=4", length=4),
        MethodConfig(name="confidence", stop="confidence"),
        MethodConfig(name="block", verifier="block"),
        MethodConfig(name="transformers", decoder="assisted", length=4),
    ]
    config = EvalConfig(sets=[PromptSet("instruct")], methods=methods)
    assert [each.name for each in ways(config, SamplingConfig())] == ["K=2", "confidence", "block"]


@pytest.mark.slow
def test_a_bug_in_greedy_texts_alone_is_not_exact() -> None:
    (sound,) = certified(MethodConfig(name="sound")).methods
    assert isinstance(sound, Certified)
    assert sound.greedy is not None
    wrong = sound.model_copy(update={"greedy": sound.greedy.model_copy(update={"bugs": 1})})
    assert not wrong.is_exact


@pytest.mark.slow
def test_the_command_certifies_a_finished_evaluation_wherever_it_lies(
    trained_pair: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = {
        "output": str(tmp_path / "run"),
        "models": {role: str(trained_pair / role) for role in ("target", "draft")},
        "rollouts": {"sets": [{"name": "instruct", "split": "train", "count": 2}]},
        "draft": None,
        "head": None,
        "eval": {
            "max_new_tokens": 8,
            "sets": [{"name": "instruct", "split": "test", "count": 2}],
            "methods": [{"name": "plain", "decoder": "plain"}, {"name": "K=2", "length": 2}],
        },
    }
    RECIPE.main(build(config))
    folder = (tmp_path / "run").rename(tmp_path / "moved") / "eval"
    assert main([str(folder), "--texts", "16"]) == 0
    made = Certificate.read(folder / CERTIFICATE)
    assert made is not None
    assert made.is_kept
    assert made.sentence in capsys.readouterr().out
    for wrong, said in (
        ([str(tmp_path)], "the folder of a finished evaluation"),
        ([str(folder), "--method", "K=3"], "did you mean 'K=2'?"),
        ([str(folder), "--texts", "1"], "2 or larger"),
    ):
        assert main(wrong) == 2
        assert said in capsys.readouterr().err
