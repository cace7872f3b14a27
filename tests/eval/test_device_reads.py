"""The number of waits for a device to read a number, on one that is none (`pretend_device.py`)."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from eval.drafting.drafters import ChainDrafter
from eval.drafting.stopping import STOPPING_RULES
from eval.drafts import DraftTree
from eval.runtime.batches import drive
from eval.runtime.feeding import sequence_of
from eval.runtime.model import CachedModel
from eval.verifiers import VERIFIERS
from heads import AcceptanceHead, BaseHead, ConfidenceHead, ImmediateHead
from heads.inputs import FEATURES
from specdata import probability
from specdata.probability import SamplingConfig, draw, draw_one
from tests.support.block_draft import block_draft
from tests.support.pretend_device import reads
from tests.support.tiny import tiny_llama

THERE, VOCABULARY = "pretend:0", 24
# A rejection's residual is made of what one read gave, and no read follows but the token's.
CHAINS = [name for name, spec in VERIFIERS.items() if not spec.branching]


def chain(length: int, seed: int) -> tuple[DraftTree, Tensor]:
    """A draft that is rarely rejected, with the target's distributions."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(length + 1, VOCABULARY, generator=generator)
    noise = torch.randn(length + 1, VOCABULARY, generator=generator)
    q, p = logits.softmax(-1).to(THERE), (logits + 0.4 * noise).softmax(-1).to(THERE)
    tokens = draw(q[:length], generator).cpu()
    index = torch.arange(length)
    return DraftTree(tokens, index, q[:length], index, "chain", planned=length), p


def reads_of(work: Callable[[], object]) -> int:
    with reads() as waits:
        work()
    return len(waits)


@pytest.mark.parametrize("name", CHAINS)
def test_a_chain_is_verified_with_as_many_reads_whatever_its_length(name: str) -> None:
    verifier = VERIFIERS[name].make(**VERIFIERS[name].grid[0])

    def most(length: int) -> int:
        counts = []
        for seed in range(40):
            tree, target = chain(length, seed)
            generator = torch.Generator().manual_seed(seed)
            counts.append(reads_of(lambda: verifier.draw(tree, target, generator)))  # noqa: B023
        return max(counts)

    # What is read of the device: the chances of all tokens, for block verification also the masses
    # of the residuals, then the next token, and for a residual that persists on its two chances.
    assert most(3) == most(16) <= 5


SIZE = 16
torch.manual_seed(0)  # a head that expects nothing would have `cost` stop
HEADS: dict[str, BaseHead] = {
    "specdec++": AcceptanceHead(hidden_size=SIZE, depth=1),
    "immediate": ImmediateHead(hidden_size=SIZE, reads=[*FEATURES]),
    "confidence": ConfidenceHead(hidden_size=SIZE),
}


@pytest.mark.parametrize(
    ("name", "head"),
    [
        *((name, None) for name in STOPPING_RULES if name != "head"),
        *((name, head) for name in ("head", "cost") for head in HEADS),
        ("confidence", "blocks"),
    ],
)
def test_a_drafted_token_is_read_once_whatever_the_stopping_rule(
    name: str, head: str | None
) -> None:
    """With what the rule asks of it, or of a head. Nothing else of a draft is read."""
    draft = tiny_llama(0, vocab=VOCABULARY)
    if head == "blocks":
        draft, head = block_draft(draft, size=13, taps=[0]), None
    asked = None if head is None else HEADS[head].eval().to(THERE)
    model = CachedModel(draft.to(THERE), VOCABULARY, capture_hidden=asked is not None)
    never = {"threshold": 0.0 if name in ("confidence", "cumulative") else 1e9}
    fields = STOPPING_RULES[name].model_fields
    if name in ("logit", "head"):
        never = {"threshold": 1.0}
    given: dict[str, Any] = {**({} if "threshold" not in fields else never)}
    if name == "cost":
        given |= {"draft_seconds": 1e-9, "token_seconds": 1.0}

    def reads_for(length: int) -> tuple[int, int]:
        """How many numbers are read, and how many tokens that drafted."""
        size = "length" if name == "fixed" else "limit"
        rule = STOPPING_RULES[name].model_validate({**given, size: length})
        drafter = ChainDrafter(
            sequence_of(model, 0, SamplingConfig()), rule.start(asked), frozenset()
        )
        model.kv_cache.free()

        def draft() -> None:
            with torch.inference_mode():
                tree = drive(drafter.propose([2, 3], 99, torch.Generator().manual_seed(0)))
            drafted.append(len(tree.tokens))

        drafted: list[int] = []
        return reads_of(draft), drafted[0]

    reads_for(2)  # imports
    (many, long), (few, short) = reads_for(12), reads_for(4)
    assert many - few == long - short
    # A rule without a threshold may end its draft by itself.
    assert (long, short) == (12, 4) or not (given or name == "fixed")


def test_a_token_drawn_with_numbers_is_the_token_drawn_without() -> None:
    probs = torch.randn(9000, generator=torch.Generator().manual_seed(0)).softmax(-1).to(THERE)
    for seed in range(20):
        token, numbers = probability.draw_and_read(
            probs, torch.Generator().manual_seed(seed), lambda x: probs.index_select(0, x)
        )
        assert token == draw_one(probs, torch.Generator().manual_seed(seed))
        assert numbers == (float(probs[token]),)


@pytest.mark.parametrize("top_p", [0.1, 0.7, 0.95])
def test_a_nucleus_that_reads_nothing_is_the_same(top_p: float) -> None:
    probs = (3 * torch.randn(5, 700, generator=torch.Generator().manual_seed(0))).softmax(-1)
    with reads() as waits:
        made = probability.nucleus(probs.to(THERE), top_p)
        assert not waits
    expected = probability.nucleus(probs, top_p)
    torch.testing.assert_close(made.cpu(), expected)
    assert torch.equal(made.cpu() > 0, expected > 0)
