"""The engines by name, importable without torch; `eval.runtime.graphs` makes what they run."""

from __future__ import annotations

from typing import Literal, get_args

Engine = Literal["eager", "captured"]
"""The engines of short forwards: the model's own code, or a traced graph."""
ENGINES: tuple[str, ...] = get_args(Engine)


def engine_on(engine: Engine, device: str) -> Engine:
    """The engine that is used on a kind of device: "captured" graphs gain nothing but on a CPU."""
    return "eager" if engine == "captured" and not device.startswith("cpu") else engine
