"""Evaluations of tiny models: engines, batches, several drafts, interruptions."""

import json
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch

from eval.decode_config import Method
from eval.decoder import SpeculativeDecoder
from eval.measuring.experiment import Artefacts, Experiment
from eval.measuring.methods import EvalConfig
from eval.measuring.pooled import pool
from eval.measuring.results import Results, Run, check_metrics, read_results, write_results
from eval.reporting.report import environment_rows, exactness
from eval.reporting.verdict import best_of, verdict
from eval.runtime.graphs import EagerWarning
from specdata.config import PromptSet, read_config
from specdata.errors import ConfigError
from specdata.models import load_model
from specdata.probability import SamplingConfig
from specdata.prompts.prompt import Prompt
from specdata.sampling import generator_for
from tests.support.experiment import METHODS, PLAIN, PROMPTS, evaluate
from tests.support.families import nearby, tiny
from tests.support.synthetic_results import ENVIRONMENT
from tests.support.target_heads import head_of, with_head
from tests.support.tiny import tiny_llama

COUNTS = ("tokens", "finish", "rounds", "n_draft", "accepted", "depth", "draft_forwards")


def counts(run: Run) -> list[tuple[object, ...]]:
    return [tuple(getattr(generation, name) for name in COUNTS) for generation in run.generations]


@pytest.fixture(scope="module")
def timed(tmp_path_factory: pytest.TempPathFactory) -> Results:
    return evaluate(tmp_path_factory.mktemp("timed"), METHODS)


@pytest.fixture(scope="module")
def untimed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("untimed")
    # The first group holds 8 prompts of both sets, the second the last two.
    write_results(folder / "results.json", evaluate(folder, METHODS, batch=2))
    return folder


def test_a_batched_evaluation_counts_what_decoding_one_by_one_counts(
    timed: Results, untimed: Path
) -> None:
    results = read_results(untimed / "results.json")
    assert [run.name for run in results.runs] == [run.name for run in timed.runs]
    for batched, alone in zip(results.runs, timed.runs, strict=True):
        assert counts(batched) == counts(alone), batched.method
        assert batched.block_efficiency == alone.block_efficiency


def test_an_interrupted_batched_evaluation_ends_as_it_would_have(untimed: Path) -> None:
    files = {path: path.read_bytes() for path in (untimed / "prompts").glob("*.json")}
    times = {path: path.stat().st_mtime_ns for path in files}
    assert len(files) == len(PROMPTS)
    lost = untimed / "prompts" / "code-p4.json"
    lost.unlink()
    evaluate(untimed, METHODS, batch=2)
    assert {path: path.read_bytes() for path in files} == files
    # The first group was whole, so it was not decoded again.
    assert sum(path.stat().st_mtime_ns != before for path, before in times.items()) == 2


def test_measurements_of_another_engine_are_not_mixed(tmp_path: Path) -> None:
    evaluate(tmp_path, [PLAIN])
    with pytest.raises(ConfigError, match="engine: 'eager' -> 'captured'") as error:
        evaluate(tmp_path, [PLAIN], engine="captured")
    assert "--eval.folder NAME" in str(error.value)


@pytest.mark.parametrize(
    ("where", "named"),
    [
        ({"hardware": {**ENVIRONMENT.hardware, "cpu": "other"}}, r"hardware\.cpu: .* -> 'other'"),
        ({"software": {**ENVIRONMENT.software, "torch": "9"}}, r"software\.torch: .* -> '9'"),
        ({"git_commit": "another"}, "git_commit: .* -> 'another'"),
    ],
)
def test_times_of_another_machine_or_version_are_not_mixed_and_its_counts_go_on(
    where: dict[str, Any], named: str, tmp_path: Path
) -> None:
    for batch in (1, 2):
        evaluate(tmp_path / f"{batch}", [PLAIN], batch=batch)
        (tmp_path / f"{batch}" / "prompts" / "code-p4.json").unlink()
    with pytest.raises(ConfigError, match=named):
        evaluate(tmp_path / "1", [PLAIN], where=where)
    evaluate(tmp_path / "2", [PLAIN], where=where, batch=2)


