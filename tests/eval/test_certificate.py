"""The certificate of exactness: sound decoders get it, a wrong one does not."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from eval.analysis.certificate import (
    BINS,
    LEVEL,
    POWER,
    Certified,
    certify,
    count_cells,
    left_out,
    sentence,
    uniformity,
    ways,
)
from eval.decode_config import DecodeConfig, Method
from eval.measuring.experiment import Artefacts, Experiment
from eval.measuring.methods import EvalConfig
from eval.verifiers.rule import Candidates, Rng, Verifier, Walk
from recipes.command import run_tool
from recipes.config import CERTIFICATE, RESULTS, build, load_yaml
from recipes.run_eval import RECIPE
from recipes.tools.init import LENGTHS, LOOKUP, TREES
from specdata.config import PromptSet
from specdata.prompts.prompt import Prompt
from specdata.sampling import SamplingConfig
from tests.support.scores import evaluation_of
from tests.support.synthetic_results import ENVIRONMENT
from tests.support.tiny import tiny_llama

PROMPTS = [Prompt(str(n), "made", "test", [2 + n, 5, n + 7]) for n in range(6)]


def accepts_too_much(p: Tensor, candidates: Candidates, rng: Rng) -> int | Tensor:
    """A defect: token verification with the chance of acceptance doubled."""
    if rng.bernoulli(2 * candidates.p[0] / candidates.q[0]):
        return 0
    residual = (p - candidates.distributions[0]).clamp(min=0)
    return residual / residual.sum()


class Lenient(DecodeConfig):
    def make_verifier(self) -> Verifier:
        return replace(super().make_verifier(), rule=Walk(accepts_too_much))


class LenientMethod(Method):
    def decoding(self, sampling: SamplingConfig) -> DecodeConfig:
        return Lenient(**super().decoding(sampling).model_dump())


@pytest.mark.slow
def test_a_decoder_that_accepts_too_much_fails_and_a_sound_one_does_not(tmp_path: Path) -> None:
    """By sampled texts; of greedy ones doubled acceptance changes nothing."""
    pair = (tiny_llama(seed, vocab=40) for seed in (0, 1))
    models = Artefacts(*pair, None, {"target": "big", "draft": "small", "head": None})
    methods = [
        Method(name="plain", decoder="plain"),
        Method(name="sound"),
        Method(name="block", verifier="block", stop="confidence"),
        LenientMethod(name="wrong", stop="confidence"),
        Method(name="uno", verifier="biased_uno", verifier_args={"epsilon": 0.5}),
    ]
    config = EvalConfig(sets=[PromptSet("instruct")], methods=methods)
    experiment = Experiment(models, PROMPTS, tmp_path, config, SamplingConfig(), 0, ENVIRONMENT)
    found = certify(experiment, tmp_path, texts=100, max_new_tokens=16)
    sound, block, wrong, biased = found
    for each in (sound, block):
        assert each.is_exact
        assert (each.ties, each.bugs) == (0, 0)
        assert not each.model_copy(update={"bugs": 1}).is_exact, "a bug in greedy texts alone"
    assert not wrong.is_exact
    assert wrong.p_value < LEVEL
    assert "NOT EXACT: wrong (sampled texts" in sentence(found)
    assert not biased.is_exact
    assert not biased.lossless
    assert "Biased: uno (sampled texts" in sentence(found)
    assert sentence(found).startswith("Exact: token (chain), block (chain).")

    # As if it had been killed before the last method: the others are read.
    (tmp_path / "3.json").unlink()
    kept = {part: part.stat().st_mtime_ns for part in tmp_path.glob("*.json")}
    assert len(kept) == 3
    assert certify(experiment, tmp_path, texts=100, max_new_tokens=16) == found
    assert {part: part.stat().st_mtime_ns for part in kept} == kept


def test_last_tokens_of_texts_are_paired_with_the_next_ones_first() -> None:
    """Else end tokens of texts of odd length would be missing."""
    pair = tiny_llama(1, vocab=12), tiny_llama(4, vocab=12)
    texts = [(torch.tensor([2, 3]), torch.tensor([4 + number])) for number in range(5)]
    counts = count_cells(pair, texts, SamplingConfig(), torch.Generator().manual_seed(0))
    assert counts.sum() == 2


def test_a_bias_of_the_stated_size_is_seen_with_the_stated_power() -> None:
    """The hardest bias of that size: it moves every cell alike."""
    rng, cells, pairs = np.random.default_rng(0), BINS**2, 4000
    uniform = np.full(cells, 1 / cells)

    def rejected(law: Sequence[float], rounds: int = 400) -> float:
        draws = rng.multinomial(pairs, law, rounds)
        return float(np.mean([uniformity(each)[0] < LEVEL for each in draws]))

    _, bias = uniformity(np.full(cells, pairs // cells))
    assert rejected(uniform) < 0.01
    moved = uniform * (1 + 2 * bias * np.where(np.arange(cells) % 2, 1, -1))
    assert 0.5 * np.abs(moved - uniform).sum() == pytest.approx(bias)
    assert rejected(moved) == pytest.approx(POWER, abs=0.05)


def test_each_form_of_draft_verifier_and_stopping_rule_is_certified_once() -> None:
    methods = [
        Method(name="plain", decoder="plain"),
        Method(name="K=2", length=2),
        Method(name="K=4", length=4),
        Method(name="confidence", stop="confidence"),
        Method(name="block", verifier="block"),
        Method(name="own head", length=2, mtp=True),
        Method(name="transformers", decoder="assisted", length=4),
    ]
    config = EvalConfig(sets=[PromptSet("instruct")], methods=methods)
    forms = ["K=2", "confidence", "block", "own head"]
    assert [each.name for each in ways(config, SamplingConfig())] == forms


def test_every_method_that_init_writes_is_certified_or_left_out_with_a_reason() -> None:
    written = [*TREES, LOOKUP, "{name: plain, decoder: plain}", "{name: hf, decoder: assisted}"]
    written += [f"{{name: K={n}, verifier: block, length: {n}}}" for n in LENGTHS]
    written += ["{name: cost without head, verifier: block, stop: cost, head: false}"]
    written += ["{name: cost, verifier: block, stop: cost}"]
    methods = [Method.model_validate(load_yaml(each)) for each in written]
    config = EvalConfig(sets=[PromptSet("instruct")], methods=methods)
    looked_at = {each.name for each in ways(config, SamplingConfig())}
    others = left_out(config, SamplingConfig())
    assert looked_at >= {"dynamic tree", "dynamic tree and lookup", "lookup", "cost", "K=1"}
    assert not looked_at & others.keys()
    assert looked_at | others.keys() == {each.name for each in methods}
    said = sentence([], others)
    assert "Not certified: K=2, K=3, K=4, K=5 (decoded as K=1 but for lengths and" in said
    assert "Not certified: hf (transformers' own loop)" in said


@pytest.mark.slow
def test_the_command_certifies_a_finished_evaluation_wherever_it_lies(
    trained_pair: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sets = [{"name": "instruct", "split": "test", "count": 2}]
    methods = [{"name": "plain", "decoder": "plain"}, {"name": "K=2", "length": 2}]
    asked = evaluation_of(trained_pair, tmp_path / "run", sets=sets, methods=methods, threads=2)
    RECIPE.main(build(asked))
    folder = (tmp_path / "run").rename(tmp_path / "moved") / "eval"
    stored = json.loads((folder / RESULTS).read_text())
    stored["runs"].append({**stored["runs"][-1], "method": "K=5", "length": 5})  # as dev adds it
    (folder / RESULTS).write_text(json.dumps(stored))
    assert run_tool("certify", [str(folder), "--texts", "16"]) == 0
    made = json.loads((folder / CERTIFICATE).read_text())
    (found,) = (Certified.model_validate_json(json.dumps(each)) for each in made["methods"])
    assert found.is_exact
    assert made["environment"]["hardware"]["threads"] == 2, "those of the evaluation"
    others = {"plain": "the target alone", "K=5": "decoded as K=2 but for lengths and thresholds"}
    assert made["left_out"] == others
    assert made["sentence"] == sentence([found], others)
    assert made["sentence"] in capsys.readouterr().out
    assert not list(folder.glob(".cert*"))
    record = json.loads((folder / "run.json").read_text())
    record["config"]["eval"]["methods"] = methods[:1]
    (folder / "run.json").write_text(json.dumps(record))
    for wrong, said in (
        ([str(folder)], "nothing to certify"),
        ([str(tmp_path)], "the folder of a finished evaluation"),
        ([str(folder), "--texts", "1"], "2 or larger"),
    ):
        assert run_tool("certify", wrong) == 2
        assert said in capsys.readouterr().err
