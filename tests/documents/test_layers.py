"""Who may import whom, read from the source."""

import ast
import re
import sys
from collections.abc import Mapping, Set
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from heads.config import HEAD_KINDS
from heads.published import write_code

ROOT = Path(__file__).parents[2]
ALLOWED = {
    "specdata": {"specdata"},
    "heads": {"heads", "specdata"},
    "distill": {"distill", "specdata"},
    "eval": {"eval", "heads", "specdata"},
    "recipes": {"recipes", "eval", "heads", "distill", "specdata"},
}
OURS = {*ALLOWED, "tests", "benchmarks", "launch"}
# transformers needs the last two itself.
PUBLISHED_WITH = {"torch", "transformers", "huggingface_hub", "safetensors"}
FILES = [path for package in ALLOWED for path in sorted((ROOT / package).rglob("*.py"))]


MODULES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
    for path in FILES
}


@cache
def imported(path: Path, *, at_work: bool = False) -> list[tuple[int, str]]:
    """Line and module of every import of a file; `at_work` leaves out those for types alone.

    Those by `import_module` too: of a name that begins with a room's, all that begin so.
    """
    modules = []
    nodes: list[ast.AST] = [ast.parse(path.read_text())]
    for node in nodes:  # which grows
        if at_work and isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            continue
        nodes += ast.iter_child_nodes(node)
        if isinstance(node, ast.Import):
            modules += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno} imports relatively"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            modules += [(node.lineno, n if n in MODULES else f"{node.module}") for n in names]
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module"):
            name, *_ = re.findall(r"'([^'{]*)", ast.unparse(node.args[0])) or [""]
            named = [module for module in MODULES if name and module.startswith(name)]
            modules += [(node.lineno, module) for module in named or [name]]
            by_users = path.name == "certify.py"  # --callable pkg.module:function
            assert name or by_users, f"{path}:{node.lineno} must say what it imports"
    return modules


def circle(below: Mapping[Any, Set[Any]]) -> set[Any]:
    """What is in a circle or above one, of things and those below each."""
    while ready := [each for each, others in below.items() if not others & below.keys()]:
        below = {each: others for each, others in below.items() if each not in ready}
    return {*below}


def test_no_test_imports_a_test() -> None:
    """What several files share is in tests/support."""
    an_import = re.compile(r"^ *(?:from|import) tests\..*\btest_", re.M)
    importing = [p.name for p in (ROOT / "tests").rglob("*.py") if an_import.search(p.read_text())]
    assert not importing


def test_no_files_import_each_other_in_a_circle() -> None:
    """At the module's level and inside functions, within and across packages."""
    below = {
        path: {MODULES[name] for _, name in imported(path, at_work=True) if name in MODULES}
        for path in FILES
    }
    assert not circle(below)


def test_no_public_class_or_constant_of_one_name_stands_in_two_rooms() -> None:
    """But for what every member of a family has under one name."""
    of_families = {"T", "RECIPE"}
    rooms: dict[str, set[tuple[str, ...]]] = {}
    for path in FILES:
        for node in ast.parse(path.read_text()).body:
            names = [node.name] if isinstance(node, ast.ClassDef) else []
            if isinstance(node, ast.Assign | ast.AnnAssign):
                stored = (n for n in ast.walk(node) if isinstance(n, ast.Name))
                names = [n.id for n in stored if isinstance(n.ctx, ast.Store)]
            for name in names:
                if name[0].isupper():
                    rooms.setdefault(name, set()).add(path.relative_to(ROOT).parts[:2])
    assert {name for name, of_it in rooms.items() if len(of_it) > 1} == of_families


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_go_down_the_layers_only(path: Path) -> None:
    package = path.relative_to(ROOT).parts[0]
    for line, module in imported(path):
        top = module.split(".")[0]
        assert top not in OURS - ALLOWED[package], f"{path}:{line} may not import {module}"


@pytest.mark.parametrize("package", ["eval", "specdata"])
def test_rooms_import_downwards_only(package: str) -> None:
    """A room is a folder or a file of the package: some order of them has no import upwards."""
    below: dict[str, set[str]] = {}
    for path in (ROOT / package).rglob("*.py"):
        room, *_ = path.relative_to(ROOT / package).with_suffix("").parts
        named = [module.split(".") for _, module in imported(path)]
        rooms = {name[1] for name in named if name[0] == package and len(name) > 1}
        below.setdefault(room, set()).update(rooms - {room})
    assert not circle(below)


@pytest.mark.parametrize(
    "module",
    [
        "heads.generate",
        *(f"heads.kinds.{each.head.partition('.')[0]}" for each in HEAD_KINDS.values()),
    ],
)
def test_published_code_is_ours_and_needs_torch_and_what_comes_with_transformers_only(
    module: str, tmp_path: Path
) -> None:
    write_code(module, tmp_path)
    for path in tmp_path.iterdir():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and node.level:
                assert (tmp_path / f"{node.module}.py").is_file(), node.module
            elif isinstance(node, ast.Import | ast.ImportFrom):
                name = node.module if isinstance(node, ast.ImportFrom) else node.names[0].name
                top = str(name).split(".")[0]
                assert top in sys.stdlib_module_names | PUBLISHED_WITH, f"{path} imports {name}"


def test_launch_holds_no_python_and_no_import_hides_a_builtin() -> None:
    assert not list((ROOT / "launch").rglob("*.py"))
    for path in FILES:
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            assert "eval" not in names, path
