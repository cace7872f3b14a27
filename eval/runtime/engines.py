"""The engines by name, importable without torch; `eval.runtime.graphs` makes what they run."""

from __future__ import annotations

from typing import Literal, get_args

Engine = Literal["eager", "captured", "compiled"]
"""How short forwards run: the model's own code, a traced graph, or that graph through Inductor."""
ENGINES: tuple[str, ...] = get_args(Engine)
