"""Greedy output that differs is judged: a tie by rounding, or a defect."""

from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from eval.analysis.ties import NOISE_FACTOR, greedy_differences, greedy_reference, judge_difference
from eval.decoder import DecodeConfig, SpeculativeDecoder
from eval.runtime.model import CachedModel
from recipes.command import run_tool
from tests.support.families import tiny

BUDGET = 24
PROMPTS = [torch.tensor([2 + start, 5, start + 7]) for start in range(6)]
CHAIN = DecodeConfig(temperature=0.0, length=4)
TREE = DecodeConfig(temperature=0.0, verifier="traversal", drafter="tree", widths=(2, 2, 1))


class Shifted(CachedModel):
    """A defect: tokens that are verified together are read one position too late."""

    def _run_eager(self, cache, inputs, positions, mask, logits_to_keep):  # type: ignore[no-untyped-def]
        late = positions + 1 if positions[0, 0] and inputs.shape[1] > 1 else positions
        return super()._run_eager(cache, inputs, late, mask, logits_to_keep)


class Leaking(CachedModel):
    """A defect: tokens that are verified together see those that follow."""

    def _causal_mask(self, start, count):  # type: ignore[no-untyped-def]
        return torch.zeros_like(super()._causal_mask(start, count))


def decoder(kind: type[CachedModel], target: Any, draft: Any, config: DecodeConfig) -> Any:
    return SpeculativeDecoder(kind(target, 40), CachedModel(draft, 40), config)


def decode(made: SpeculativeDecoder) -> Callable[[Tensor], Tensor]:
    return lambda prompt: (
        made.generate(prompt, max_new_tokens=BUDGET, generator=torch.Generator()).tokens
    )


@pytest.mark.parametrize("defect", [Shifted, Leaking])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_decoder_with_a_defect_is_called_a_bug(
    defect: type[CachedModel], dtype: torch.dtype
) -> None:
    target = tiny("llama", 2, dtype=dtype)
    broken = decode(decoder(defect, target, target, CHAIN))
    differences = greedy_differences(target, PROMPTS, broken, max_new_tokens=BUDGET)
    bugs = [each for each in differences.values() if each.verdict == "bug"]
    assert len(bugs) >= 2
    assert str(bugs[0]).startswith(f"bug at new token {bugs[0].position}: plain token ")


@pytest.mark.slow
def test_half_precision_sequences_that_differ_are_ties() -> None:
    """Flat distributions in bfloat16: many logits are equal to a few bits, so rounding decides.

    How often depends on the processor, so each token also has a twin of equal logits, and one
    method names them the other way round: of equal logits it takes the other.
    """
    half = 1000

    def renamed(ids: Tensor) -> Tensor:
        return (ids + half) % (2 * half)

    def with_twins(model: Any) -> Any:
        with torch.no_grad():
            model.lm_head.weight[half:] = model.lm_head.weight[:half]
        return model

    def other_names(model: Any) -> Callable[[Tensor], Tensor]:
        turned = deepcopy(model)
        with torch.no_grad():
            for matrix in (turned.lm_head.weight, turned.model.embed_tokens.weight):
                matrix.copy_(matrix.roll(half, dims=0))
        made = decode(SpeculativeDecoder.from_config(turned, turned, CHAIN))
        return lambda prompt: renamed(made(renamed(prompt)))

    ties = 0
    for seed in range(2):
        sizes = {"initializer_range": 0.1, "dtype": torch.bfloat16, "hidden_size": 32}
        target = with_twins(tiny("llama", seed, vocab=2000, **sizes))
        draft = tiny("llama", seed + 50, vocab=2000, **sizes)
        methods = {
            "chain": decode(SpeculativeDecoder.from_config(target, target, CHAIN)),
            "tree": decode(SpeculativeDecoder.from_config(target, draft, TREE)),
            "twins": other_names(target),
        }
        for method in methods.values():
            differences = greedy_differences(target, PROMPTS, method, max_new_tokens=BUDGET)
            for difference in differences.values():
                assert difference.verdict == "tie"
                assert difference.plain is not None
                assert difference.decoded is not None
                assert difference.plain.token != difference.decoded.token
                assert difference.decoded.gap <= NOISE_FACTOR * difference.decoded.noise
            ties += len(differences)
    assert ties > 0, "no text differed, so nothing was judged"


def test_a_defect_after_a_tie_is_still_a_bug() -> None:
    """Two rows of the output embedding are equal, so one token may stand for the other; then the
    rest of the text must be the model's again."""
    target = tiny("llama", 2)
    prompt = PROMPTS[0]
    expected = greedy_reference(target, prompt, BUDGET).tolist()
    with torch.no_grad():
        rows = target.lm_head.weight
        rows[39] = rows[expected[4]]
    twin = greedy_reference(target, prompt, BUDGET).tolist()
    assert twin == expected, "of equal logits the first is taken"

    def judged(text: list[int], budget: int = BUDGET) -> str:
        difference = judge_difference(target, prompt.tolist(), expected, text, budget)
        assert difference.position == next(
            (i for i, pair in enumerate(zip(expected, text, strict=False)) if pair[0] != pair[1]),
            min(len(expected), len(text)),
        )
        return difference.verdict

    head = [*expected[:4], 39]
    rest = greedy_reference(target, torch.tensor([*prompt, *head]), BUDGET - 5).tolist()
    assert judged(head + rest) == "tie"
    wrong = [*rest[:3], (rest[3] + 7) % 39, *rest[4:]]
    assert judged(head + wrong) == "bug"
    assert judged(head) == "bug", "it ends before the budget without an end token"
    assert judged(expected[:-1]) == "bug", "it ends before the budget without an end token"
    assert judged([*expected, 5]) == "bug", "it goes on after the budget"


def test_the_command_compares_each_method_and_names_what_it_cannot_use(
    tiny_pair: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ["--target", str(tiny_pair / "target"), "--draft", str(tiny_pair / "draft")]
    asked += ["--count", "6", "--max-new-tokens", "24"]
    tree = "{verifier: traversal, drafter: tree, widths: [2, 2, 1]}"
    given = ["--method", "{length: 2}", "--method", tree, "--engine", "captured"]
    assert run_tool("certify", [*asked, *given]) == 0
    said = capsys.readouterr().out
    assert "{length: 2}: " in said
    assert said.count("texts identical") == 2
    for changes, message in [
        (["--prompts", "nothing.jsonl"], "nothing.jsonl"),
        (["--max-new-tokens", "0"], "--max-new-tokens must be 1"),
        (["--method", "{verifier: block, drafter: tree}"], "method '{verifier: block, drafter"),
    ]:
        assert run_tool("certify", [*asked, *changes]) == 2
        assert message in capsys.readouterr().err
