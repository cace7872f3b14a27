"""Memory grows with a text's length, not with its square, and what is computed stays the same."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from distill.config import InitConfig
from distill.drafts import round_places
from distill.initial import new_draft
from distill.rounds import Place, of_round
from eval.decoder import DecodeConfig, SpeculativeDecoder
from eval.runtime import model as runtime
from eval.runtime.feeding import sequence_of
from eval.runtime.model import CachedModel
from specdata.drafts import attention
from specdata.drafts.taps import attach
from specdata.lm_head import find_lm_head
from specdata.probability import SamplingConfig
from specdata.target_states import target_taps
from tests.support.families import RECURRENT, WINDOWED, tiny
from tests.support.states_draft import pair
from tests.support.tiny import tiny_llama

CHAIN = DecodeConfig(length=3)
TREE = DecodeConfig(verifier="traversal", drafter="tree", widths=(2, 2, 1))
SOME = 16
"""Rows of a mask, of few tokens, so that a mask of a whole text is the largest tensor."""


class Largest(TorchDispatchMode):
    """Notes the most entries of the tensors that are made."""

    def __init__(self) -> None:
        super().__init__()
        self.entries = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.entries = max(
            self.entries,
            *(each.numel() for each in tree_leaves(out) if isinstance(each, Tensor)),
            0,
        )
        return out


def models(kind: str) -> tuple[Any, Any]:
    """A target and a draft of a kind, in float64."""
    if kind == "windows":
        return tiny("gemma3_text", 2), tiny("gemma3_text", 3)
    if kind == "plain":
        return tiny_llama(0, vocab=40), tiny_llama(1, vocab=40)
    if kind != "eagle3":
        return pair(40, kind)
    target = tiny_llama(0, vocab=40, layers=3)
    init = InitConfig(kind="states", layers=1, taps=[0, 2], layout="eagle3")
    draft = new_draft(target, init).double().eval()
    torch.manual_seed(0)
    for weight in draft.parameters():
        torch.nn.init.normal_(weight, float(weight.dim() == 1), 0.3)
    draft.d2t, draft.t2d = torch.zeros_like(draft.d2t), torch.ones_like(draft.t2d)
    attach(draft, target)
    return target, draft


def check_growth(work: Callable[[int], object]) -> None:
    """Twice the text takes at most some more than twice the memory, where a square takes four."""
    entries = []
    for length in (120, 240):
        with Largest() as largest:
            work(length)
        entries.append(largest.entries)
    assert entries[1] < 2.5 * entries[0], entries


@pytest.mark.parametrize("family", ["llama, grouped queries", *WINDOWED, *RECURRENT])
def test_a_prompt_in_pieces_gives_the_logits_of_one_forward(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runtime, "PIECE", 3)
    model, prompt = tiny(family, 2), [(7 * place + 5) % 40 for place in range(17)]
    sequence = sequence_of(CachedModel(model, 40), 0, SamplingConfig())
    with torch.inference_mode():
        if family in RECURRENT:
            found = sequence.append([*prompt, 4], 2, drafted=1).run()
        else:
            found = sequence.append_tree([4, 9], [0, 0], prompt).run()
        for row, text in zip(found, (prompt, [*prompt, 4], [*prompt, 9]), strict=False):
            expected = model(input_ids=torch.tensor([text])).logits[0, -1]
            torch.testing.assert_close(row, expected, rtol=0, atol=5e-6)


@torch.inference_mode()
def test_a_draft_that_hides_the_first_token_gives_the_same_in_pieces(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    draft, prompt = models("eagle3")[1], [(7 * place + 5) % 40 for place in range(17)]

    def read() -> Tensor:
        return sequence_of(CachedModel(draft, 40), 0, SamplingConfig()).append(prompt, 1).run()

    whole = read()
    monkeypatch.setattr(runtime, "PIECE", 3)
    torch.testing.assert_close(read(), whole)


@pytest.mark.parametrize(
    ("kind", "config"),
    [("plain", TREE), ("windows", CHAIN), ("windows", TREE), ("eagle3", CHAIN), ("eagle3", TREE)],
)
def test_decoding_makes_no_tensor_of_a_text_squared(
    kind: str, config: DecodeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runtime, "PIECE", SOME)
    decoder = SpeculativeDecoder.from_config(*models(kind), config)

    def decode(length: int) -> None:
        prompt, draw = 2 + torch.arange(length) % 38, torch.Generator().manual_seed(0)
        decoder.generate(prompt, max_new_tokens=4, generator=draw)

    check_growth(decode)


def read_places(draft: Any, ids: Tensor, begins: Tensor, dropping: int | None) -> list[Place]:
    taps = target_taps(draft, [], ids)
    asked: dict[str, Any] = {"taps": taps, "begins": begins, "dropping": dropping}
    return [*round_places(find_lm_head(draft), ids, 3, **asked)]


@pytest.mark.parametrize("kind", ["states", "eagle3", "masks"])
def test_training_on_long_texts_computes_what_it_does_on_short_ones(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """States of each place of a round, and gradients, of rows whose rounds begin elsewhere."""
    draft, ids = models(kind)[1], torch.arange(60).reshape(2, 30) * 7 % 40
    begins = torch.zeros_like(ids, dtype=torch.bool)
    begins[0, 4:21] = begins[1, :17] = True

    def read() -> tuple[list[Tensor], list[Tensor]]:
        draft.zero_grad()
        places = read_places(draft, ids, begins, dropping=1)
        states = [
            each.states[of_round(begins, step) & each.kept] for step, each in enumerate(places)
        ]
        torch.stack([each.square().sum() for each in states]).sum().backward()
        return states, [each.grad for each in draft.parameters() if each.grad is not None]

    expected = read()
    monkeypatch.setattr(attention, "LONG", 0)
    monkeypatch.setattr(attention, "ROWS", 4)
    torch.testing.assert_close(read(), expected)


@pytest.mark.parametrize("kind", ["states", "eagle3", "masks", "blocks"])
def test_training_makes_no_tensor_of_a_text_squared(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (("LONG", 0), ("ROWS", SOME)):
        monkeypatch.setattr(attention, name, value)
    draft = models(kind)[1]

    def step(length: int) -> None:
        ids = 2 + torch.arange(length)[None] % 38
        places = read_places(draft, ids, torch.ones_like(ids, dtype=torch.bool), dropping=0)
        torch.stack([each.states.sum() for each in places]).sum().backward()

    check_growth(step)
