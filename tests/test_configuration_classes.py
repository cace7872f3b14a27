"""Configuration classes: every mistake is named under its dotted key, with what must hold."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import pytest
from pydantic import Field, ValidationError, model_validator

from specdata.config import Config, read_config
from specdata.errors import ConfigError


@dataclass(frozen=True)
class Sampling:
    temperature: float = 1.0


class Head(Config):
    depth: int = Field(3, ge=0, description="residual blocks")
    mixing: float = Field(0.15, ge=0, lt=1, description="share of target tokens")
    objective: Literal["kl", "tv"] = Field("kl", description="loss")

    @model_validator(mode="after")
    def _fits(self) -> Head:
        if self.depth == 0 and self.objective == "tv":
            raise ValueError("objective tv needs a depth above 0")
        return self


class Pair(Config):
    output: str = Field(description="folder")
    head: Head | None = Field(None, description="head")
    heads: list[Head] = Field([], description="more heads")
    sampling: Sampling = Field(Sampling(), description="sampling")
    widths: tuple[int, ...] = Field((), description="widths")
    free: dict[str, Any] = Field({}, description="parameters of something else")
    template: str = Field("", description="text")
    quick: bool = Field(False, description="a switch")


@pytest.mark.parametrize(
    ("values", "line"),
    [
        ({"output": "x", "head": {"depht": 1}}, "head.depht: unknown key: did you mean 'depth'?"),
        ({"output": "x", "head": {"zzzz": 1}}, "unknown key: known: depth, mixing, objective"),
        ({"output": "x", "otuput": "y"}, "otuput: unknown key: did you mean 'output'?"),
        ({"output": "x", "heads": [{}, {"mixin": 1}]}, "heads.1.mixin: unknown key: did you mean"),
        ({"output": "x", "sampling": {"tempratur": 1}}, "did you mean 'temperature'?"),
        ({"output": "x", "head": {"mixing": 1.5}}, "head.mixing: must be less than 1 (got 1.5)"),
        ({"output": "x", "head": {"mixing": float("nan")}}, "head.mixing: must be a finite number"),
        ({"output": "x", "head": {"depth": "deep"}}, "head.depth: must be a valid integer"),
        ({"output": "x", "head": {"objective": "lk"}}, "head.objective: must be 'kl' or 'tv'"),
        ({"output": "x", "head": {"depth": 0, "objective": "tv"}}, "head: objective tv needs a"),
        ({}, "output: is missing"),
        ({"output": "x", "head": {"depth": True}}, "head.depth: must be a number (got true)"),
        ({"output": "x", "head": {"mixing": False}}, "head.mixing: must be a number (got false)"),
        (
            {"output": "x", "sampling": {"temperature": True}},
            "sampling: 'temperature' must be a number (got true)",
        ),
        ({"output": "x", "heads": [{}, {"depth": True}]}, "heads.1.depth: must be a number"),
        ({"output": "x", "widths": [2, True]}, "widths: must be a number (got true)"),
        ({"output": "a\x1b[2Jb"}, r"output: must hold no control characters (got 'a\x1b[2Jb')"),
        ({"output": "a\nb"}, "output: must hold no control characters"),
        ({"output": "x", "free": {"a": "\x07"}}, "free: 'a' must hold no control characters"),
        ({"output": "x", "\x1b[2J": 1}, r"'\x1b[2J': unknown key"),
        ({"output": "x", "sampling": None}, "sampling: must be a section, a mapping of keys, and"),
        ({"output": "x", "heads": [3]}, "heads.0: must be a section, a mapping of keys (got 3)"),
    ],
)
def test_a_mistake_is_one_line_under_its_dotted_key(values: dict[str, Any], line: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read_config(Pair, values)
    assert line in str(caught.value)


def test_every_mistake_is_reported_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        read_config(Pair, {"head": {"depth": -1, "mixing": 2, "epoch": 1}})
    assert len(str(caught.value).splitlines()) == 5


def test_switches_and_templates_take_what_is_refused_elsewhere() -> None:
    pair = read_config(Pair, {"output": "x", "quick": True, "template": "a\n\tb"})
    assert (pair.quick, pair.template) == (True, "a\n\tb")


def test_values_are_converted_and_cannot_be_changed() -> None:
    pair = read_config(Pair, {"output": "x", "head": {"mixing": "1e-1"}})
    assert pair.head is not None
    assert pair.head.mixing == 0.1
    with pytest.raises(ValidationError, match="frozen"):
        pair.output = "y"
