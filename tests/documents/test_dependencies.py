"""The declared versions: what they leave room for, and what the lists of exact versions hold."""

import ast
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
DEPENDENCIES = [Requirement(line) for line in PROJECT["dependencies"]]
EXTRAS = PROJECT["optional-dependencies"]
DEVELOPMENT = [Requirement(line) for line in EXTRAS["dev"]]
PACKAGES = ("specdata", "distill", "heads", "eval", "recipes")
MODULES = {"pyyaml": "yaml"}
PARTS = {"pydantic_core", "markupsafe"}  # of pydantic and of jinja2, which pin them

# Versions that a resolver chose of what engines ask for (their packages' metadata).
VLLM = "torch==2.14.0 transformers==5.20.2 huggingface_hub==2.4.0 tokenizers==0.23.3"
VLLM += " safetensors==0.8.0 pydantic==2.14.3 filelock==4.2.11 numpy==2.3.5"
SGLANG = (
    "torch==2.14.1 transformers==5.19.0 tokenizers==0.23.2 huggingface_hub==1.33.0 numpy==2.3.5"
)
SPECULATORS = "torch==2.14.1 transformers==5.19.0 datasets==5.1.0 numpy==2.4.6 tqdm==4.70.1"
ENGINES = {"vllm 0.33.0": VLLM, "sglang 0.5.23": SGLANG, "speculators 0.9.0": SPECULATORS}


def pins(name: str) -> dict[str, Version]:
    """Exact versions of a constraints file, by canonical name."""
    lines = (ROOT / name).read_text("utf-8").splitlines()
    pairs = [line.split("==") for line in lines if line and not line.startswith("#")]
    return {canonicalize_name(package): Version(version) for package, version in pairs}


@pytest.mark.parametrize("engine", ENGINES)
def test_the_declared_ranges_leave_room_for_an_engine(engine: str) -> None:
    ours = {canonicalize_name(wanted.name): wanted.specifier for wanted in DEPENDENCIES}
    for pin in ENGINES[engine].split():
        name, version = pin.split("==")
        assert version in ours[canonicalize_name(name)], f"{pin} of {engine}"


def test_the_oldest_set_is_the_lower_end_of_every_declared_range() -> None:
    oldest = pins("constraints-oldest.txt")
    for wanted in DEPENDENCIES + DEVELOPMENT:
        (floor,) = (
            Version(bound.version) for bound in wanted.specifier if bound.operator in (">=", "==")
        )
        version = oldest[canonicalize_name(wanted.name)]
        assert version in wanted.specifier
        # The first release that is called so: 2.0.0 for 2.0.
        assert version.release[: len(floor.release)] == floor.release, wanted


def test_what_is_declared_is_imported_and_what_is_imported_is_declared() -> None:
    imported: set[str] = set()
    for path in (path for package in PACKAGES for path in (ROOT / package).rglob("*.py")):
        if path.name == "in_openvino.py":  # runs in an environment of its own
            continue
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.Import):
                imported |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                imported.add((node.module or "").partition(".")[0])
    declared = {MODULES.get(wanted.name, wanted.name) for wanted in DEPENDENCIES}
    optional = {
        Requirement(line).name for name, lines in EXTRAS.items() if name != "dev" for line in lines
    }
    found = imported - {*sys.stdlib_module_names, *PACKAGES, *PARTS}
    assert found - optional == declared
