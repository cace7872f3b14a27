"""Refusals before a stage starts, by a run and by its plan alike; nothing is written."""

import gc
import json
import shutil
from pathlib import Path

import pytest

from recipes import pipeline
from recipes.command import RECIPES, main
from recipes.config import parse
from recipes.recipe import Recipe
from specdata.storage.files import write_json
from tests.support.checks import own
from tests.support.documents import blocks
from tests.support.target_heads import with_head

ROOT = Path(__file__).parents[2]


def toy(out: Path) -> list[str]:
    """The toy configuration in another folder, where no model is."""
    pair = [f"--models.target={out}/pair/target", f"--models.draft={out}/pair/draft"]
    return [f"--output={out}", *pair]


def refuse(
    recipe: Recipe, flags: list[str], message: str, out: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for more in (["--plan"], []):
        assert recipe.run([*flags, *more]) == 2
        said = capsys.readouterr()
        assert (said.out, message in said.err) == ("", True), (more, said)
        assert not out.exists()


def test_models_without_weights_are_planned_with_and_refused_before_the_first_stage(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = own(tmp_path / "out", {"vocab_size": 8}, {"vocab_size": 8})
    flags += ["--config", str(ROOT / "recipes" / "configs" / "toy.yaml")]
    asked = {"repetition_penalty": 1.1, "min_length": 0, "bad_words_ids": [[3]], "top_p": 0.8}
    write_json(tmp_path / "target" / "generation_config.json", asked)
    assert RECIPES["pipeline"].run([*flags, "--plan"]) == 0
    assert gc.isenabled()  # switched off for the imports alone
    shown = capsys.readouterr().out
    assert shown.count("json asks for repetition_penalty 1.1, bad_words_ids, which") == 1
    assert f"reads target: {tmp_path / 'target'} (its config.json, no weights)" in shown
    assert RECIPES["pipeline"].run(flags) == 2
    said = capsys.readouterr().err
    assert f"{tmp_path / 'target'} has a config.json and no weights" in said
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("asked", "is_said"),
    [
        ({"top_p": 0.8}, True),
        ({"eos_token_id": []}, True),
        ({"eos_token_id": 3}, False),
        ({}, False),
    ],
)
def test_a_plan_says_that_no_text_ends_where_config_json_alone_names_an_end_token(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], asked: dict[str, object], is_said: bool
) -> None:
    flags = own(tmp_path / "out", {"vocab_size": 8, "eos_token_id": 5}, {"vocab_size": 8})
    flags += ["--config", str(ROOT / "recipes" / "configs" / "toy.yaml"), "--plan"]
    write_json(tmp_path / "target" / "generation_config.json", asked)
    assert RECIPES["pipeline"].run(flags) == 0
    assert ("if it is to end at 5, as" in capsys.readouterr().out) == is_said


TRAINED = "[{name: maths, split: train, count: 2}]"
TYPO = "[{name: instrct, split: train}]"
SPLIT = "[{name: maths, split: tset, count: 1}]"
MANY = "[{name: maths, split: test, count: 999999}]"


