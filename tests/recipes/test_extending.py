"""The edits of docs/extending*.md, made in a copy of the tree, tested and used there."""

import ast
import copy
import json
import os
import re
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.stages import CONFIG

ROOT = Path(__file__).parents[2]
PAGES = [path.read_text() for path in sorted((ROOT / "docs").glob("extending*.md"))]
PARTS = [part for page in PAGES for part in re.split(r"^## ", page, flags=re.M)[1:]]
SECTIONS = {part.split("\n")[0]: part for part in PARTS}
TESTS = re.compile(r"tests/\w+/test_\w+\.py")
BLOCK = re.compile(
    r"^(?:New file|In) `([^`]+)`(?:, (before|into) `([^`]+)`)?:\n```\w+\n(.*?)```", re.M | re.S
)


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the tree in which the edits of all sections are made."""
    folder = tmp_path_factory.mktemp("tree")
    listed = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    for name in subprocess.check_output(listed, cwd=ROOT, text=True).splitlines():
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / name, folder / name)
    for section in SECTIONS.values():
        blocks = BLOCK.findall(section)
        assert len(blocks) == len(re.findall(r"^```\w+$", section, re.M)), "one is lost"
        for name, how, where, block in blocks:
            path = folder / name
            assert path.exists() == bool(how), name
            source = path.read_text() if how else ""
            edit = {"before": before, "into": into}.get(how, lambda _source, _where, new: new)
            path.write_text(edit(source, where, block))
    return folder


def before(source: str, where: str, block: str) -> str:
    """The block before the first line that begins with a text, as far to the right as it."""
    line = re.search(rf"^( *){re.escape(where)}", source, re.M)
    assert line is not None, where
    return source[: line.start()] + textwrap.indent(block, line[1]) + source[line.start() :]


def into(source: str, name: str, block: str) -> str:
    """The block as the last entry of a table: the outermost tuple, list or dict that NAME is."""
    (assigned,) = (
        node
        for node in ast.parse(source).body
        if isinstance(node, ast.Assign | ast.AnnAssign)
        and name in ast.unparse(node).split("=")[0].split(":")[0].split()
    )
    assert assigned.value is not None
    table = next(
        each
        for each in ast.walk(assigned.value)
        if isinstance(each, ast.Tuple | ast.List | ast.Dict)
    )
    last = (table.values if isinstance(table, ast.Dict) else table.elts)[-1]
    lines = source.splitlines(keepends=True)
    assert last.end_lineno is not None
    line, end = lines[last.end_lineno - 1], last.end_col_offset
    if re.fullmatch(r",( *#.*)?\n", line[end:]):
        lines.insert(last.end_lineno, block)
    else:  # all on one line
        lines[last.end_lineno - 1] = f"{line[:end]}, {block.rstrip().rstrip(',')}{line[end:]}"
    return "".join(lines)


def run(tree: Path, *arguments: str) -> str:
    """Run Python in a copy of the tree, which must succeed; its output."""
    environment = {**os.environ, "PYTHONPATH": str(tree)}
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=tree,
        env=environment,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-6000:]
    return done.stdout


def test_every_edit_of_the_pages_finds_its_place(tree: Path) -> None:
    edited = {block[0] for section in SECTIONS.values() for block in BLOCK.findall(section)}
    for name in edited:
        assert not name.endswith(".py") or ast.parse((tree / name).read_text()).body, name


@pytest.mark.exhaustive
def test_the_tests_that_the_sections_name_pass_once_their_edits_are_made(tree: Path) -> None:
    tests = [sorted({*TESTS.findall(section)}) for section in SECTIONS.values()]
    assert all(tests)
    run(tree, "-m", "ruff", "format", "--quiet", ".")
    run(tree, "-m", "ruff", "check", ".")
    run(tree, "-m", "tests.eval.test_conformance")  # writes the vectors, as its section says
    pytest_ = ("-m", "pytest", "-q", "-x", "-p", "no:cacheprovider")
    named = sorted({name for each in tests for name in each})
    run(tree, *pytest_, "-m", "not slow and not exhaustive", *named)
    # The stage made, killed and continued; the rest is in the pipeline below.
    run(tree, *pytest_, "-k", "Survey", "tests/recipes/test_stages.py")


@pytest.mark.exhaustive
def test_one_pipeline_uses_all_that_was_added(tree: Path) -> None:
    """The prompts, the stage, the loss, the feature, the head, the verifier and the rule."""
    config = copy.deepcopy(CONFIG)
    articles = [{"article": f"It rained on day {day}.", "highlights": "Rain."} for day in range(4)]
    (tree / "articles.jsonl").write_text("".join(json.dumps(row) + "\n" for row in articles))
    added = {"name": "cnn-dailymail", "split": "train", "count": 4, "source": "articles.jsonl"}
    config["rollouts"]["sets"].append(added)
    config["survey"] = {"long": 4}
    config["draft"]["objective"] = "hellinger"
    config["head"] = {"kind": "weighted", "features": ["log_q", "is_best"], "epochs": 1}
    config["eval"]["methods"] += [
        {"name": "hesitant", "verifier": "hesitant", "verifier_args": {"share": 0.5}},
        {"name": "patient", "stop": "patience", "patience": 2},
    ]
    (tree / "all.yaml").write_text(yaml.safe_dump(config))
    run(tree, "recipes/pipeline.py", "--config", "all.yaml")

    def written(path: str) -> Any:
        return json.loads((tree / "out" / path).read_text())

    assert written("survey/survey.json")["rows"] == 28
    assert written("draft/run.json")["settings"]["draft"]["objective"] == "hellinger"
    assert written("head/model/config.json")["reads"] == ["log_q", "is_best"]
    runs = {each["method"]: each for each in written("eval/results.json")["runs"]}
    assert runs["hesitant"]["verifier"] == "hesitant"
    assert runs["patient"]["stop"] == "patience"
    assert all(runs[name]["rounds"] > 0 for name in ("hesitant", "patient", "head"))
