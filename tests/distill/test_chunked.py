"""The loss in chunks of positions: the value and the gradients of all of them at once."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import peft
import pytest
import torch
from datasets import Dataset
from torch import Tensor, nn

from distill import objective
from distill.config import DistilConfig
from distill.distillation import DistilTrainer, draft_trainer
from distill.losses import LOSSES, Loss
from distill.objective import (
    CHUNK_BYTES,
    ENTRY_BYTES,
    LOGITS_BYTES,
    ChunkedLoss,
    Columns,
    positions_at_once,
)
from specdata.drafts.dspark_network import MarkovOutput
from specdata.lm_head import LMHead
from specdata.probability import probabilities
from specdata.sampling import SamplingConfig
from tests.support.families import tiny
from tests.support.tiny import Capped, tiny_llama

NAMES = sorted(LOSSES)
V, H, POSITIONS = 11, 6, 13


class ReducedHead(nn.Module):
    """An output embedding of some tokens only, as wide as the whole vocabulary."""

    def __init__(self, kept: list[int], weight: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight)
        self.kept = torch.tensor(kept)

    def forward(self, states: Tensor) -> Tensor:
        logits = nn.functional.linear(states, self.weight)
        full = logits.new_full((*logits.shape[:-1], V), -torch.inf)
        return full.index_copy(-1, self.kept, logits)


OUTPUTS: dict[str, Callable[[], nn.Module | None]] = {
    "linear": lambda: nn.Linear(H, V, bias=False),
    "bias": lambda: nn.Linear(H, V),
    "frozen": lambda: nn.Linear(H, V).requires_grad_(False),
    "reduced": lambda: ReducedHead([0, 3, 4, 9], torch.randn(4, H)),
    "bias by tokens": lambda: MarkovOutput(
        torch.randn(4, H - 2), torch.randn(4, 2), torch.tensor([0, 3, 4, 9]), V
    ),
    "partly": lambda: nn.Sequential(nn.Linear(H, H).requires_grad_(False), nn.Linear(H, V)),
    "none": lambda: None,
}


def gradients(value: Tensor, states: Tensor, head: LMHead) -> list[Tensor]:
    trained = [] if head.embedding is None else head.embedding.parameters()
    inputs = [states, *(each for each in trained if each.requires_grad)]
    return list(torch.autograd.grad(3 * value, inputs))


@pytest.mark.parametrize(
    ("output", "dtype"), [*((output, torch.float64) for output in OUTPUTS), ("bias", torch.float32)]
)
@pytest.mark.parametrize("name", NAMES)
def test_chunks_give_the_value_and_the_gradients_of_all_positions_at_once(
    name: str, output: str, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    embedding = OUTPUTS[output]()
    embedding = embedding if embedding is None else embedding.to(dtype)
    capped = lambda logits: torch.tanh(logits / 3) * 3  # noqa: E731
    transform = capped if output in ("linear", "bias", "none") else lambda logits: logits
    head = LMHead(tiny_llama(0), embedding, transform, V)  # the model is not asked
    width = V if embedding is None else H
    states = (2 * torch.randn(POSITIONS, width, dtype=dtype)).requires_grad_()
    target = 2 * torch.randn(POSITIONS, V, dtype=dtype)

    def loss(logits: Tensor, columns: Columns) -> Tensor:
        ones = torch.ones(len(logits))
        logits = logits if output != "none" else transform(logits)
        return LOSSES[name](logits, columns["target"], ones) * len(logits)

    columns = {"target": target}
    value = loss(head.logits(states), columns)
    expected = gradients(value, states, head)
    # float32 rounds each of the few terms of a sum by 6e-8 of it.
    exact = {"rtol": 0.0, "atol": 1e-12 if dtype == torch.float64 else 2e-5}
    for at_once in (1, 4, None):
        summed = ChunkedLoss(head, loss, at_once=at_once)
        chunked = summed(states, columns)
        torch.testing.assert_close(chunked, value, **exact)
        for ours, theirs in zip(gradients(chunked, states, head), expected, strict=True):
            torch.testing.assert_close(ours, theirs, **exact)
        with torch.no_grad():
            unlearnt = summed(states, columns)
        torch.testing.assert_close(unlearnt, value, **exact)


def test_no_logits_of_all_positions_are_made() -> None:
    seen: list[int] = []
    torch.manual_seed(0)
    head = LMHead(tiny_llama(0), nn.Linear(H, V), lambda logits: logits, V)
    states = torch.randn(POSITIONS, H, requires_grad=True)

    def loss(logits: Tensor, columns: Columns) -> Tensor:
        seen.append(len(logits))
        return logits.square().sum()

    ChunkedLoss(head, loss, at_once=4)(states, {}).backward()  # type: ignore[no-untyped-call]
    assert seen == [4, 4, 4, 1]
    for device, most, entry in (("cpu", LOGITS_BYTES, 4), ("cuda", CHUNK_BYTES, ENTRY_BYTES)):
        assert positions_at_once(152_000, torch.device(device))[0] * 152_000 * entry <= most
        assert positions_at_once(10**12, torch.device(device)) == (1, 1)


def test_a_loss_on_a_cpu_takes_few_of_the_logits_that_are_made_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(objective, "CACHED_LOGITS", 3 * V)
    seen: list[int] = []
    head = LMHead(tiny_llama(0), nn.Linear(H, V), lambda logits: logits, V)

    def loss(logits: Tensor, columns: Columns) -> Tensor:
        seen.append(len(logits))
        return logits.square().sum()

    ChunkedLoss(head, loss, at_once=5)(torch.randn(POSITIONS, H), {})
    assert seen == [3, 2, 3, 2, 3]


@pytest.mark.parametrize("output", ["bias", "reduced"])
def test_states_that_are_read_at_one_position_share_what_is_made_of_it_once(output: str) -> None:
    torch.manual_seed(0)
    head = LMHead(tiny_llama(0), OUTPUTS[output](), lambda logits: logits, V)
    rows = {"position": torch.tensor([0, 0, 0, 1, 3, 3, 3]), "weight": torch.rand(7)}
    states, target = torch.randn(7, H, requires_grad=True), torch.randn(4, V)
    made: list[int] = []

    def once(columns: Columns) -> Columns:
        made.append(len(columns["target"]))
        return {"p_logits": 2 * columns["target"]}

    def loss(logits: Tensor, columns: Columns) -> Tensor:
        weights = columns["weight"]
        return LOSSES["js"](logits, columns["p_logits"], weights) * weights.sum()

    shared = ChunkedLoss(head, loss, once=once)(states, {"target": target}, rows)
    expected = loss(
        head.logits(states), {"p_logits": 2 * target[rows["position"]], "weight": rows["weight"]}
    )
    torch.testing.assert_close(shared, expected)
    for ours, theirs in zip(
        gradients(shared, states, head), gradients(expected, states, head), strict=True
    ):
        torch.testing.assert_close(ours, theirs)
    assert made == [4]


def test_no_position_gives_zero_and_gradients_of_zero() -> None:
    """A process without a row of its own must take part in the sum of the gradients."""
    torch.manual_seed(0)
    target = torch.randn(0, V)
    for embedding in (nn.Linear(H, V), ReducedHead([0, 3], torch.randn(2, H))):
        head = LMHead(tiny_llama(0), embedding, lambda logits: logits, V)
        states = torch.randn(0, H, requires_grad=True)
        for each in LOSSES.values():

            def loss(logits: Tensor, columns: Columns, of: Loss = each) -> Tensor:
                return of(logits, columns["target"], torch.ones(len(logits)))

            value = ChunkedLoss(head, loss)(states, {"target": target})
            assert value.item() == 0.0
            embedding.zero_grad()
            value.backward()  # type: ignore[no-untyped-call]
            for parameter in embedding.parameters():
                assert parameter.grad is not None
                assert (parameter.grad == 0).all()


def unknown_way() -> nn.Module:
    """A model that does something to its logits that nobody knows of."""
    plain = tiny("llama", 1, vocab=24)
    model = Capped(plain.config)
    model.load_state_dict(plain.state_dict())
    return model


def adapted() -> nn.Module:
    targets = ["q_proj", "v_proj", "lm_head"]
    lora = peft.LoraConfig(r=2, target_modules=targets, init_lora_weights=False)
    return peft.get_peft_model(tiny("llama", 1, vocab=24), lora)


# Tied; a bias of the logits, a soft cap, a scale; learned positions; and what no family has.
MODELS: dict[str, Callable[[], nn.Module]] = {
    name: partial(tiny, name, 1, vocab=24)
    for name in ("llama, tied", "phi", "gemma2", "cohere", "gpt2")
}
MODELS |= {"unknown way": unknown_way, "adapters": adapted}


ROWS = [
    {"prompt_ids": [3, 4, 5, 6], "completion_ids": [7, 8, 9]},
    {"prompt_ids": [10, 11], "completion_ids": [12, 23, 20, 14, 1]},
    {"prompt_ids": [3], "completion_ids": [15]},
]
CASES = {
    "plain": ("sampler", SamplingConfig(temperature=0.8)),
    "truncated": ("sampler", SamplingConfig(temperature=0.7, top_k=5, top_p=0.9, min_p=0.1)),
    "greedy": ("sampler", SamplingConfig(temperature=0.0)),
    "raw": ("raw", SamplingConfig(temperature=0.0)),
}


def trainer_of(
    student: nn.Module, folder: Path, sampling: SamplingConfig, **settings: object
) -> DistilTrainer:
    teacher = tiny_llama(7, vocab=26)  # wider by two tokens than the students
    config = DistilConfig(batch_size=3, epochs=1, **settings)
    trainer = draft_trainer(
        teacher, student, Dataset.from_list(ROWS), folder / "work", config, sampling, 0
    )
    assert isinstance(trainer, DistilTrainer)
    return trainer


def by_autograd(
    trainer: DistilTrainer, student: nn.Module, warped: SamplingConfig | None
) -> Tensor:
    """The loss by the models' own logits, row by row without padding."""
    total, count = torch.zeros((), dtype=torch.float64), 0
    for row in ROWS:
        ids = torch.tensor([row["prompt_ids"] + row["completion_ids"]])
        begin, end = len(row["prompt_ids"]) - 1, ids.shape[1] - 1
        with torch.no_grad():
            p = trainer.objective.teacher.model(ids).logits[0, begin:end]
        q = nn.functional.pad(student(ids).logits[0, begin:end], (0, 2), value=-torch.inf)
        if warped is not None:
            p, q = probabilities(p, warped).log(), q / (warped.temperature or 1.0)
        loss = LOSSES[trainer.objective.settings.objective]
        total = total + loss(q, p, torch.ones(end - begin)) * (end - begin)
        count += end - begin
    return total / count


