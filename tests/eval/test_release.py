"""Releases: what is published loads, decodes as it was measured, and says only what was found."""

import ast
import json
import re
import shlex
import shutil
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import ModelCard, constants, snapshot_download
from huggingface_hub.errors import OfflineModeIsEnabled
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from distill.config import InitConfig
from distill.initial import make_initial
from distill.toy import train_tokenizer
from eval.decode_config import Method
from eval.decoder import DecodeConfig, SpeculativeDecoder
from eval.measuring.experiment import Artefacts, Experiment
from eval.measuring.methods import EvalConfig
from eval.measuring.results import check_metrics, read_results
from eval.publishing.metadata import About, check_repository, loadable, metadata
from eval.publishing.release import fastest_lengths, head_run, release_draft, release_head
from eval.reporting.rendering import escape_markdown, public_name
from eval.reporting.report import positions_of
from eval.reporting.table import described, shown_methods
from heads import AcceptanceHead, ConfidenceHead
from recipes.command import run_tool
from recipes.releases import for_engines
from specdata.config import PromptSet
from specdata.errors import ConfigError, ManifestError, VocabularyMismatchError
from specdata.lm_head import width_of_states
from specdata.models import load_model
from specdata.sampling import SamplingConfig, generator_for
from tests.support.drive_published_code import drive
from tests.support.experiment import PLAIN, PROMPTS
from tests.support.hub import Server
from tests.support.initial import ROWS
from tests.support.release import Pair, measured_of, save_llama
from tests.support.synthetic_results import ENVIRONMENT, MAX_NEW_TOKENS, synthetic_results
from tests.support.target_heads import with_head


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return Pair(tmp_path_factory.mktemp("pair"))


