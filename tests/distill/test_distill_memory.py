"""Memory and time of distillation: chunks, stored states, lengths, precision."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from datasets import Dataset
from torch import Tensor, nn
from transformers import LlamaConfig

from distill import teacher as teachers
from distill.batches import Numbered, check_context, collate, fitted
from distill.losses import LOSSES
from distill.teacher import Part, TargetTeacher, learnt_part
from specdata.drafts.draft_vocabulary import reduce_vocabulary
from specdata.errors import ConfigError
from specdata.models import load_model
from specdata.sampling import SamplingConfig
from tests.support.random_pair import texts_of
from tests.support.tiny import tiny_llama
from tests.support.trainings import QUICK, batch_gradients, changed, distilled, trainer_of

# --- a draft with a reduced vocabulary


@pytest.mark.parametrize(
    ("objective", "temperature"), [*((name, 0.5) for name in LOSSES), ("lk_hybrid", None)]
)
def test_a_reduced_draft_learns_the_same_from_the_tokens_that_it_can_propose(
    pair: Path,
    tmp_path: Path,
    objective: str,
    temperature: float | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    warp = "raw" if temperature is None else "sampler"
    sampling = SamplingConfig(temperature or 0.7, top_p=0.9 if temperature is None else 1.0)

    def learnt(whole: bool) -> tuple[Tensor, list[Tensor]]:
        draft = load_model(str(pair / "draft"))
        reduce_vocabulary(draft, range(3, 40, 2))
        config = changed(QUICK, objective=objective, warp=warp)
        rows = texts_of(pair, 8, seed=1)
        with monkeypatch.context() as patched:
            if whole:
                patched.setattr(teachers, "learnt_part", lambda *_: None)
            trainer = trainer_of(pair / "target", draft, rows, tmp_path, config, sampling)
        assert (trainer.objective.teacher.part is None) == whole
        return batch_gradients(trainer, 1)

    (value, found), (expected, of_whole) = learnt(whole=False), learnt(whole=True)
    torch.testing.assert_close(value, expected, rtol=1e-5, atol=0.0)
    for gradient, wanted in zip(found, of_whole, strict=True):
        torch.testing.assert_close(gradient, wanted, rtol=1e-3, atol=1e-5)
    assert max(float(gradient.abs().max()) for gradient in found) > 1e-3


def test_truncation_takes_the_whole_distribution_of_the_target(pair: Path) -> None:
    draft = load_model(str(pair / "draft"))
    assert learnt_part(draft, QUICK, SamplingConfig(0.2)) is None
    reduce_vocabulary(draft, range(3, 40, 2))
    for warp, sampling, is_part in (
        ("raw", SamplingConfig(0.2, top_p=0.9), True),
        ("sampler", SamplingConfig(0.2), True),
        ("sampler", SamplingConfig(0.2, top_p=0.9), False),
        ("sampler", SamplingConfig(1.0, top_k=20), False),
        ("sampler", SamplingConfig(1.0, min_p=0.1), False),
        ("sampler", SamplingConfig(0.0), False),
    ):
        assert (learnt_part(draft, changed(QUICK, warp=warp), sampling) is not None) == is_part


def test_of_a_draft_that_can_propose_every_token_no_logits_are_made_to_sum_over_the_others() -> (
    None
):
    model, made = tiny_llama(0, vocab=23), []
    teacher = TargetTeacher(model, part=Part(torch.arange(23), 0.7))
    model.get_output_embeddings().register_forward_hook(lambda *_: made.append(1))
    rest = teacher.columns(next(batches(2)))["rest"]
    assert rest.isneginf().all()
    assert not made


# --- what the target says


def rows() -> Dataset:
    lengths = [(3, 4), (1, 9), (5, 2), (2, 7), (4, 1), (1, 1)]
    return Dataset.from_list(
        [
            {
                "prompt_ids": [(7 * index + place) % 23 for place in range(prompt)],
                "completion_ids": [(11 * index + 3 * place) % 23 for place in range(completion)],
            }
            for index, (prompt, completion) in enumerate(lengths)
        ]
    )


def batches(size: int) -> Iterator[dict[str, Tensor]]:
    numbered = Numbered(rows())
    for start in range(0, len(numbered), size):
        yield collate(0)([numbered[index] for index in range(start, start + size)])


def test_what_is_kept_of_the_target_is_what_it_says_and_is_read_once() -> None:
    model, read = tiny_llama(0, vocab=23), []
    kept, live = TargetTeacher(model, rows()), TargetTeacher(model)
    model.register_forward_pre_hook(lambda *_: read.append(1))
    model.model.register_forward_pre_hook(lambda *_: read.append(1))
    for _ in range(3):
        for batch in batches(2):
            torch.testing.assert_close(kept.columns(batch)["states"], live.columns(batch)["states"])
    assert len(read) == 1 + 9  # all six rows in one batch, and every batch at every pass


def test_what_is_kept_has_the_same_bits_whatever_the_order_of_training() -> None:
    """So a killed run, which reads the rollouts in the order of what is left, goes on exactly."""
    model = tiny_llama(0, vocab=23).float()
    one, other = TargetTeacher(model, rows()), TargetTeacher(model, rows())
    forwards = [one.columns(batch)["states"] for batch in batches(2)]
    backwards = [other.columns(batch)["states"] for batch in reversed(list(batches(2)))]
    for ours, theirs in zip(forwards, reversed(backwards), strict=True):
        assert torch.equal(ours, theirs)


def test_other_text_than_the_rollouts_is_read(pair: Path, tmp_path: Path) -> None:
    texts, config = texts_of(pair, 8, seed=1), changed(QUICK, on_policy=0.5)
    trainer = trainer_of(pair / "target", pair / "draft", texts, tmp_path, config)
    batch, _ = trainer.get_batch_samples(
        iter(trainer.get_train_dataloader()), 1, torch.device("cpu")
    )
    assert sorted((batch[0]["examples"] < 0).tolist()) == 4 * [False] + 4 * [True]
    live = TargetTeacher(trainer.objective.teacher.model)
    torch.testing.assert_close(
        trainer.objective.teacher.columns(batch[0]), live.columns(batch[0]), rtol=1e-4, atol=1e-5
    )


# --- lengths


def test_rollouts_that_are_too_long_are_cut_and_those_without_a_completion_left_out() -> None:
    fit = fitted(rows(), 5)
    assert (fit.cut, fit.left_out) == (3, 1)
    assert [len(ids) for ids in fit.rollouts["completion_ids"]] == [2, 4, 3, 1, 1]
    assert fit.rollouts["prompt_ids"] == [rows()["prompt_ids"][index] for index in (0, 1, 3, 4, 5)]
    whole = fitted(rows(), None)
    assert (whole.rollouts.to_list(), whole.cut, whole.left_out) == (rows().to_list(), 0, 0)
    empty = fitted(Dataset.from_list([{"prompt_ids": [1], "completion_ids": []}, rows()[0]]), None)
    assert (empty.left_out, empty.rollouts.to_list()) == (1, [rows()[0]])


def test_rollouts_of_which_nothing_can_be_learnt_are_refused_before_a_model_is_loaded(
    pair: Path, tmp_path: Path
) -> None:
    empty = Dataset.from_dict({"prompt_ids": [[5, 6]], "completion_ids": [[]]})
    empty = empty.cast(texts_of(pair, 1, seed=1).features)
    with pytest.raises(ValueError, match=r"none of 1 rollouts .* their completions are empty"):
        distilled(pair, tmp_path / "out", train=empty, dev=empty)
    with pytest.raises(ValueError, match="max_length is 2, and the shortest prompt has "):
        distilled(pair, tmp_path / "out", changed(QUICK, max_length=2))
    assert not list(tmp_path.iterdir())


def test_a_context_that_is_too_short_is_refused_with_both_numbers(
    pair: Path, tmp_path: Path
) -> None:
    short = LlamaConfig(max_position_embeddings=8)
    short.name_or_path = "small"
    check_context({"draft": short}, fitted(rows(), 8).rollouts)
    with pytest.raises(ConfigError, match=r"has 10 tokens, but the draft \(small\) .* at most 8"):
        check_context({"draft": short}, rows())
    shutil.copytree(pair, tmp_path / "pair")
    for role in ("target", "draft"):
        path = tmp_path / "pair" / role / "config.json"
        before = path.read_text()
        path.write_text(json.dumps({**json.loads(before), "max_position_embeddings": 6}))
        with pytest.raises(ConfigError, match=f"but the {role} .* has positions for 6"):
            distilled(tmp_path / "pair", tmp_path / "out")
        path.write_text(before)
    assert not list(tmp_path.glob("out*"))


# --- memory and precision


def test_bfloat16_is_of_the_forward_and_the_weights_that_move_are_float32(
    pair: Path, tmp_path: Path
) -> None:
    """A norm's weights are 1 and a step moves them by less than half of bfloat16's spacing there,
    1/256: a draft kept in bfloat16 would never move them."""
    config = changed(QUICK, precision="bfloat16", learning_rate=1e-4)
    texts = texts_of(pair, 8, seed=1)
    trainer = trainer_of(pair / "target", pair / "draft", texts, tmp_path, config)
    seen: set[torch.dtype] = set()
    for module in trainer.objective.draft.model.modules():
        if isinstance(module, nn.Linear):
            module.register_forward_hook(lambda _, __, output: seen.add(output.dtype))
    before = {name: each.clone() for name, each in trainer.objective.draft.named_parameters()}
    trainer.train()
    assert seen == {torch.bfloat16}
    norms = [name for name in before if "norm" in name]
    assert len(norms) == 3
    for name, parameter in trainer.objective.draft.named_parameters():
        assert parameter.dtype == torch.float32
        moved = parameter - before[name]
        assert moved.abs().max() > 0, name
        if name in norms:
            assert moved.abs().max() < 1 / 512
            assert torch.equal(parameter.bfloat16(), before[name].bfloat16())