@pytest.mark.parametrize(
    ("recipe", "flags", "message"),
    [
        ("make-rollouts", ["--rollouts.sets", SPLIT], "unknown split 'tset'"),
        ("make-rollouts", ["--rollouts.sets", MANY], "has 6250 prompts, 999999 were asked for"),
        ("make-rollouts", ["--rollouts.sets", "[{name: /no/x.jsonl}]"], "cannot be read"),
        ("make-rollouts", ["--rollouts.max_new_tokens", "1024"], "set it to 1023 or less"),
        ("make-rollouts", ["--rollouts.samples=2", "--sampling.temperature=0"], "is the same"),
        ("make-rollouts", ["--method", "K=4"], "this recipe measures nothing"),
        ("run-eval", ["--eval.max_new_tokens", "1024"], "set it to 1023 or less"),
        ("run-eval", ["--method", "{name: a, verifier: blok}"], "did you mean 'block'?"),
        ("run-eval", ["--method", "{name: a, verifier_args: {x: 1}}"], "it has no x"),
        ("pipeline", ["--labels.draws=5"], "got 6 and 5: raise labels.draws"),
        ("publish", ["--eval.methods", "[{name: plain, decoder: plain}]"], "a draft's card needs"),
        (
            "pipeline",
            ["--rollouts.sets", "[{name: code, count: 1}]"],
            "must hold splits train and dev to train on",
        ),
        ("pipeline", ["--method", "{name: a, stop: head}"], "to eval.methods (--method leaves"),
        ("pipeline", ["--eval.sets", TYPO], "did you mean 'instruct'?"),
        ("pipeline", ["--eval.sets", TRAINED], "must hold prompts that nothing was trained on"),
    ],
)
def test_a_plan_refuses_what_a_run_refuses_before_anything_is_made(
    recipe: str, flags: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if recipe == "publish":  # whose run asks for the evaluation first
        assert RECIPES[recipe].run([*toy(tmp_path / "out"), *flags, "--plan"]) == 2
        assert message in capsys.readouterr().err
        return
    out = tmp_path / "out"
    refuse(RECIPES[recipe], [*toy(out), *flags], message, out, capsys)


def rows(folder: Path, name: str, *lines: object) -> str:
    """A file of prompts."""
    path = folder / name
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(path)


def test_a_plan_looks_for_what_a_run_reads_and_writes(
    trained_pair: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    own = rows(tmp_path, "own.jsonl", {"prompt": "Say this."}, {"prompt": "And that."})
    both = ", ".join(f"{{name: {own}, split: {split}, count: 0}}" for split in ("train", "dev"))
    other = tmp_path / "other"  # the same model with two tokens exchanged
    shutil.copytree(trained_pair / "draft", other)
    tokenizer = json.loads((other / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    *_, a, b = vocabulary
    vocabulary[a], vocabulary[b] = vocabulary[b], vocabulary[a]
    (other / "tokenizer.json").write_text(json.dumps(tokenizer))
    (tmp_path / "file").touch()
    talk = rows(tmp_path, "talk.jsonl", {"messages": [{"role": "user", "content": "Hello."}]})
    models = [f"--models.{name}={trained_pair / name}" for name in ("target", "draft")]
    flags = [f"--output={out}", "--toy=null", *models]
    for more, message in (
        (["--models.target=/models/my-7b"], "from /models/my-7b, and there is no such"),
        (["--models.draft=my model"], "from my model, and there is no such"),
        ([f"--eval.sets=[{{name: {talk}, split: test, count: 0}}]"], "has no chat template"),
        ([f"--models.draft={other}"], "must share a vocabulary; 2 ids differ"),
        ([f"--rollouts.sets=[{both}]"], "of split dev to train on, and all of them were dropped"),
        (["--models.load.draft.attn_implementation=x"], "must be 'eager' or 'sdpa'"),
        ([f"--output={tmp_path}/file/out"], f"{tmp_path}/file is no folder"),
    ):
        refuse(pipeline.RECIPE, [*flags, *more], message, out, capsys)
    (out / "eval").mkdir(parents=True)
    (out / "eval" / "mine.txt").touch()
    for more in (["--plan"], []):
        assert pipeline.RECIPE.run([*flags, *more]) == 2
        assert "eval is not empty and holds no run.json" in capsys.readouterr().err


def test_init_writes_a_configuration_that_can_be_planned(
    trained_pair: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    own = rows(tmp_path, "own.jsonl", *({"prompt": f"Say {n % 20}."} for n in range(25)))
    asked = ["init", str(trained_pair / "target"), "--prompts", own, "--device", "cpu"]
    assert main(asked) == 0
    assert "(10 train, 5 dev, 5 test" in capsys.readouterr().out  # equal lines are one
    assert main(["pipeline", "my-pair.yaml", "--plan"]) == 0
    assert "15 completions" in capsys.readouterr().out
    assert main(asked) == 2
    assert "my-pair.yaml, my-pair-train.jsonl" in capsys.readouterr().err
    Path("broken.jsonl").write_text('{"prompt": "a"}\n{"prompt": "b"}\n{"prom')
    assert main([*asked, "--prompts", "broken.jsonl", "--out", "new/pair.yaml"]) == 2
    assert "broken.jsonl, line 3: must" in capsys.readouterr().err
    assert not Path("new").exists()


LLAMA = {"model_type": "llama", "vocab_size": 8, "hidden_size": 16, "intermediate_size": 8}
LLAMA |= {"num_attention_heads": 2, "num_hidden_layers": 8}
MAMBA = {"model_type": "mamba", "hidden_size": 16, "num_hidden_layers": 1, "vocab_size": 8}


def chatting(folder: Path) -> None:
    """A folder that describes a target that chats, of which there are no weights."""
    write_json(folder / "config.json", LLAMA)
    write_json(folder / "tokenizer_config.json", {"chat_template": "{{ messages }}"})
    sampling = {"do_sample": True, "temperature": 0.7, "top_k": 20, "top_p": 0.8}
    write_json(folder / "generation_config.json", sampling)


def test_the_example_of_the_documents_is_what_init_writes_and_a_plan_names_what_differs_from_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    chatting(tmp_path / "my-7b")
    rows(tmp_path, "mine.jsonl", *({"prompt": f"Say {n}."} for n in range(1000)))
    assert main(["init", "my-7b", "--prompts", "mine.jsonl", "--device", "cuda"]) == 0
    assert [Path("my-pair.yaml").read_text()] == blocks("docs/configuration.md", "yaml")
    chatting(tmp_path / "short")
    write_json(tmp_path / "short" / "config.json", LLAMA | {"max_position_embeddings": 200})
    assert main(["init", "short", "--prompts", "mine.jsonl", "--out", "short.yaml"]) == 0
    assert Path("short.yaml").read_text().count("max_new_tokens: 100\n") == 2
    wrong = ["--draft", "egale3", "--out", "other.yaml"]
    assert main(["init", "my-7b", "--prompts", "mine.jsonl", *wrong]) == 2
    assert "did you mean 'eagle3'" in capsys.readouterr().err
    assert main(["pipeline", "my-pair.yaml", "--plan"]) == 0
    assert "would fail:\n  my-7b has a config.json and no weights" in capsys.readouterr().out
    other = ["--sampling.temperature=1", "--sampling.top_k=0"]
    assert main(["pipeline", "my-pair.yaml", "--plan", *other]) == 0
    shown = capsys.readouterr().out
    assert "temperature is 1 here and 0.7 there, top_k is 0 here and 20 there." in shown


# What reads no tree is asked for chains: of the draft, by the head, and looked up.
CHAINS = "head: false}\n    - {name: cost, verifier: block, stop: cost}   # asks the head\n"
CHAINS += "    - {name: lookup, verifier: naive, drafter: lookup, "


@pytest.mark.parametrize(
    ("draft", "target", "written", "left_out"),
    [
        ("states", LLAMA, "draft: {init: {kind: states, layers: 1}}", "draft: null"),
        ("eagle3", LLAMA, "layout: eagle3, layers: 1}}\nhead: null", "stop: cost}"),
        ("dspark", LLAMA, "head: {kind: confidence}", "head: null"),
        ("my-org/my-160m", LLAMA, 'draft: "my-org/my-160m", dtype', "init"),
        ("my-org/my-160m", MAMBA, CHAINS, "tree"),
    ],
)
def test_init_writes_a_file_for_each_kind_of_draft_without_what_it_cannot_do(
    draft: str,
    target: dict[str, object],
    written: str,
    left_out: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    chatting(tmp_path / "target")
    write_json(tmp_path / "target" / "config.json", target)
    rows(tmp_path, "mine.jsonl", *({"ask": f"Say {n}."} for n in range(9)))
    asked = ["init", "target", "--prompts", "mine.jsonl", "--draft", draft, "--device", "cpu"]
    assert main(asked) == 2  # no column is called prompt
    assert main([*asked, "--template", "{ask}"]) == 0
    text = Path("my-pair.yaml").read_text()
    assert written in text
    assert left_out not in text
    assert text.count('template: "{ask}", chat: true}') == 4
    assert "engine: captured" in text
    assert main(["pipeline", "my-pair.yaml", "--plan"]) == 0


@pytest.mark.parametrize(
    ("file", "values", "said"),
    [
        ("tokenizer_config.json", {"added_tokens_decoder": {}, "unk_token": "<x>"}, "1 ids differ"),
        ("adapter_config.json", {"base_model_name_or_path": "/no/base"}, "{} holds adapters of"),
        ("model.safetensors.index.json", {"weight_map": {"a": "2"}}, "{} lacks 2, which its model"),
        ("config.json", {}, "{} has no config.json"),
    ],
)
def test_a_plan_ends_with_what_would_fail(
    file: str,
    values: dict[str, object],
    said: str,
    trained_pair: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    draft = tmp_path / "draft"
    shutil.copytree(trained_pair / "draft", draft)
    if file in ("adapter_config.json", "config.json"):
        (draft / "config.json").unlink()
    if file == "adapter_config.json":
        (draft / "model.safetensors").unlink()
    if values:
        there = json.loads((draft / file).read_text()) if (draft / file).exists() else {}
        write_json(draft / file, there | values)
    models = [f"--models.target={trained_pair / 'target'}", f"--models.draft={draft}"]
    flags = [f"--output={tmp_path / 'out'}", "--toy=null", *models, *methods("{name: a}")]
    assert pipeline.RECIPE.run([*flags, "--plan"]) == 0
    assert said.format(draft) in capsys.readouterr().out.split("\nwould fail:\n  ")[1]
    assert pipeline.RECIPE.run(flags) == 2
    assert said.format(draft) in capsys.readouterr().err


def methods(*ours: str) -> list[str]:
    plain = "--eval.methods=[{name: plain, decoder: plain}]"
    return [plain, *(word for each in ours for word in ("--method", each)), "--head=null"]


SHORT = ["--rollouts.max_new_tokens=8", "--eval.max_new_tokens=64"]
ROOM = "eval.max_new_tokens must leave room for a prompt: {}/"
ASKED, NO_HEAD = "--head={kind: specdec++}", "after masks (depths 3) there is none"
NO_DRAFT = ["--draft=null"]
MADE = ["--models.draft=null", "--draft.init={kind: states, layout: dspark, layers: 1}"]
IN_BLOCKS = {"target_states": {"blocks": {"size": 3}}}
TOO_LONG = "a draft in blocks of 3 tokens proposes no longer paths, and 4 tokens are asked for"
CHAIN = methods("{name: mine, length: 4}")
TREE = methods("{name: mine, verifier: naive, drafter: tree, widths: [2]}")
ASSISTED = methods("{name: theirs, decoder: assisted}")
UNSCORED = [*CHAIN, "--eval.scores=[exact_match]", "--eval.sets=[{name: chat-letters, count: 2}]"]


@pytest.mark.parametrize(
    ("recipe", "target", "draft", "flags", "message"),
    [
        ("pipeline", {"n_positions": 64}, {"n_positions": 99}, SHORT, ROOM + "target has"),
        ("pipeline", {"n_positions": 99}, {"n_positions": 64}, SHORT, ""),
        ("pipeline", {"text_config": {"n_positions": 64}}, {}, SHORT, ROOM + "target has"),
        ("pipeline", {}, {"depths": 3}, ["--draft=null", ASKED], NO_HEAD),
        ("pipeline", {}, {}, ["--draft.depths=3", ASKED], NO_HEAD),
        ("pipeline", {}, IN_BLOCKS, [*NO_DRAFT, ASKED], NO_HEAD),
        ("train-draft", {}, {}, [*MADE, "--draft.init.block=3", ASKED], NO_HEAD),
        ("pipeline", {}, IN_BLOCKS, [*NO_DRAFT, *CHAIN], "method 'mine': " + TOO_LONG),
        ("pipeline", {}, IN_BLOCKS, [*NO_DRAFT, *TREE], ""),
        ("pipeline", {}, {}, [*MADE, "--draft.init.block=3", *CHAIN], "'mine': " + TOO_LONG),
        ("pipeline", {"model_type": "rwkv"}, {}, CHAIN, "{}/target, which is refused: rwkv takes"),
        ("pipeline", {}, {"model_type": "falcon", "alibi": True}, CHAIN, "falcon derives position"),
        ("pipeline", MAMBA, {}, TREE, "{}/target: mamba has recurrent layers"),
        ("pipeline", {}, MAMBA, TREE, "method 'mine' with "),
        ("pipeline", MAMBA, {}, ASSISTED, "transformers' assisted generation"),
        ("pipeline", MAMBA, MAMBA, CHAIN, ""),
        ("pipeline", {}, {}, UNSCORED, "no prompt of chat-letters has one"),
        ("pipeline", {}, {}, ["--head={report_to: trackio}"], "head.report_to is trackio"),
    ],
)
def test_what_the_models_config_json_rules_out_is_refused_before_anything_is_made(
    recipe: str,
    target: dict[str, object],
    draft: dict[str, object],
    flags: list[str],
    message: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Contexts, heads after masks, and what no evaluation could decode."""
    out = tmp_path / "out"
    flags = [*own(out, target, draft), *flags]
    if message:
        refuse(RECIPES[recipe], flags, message.format(tmp_path), out, capsys)
    else:
        assert RECIPES[recipe].run([*flags, "--plan"]) == 0


def test_a_plan_does_not_ask_the_hub_and_a_pipeline_asks_it_first(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    flags = [*toy(out), "--eval.sets", "[{name: nobody/nothing, split: test, count: 1}]"]
    assert pipeline.RECIPE.run([*flags, "--plan"]) == 0
    assert "nobody/nothing (from the Hub: no such folder here)" in capsys.readouterr().out
    assert pipeline.RECIPE.run(flags) == 2
    assert "nobody/nothing" in capsys.readouterr().err
    assert not out.exists()


def test_init_writes_the_methods_of_a_head_that_the_target_brings_and_a_plan_names_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    with_head(tmp_path / "target", "glm4_moe", max_position_embeddings=2048)
    rows(tmp_path, "mine.jsonl", *({"prompt": f"Say {n}."} for n in range(9)))
    for draft in ("target", "mtp"):
        given = ["target", "--prompts", "mine.jsonl", "--device", "cpu", "--draft", draft]
        assert main(["init", *given, "--out", f"{draft}.yaml"]) == 0
        methods = parse([f"{draft}.yaml"]).config.eval.methods
        assert [each.deepest for each in methods if each.mtp] == [1, 2, 3]
        assert [each.deepest for each in methods if each.is_chain and not each.mtp][:3] == [1, 2, 3]
        capsys.readouterr()
        assert main(["pipeline", f"{draft}.yaml", "--plan"]) == 0
        assert "target brings a head along: " in (said := capsys.readouterr().out)
        assert "would fail" not in said
    asks = ["--method", "{name: cost, mtp: true, stop: cost}"]
    assert main(["pipeline", "target.yaml", *asks, "--plan"]) == 2
    assert "an acceptance head is trained for the run's draft" in capsys.readouterr().err