# PEFT 0.21 asks for a property that transformers 5.23 renames.
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
@pytest.mark.parametrize("name", MODELS)
def test_the_trainers_loss_is_that_of_the_models_own_logits(name: str, tmp_path: Path) -> None:
    torch.manual_seed(1)
    student = MODELS[name]().double().eval()
    for which, (warp, sampling) in CASES.items():
        trainer = trainer_of(student, tmp_path / which, sampling, warp=warp, objective="js")
        assert (trainer.objective.head.embedding is None) == (name == "unknown way")
        batch = next(iter(trainer.get_train_dataloader()))
        found = trainer.compute_loss(trainer.model, batch, num_items_in_batch=torch.tensor(9))
        expected = by_autograd(trainer, student, sampling if warp == "sampler" else None)
        # Some families normalise in float32, whatever the weights are.
        torch.testing.assert_close(found, expected, rtol=0.0, atol=1e-8)
        trained = [each for each in student.parameters() if each.requires_grad]
        ours, theirs = (torch.autograd.grad(each, trained) for each in (found, expected))
        largest = max(float(each.abs().max()) for each in theirs)
        assert largest > 1e-4, largest
        for mine, other in zip(ours, theirs, strict=True):
            torch.testing.assert_close(mine, other, rtol=0.0, atol=1e-8)
