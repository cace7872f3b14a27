"""Who may import whom, read from the source."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
ALLOWED = {
    "specdata": {"specdata"},
    "heads": {"heads", "specdata"},
    "distill": {"distill", "specdata"},
    "eval": {"eval", "heads", "specdata"},
    "recipes": {"recipes", "eval", "heads", "distill", "specdata"},
}
OURS = {*ALLOWED, "tests", "benchmarks", "launch"}
FILES = [path for package in ALLOWED for path in sorted((ROOT / package).rglob("*.py"))]


def imported(path: Path) -> list[tuple[int, str]]:
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno} imports relatively"
            found.append((node.lineno, node.module or ""))
    return found


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_go_down_the_layers_only(path: Path) -> None:
    package = path.relative_to(ROOT).parts[0]
    for line, module in imported(path):
        top = module.split(".")[0]
        assert top not in OURS - ALLOWED[package], f"{path}:{line} may not import {module}"


@pytest.mark.parametrize(
    "path",
    [
        ROOT / "specdata/probability.py",
        ROOT / "specdata/sampling.py",
        *sorted((ROOT / "eval/verifiers").glob("*.py")),
    ],
    ids=lambda path: path.name,
)
def test_distributions_and_verifiers_need_nothing_but_torch_and_each_other(path: Path) -> None:
    ours = ("eval.verifiers", "eval.drafts", "specdata.probability", "specdata.sampling")
    for line, module in imported(path):
        if module.split(".")[0] in OURS:
            assert module.startswith(ours), f"{path}:{line} imports {module}"
        else:
            assert module.split(".")[0] not in {"transformers", "datasets"}, f"{path}:{line}"


@pytest.mark.parametrize(
    "module",
    [
        "specdata.prompts.reading",
        "specdata.rollouts.config",
        "specdata.labels.config",
        "specdata.sampling",
        "specdata.storage.manifest",
    ],
)
def test_configuration_is_imported_without_heavy_libraries(module: str) -> None:
    heavy = ("torch", "transformers", "tokenizers", "datasets", "pyarrow", "numpy")
    command = f"import sys, {module}; print([x for x in {heavy} if x in sys.modules])"
    done = subprocess.run([sys.executable, "-c", command], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "[]\n"), done.stderr


@pytest.mark.parametrize(
    "path", sorted((ROOT / "eval/runtime").glob("*.py")), ids=lambda path: path.name
)
def test_the_runtime_of_decoding_knows_nothing_of_what_is_decoded(path: Path) -> None:
    for line, module in imported(path):
        if module.split(".")[0] in OURS - {"specdata"}:
            assert module.startswith("eval.runtime"), f"{path}:{line} imports {module}"


def test_launch_holds_no_python_and_nobody_imports_a_package_named_like_a_builtin() -> None:
    assert not list((ROOT / "launch").rglob("*.py"))
    for path in FILES:
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            assert "eval" not in names, path
