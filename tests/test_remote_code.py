"""Code that comes with a model is never run, whatever is answered on the terminal."""

from __future__ import annotations

import ast
import io
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from eval.publishing.release import _load_whole
from specdata.errors import ConfigError
from specdata.models import load_configs, load_model, load_tokenizer
from tests.chats import chat_tokenizer
from tests.tiny import tiny_llama

ROOT = Path(__file__).parent.parent
PACKAGES = ("specdata", "heads", "distill", "eval", "recipes", "benchmarks")
# Our own loader of heads; transformers' class of generation settings and PEFT's of adapters around
# a model that is there, which have no code.
WITHOUT = (
    "AcceptanceHead",
    "BaseHead",
    "super()",
    "super(BaseHead, actual)",
    "GenerationConfig",
    "peft.PeftModel",
)


def calls(tree: ast.AST) -> list[ast.Call]:
    return [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr in ("from_pretrained", "from_config")
        and ast.unparse(node.func.value) not in (*WITHOUT, "SpeculativeDecoder")
    ]


@pytest.mark.parametrize("package", PACKAGES)
def test_every_call_that_loads_with_transformers_refuses_remote_code(package: str) -> None:
    for path in sorted((ROOT / package).rglob("*.py")):
        for call in calls(ast.parse(path.read_text())):
            given = {word.arg: ast.unparse(word.value) for word in call.keywords}
            assert given.get("trust_remote_code") == "False", f"{path}:{call.lineno}"


def test_the_calls_of_this_project_are_found() -> None:
    assert len(calls(ast.parse((ROOT / "specdata" / "models.py").read_text()))) == 6


@pytest.fixture
def marker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The text that a model's code writes if it runs; anybody who is asked answers yes."""
    monkeypatch.setattr(sys, "stdin", io.StringIO("y\n" * 100))
    return tmp_path / "was-run"


def with_code(folder: Path, marker: Path, **changes: Any) -> str:
    """A model's folder whose configuration, model and tokenizer are classes of its own."""
    tiny_llama(0, vocab=400).save_pretrained(folder)
    chat_tokenizer("chatml").save_pretrained(folder)
    (folder / "mine.py").write_text(f"open({str(marker)!r}, 'w').close()\nclass Mine: pass\n")
    described = json.loads((folder / "config.json").read_text())
    auto = dict.fromkeys(("AutoConfig", "AutoModelForCausalLM"), "mine.Mine")
    changes = {"model_type": "mine", "architectures": ["Mine"], "auto_map": auto} | changes
    (folder / "config.json").write_text(json.dumps({**described, **changes}))
    settings = folder / "tokenizer_config.json"
    mine = {"tokenizer_class": "Mine", "auto_map": {"AutoTokenizer": [None, "mine.Mine"]}}
    settings.write_text(json.dumps({**json.loads(settings.read_text()), **mine}))
    return str(folder)


@pytest.mark.parametrize(
    "load", [load_model, load_tokenizer, load_configs, lambda name: _load_whole(Path(name))]
)
def test_a_model_with_code_of_its_own_is_refused_without_a_question(
    tmp_path: Path, marker: Path, load: Callable[[str], object], capsys: pytest.CaptureFixture[str]
) -> None:
    name = with_code(tmp_path / "model", marker)
    with pytest.raises(ConfigError, match="such code is never run here") as refusal:
        load(name)
    assert not marker.exists()
    assert "y/N" not in capsys.readouterr().out
    assert "auto_map" in str(refusal.value)
    assert "architecture transformers itself has" in str(refusal.value)
