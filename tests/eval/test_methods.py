"""Methods: chosen on the command line, refused before a model is loaded, calibrated once."""

import json
import re

import pytest

from eval.decode_config import Method
from eval.drafting.stopping.logistic import CalibratedRule, Calibration
from eval.drafting.stopping.thresholds import Entropy
from eval.measuring.methods import EvalConfig, check_methods, needs_fit, with_fit
from eval.measuring.results import columns, method_of
from recipes import run_eval
from recipes.config import parse
from recipes.publish import Release
from recipes.run_eval import Eval
from specdata.config import PromptSet, read_config
from specdata.errors import ConfigError
from specdata.probability import SamplingConfig


def test_a_method_can_be_written_on_the_command_line() -> None:
    tree = "{name: my tree, verifier: traversal, drafter: tree, widths: [2, 2]}"
    given = parse(["--method", tree, "--method=head h=.6"], "").config.eval.methods
    plain, tree, rule = given
    assert (plain.decoder, tree.name, tree.widths) == ("plain", "my tree", (2, 2))
    assert rule.stop.threshold == 0.6
    assert rule.replace(stop="entropy").stop == Entropy()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("K=44", "unknown method 'K=44': did you mean 'K=4'?"),
        ("zzz", "unknown method 'zzz': known: plain, K=4"),
        ("{name: a, widht: [2]}", "method 'a': widht: unknown key: did you mean 'widths'?"),
        ("{verifier: block}", "--method '{verifier: block}': name: is missing"),
        ("{name: [", "not a YAML value"),
        ("{name: a, length: many}", "length: .*got 'many'"),
        ("{name: a, stop: logit, calibration: [.nan, 1]}", "calibration.*finite number"),
    ],
)
def test_a_mistaken_method_is_named(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse(["--method", text], "")


ALONE = "{name: server alone, decoder: server, url: 'http://127.0.0.1:1', served_model: t}"


def test_served_methods_are_compared_with_the_server_alone_and_need_no_plain_one() -> None:
    served = ALONE.replace("server alone", "with a draft")
    config = parse(["--eval.methods", f"[{ALONE}, {served}]"]).config
    assert [method.name for method in config.eval.methods] == ["server alone", "with a draft"]


@pytest.mark.parametrize(
    ("methods", "message"),
    [
        ("[{name: plain}]", "'plain' has decoder: speculative.* must have decoder: plain"),
        ("[{name: a, decoder: plain}]", "'a' has decoder: plain.* must be named 'plain'"),
        ("[{name: ''}, {name: plain, decoder: plain}]", "a method's name is empty"),
        ("[{name: a}, {name: a}]", "two methods are named 'a'"),
        ("[{name: a}, {name: b}]", "no method is 'plain', .* decoder: plain}; got a, b"),
        (f"[{ALONE}, {{name: b}}]", "no method is 'plain', .*; got server alone, b"),
        (f"[{ALONE.replace('server alone', 'a')}]", "no method is 'plain', .*; got a"),
    ],
)
def test_names_of_methods_that_cannot_be_compared_are_refused(methods: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse(["--eval.methods", methods])


@pytest.mark.parametrize(
    ("method", "message"),
    [
        ("verifier: block, drafter: tree, widths: [2, 2]", "has a proof for chain"),
        ("stop: cost, threshold: .5", "stop cost does not use threshold"),
        ("verifier: rrs, drafter: tree, widths: [2], length: 8", "tree does not use length"),
        ("stop: cost, draft_seconds: -1", "draft_seconds: must be greater than or equal to 0"),
        ("decoder: assisted, threshold: 1.4", "must be less than or equal to 1"),
        (
            "decoder: assisted, stop: logit",
            "decoder assisted does not use stop: leave it out .* or take decoder: speculative",
        ),
        ("verifier: naive, drafter: dynamic_tree, nodes: 5", "needs nodes and depth of 1 or more"),
        ("verifier: traversal, drafter: dynamic_tree, nodes: 5, depth: 3", "gives tree, chosen"),
        ("path_temperatures: [1.5]", "drafter chain does not use path_temperatures"),
        ("drafter: lookup", "needs the number of its tokens, such as lookup: 8"),
        ("drafter: lookup, verifier: naive, lookup: 8, mtp: true", "and no mtp"),
        *(
            (f"mtp: true, stop: {rule}", "labels, which are of the run's draft.* give calibration")
            for rule in ("logit", "cost, head: false")
        ),
        ("drafter: lookup, lookup: 8, stop: cost", "stop='cost' ends chains"),
        ("match: 2", "does not use match: leave it out, or say with lookup how many"),
        ("verifier: greedy_block, lookup: 8", "cannot take turns .*: take token or block"),
        (
            "verifier: rrs_wor, drafter: tree, widths: [2], siblings: distinct, lookup: 8",
            "lookups are chains, .* and tree, distinct: take naive or traversal, or leave lookup",
        ),
        (
            "verifier: traversal, drafter: tree, widths: [100, 100, 100, 100]",
            "at most 4096 nodes, .* got 101010100: lower widths",
        ),
    ],
)
def test_an_impossible_method_is_refused_by_name_before_any_model_is_loaded(
    method: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The models of this configuration do not exist, so loading one would be another error."""
    flags = ["--method", f"{{name: odd, {method}}}", "--output", "nowhere"]
    flags += [f"--models.{role}=nowhere/pair/{role}" for role in ("target", "draft")]
    assert run_eval.RECIPE.run(flags) == 2
    said = capsys.readouterr()
    assert said.out == ""
    where = r"(unusable configuration:\n  eval\.methods\.1: |--method .*: )?"
    assert re.search(f"^error: {where}method 'odd': .*{message}", said.err), said.err


def evaluation(*methods: Method) -> EvalConfig:
    plain = Method(name="plain", decoder="plain")
    return EvalConfig(sets=[PromptSet("maths", "test", 1)], methods=[plain, *methods])


def test_a_fitted_calibration_reaches_the_methods_that_give_none() -> None:
    config = evaluation(
        Method(name="K=4"),
        Method(name="logit", stop="logit"),
        Method(name="mine", stop="logit", calibration=(9.0, 9.0)),
        Method(name="cost", stop="cost"),
    )
    assert needs_fit(config)
    fitted = with_fit(config, {"calibration": [1.5, 0.5], "rows": 48})
    assert not needs_fit(fitted)
    sampling = SamplingConfig()
    models = {
        method.name: method.decoding(sampling).stop.model
        for method in fitted.methods
        if isinstance(method.stop, CalibratedRule)
    }
    assert models == {
        "logit": Calibration(1.5, 0.5),
        "mine": Calibration(9.0, 9.0),
        "cost": Calibration(1.5, 0.5),
    }
    assert columns(fitted.methods[2])["parameters"] == {"calibration": [1.5, 0.5]}
    check_methods(fitted, sampling, head=False)


def test_another_list_of_methods_goes_to_another_folder_and_is_read_from_there() -> None:
    config = parse(["--method", "K=4", "--eval.folder", "eval-k2"], "").config
    assert Eval(config).folder.name == "eval-k2"
    assert "eval-k2/results.json" in Release(config).inputs["results"]
    # Each method has its own key, so a refusal names those that differ.
    assert set(Eval(config).stored_settings()["eval"]["methods"]) == {"plain", "K=4"}
    for bad in ("head", "eval/x", "../eval", ""):
        with pytest.raises(ConfigError, match="begins with 'eval', of letters"):
            parse(["--eval.folder", f"'{bad}'"], "")


@pytest.mark.parametrize(
    "given",
    [
        {"name": "plain", "decoder": "plain"},
        {"decoder": "generate"},
        {"decoder": "assisted", "length": 7},
        {"decoder": "assisted", "lookup": 3},
        {"decoder": "assisted", "threshold": 0.3, "limit": 6},
        {"length": 9, "verifier": "block"},
        {"stop": "confidence", "threshold": 0.5, "limit": 5},
        {"stop": "logit", "threshold": 0.4, "limit": 7, "calibration": [0.3, 1.2]},
        {"stop": "head", "threshold": 0.3},
        {"stop": "cost", "limit": 9, "draft_seconds": 0.1, "token_seconds": 1.0, "head": False,
         "calibration": [0.3, 1.2]},
        {"verifier": "biased_uno", "verifier_args": {"epsilon": 0.2}},
        {"verifier": "importance", "drafter": "paths", "paths": 2, "length": 3,
         "path_temperatures": [1.0, 1.2], "verifier_args": {"solver": "luce"}},
        {"verifier": "rrs_wor", "drafter": "tree", "widths": [2, 2], "siblings": "distinct"},
        {"verifier": "naive", "drafter": "dynamic_tree", "nodes": 5, "depth": 3, "gain": 0.5},
        {"verifier": "kseq", "drafter": "paths", "paths": 2, "length": 3, "lookup": 8, "match": 2},
        {"verifier": "importance", "drafter": "lookup", "lookup": 8,
         "verifier_args": {"solver": "luce"}},
    ],
    ids=str,
)  # fmt: skip
def test_a_method_is_read_back_as_it_is_written_in_settings_and_in_a_row_of_results(
    given: dict[str, object],
) -> None:
    """Of a row drafter, verifier, rule, length and threshold are columns; the rest parameters."""
    method = read_config(Method, {"name": "a", **given})
    written = method.model_dump(mode="json")
    assert written.items() >= given.items()
    assert not any(isinstance(v, dict) for key, v in written.items() if key != "verifier_args")
    assert read_config(Method, written) == method
    assert method.replace(name="b").stop == method.stop
    row = json.loads(json.dumps(columns(method)))
    head = method.stop.reads_head
    assert method_of(row, draft=method.uses_draft, head=head) == method
