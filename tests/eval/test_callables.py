"""The certificate of a function: each check finds its planted fault, and passes what is right."""

import math
import random
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from eval.analysis.callables import CHECKS, CheckSettings, Subject, certify_callable, made_pair
from recipes.command import run_tool
from specdata.errors import ConfigError

LENGTH = 2
SETTINGS = CheckSettings(texts=24, new=12, seconds=math.inf)
accepted_of_all_calls = [0, 0]


def laws(model: Any, ids: list[int]) -> Tensor:
    """(T, V) distributions after each token."""
    with torch.no_grad():
        return model(input_ids=torch.tensor([ids])).logits[0].softmax(-1)


def accepts(chance: Tensor) -> bool:
    return bool(torch.rand(()) < chance)


def draw(law: Tensor) -> int:
    return int(torch.multinomial(law, 1))


def one_round(
    draft: Any,
    target: Any,
    ids: list[int],
    fault: str = "",
    *,
    length: int = LENGTH,
    accept: Any = accepts,
    draw: Any = draw,
) -> list[int]:
    """Token verification of a chain; with a planted fault if one is named."""
    read, text, q = ids[-1:] if fault == "last token alone" else ids, [], []
    forgets = fault == "draft forgets a token" and len(ids) > 6
    for _ in range(length):
        q.append(laws(draft, [*(ids[:-1] if forgets else read), *text])[-1])
        text.append(draw(q[-1]))
    p = laws(target, [*read, *text])[len(read) - 1 :]
    for place, token in enumerate(text):
        chance = p[place, token] / q[place][token]
        if fault == "accepts too much":
            chance = 1.5 * chance
        if fault == "second token unverified" and place:
            chance = torch.tensor(1.0)
        if not accept(chance):
            rest = (p[place] - q[place]).clamp(min=0)
            return [*text[:place], draw(p[place] if fault == "draws from p again" else rest)]
    return [*text, draw(p[-1])]


def step(draft: Any, target: Any, ids: Tensor, fault: str = "") -> Tensor:
    return torch.cat([ids[0], torch.tensor(one_round(draft, target, ids[0].tolist(), fault))])


def generate(
    prompts: list[list[int]],
    max_new_tokens: int,
    seeds: list[int],
    target: Any,
    draft: Any,
    fault: str = "",
    how: str = "torch",
) -> Any:
    end, texts, rounds = target.generation_config.eos_token_id, [], 0
    for row, (prompt, seed) in enumerate(zip(prompts, seeds, strict=True)):
        torch.manual_seed(seed)
        source = random.Random(seed)
        ways: dict[str, dict[str, Any]] = {
            "torch": {},
            "in place": {
                "draw": lambda law: int((law / torch.empty_like(law).exponential_()).argmax())
            },
            "its own": {"accept": lambda chance, source=source: source.random() < float(chance)},
        }
        choose = {"draw": lambda law, source=source: source.choices(range(len(law)), law)[0]}
        ways["wholly its own"] = ways["its own"] | choose
        text: list[int] = []
        while len(text) < max_new_tokens and end not in text:
            ids = (
                [*prompt[1:], *text] if fault == "other rows shifted" and row else [*prompt, *text]
            )
            left = max_new_tokens - len(text) - 1
            length = LENGTH if fault == "past the budget" else min(LENGTH, left)
            text += one_round(draft, target, ids, fault, length=length, **ways[how])
            rounds += 1
        if end in text and fault != "past the end":
            text = text[: text.index(end) + 1]
        texts.append(torch.tensor(text))
    if fault == "sums acceptance over calls":
        accepted_of_all_calls[0] += sum(map(len, texts)) - rounds
        accepted_of_all_calls[1] += 1
        return texts, float(accepted_of_all_calls[0])
    return texts


FAULTS: dict[str, tuple[Callable[..., Any], str]] = {
    "accepts too much": (generate, "law"),
    "draws from p again": (step, "law"),
    "second token unverified": (step, "law"),
    "other rows shifted": (generate, "rows"),
    "draft forgets a token": (generate, "same"),
    "last token alone": (generate, "greedy"),
    "past the budget": (generate, "ends"),
    "past the end": (generate, "ends"),
    "sums acceptance over calls": (generate, "ends"),
}


# What is right, once for each check.
RIGHT = [("", *case) for case in dict.fromkeys(FAULTS.values())]


@pytest.mark.parametrize(
    ("fault", "function", "check"), [*RIGHT, *((name, *case) for name, case in FAULTS.items())]
)
def test_each_check_finds_its_fault_and_passes_what_is_right(
    fault: str, function: Callable[..., Any], check: str
) -> None:
    holds, finding = CHECKS[check](Subject(partial(function, fault=fault), fault), SETTINGS)
    assert holds is (not fault), finding
    if check == "law":
        assert "next 3 tokens" in finding


@pytest.mark.parametrize(("how", "fault"), [("in place", ""), ("its own", "accepts too much")])
def test_draws_that_cannot_be_walked_are_judged_by_samples(how: str, fault: str) -> None:
    subject = Subject(partial(generate, fault=fault, how=how), how)
    holds, finding = CHECKS["law"](subject, CheckSettings(texts=90, new=20, seconds=math.inf))
    assert holds is (not fault), finding
    assert "not walked: it draws by other means" in finding


def test_a_text_that_another_generator_drew_twice_by_chance_is_no_fault() -> None:
    def twice(
        prompts: list[list[int]], max_new_tokens: int, seeds: list[int], target: Any, draft: Any
    ) -> Any:
        """The same for seeds 0 and 1."""
        seeds = [max(1, seed) for seed in seeds]
        return generate(prompts, max_new_tokens, seeds, target, draft, how="wholly its own")

    settings = CheckSettings(texts=90, new=20, seconds=math.inf)
    holds, finding = CHECKS["law"](Subject(twice, "twice"), settings)
    assert holds, finding
    assert "not walked: it draws by other means" in finding


def test_what_cannot_be_seen_is_said_and_what_raises_is_a_fault() -> None:
    def mute(prompts: Any, max_new_tokens: int, seeds: Any) -> list[list[int]]:
        raise ZeroDivisionError("by nought")

    found = certify_callable(mute, "mute", CheckSettings(pair=made_pair(16), texts=3, new=4))
    assert [each.holds for each in found] == [False, False, None, None, False]
    assert "ZeroDivisionError: by nought" in str(found[0])
    assert "not seen" in str(found[2])
    with pytest.raises(ConfigError, match="takes no models"):
        certify_callable(mute, "mute", SETTINGS)
    with pytest.raises(ConfigError, match=r"must take \(prompts, max_new_tokens, seeds\)"):
        certify_callable(lambda x: x, "other", SETTINGS)
    with pytest.raises(ConfigError, match="at least one after them"):
        CHECKS["law"](Subject(lambda draft, target, ids: ids, "still"), SETTINGS)


def test_the_command_prints_a_line_a_check(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    few = ["--texts", "6", "--seconds", "1"]
    assert run_tool("certify", ["--callable", "tests.eval.test_callables:step", *few]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == list(CHECKS)
    assert "holds" in lines[0]
    (tmp_path / "unfinished.py").write_text("def step(:")
    monkeypatch.syspath_prepend(tmp_path)
    for wrong in ("tests.none:step", "tests.eval.test_callables:LENGTH", "unfinished:step"):
        assert run_tool("certify", ["--callable", wrong]) == 2
        assert "MODULE:FUNCTION" in capsys.readouterr().err