def test_prompts_of_one_conversation_are_resampled_together(tmp_path: Path) -> None:
    prompts = [replace(each, row=number // 2) for number, each in enumerate(PROMPTS)]
    for run in evaluate(tmp_path, [PLAIN], prompts=prompts).runs:
        assert (run.prompts, len(run.generations)) == (3, 5)


def test_another_method_goes_first_with_each_prompt(tmp_path: Path) -> None:
    log: list[str] = []
    evaluate(tmp_path, METHODS[:2], log=log)
    # Which generations drafted; the first is behind what warmed up both methods.
    drafted = ["draft" in part for part in " ".join(log).split("done")[1:-1]]
    assert drafted == [*[False, True, True, False] * 5][1:]


@pytest.mark.slow
def test_the_engine_reaches_every_method_of_ours_and_is_shown(
    timed: Results, tmp_path: Path
) -> None:
    theirs = read_config(Method, {"name": "1", "decoder": "assisted", "threshold": 1})
    methods = [PLAIN, METHODS[1], Method(name="theirs", decoder="assisted", length=3), theirs]
    methods.append(Method(name="generate", decoder="generate"))
    results = evaluate(tmp_path, methods, engine="captured")
    assert {run.name: run.engine for run in results.runs} == {
        "plain": "captured",
        "K=3": "captured",
        "theirs": "eager",
        "1": "eager",
        "generate": "eager",
    }
    for run in results.runs:  # one token ends a draft of transformers with a threshold of 1
        assert run.name != "1" or len(run.acceptance_by_position) == 1
        assert run.name != "generate" or (run.block_efficiency, run.draft) == (1.0, None)
    best = best_of(pool(results))
    assert best is not None
    assert best.method.uses_draft  # whatever is fastest
    for run, eager in zip(results.of("maths"), timed.of("maths")[:2], strict=False):
        assert counts(run) == counts(eager)
    assert ("engine", "captured") in environment_rows(results)
    assert ("engine", "eager") in environment_rows(timed)
    stored = json.loads((tmp_path / "prompts" / "maths-p0.json").read_text())
    assert stored["settings"]["engine"] == "captured"


def test_a_target_of_which_no_graph_is_made_is_recorded_as_run_eagerly(tmp_path: Path) -> None:
    sets = [PromptSet("maths", "test", 1)]
    config = EvalConfig(sets=sets, methods=[PLAIN], max_new_tokens=4, engine="captured")
    names = {"target": "target", "draft": "draft", "head": None}
    models = Artefacts(tiny("qwen3_next", 2), nearby("qwen3_next"), None, names)
    environment = ENVIRONMENT.model_copy(update={"batch_size": 1})
    experiment = Experiment(models, PROMPTS[:1], tmp_path, config, SamplingConfig(), 5, environment)
    with pytest.warns(EagerWarning):
        experiment.measure(lambda _: None)
    assert [run.engine for run in experiment.results().runs] == ["eager"]


def test_the_bias_of_a_biased_verifier_is_measured_stored_and_shown(tmp_path: Path) -> None:
    biased = Method(name="biased", verifier="biased_uno", verifier_args={"epsilon": 0.2}, length=3)
    fair = Method(name="fair", length=3)
    write_results(tmp_path / "results.json", evaluate(tmp_path, [PLAIN, fair, biased]))
    results = read_results(tmp_path / "results.json")
    check_metrics(results)
    for dataset in results.datasets():
        plain, lossless, run = results.of(dataset)
        assert (plain.total_variation, lossless.total_variation) == (None, None)
        assert run.total_variation is not None
        assert 0.0 < run.total_variation < 1.0
        tokens = sum(generation.variation_tokens for generation in run.generations)
        total = sum(generation.variation for generation in run.generations)
        assert run.total_variation == pytest.approx(total / tokens)
    (bias,) = (row.value("total_variation") for row in pool(results) if row.name == "biased")
    assert f"(total variation {bias:.3f}" in exactness(results)
    # Counted in batches, the same sequences have the same bias.
    batched = evaluate(tmp_path / "batched", [PLAIN, fair, biased], batch=2)
    for run, alone in zip(batched.runs, results.runs, strict=True):
        assert run.total_variation == pytest.approx(alone.total_variation)


def test_dev_asks_for_the_lengths_next_to_the_best_and_a_resume_goes_on_with_the_same(
    tmp_path: Path,
) -> None:
    """The target's last four layers add nothing, and the draft is the first: all is accepted."""
    target, draft = tiny_llama(2, vocab=40, layers=5), tiny_llama(2, vocab=40, layers=1)
    draft.load_state_dict(target.state_dict(), strict=False)
    for layer in target.model.layers[1:]:
        for module in (layer.self_attn.o_proj, layer.mlp.down_proj):
            torch.nn.init.zeros_(module.weight)
    prompts = [
        Prompt(f"p{n}", name, name, [2 + n, 5]) for name in ("dev", "test") for n in range(10)
    ]
    sets = [PromptSet(name, name, 10) for name in ("dev", "test")]
    methods = [PLAIN, *(Method(name=f"K={k}", verifier="block", length=k) for k in (1, 2))]
    config = EvalConfig(sets=sets, methods=methods, max_new_tokens=8)
    names = {"target": "target", "draft": "draft", "head": None}
    models, said = Artefacts(target, draft, None, names), []
    made = Experiment(models, prompts, tmp_path, config, SamplingConfig(), 5, ENVIRONMENT)
    whole = made.with_lengths(lambda part: part.measure(lambda _: None), said.append)
    added = [method.name for method in whole.config.methods[3:]]
    assert added[0] == "K=3"
    assert ", ".join(said).endswith(added[-1])
    stored = {path: path.read_bytes() for path in tmp_path.rglob("*.json")}
    # As if it had been stopped in the middle of the last round.
    rounds = json.loads((tmp_path / "lengths.json").read_text())["rounds"]
    names = [[each["name"] for each in asked] for asked in rounds]
    assert names.pop() == []
    assert {"plain", *added} <= {*chain.from_iterable(names)}
    (tmp_path / "lengths.json").write_text(json.dumps({"rounds": rounds[:-1]}))
    lost = tmp_path / f"prompts-{len(names)}" / "dev-p3.json"
    lost.unlink()
    again = made.with_lengths(lambda part: part.measure(lambda _: None), said.append)
    assert again.config.methods[: 3 + len(added)] == whole.config.methods
    changed = [path for path, before in stored.items() if path.read_bytes() != before]
    assert lost in changed
    assert {*changed} <= {lost, tmp_path / "lengths.json"}
    again.measure(lambda _: None)
    results = again.results()
    assert [run.name for run in results.of("dev")] == names[-1]  # all of them took turns
    assert {*added} < {run.name for run in results.of("test")}
    assert "not known" not in verdict(results)
    # Where no dev set is, or one length alone, only what is listed is measured.
    for other in (
        config.model_copy(update={"methods": methods[:2]}),
        config.model_copy(update={"sets": sets[1:]}),
    ):
        part = replace(made, config=other)
        assert part.with_lengths(pytest.fail, pytest.fail) is part


def test_a_method_drafts_with_the_targets_own_head_and_results_say_so(tmp_path: Path) -> None:
    target = load_model(str(with_head(tmp_path / "target", "glm4_moe")))
    own = head_of(target)
    names = {"target": "target", "draft": "draft", "head": None}
    methods = [PLAIN, Method(name="K=2", length=2), Method(name="mtp K=2", length=2, mtp=True)]
    size = target.config.vocab_size
    sets = [PromptSet("maths", "test", 5), PromptSet("code", "test", 5)]
    config = EvalConfig(sets=sets, methods=methods, max_new_tokens=8)
    models = Artefacts(target, tiny_llama(1, vocab=size).float(), None, names, own)
    run = Experiment(models, PROMPTS, tmp_path / "eval", config, SamplingConfig(), 5, ENVIRONMENT)
    run.measure(lambda done: None)
    write_results(tmp_path / "results.json", run.results())
    results = read_results(tmp_path / "results.json")
    found = {each.name: each for each in results.runs if each.dataset == "maths"}
    assert found["mtp K=2"].method == methods[2]
    assert (found["K=2"].draft, found["mtp K=2"].draft) == ("draft", "target")
    decoder = SpeculativeDecoder.from_config(target, own, methods[2].decoding(SamplingConfig()))
    rounds = 0
    for prompt in PROMPTS[:5]:
        seeded = generator_for(5, "eval", prompt.example_id)
        ids = torch.tensor(prompt.ids)
        rounds += len(decoder.generate(ids, max_new_tokens=8, generator=seeded).rounds)
    assert found["mtp K=2"].n_target == rounds