@pytest.fixture(scope="module")
def draft(pair: Pair, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("release") / "draft"
    about = About(
        "JackFram/llama-68m",
        "apache-2.0",
        ["en", "code"],
        ["tatsu-lab/alpaca", "instruct"],
        {"TV before": 0.61, "TV | after": None},
        certificate="Exact: token (chain).",
    )
    return release_draft(pair.draft, out, pair.results, about)


@pytest.fixture(scope="module")
def head(pair: Pair, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("release") / "head"
    return release_head(pair.head, out, pair.results, About("acme/draft-160m"))


def code_blocks(card: ModelCard, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", card.text, flags=re.DOTALL)


def uncommented(code: str) -> str:
    """The example of a draft's card with block verification, whose lines are comments."""
    return code.replace("    # ", "    ")


@pytest.mark.smoke
def test_a_released_draft_loads_with_the_same_weights(
    pair: Pair, draft: Path, tmp_path: Path
) -> None:
    ours = load_file(draft / "model.safetensors")
    theirs = load_file(pair.draft / "model.safetensors")
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    AutoModelForCausalLM.from_pretrained(draft)
    text = "a short text"
    expected = AutoTokenizer.from_pretrained(pair.target)(text)["input_ids"]
    assert AutoTokenizer.from_pretrained(draft)(text)["input_ids"] == expected
    for file in pair.target.glob("tokenizer*"):
        assert (draft / file.name).read_bytes() == file.read_bytes()
    (tmp_path / "new").touch()
    for path in draft.rglob("*"):  # readable as any new file is
        assert path.is_dir() or path.stat().st_mode == (tmp_path / "new").stat().st_mode, path


def test_a_released_draft_drafts_the_length_measured_in_transformers(
    pair: Pair, draft: Path
) -> None:
    settings = json.loads((draft / "generation_config.json").read_text())
    own = fastest_lengths(pair.results)["transformers"]
    assert settings["num_assistant_tokens"] == own[0].method.deepest
    assert settings["num_assistant_tokens_schedule"] == "constant"
    assert settings["assistant_confidence_threshold"] == 0.0
    target = AutoModelForCausalLM.from_pretrained(pair.target)
    assistant = AutoModelForCausalLM.from_pretrained(draft)
    prompt = torch.tensor([[5, 6, 7]])
    ask = {"attention_mask": torch.ones_like(prompt), "max_new_tokens": 8, "do_sample": False}
    plain = target.generate(prompt, **ask)
    assert torch.equal(target.generate(prompt, assistant_model=assistant, **ask), plain)


@pytest.mark.parametrize(
    ("base", "target", "bases", "unnamed"),
    [
        ("acme/draft-160m", "acme/target-7b@main", ["acme/draft-160m", "acme/target-7b"], []),
        ("runs/toy/draft/model", "acme/target-7b", "acme/target-7b", ["runs/toy/draft/model"]),
        (None, "target", None, ["target"]),
    ],
)
def test_base_models_of_a_card_are_the_draft_and_the_target_that_are_on_the_hub(
    base: str | None, target: str, bases: list[str] | str | None, unnamed: list[str]
) -> None:
    data, left_out = metadata(
        About(base),
        target=target,
        library="draftsmith",
        tags=["acceptance-head"],
        relation="adapter",
    )
    assert (data.base_model, left_out) == (bases, unnamed)
    assert data.to_dict().get("base_model_relation") == (
        "adapter" if base and not unnamed else None
    )
    read = ModelCard(f"---\n{data.to_yaml()}\n---\n").data
    assert read.to_dict() == data.to_dict()


@pytest.mark.parametrize(
    "wrong", [{"license": "Apache License 2.0"}, {"license": "other"}, {"language": ["English"]}]
)
def test_a_licence_or_language_that_the_hub_refuses_is_refused(wrong: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match="is given by its"):
        About(**wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "name", ["no-owner", "a/b/c", "a b/c", "../up", "a/b.git", "a/b-", "a/" + 97 * "b", "ä/b"]
)
def test_a_repository_is_owner_and_name(name: str) -> None:
    with pytest.raises(ConfigError, match="OWNER/NAME"):
        check_repository(name)


def test_the_draft_card_generates_under_the_measured_sampling(pair: Pair, draft: Path) -> None:
    card = ModelCard.load(draft / "README.md")
    assert "certified on this pair: Exact: token (chain)." in card.text
    (code,) = code_blocks(card, "python")
    for each in (code, uncommented(code)):
        calls = [node for node in ast.walk(ast.parse(each)) if isinstance(node, ast.Call)]
        (made,) = [c for c in calls if any(k.arg == "assistant_model" for k in c.keywords)]
        constants = [k for k in made.keywords if isinstance(k.value, ast.Constant)]
        given = {k.arg: ast.literal_eval(k.value) for k in constants}
        for name, neutral in asdict(SamplingConfig()).items():
            assert given[name] == pair.results.runs[0].sampling.get(name, neutral)
        assert given["repetition_penalty"] == 1.0
    said = card.text.replace("\\", "")
    assert "generation_config.json asks for repetition_penalty 1.1" in said
    assert "custom_generate" in given


def test_cards_of_a_chat_model_ask_through_its_chat_template(pair: Pair, tmp_path: Path) -> None:
    target = shutil.copytree(pair.target, tmp_path / "target")
    tokenizer = AutoTokenizer.from_pretrained(target)
    tokenizer.chat_template = "{{ messages[0].content }} {{ mode }} {{ add_generation_prompt }}"
    tokenizer.save_pretrained(target)
    results, about = measured_of(pair.results, target=target), About(chat={"mode": "short"})
    for folder in (
        release_draft(pair.draft, tmp_path / "draft", results, about),
        release_head(pair.head, tmp_path / "head", results, about),
    ):
        for code in code_blocks(ModelCard.load(folder / "README.md"), "python"):
            asks = re.search(r"^messages = .*?^\)$", code, re.MULTILINE | re.DOTALL)
            assert asks is not None
            scope: dict[str, Any] = {"tokenizer": tokenizer}
            exec(asks[0], scope)
            read = tokenizer.decode(scope["inputs"]["input_ids"][0])
            assert read == f"{scope['messages'][0]['content']} short True"


@pytest.mark.parametrize("kind", ["draft", "head"])
def test_every_number_of_the_table_is_in_the_results(
    pair: Pair, kind: str, request: pytest.FixtureRequest
) -> None:
    folder = request.getfixturevalue(kind)
    text, shown = ModelCard.load(folder / "README.md").text, set[str]()
    is_rectangular(text)
    check_metrics(read_results(folder / "results.json"))
    measured = text[text.index("## Measured") :]
    for name in shown_methods(pair.results):
        (row,) = [line for line in measured.splitlines() if re.match(rf"\| {name}( †)? \|", line)]
        for run in (run for run in pair.results.runs if run.name == name):
            low, high = run.intervals["speedup"]
            assert f"{run.speedup:.2f}x [{low:.2f}, {high:.2f}]" in row
    for entry in ModelCard.load(folder / "README.md").data.eval_results or []:
        (run,) = [
            r
            for r in pair.results.of(entry.dataset_name)
            if str(entry.metric_name).endswith(f" of {r.name}")
        ]
        assert entry.metric_value == round(getattr(run, entry.metric_type), 3)
        shown.add(entry.metric_type)
    assert shown == {"speedup", "block_efficiency"}  # in what the Hub reads, too
    assert pair.results.environment.git_commit[:7] in text  # type: ignore[index]
    if kind == "draft":
        longest = next(r for r in pair.results.of("alpaca") if r.name == "fixed-12")
        (row,) = [line for line in text.splitlines() if line.startswith("| alpaca, fixed-12 |")]
        for share in positions_of(longest):
            assert f" {share.value:.3f} [{share.low:.3f}, {share.high:.3f}] |" in row
    assert "Prompts: alpaca 12, gsm8k 12" in text
    assert "95 %" in text


def is_rectangular(card: str) -> None:
    """Assert that all rows of each table have as many columns."""
    widths: list[int] = []
    for line in card.splitlines():
        if not line.startswith("|"):
            widths = []
            continue
        widths.append(len(re.findall(r"(?<!\\)\|", line)))
        assert widths[-1] == widths[0], line


def test_engines_that_want_equal_output_sizes_are_left_out_for_others(tmp_path: Path) -> None:
    padded = Pair(tmp_path, pad=64)
    out = release_draft(padded.draft, tmp_path / "out", padded.results)
    card = ModelCard.load(out / "README.md")
    assert code_blocks(card, "bash") == []
    assert "padding" in card.text


def test_the_example_of_a_head_that_the_cost_rule_alone_asks_decodes_without_a_threshold(
    pair: Pair, tmp_path: Path
) -> None:
    runs = [
        run.model_copy(update={"method": run.method.replace(stop="cost")}) if run.head else run
        for run in pair.results.runs
    ]
    results = pair.results.model_copy(update={"runs": runs})
    card = ModelCard.load(release_head(pair.head, tmp_path / "out", results) / "README.md")
    code = code_blocks(card, "python")[-1]
    names = {loadable(str(path)): str(path) for path in (pair.target, pair.draft)}
    for name, path in (names | {loadable("out"): str(tmp_path / "out")}).items():
        code = code.replace(json.dumps(name), json.dumps(path))
    shown: dict[str, Any] = {}
    exec(code, shown)
    assert shown["config"].stop == head_run(results).method.stop
    assert "threshold" not in code


def test_a_card_names_the_methods_whose_counts_follow_the_clock(pair: Pair, tmp_path: Path) -> None:
    rules = {"head-0.3": {}, "head-0.5": {"draft_seconds": 0.1, "token_seconds": 1.0}}
    runs = [
        run.model_copy(update={"method": run.method.replace(stop="cost", **rules[run.name])})
        if run.name in rules
        else run
        for run in pair.results.runs
    ]
    for name, given, said in (
        ("clock", runs, "but not those of head-0.3: the length"),
        ("none", pair.results.runs, "the prompts and the\nsampling only. `results.json`"),
    ):
        results = pair.results.model_copy(update={"runs": given})
        card = release_draft(pair.draft, tmp_path / name, results) / "README.md"
        assert said in card.read_text(encoding="utf-8")


def test_a_card_is_titled_by_its_pair_and_says_what_its_methods_sets_and_lengths_are(
    pair: Pair, draft: Path, head: Path, tmp_path: Path
) -> None:
    cards = [(folder / "README.md").read_text(encoding="utf-8") for folder in (draft, head)]
    assert "\n# draft for target\n" in cards[0]
    assert "\n# head for acme/draft-160m with target\n" in cards[1]
    for name in shown_methods(pair.results):
        assert all(f"\n- {escape_markdown(name)}: " in card for card in cards)
    assert "5 is the number in vLLM's own example, and what is best in draftsmith's" in cards[0]
    runs = [
        run.model_copy(update={"dataset": "dev", "split": "dev"})
        for run in pair.results.of("gsm8k")
    ]
    results = pair.results.model_copy(update={"runs": [*pair.results.of("alpaca"), *runs]})
    made = (
        release_draft(pair.draft, tmp_path / "chosen", results),
        release_head(pair.head, tmp_path / "asked", results),
    )
    chosen = [(folder / "README.md").read_text(encoding="utf-8") for folder in made]
    assert all("\n- dev: the prompts on which methods are chosen" in card for card in chosen)
    says = ("measured, over all prompt sets: K", "second on the prompts below")
    of_dev = ("measured, on dev: K", "second on the prompts that methods are chosen on")
    for card, other, was, now in zip(cards, chosen, says, of_dev, strict=True):
        assert (was in card, now in card, was in other, now in other) == (True, False, False, True)
    methods = {
        name: Method(name=name, **settings)
        for name, settings in {
            "K=1": {"length": 1},
            "cost": {"stop": "cost"},
            "mine": {
                "drafter": "dynamic_tree",
                "verifier": "naive",
                "nodes": 5,
                "depth": 2,
                "lookup": 8,
            },
            "words": {"drafter": "lookup", "verifier": "naive", "lookup": 8},
            "theirs": {"decoder": "assisted", "lookup": 3},
        }.items()
    }
    assert len({described(method) for method in methods.values()}) == len(methods)


def same_rounds(shown: dict[str, Any], decoder: SpeculativeDecoder) -> None:
    """What an example of a card decoded is what a decoder does of the same prompt and seed."""
    prompt, generator = shown["inputs"]["input_ids"][0], torch.Generator().manual_seed(0)
    expected = decoder.generate(prompt, max_new_tokens=MAX_NEW_TOKENS, generator=generator)
    assert torch.equal(shown["out"].tokens, expected.tokens)
    found, wanted = (
        [(each.drafted, each.accepted) for each in out.rounds] for out in (shown["out"], expected)
    )
    assert found == wanted


@pytest.mark.parametrize("layout", [None, "dspark", "mtp"])
def test_the_code_of_a_card_decodes_the_measured_prompts_with_the_counts_of_the_card(
    pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, layout: Any
) -> None:
    made, own, target = tmp_path / "made", tmp_path / "own", str(pair.target)
    dtype, engine = "bfloat16", "captured"
    if layout == "mtp":
        dtype, engine = "float32", "eager"  # in bfloat16 its experts are chosen by rounding
        target = str(with_head(tmp_path / "target", "glm4_moe"))
        init = InitConfig(kind="mtp", engine="sglang")
    else:
        init = InitConfig(kind="states", layers=1, layout=layout)
    make_initial(target=target, draft=None, rollouts=ROWS, out=made, config=init, seed=0)
    models = [load_model(each, dtype=dtype) for each in (target, str(made))]
    kind = ConfidenceHead if layout == "dspark" else AcceptanceHead
    head = kind(hidden_size=width_of_states(models[1]))
    head.save_pretrained(own)
    methods = [PLAIN, Method(name="blocks", verifier="block", length=3)]
    methods.append(Method(name="asking", verifier="block", stop="head", threshold=0.9, limit=5))
    config = EvalConfig(
        sets=[PromptSet("maths", "test", 5)], methods=methods, max_new_tokens=24, engine=engine
    )
    artefacts = Artefacts(*models, head, {"target": target, "draft": str(made), "head": str(own)})
    where = ENVIRONMENT.model_copy(update={"dtype": dtype})
    sampling, prompts = SamplingConfig(0.7, 20), PROMPTS[:5]
    run = Experiment(artefacts, prompts, tmp_path / "eval", config, sampling, 5, where)
    run.measure(lambda done: None)
    results = run.results()
    engines = for_engines(made, target) if layout else None
    folders = {
        "blocks": release_draft(made, tmp_path / "draft", results, engines=engines),
        "asking": release_head(own, tmp_path / "head", results, About(str(tmp_path / "draft"))),
    }
    monkeypatch.chdir(tmp_path)
    if layout == "dspark":
        assert run_tool("import", ["draft", "--target", target, "--out", "imported"]) == 0
    for name, folder in folders.items():
        card, shown = ModelCard.load(folder / "README.md"), dict[str, Any]()
        (code,) = code_blocks(card, "python")
        for path in (target, *map(str, folders.values())):
            code = code.replace(json.dumps(loadable(path)), json.dumps(path))
        exec(code, shown)
        rounds = []
        for prompt in prompts:
            seeded = generator_for(5, "eval", prompt.example_id)
            ids = torch.tensor(prompt.ids)
            out = shown["decoder"].generate(ids, max_new_tokens=24, generator=seeded)
            rounds += out.rounds
        tokens = sum(each.emitted for each in rounds)
        (row,) = [line for line in card.text.splitlines() if line.startswith(f"| {name} |")]
        assert f"| {tokens / len(rounds):.2f} |" in row
        (measured,) = [each for each in results.runs if each.name == name]
        assert (len(rounds), tokens) == (measured.n_target, measured.tokens)
        if layout == "mtp" and name == "blocks":
            assert "`draft: {init: {kind: mtp, engine: sglang}, epochs: 0}`" in card.text
            assert "trained in float32, stored in the precision of the target's files" in card.text


def test_a_release_names_models_on_the_hub_and_no_folder_of_this_machine(
    pair: Pair, draft: Path, head: Path, tmp_path: Path
) -> None:
    loaded = AcceptanceHead.from_pretrained(head)
    assert (loaded.draft, loaded.rejection_weight) == ("acme/draft-160m", 6)
    runs = [
        run.model_copy(update={"generations": [replace(x, beyond=1) for x in run.generations]})
        for run in pair.results.runs
    ]  # the verdict names a draft whose positions ended
    long = pair.results.model_copy(update={"runs": runs})
    about = About("acme/draft-160m")
    for folder in (draft, head, release_head(pair.head, tmp_path / "head", long, about)):
        for path in folder.iterdir():
            if path.suffix in {".md", ".json"}:
                assert str(pair.target.parent) not in path.read_text(encoding="utf-8"), path
        card = (folder / "README.md").read_text()
        names = re.findall(r'(?:from_pretrained|custom_generate=|vllm serve )\(?"?([^"\s)]+)', card)
        assert all(re.fullmatch(r"/path/to/\w+|acme/draft-160m", name) for name in names)
        assert "put a folder of yours in the place of: `/path/to/" in card


def test_a_release_names_no_server_and_a_draft_on_states_needs_no_times(
    pair: Pair, tmp_path: Path
) -> None:
    made, out = tmp_path / "made", tmp_path / "out"
    init = InitConfig(kind="states", layers=1)
    make_initial(target=pair.target, draft=None, rollouts=ROWS, out=made, config=init, seed=0)
    results = synthetic_results("alpaca", timed=False)
    results = measured_of(results, target=pair.target, draft=made)
    served = {"decoder": "server", "url": "http://10.0.0.5:8000", "served_model": "/data/x"}
    plain = next(run for run in results.runs if run.name == "plain")
    engine = plain.model_copy(update={"method": Method(name="engine", **served)})
    release_draft(made, out, results.model_copy(update={"runs": [*results.runs, engine]}))
    stored = (out / "results.json").read_text()
    assert "http://SERVER" in stored
    assert not re.search(r"10\.0\.0|/data", stored)


def test_nothing_is_uploaded_unless_a_repository_is_named(pair: Pair, tmp_path: Path) -> None:
    # The tests run offline, so an attempt to reach the Hub shows as this error.
    out = tmp_path / "draft"
    with pytest.raises(OfflineModeIsEnabled):
        release_draft(pair.draft, out, pair.results, push_to="acme/draft")
    assert list(tmp_path.iterdir()) == []
    assert release_draft(pair.draft, out, pair.results) == out


@pytest.mark.smoke
@pytest.mark.parametrize("layout", [None, "eagle3", "dspark"])
def test_a_draft_on_states_and_its_head_decode_from_the_hub_as_where_they_were_measured(
    pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, layout: Any
) -> None:
    kept = None if layout == "dspark" else 40
    init = InitConfig(kind="states", layers=1, vocabulary=kept, layout=layout)
    made, target = tmp_path / "made", str(pair.target)
    make_initial(target=target, draft=None, rollouts=ROWS, out=made, config=init, seed=0)
    runs = [run for run in pair.results.runs if run.method.decoder != "assisted"]
    results, head = pair.results.model_copy(update={"runs": runs}), pair.head
    if layout == "dspark":
        head = tmp_path / "confidence"
        ConfidenceHead(hidden_size=width_of_states(load_model(str(made)))).save_pretrained(head)
    results = measured_of(results, draft=made, head=head)
    root, names = tmp_path / "hub", ("acme/draft", "acme/head")
    with Server(root) as server:
        monkeypatch.setattr(constants, "ENDPOINT", server.url)
        files = f"{server.url}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", files)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        own = head if layout == "dspark" else None
        engines = for_engines(made, target, own) if layout else None
        release_draft(made, tmp_path / "draft", results, engines=engines, push_to=names[0])
        release_head(head, tmp_path / "head", results, About(names[0]), push_to=names[1])
        cards = [(root / name / "README.md").read_text(encoding="utf-8") for name in names]
        monkeypatch.chdir(tmp_path)
        for name, card in zip(names, cards, strict=True):
            if layout:  # as the card says
                lines = re.search(
                    r"hf download (.*) --local-dir (.*)\ndraftsmith (import .*)", card
                )
                assert lines is not None
                snapshot_download(lines[1], local_dir=lines[2])
                words = shlex.split(lines[3].replace(loadable(target), target))
                assert run_tool(words[0], words[1:]) == 0
            else:
                with pytest.raises(ValueError, match=r"load-with-draftsmith_see-README\.md"):
                    AutoModelForCausalLM.from_pretrained(names[0])
            (code,) = code_blocks(ModelCard(card), "python")
            assert "AutoModel" not in code, name
            shown: dict[str, Any] = {}
            exec(code.replace(json.dumps(loadable(target)), json.dumps(target)), shown)
            asked = shown["config"], shown.get("head")
            decoder = SpeculativeDecoder.from_config(shown["target"], load_model(str(made)), *asked)
            same_rounds(shown, decoder)
            shutil.rmtree(tmp_path / "imported", ignore_errors=True)
    for card in cards:
        assert str(tmp_path) not in card
    assert ("a block of up to 7 after one forward" in cards[0]) == (layout == "dspark")
    assert "parallel_drafting" not in cards[0]
    assert str(pair.target.parent) not in (root / names[0] / "config.json").read_text()
    assert ("It proposes 40 of" in cards[0]) == (kept is not None)
    assert not (root / names[0] / "custom_generate").exists()


@pytest.mark.slow
def test_repositories_on_the_hub_decode_with_transformers_alone_as_we_do(
    pair: Pair, tmp_path: Path
) -> None:
    """Loaded and used in a process that has nothing of ours."""
    root, out = tmp_path / "hub", tmp_path / "out"
    out.mkdir()
    with Server(root) as server, pytest.MonkeyPatch.context() as patch:
        patch.setattr(constants, "ENDPOINT", server.url)
        patch.setattr(constants, "HF_HUB_OFFLINE", False)
        release_draft(pair.draft, out / "draft", pair.results, push_to="acme/draft-160m")
        about = About("acme/draft-160m")
        release_head(pair.head, out / "head", pair.results, about, push_to="acme/head")
        cards = [
            ModelCard.load(root / "acme" / name / "README.md") for name in ("draft-160m", "head")
        ]
        case: dict[str, Any] = {"target": "target", "draft": "draft", "head": "head", "seed": 3}
        asked = {"max_new_tokens": 20, "do_sample": True, "top_k": 0, "repetition_penalty": 1.0}
        case |= {"prompt": [[5, 6, 7]], "arguments": asked}
        (of_draft,), (of_head, _) = (code_blocks(card, "python") for card in cards)
        examples = [of_draft, uncommented(of_draft), of_head]
        named = json.dumps(loadable(str(pair.target)))
        orders = {
            "folder": "acme/head",
            "models": {"target": str(pair.target), "draft": "acme/draft-160m"},
            "heads": {"head": "acme/head"},
            "cases": [case],
            "examples": [code.replace(named, json.dumps(str(pair.target))) for code in examples],
        }
        environment = {"HF_ENDPOINT": server.url, "HF_HUB_OFFLINE": "0", "HF_HOME": str(out)}
        found = drive(out, orders, **environment)
    head = AcceptanceHead.from_pretrained(pair.head)
    decoder = SpeculativeDecoder.from_config(
        AutoModelForCausalLM.from_pretrained(pair.target).eval(),
        AutoModelForCausalLM.from_pretrained(pair.draft).eval(),
        DecodeConfig(verifier="block", stop="head"),
        head,
    )
    seed = torch.Generator().manual_seed(3)
    expected = decoder.generate(torch.tensor([5, 6, 7]), max_new_tokens=20, generator=seed)
    assert found["tokens"] == [expected.tokens.tolist()]


def test_a_release_of_other_results_or_of_weights_that_do_not_fit_leaves_nothing_behind(
    pair: Pair, tmp_path: Path
) -> None:
    other = train_tokenizer(["zyxw vuts rqpo nmlk zyxw"] * 4, 264)
    save_llama(tmp_path / "other", other, seed=2)
    broken = shutil.copytree(pair.draft, tmp_path / "broken")
    weights = load_file(broken / "model.safetensors")
    prefixed = {f"module.{name}": value for name, value in weights.items()}
    save_file(prefixed, broken / "model.safetensors", metadata={"format": "pt"})
    first, *rest = pair.results.runs
    forged = first.model_copy(update={"tokens_per_second": 1e6})
    named = measured_of(pair.results, target=tmp_path / "other").runs
    of_broken = measured_of(pair.results, draft=broken).runs
    free = [r for r in pair.results.runs if not r.method.fixed_length]
    for publish, folder, runs, error, message in (
        (release_draft, pair.target, [first, *rest], ManifestError, "they measure"),
        (release_head, pair.draft, [first, *rest], ManifestError, "they measure"),
        (release_draft, pair.draft, [forged, *rest], ManifestError, "tokens_per_second"),
        (release_draft, pair.draft, free, ManifestError, "fixed length"),
        (release_draft, pair.draft, named, VocabularyMismatchError, "tokenizer|vocabular"),
        (release_draft, broken, of_broken, ManifestError, "do not fit"),
    ):
        results = pair.results.model_copy(update={"runs": runs})
        with pytest.raises(error, match=message):
            publish(folder, tmp_path / "out", results)
        assert not (tmp_path / "out").exists()


def test_names_are_escaped_in_markdown() -> None:
    assert escape_markdown("a|b\n<script>") == r"a\|b \<script\>"
    assert escape_markdown("K=4 (x2) - h_.5") == r"K=4 (x2) - h\_.5"
    assert public_name("acme/draft-160m") == "acme/draft-160m"
    assert public_name("/home/me/runs/toy/draft/model") == "draft"
    assert public_name("/home/me/target") == "target"
