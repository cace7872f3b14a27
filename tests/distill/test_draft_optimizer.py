"""Where a draft starts and how its training steps: aligned outputs, Muon, frozen embeddings."""

import copy
from pathlib import Path

import pytest
import torch
from datasets import Dataset
from torch import nn
from transformers import PreTrainedModel

from distill.drafts.plain import align_output, cut
from distill.muon import Float32Muon, MuonWithAdamW, muon_optimizer
from specdata import least_squares
from specdata.drafts.draft_vocabulary import reduce_vocabulary
from specdata.drafts.taps import decoder_layers
from specdata.errors import ConfigError
from specdata.lm_head import hidden_states
from specdata.models import load_model
from tests.support.families import tiny
from tests.support.random_pair import texts_of
from tests.support.trainings import QUICK, changed, trainer_of

ROWS = Dataset.from_list(
    [
        {
            "prompt_ids": [(7 * row + place) % 37 + 1 for place in range(3)],
            "completion_ids": [(11 * row + 3 * place) % 37 + 1 for place in range(12)],
        }
        for row in range(20)
    ]
)


def states_of(model: PreTrainedModel) -> torch.Tensor:
    """Last hidden states at the completion positions of all rows."""
    parts = []
    for row in ROWS:
        ids = torch.tensor([row["prompt_ids"] + row["completion_ids"]])
        parts.append(hidden_states(model, ids)[0, len(row["prompt_ids"]) - 1 : -1])
    return torch.cat(parts)


# --- aligned output matrices


@pytest.mark.parametrize(
    ("family", "tied"), [("llama", False), ("llama", True), ("granite", True), ("gpt2", False)]
)
def test_an_aligned_output_is_the_targets_after_the_least_squares_map_of_the_states(
    family: str, tied: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(least_squares, "RIDGE", 0.0)
    target = tiny(family, 0, vocab=40, tie_word_embeddings=tied, dtype=torch.float64)
    embedding = target.get_input_embeddings().weight.detach().clone()
    draft = cut(target, [0])
    ours, theirs = states_of(draft), states_of(target)
    shortcut = torch.linalg.lstsq(ours, theirs).solution
    expected = target.get_output_embeddings().weight @ shortcut.T
    align_output(draft, target, ROWS)
    torch.testing.assert_close(draft.get_output_embeddings().weight, expected)
    assert draft.get_input_embeddings().weight.equal(embedding)
    assert target.get_input_embeddings().weight.equal(embedding)
    assert not draft.config.get_text_config().tie_word_embeddings
    whole = cut(target, range(len(decoder_layers(target)[1])))  # is aligned already
    align_output(whole, target, ROWS)
    ids = torch.arange(1, 13).unsqueeze(0)
    torch.testing.assert_close(whole(input_ids=ids).logits, target(input_ids=ids).logits)


# --- Muon


def muon(model: PreTrainedModel) -> MuonWithAdamW:
    return muon_optimizer(model, lr=1e-2, betas=(0.9, 0.95))


def stepped(model: torch.nn.Module, optimizer: torch.optim.Optimizer, seeds: range) -> None:
    for seed in seeds:
        generator = torch.Generator().manual_seed(seed)
        for weight in model.parameters():
            weight.grad = torch.randn(weight.shape, generator=generator)
        optimizer.step()


def test_muon_steps_the_matrices_of_the_layers_and_adamw_all_else() -> None:
    model = tiny("llama", 0, vocab=40, dtype=torch.float32)
    _, layers = decoder_layers(model)
    inner = {id(weight) for weight in layers.parameters() if weight.ndim == 2}
    alike = copy.deepcopy(model)
    ours = muon(model)
    stepped(model, ours, range(3))
    twins = dict(alike.named_parameters())
    expected: list[torch.optim.Optimizer] = [
        type(ours.parts[0])(  # as the processor multiplies
            [twins[n] for n, w in model.named_parameters() if id(w) in inner],
            lr=1e-2,
            weight_decay=0.0,
            adjust_lr_fn="match_rms_adamw",
        ),
        torch.optim.AdamW(
            [twins[n] for n, w in model.named_parameters() if id(w) not in inner],
            lr=1e-2,
            betas=(0.9, 0.95),
            weight_decay=0.0,
        ),
    ]
    for seed in range(3):
        for optimizer in expected:
            stepped(alike, optimizer, range(seed, seed + 1))
    for name, weight in model.named_parameters():
        assert weight.equal(twins[name]), name


@pytest.mark.parametrize("shape", [(24, 8), (8, 24)])
def test_muon_in_float32_steps_as_torchs_does_in_bfloat16(shape: tuple[int, int]) -> None:
    begun = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    ends = []
    for kind in (torch.optim.Muon, Float32Muon):
        layer = torch.nn.Linear(*reversed(shape), bias=False)
        layer.weight.data.copy_(begun)
        settings = {"lr": 1e-2, "weight_decay": 0.0, "adjust_lr_fn": "match_rms_adamw"}
        stepped(layer, kind(layer.parameters(), **settings), range(3))
        ends.append(layer.weight.detach())
    theirs, ours = ends
    assert (ours - theirs).norm() <= 0.03 * (theirs - begun).norm()


def test_a_scheduler_sets_the_rate_of_both_also_after_a_state_is_loaded() -> None:
    model = tiny("llama", 0, vocab=40, dtype=torch.float32)
    first = muon(model)
    stepped(model, first, range(2))
    stored, weights = copy.deepcopy(first.state_dict()), copy.deepcopy(model.state_dict())
    stepped(model, first, range(2, 4))
    expected = copy.deepcopy(model.state_dict())
    model.load_state_dict(weights)
    second = muon(model)
    second.load_state_dict(stored)
    stepped(model, second, range(2, 4))
    for name, value in model.state_dict().items():
        assert value.equal(expected[name]), name
    schedule = torch.optim.lr_scheduler.LambdaLR(second, lambda _: 0.0)
    stepped(model, second, range(4, 6))
    schedule.step()
    assert [group["lr"] for part in second.parts for group in part.param_groups] == [0.0, 0.0]
    for name, value in model.state_dict().items():
        assert value.equal(expected[name]), name


# --- frozen embeddings


def test_a_frozen_embedding_stays_and_all_else_learns(pair: Path, tmp_path: Path) -> None:
    draft = load_model(str(pair / "draft"))
    reduce_vocabulary(draft, range(40))
    before = {name: weight.detach().clone() for name, weight in draft.named_parameters()}
    config = changed(QUICK, batch_size=4, learning_rate=1e-2, freeze_embeddings=True)
    given = texts_of(pair, 8, seed=1), tmp_path, config
    trainer_of(pair / "target", draft, *given).train()
    embedding = draft.get_input_embeddings()
    assert isinstance(embedding, nn.Embedding)
    for name, weight in draft.named_parameters():
        assert weight.equal(before[name]) == (weight is embedding.weight), name
    tied = load_model(str(pair / "draft"))
    tied.get_output_embeddings().weight = tied.get_input_embeddings().weight
    with pytest.raises(ConfigError, match="reduce the vocabulary"):
        trainer_of(pair / "target", tied, *given)
