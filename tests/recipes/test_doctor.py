"""What is said of a published draft: each planted fault by its name, and nothing of a sound one."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from distill.config import InitConfig
from distill.initial import make_initial
from recipes.command import main, run_tool
from recipes.doctor import written_texts
from specdata.models import load_model, load_tokenizer
from specdata.sampling import SamplingConfig
from tests.support.dspark_layout import H, published
from tests.support.initial import stored
from tests.support.random_pair import measured_only

KEPT = 300
Change = Callable[[dict[str, Tensor], dict[str, Any]], object]


def least_squares(pair: Path, folder: Path, **init: Any) -> None:
    """Write a draft that is not trained, and as `folder/out` what engines load."""
    target = str(pair / "target")
    models = load_model(target), load_tokenizer(target)
    make_initial(
        target=target,
        draft=None,
        rollouts=written_texts(*models, "instruct", 64, 48, SamplingConfig()),
        out=folder / "draft",
        config=InitConfig(kind="states", layers=1, **init),
        seed=0,
    )
    assert run_tool("export", [str(folder / "draft"), "--out", str(folder / "out")]) == 0


@pytest.fixture(scope="module")
def released(trained_pair: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A draft of least squares alone, in EAGLE's layout: only its own taps and flags fit it."""
    folder = tmp_path_factory.mktemp("doctor")
    least_squares(trained_pair, folder, layout="eagle3", vocabulary=KEPT)
    return changed(folder / "out", folder / "released", train)


def train(tensors: dict[str, Tensor], _config: dict[str, Any]) -> None:
    draws = torch.Generator().manual_seed(0)
    for name in ("midlayer.self_attn.o_proj.weight", "midlayer.mlp.down_proj.weight"):
        tensors[name] = 1e-3 * torch.rand(tensors[name].shape, generator=draws)
    # Read by the flag alone that the draft has not.
    norm = tensors["midlayer.hidden_norm.weight"]
    tensors["midlayer.hidden_norm.weight"] = torch.randn(norm.shape, generator=draws)


def changed(source: Path, out: Path, change: Change) -> Path:
    shutil.copytree(source, out)
    tensors = load_file(source / "model.safetensors")
    config = json.loads((source / "config.json").read_text())
    change(tensors, config)
    save_file(tensors, out / "model.safetensors")
    (out / "config.json").write_text(json.dumps(config))
    return out


def said_of(
    folder: Path, pair: Path, capsys: pytest.CaptureFixture[str], count: int = 12
) -> tuple[int, str]:
    capsys.readouterr()
    asked = ["--target", str(pair / "target"), "--prompts", "instruct", "--count", str(count)]
    status = run_tool("doctor", [str(folder), *asked, "--max-new-tokens", "32"])
    return status, capsys.readouterr().out


