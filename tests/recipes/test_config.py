"""The configuration: a file, overridden by a command line; mistakes are named, nothing is run."""

import os
from pathlib import Path
from typing import Any, get_args

import pytest
import yaml
from pydantic import ValidationError

from recipes.command import main
from recipes.config import PipelineConfig, _options, load_yaml, parse
from recipes.run_eval import Eval
from specdata.config import read_config
from specdata.errors import ConfigError

ROOT = Path(__file__).parents[2]
CONFIGS = sorted((ROOT / "recipes" / "configs").rglob("*.yaml"))


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.name)
def test_every_shipped_configuration_loads(path: Path) -> None:
    assert parse(["--config", str(path)], "").config.output


def test_the_command_line_wins_over_the_file_and_the_file_over_defaults() -> None:
    config = parse(["--head.depth", "1", "--head.learning_rate=1e-4", "--seed", "7"], "").config
    assert config.head is not None
    assert (config.head.depth, config.head.learning_rate, config.seed) == (1, 1e-4, 7)
    assert config.head.kind == "immediate"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--head.dept", "1"], "did you mean 'head.depth'"),
        (["--config", "nowhere.yaml"], "nowhere.yaml does not exist"),
        (["a.yaml", "b.yaml"], "two configuration files, a.yaml and b.yaml: give one"),
        (["--sampling.top_p", "0"], "top_p must lie in"),
        (["--sampling.repetition_penalty", "1.1"], r"nothing here applies repetition_.*y: 1.0\)"),
        (["--sampling.temperature=1e400"], "temperature"),
        (["--seed", "[1"], "not a YAML value"),
        (["--eval.sets", "[]"], "at least one prompt set"),
        (["--seed", "4294967296"], "seed: must be less than or equal to 4294967295"),
        (["--toy.target_width", "7"], "toy.target_width: must be a multiple of 2"),
        (["--output=~/x"], r"output: must be written out \(got '~/x'\)"),
        (["--models", "{target: a, draft: b, target: c}"], "--models: .*: 'target' is given twice"),
    ],
)
def test_a_mistake_says_what_must_hold(arguments: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse(arguments, "")


@pytest.mark.parametrize(
    ("values", "line"),
    [
        ({"head": {"depht": 1}}, "head.depht: unknown key: did you mean 'depth'?"),
        ({"head": {"zzzz": 1}}, "unknown key: known: kind, depth, width"),
        ({"eval": {"sets": [{"name": "maths"}, {"nam": 1}]}}, "eval.sets.1.nam: unknown key: did"),
        ({"head": {"mixing": float("nan")}}, "head.mixing: must be a finite number"),
        ({}, "output: is missing"),
        ({"head": {"depth": True}}, "head.depth: must be a number (got true)"),
        ({"eval": {"methods": [{"name": "a", "widths": [2, True]}]}}, "widths: must be a number"),
        ({"output": "a\x1b[2Jb"}, r"output: must hold no control characters (got 'a\x1b[2Jb')"),
        ({"sampling": None}, "sampling: must be a section, a mapping of keys, and"),
        # Both at once.
        ({"head": {"depth": -1, "mixing": 2}}, "head.depth: must be greater than or equal to 0"),
        ({"head": {"depth": -1, "mixing": 2}}, "head.mixing: must be less than 1 (got 2"),
    ],
)
def test_a_mistake_is_one_line_under_its_dotted_key(values: dict[str, Any], line: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read_config(PipelineConfig, values)
    (said,) = (each for each in str(caught.value).splitlines() if line in each)
    assert said.startswith("  ")


def test_templates_take_line_breaks_and_no_value_can_be_changed() -> None:
    config = parse(["--eval.sets", r'[{name: maths, template: "a\n\tb {q}"}]'], "").config
    assert config.eval.sets[0].template == "a\n\tb {q}"
    with pytest.raises(ValidationError, match="frozen"):
        config.output = "y"


@pytest.mark.parametrize("name", ["/a/run #1", "2024-01-01", "1e3", "a: b", "[x", "null", "'q'"])
def test_text_on_the_command_line_is_taken_as_it_stands(name: str) -> None:
    given = ["--output", name, "--eval.folder", "eval-007", "--toy", "null"]
    config = parse(given, "").config
    assert config.output == name
    assert config.eval.folder == "eval-007"
    assert config.toy is None
    assert parse(["--labels.logits", "null"], "").config.labels.logits is None
    assert parse(["--labels.logits", "a #1"], "").config.labels.logits == "a #1"


ALIKE = """
output: out
models: {target: t, draft: d, load: {target: &same {attn_implementation: sdpa}, draft: *same}}
rollouts: {sets: [{name: maths}]}
eval: {sets: [{name: maths}], methods: [{name: plain, decoder: plain}]}
"""


def test_an_option_changes_one_of_two_aliases(tmp_path: Path) -> None:
    (tmp_path / "pair.yaml").write_text(ALIKE)
    given = ["--config", str(tmp_path / "pair.yaml")]
    load = parse([*given, "--models.load.target.attn_implementation", "eager"]).config.models.load
    assert (load.target.attn_implementation, load.draft.attn_implementation) == ("eager", "sdpa")


MERGED = """
anchors: &outer
  deep: &second {<<: &first {batch_size: 7, epochs: 3}, epochs: 4}
draft: {<<: *second, steps: 5, batch_size: 8}
"""


def test_a_key_beside_merge_keys_wins() -> None:
    assert load_yaml(MERGED)["draft"] == {"batch_size": 8, "epochs": 4, "steps": 5}
    assert load_yaml("[&a {x: 1}, &b {y: 2}, {<<: [*a, *b], x: 3}]")[2] == {"x": 3, "y": 2}


@pytest.mark.parametrize("text", ["a: {x: 1, x: 2}", "[&a {x: 1}, {<<: *a, y: 1, y: 2}]"])
def test_a_key_that_is_given_twice_is_refused_beside_merge_keys_too(text: str) -> None:
    with pytest.raises(yaml.constructor.ConstructorError, match="is given twice"):
        load_yaml(text)


@pytest.mark.parametrize("text", ["a: [", "- 1\n- 2", "\x00", "seed: 1\nseed: 2"])
def test_a_file_that_is_no_configuration_is_named(text: str, tmp_path: Path) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"bad\.yaml"):
        parse(["--config", str(path)], "")


COUNTS = [
    *(
        key
        for key, info in _options(PipelineConfig, "")
        if int in {info.annotation, *get_args(info.annotation)}
    ),
    "draft.epochs",
    "draft.finetune.epochs",
]


@pytest.mark.parametrize("key", COUNTS)
def test_a_count_that_nothing_could_hold_is_refused_where_it_is_read(key: str) -> None:
    assert len(COUNTS) > 40
    with pytest.raises(ConfigError, match=rf"{key.rpartition('.')[2]}\W.*\(?got 1(0{{30}}|e\+30)"):
        parse([f"--{key}", "1" + "0" * 30], "")


ALIASES = [
    "&a [*a]",
    "&a {b: *a}",
    "&a {<<: *a}",
    "[&a0 [x]" + "".join(f", &a{n} [{f'*a{n - 1}, ' * 10}]" for n in range(1, 10)) + "]",
]


@pytest.mark.parametrize("text", ALIASES)
def test_yaml_that_grows_where_aliases_are_written_out_is_refused(
    text: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=r"--method: .*at most 10,000 values with its aliases"):
        parse(["--method", text], "")
    (tmp_path / "pair.yaml").write_text(f"output: {text}\n")
    with pytest.raises(ConfigError, match=r"pair\.yaml .*at most 10,000 values"):
        parse(["--config", str(tmp_path / "pair.yaml")], "")


def test_what_is_no_file_of_a_configurations_size_is_never_read(tmp_path: Path) -> None:
    large, pipe = tmp_path / "large.yaml", tmp_path / "pipe"
    large.write_bytes(b"#" * 20_000_000)
    os.mkfifo(pipe)
    for path in (large, pipe, tmp_path, Path("/dev/zero")):
        with pytest.raises(ConfigError, match="it must be a regular file of at most 131,072"):
            parse(["--config", str(path)], "")


VERIFIERS = ["verifiers", "t", "d", "--prompts", "p"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["init", "target", "--prompts", "{}"], "--prompts must be a"),
        (["init", "target", "--prompts", "no.jsonl"], "--prompts must be a file that is there"),
        (["doctor", "d", "--target", "t", "--prompts", "no.jsonl"], "--prompts: prompt file no"),
        (["init", "target", "--prompts", str(CONFIGS[0]), "--out", "."], "must be a"),
        ([*VERIFIERS, "--seconds=nan"], "--seconds: must be a"),
        ([*VERIFIERS, "--seconds=0"], "--seconds: must be a"),
        ([*VERIFIERS, "--count=" + "9" * 5000], "--count: must be a"),
    ],
)
def test_pipes_and_impossible_options_of_tools_are_refused_before_anything_is_read(
    arguments: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    os.mkfifo(tmp_path / "pipe.jsonl")
    try:
        status: object = main([each.format(tmp_path / "pipe.jsonl") for each in arguments])
    except SystemExit as left:  # as argparse ends
        status = left.code
    assert status == 2
    assert message in capsys.readouterr().err


def test_a_plan_says_how_large_things_become_and_what_was_chosen(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    pair = [f"--models.target={out}/pair/target", f"--models.draft={out}/pair/draft"]
    assert main(["pipeline", "--plan", f"--output={out}", *pair]) == 0
    said = capsys.readouterr().out
    assert "1,368 completions, at most 131,328 tokens, about 135.0 MB" in said
    assert "head: {kind: immediate, epochs: 14, draws: 6, learning_rate: 0.006}" in said
    assert not out.exists()


@pytest.mark.parametrize(
    ("method", "is_asked"),
    [
        ("{name: cost, stop: cost}", True),
        ("{name: cost without head, stop: cost, head: false}", False),
    ],
)
def test_an_evaluation_reads_the_runs_head_if_a_method_asks_it(method: str, is_asked: bool) -> None:
    methods = f"[{{name: plain, decoder: plain}}, {method}]"
    config = parse(["--draft.init.kind", "target", "--eval.methods", methods], "").config
    assert config.head is not None
    assert ("head" in Eval(config).inputs) is is_asked