def test_nothing_is_wrong_with_a_sound_draft(
    released: Path, in_blocks: Path, trained_pair: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for folder, taps in ((released, [0, 1]), (in_blocks, [1])):
        status, said = said_of(folder, trained_pair, capsys)
        assert (status, "problem" in said, "warning" in said) == (0, False, False), said
        assert f"taps {taps}, no norm flags: no other is better" in said
    status, said = said_of(trained_pair / "draft", trained_pair, capsys)
    assert status == 0, said
    assert "an ordinary draft" in said


def shift(_tensors: dict[str, Tensor], config: dict[str, Any]) -> None:
    for part in (config, config["eagle_config"]):
        part["eagle_aux_hidden_state_layer_ids"] = [1, 2]


def random_head(tensors: dict[str, Tensor], _config: dict[str, Any]) -> None:
    draws = torch.Generator().manual_seed(1)
    shape = tensors["lm_head.weight"].shape
    tensors["lm_head.weight"] = 0.02 * torch.randn(shape, generator=draws)


FAULTS: dict[str, tuple[Change, str]] = {
    "taps off by one": (shift, r"with taps \[0, 1\] the draft is accepted more"),
    "norm flag": (
        lambda _, config: config.update(norm_before_residual=True),
        "with norm_before_residual False the draft is accepted more",
    ),
    "flags not said": (lambda _, config: config.pop("norm_output"), "does not say norm_output"),
    "missing": (lambda tensors, _: tensors.pop("midlayer.mlp.up_proj.weight"), "are missing"),
    "not finite": (
        lambda tensors, _: tensors["fc.weight"].fill_(torch.nan),
        r"^problem +tensors: fc\.weight holds NaN",
    ),
    "random": (random_head, "lm_head.weight are as random weights are"),
    "no map": (lambda tensors, _: tensors.pop("d2t"), "has no d2t"),
    "ids for differences": (
        lambda tensors, _: tensors["d2t"].add_(torch.arange(KEPT)),
        "d2t holds ids",
    ),
    "a key": (lambda _, config: config.update(clip_qkv=8), r"config.json: clip_qkv \(8\) is not"),
    "maps of two drafts": (
        lambda tensors, _: tensors["t2d"].copy_(~tensors["t2d"]),
        "t2d marks other tokens",
    ),
}


def test_it_is_said_wherever_a_draft_is_used_that_it_ends_before_its_target_does(
    released: Path, trained_pair: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def ends(_tensors: dict[str, Tensor], config: dict[str, Any]) -> None:
        config["max_position_embeddings"] = 20

    few, target = changed(released, tmp_path / "few", ends), str(trained_pair / "target")
    draft = tmp_path / "draft"
    methods = '--eval.methods=[{name: plain, decoder: plain}, {name: "K=3", length: 3}]'
    sets = "--eval.sets=[{name: instruct, split: test, count: 1}]"
    evaluation = [*measured_only(trained_pair, tmp_path / "run"), "--models.draft", draft]
    evaluation += ["--config", "recipes/configs/toy.yaml", "--eval.max_new_tokens=8", sets, methods]
    for command, given in (
        ("import", [few, "--target", target, "--out", draft]),
        ("doctor", [draft, "--target", target, "--prompts", "instruct", "--count", "3"]),
        ("run-eval", [*evaluation, "--plan"]),
    ):
        assert main([command, *map(str, given)]) == (command == "doctor")
        said = " ".join("".join(capsys.readouterr()).split())
        assert "has positions for 20 tokens, prompt included, and the target" in said, command
    assert main(["run-eval", *map(str, evaluation)]) == 0  # of what is left
    said = " ".join(capsys.readouterr().out.split())
    assert re.search(r"K=3 drafted nothing in [1-9]\d* of \d+ rounds: draft has no", said)


@pytest.fixture(scope="module")
def in_blocks(trained_pair: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A draft of least squares alone, in DSpark's layout."""
    folder = tmp_path_factory.mktemp("blocks")
    least_squares(trained_pair, folder, layout="dspark", block=4)
    draws = torch.Generator().manual_seed(0)

    def train(tensors: dict[str, Tensor], _config: dict[str, Any]) -> None:
        for name, each in tensors.items():
            if not each.any():
                tensors[name] = 1e-3 * torch.rand(each.shape, generator=draws)

    return changed(folder / "out", folder / "released", train)


def ids_of_the_last_layer(_tensors: dict[str, Tensor], config: dict[str, Any]) -> None:
    for part in (config, config["dflash_config"]):
        part["target_layer_ids"] = [config["num_target_layers"] - 1]


def with_head(**said: bool) -> Change:
    def change(tensors: dict[str, Tensor], config: dict[str, Any]) -> None:
        tensors["confidence_head.proj.weight"] = torch.ones(1, 8)
        config.update({"enable_confidence_head": True, **said})

    return change


TRAPS: dict[str, tuple[Change, str]] = {
    "anchor not said": (
        lambda _, config: config.pop("sample_from_anchor"),
        "sample_from_anchor: is not said: vLLM",
    ),
    "anchor says nothing": (
        lambda _, config: config.update(sample_from_anchor=False),
        "sample_from_anchor: is False",
    ),
    "last layer": (ids_of_the_last_layer, "llama.cpp hands out nothing of the last one"),
    "embedding": (
        lambda tensors, _: tensors.update({"embed_tokens.weight": torch.ones(8, 8)}),
        "embed_tokens: is in the folder: llama.cpp would take it as output matrix",
    ),
    "few tokens": (
        lambda _, config: config.update(draft_vocab_size=KEPT),
        "lm_head: is missing, and vLLM refuses",
    ),
    "all wrong": (  # the least likely tokens are proposed
        lambda tensors, _: [
            tensors[name].mul_(-50) for name in ("norm.weight", "markov_head.markov_w2.weight")
        ],
        "nearly always the wrong target, a flag or taps: too little",
    ),
    "head off": (with_head(enable_confidence_head=False), "enable_confidence_head must be true"),
    "head of states alone": (
        with_head(confidence_head_with_markov=False),
        "confidence_head_with_markov must be true",
    ),
    "no head": (
        lambda _, config: config.update(enable_confidence_head=True),
        "enable_confidence_head is true and no tensor is there",
    ),
}


ILL = [("released", fault, *FAULTS[fault]) for fault in FAULTS]
ILL += [("in_blocks", trap, *TRAPS[trap]) for trap in TRAPS]


@pytest.mark.parametrize(
    ("draft", "change", "expected"),
    [pytest.param(draft, *rest, id=fault) for draft, fault, *rest in ILL],
)
def test_each_fault_is_named(
    draft: str,
    change: Change,
    expected: str,
    request: pytest.FixtureRequest,
    trained_pair: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder = changed(request.getfixturevalue(draft), tmp_path / "ill", change)
    status, said = said_of(folder, trained_pair, capsys)
    line = [each for each in said.splitlines() if each.startswith(("problem", "warning"))]
    assert any(re.search(expected, each) for each in line), said
    assert status == any(each.startswith("problem") for each in line)


def test_better_settings_are_no_problem_of_few_texts_or_of_a_folder_that_was_measured(
    released: Path, trained_pair: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = changed(released, tmp_path / "flag", FAULTS["norm flag"][0])
    status, said = said_of(folder, trained_pair, capsys)
    assert re.search(r"accepted more, [\d.]+ \[1\.\d+, [\d.]+\] times", said)
    assert status == 1
    status, said = said_of(folder, trained_pair, capsys, count=4)
    assert (status, "4 texts do not tell" in said) == (0, True), said
    (folder / "results.json").write_text(json.dumps({"runs": [{"draft": "us/draft"}]}))
    status, said = said_of(folder, trained_pair, capsys)
    assert (status, "warning  settings: with norm_before_residual False" in said) == (0, True), said


def test_ids_that_may_mean_outputs_of_layers_are_said_at_import_and_both_are_measured(
    released: Path, trained_pair: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """ModelOpt's: inputs of layers 1 and 2 are the outputs of 0 and 1."""

    def of_modelopt(_tensors: dict[str, Tensor], config: dict[str, Any]) -> None:
        for part in (config, config["eagle_config"]):
            part["eagle_aux_hidden_state_layer_ids"] = [0, 1]
        config["eagle_config"]["next_layer_regular"] = True

    least_squares(trained_pair, tmp_path, layout="eagle3", vocabulary=KEPT, taps=[1, 2])
    for source, kind, found in (
        (
            changed(tmp_path / "out", tmp_path / "read", train),
            "problem",
            "more, so write those into config.json",
        ),
        (released, "ok", r"less, so \[0, 1\] are right"),
    ):
        folder = changed(source, tmp_path / kind, of_modelopt)
        given = [str(folder), "--target", str(trained_pair / "target")]
        assert run_tool("import", [*given, "--out", str(tmp_path / f"{kind}-draft")]) == 0
        said = " ".join(capsys.readouterr().out.split())
        assert "next_layer_regular beside them is of NVIDIA's ModelOpt" in said
        status, said = said_of(folder, trained_pair, capsys)
        assert re.search(rf"^{kind} +taps: .*are \[1, 2\].*{found}", said, re.M), said
        assert status == (kind == "problem")


@pytest.mark.parametrize("draft", ["released", "in_blocks"])
def test_a_wrong_target_is_named_and_neither_flags_nor_taps(
    draft: str,
    request: pytest.FixtureRequest,
    trained_pair: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    shutil.copytree(trained_pair / "target", tmp_path / "target")
    target = load_model(str(tmp_path / "target"))
    with torch.no_grad():
        target.get_input_embeddings().weight.copy_(target.get_input_embeddings().weight.roll(7, 0))
        target.model.norm.weight.mul_(30)  # sure of itself: flat distributions are all alike
    target.save_pretrained(tmp_path / "target")
    verifier = {"verifier": {"name_or_path": "their/own-7b"}}
    folder = changed(
        request.getfixturevalue(draft),
        tmp_path / "draft",
        lambda _, config: config.update(speculators_config=verifier),
    )
    status, said = said_of(folder, tmp_path, capsys)
    blamed = [each for each in said.splitlines() if each.startswith(("problem", "warning"))]
    assert "may be the wrong one: config.json names their/own-7b" in blamed[0]
    assert "may be the wrong one, or the draft untrained" in said
    assert (status, " settings:" in said) == (1, False), said


def test_a_target_that_llama_cpp_hands_out_nothing_of_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    layers = {"num_hidden_layers": 4, "layer_types": ["full_attention"] * 4}
    stored(tmp_path / "target", "qwen2", hidden_size=H, **layers)
    published(tmp_path / "draft", 298)
    said = said_of(tmp_path / "draft", tmp_path, capsys)[1]
    assert "warning  target: llama.cpp lets no draft look inside of qwen2" in said


def test_another_chat_template_is_named(
    released: Path, trained_pair: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = changed(released, tmp_path / "ill", lambda *_: None)
    tokenizer = load_tokenizer(str(folder))
    tokenizer.chat_template = "{{ messages[0]['content'] }}"
    tokenizer.save_pretrained(folder)
    _, said = said_of(folder, trained_pair, capsys)
    assert "warning  chat template: another than the target's" in said
