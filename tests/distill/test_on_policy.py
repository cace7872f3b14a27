"""Texts that the draft writes while it trains: which rows, what text, where the loss is taken."""

import warnings
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch import Tensor
from transformers import PreTrainedTokenizerFast, Trainer, TrainingArguments

from distill.batches import DraftTexts, TextRow, collate, rows_of
from distill.config import DistilConfig
from specdata.probability import SamplingConfig
from specdata.rollouts.backend import sample_batch
from specdata.texts import IGNORED
from tests.support.chi_square import p_value
from tests.support.families import tiny
from tests.support.tiny import END, joint_distribution, tiny_llama
from tests.support.trainings import (
    PLAIN,
    QUICK,
    assert_same_gradients,
    changed,
    step_gradients,
    trainer_of,
)

# transformers warns of the older name as soon as it knows the newer one.
CHECKPOINTING = (
    "activation_checkpointing"
    if hasattr(TrainingArguments, "activation_checkpointing")
    else "gradient_checkpointing"
)

with warnings.catch_warnings():
    # It says that experimental parts of TRL may change.
    warnings.filterwarnings("ignore", message=".*experimental.*")
    from trl.experimental.gkd import GKDConfig, GKDTrainer

V = 40
WARPED = SamplingConfig(0.7, 12, 0.9)


def texts(share: float = 1.0, **changes: Any) -> DraftTexts:
    settings = {
        "sampling": SamplingConfig(),
        "seed": 5,
        "ends": frozenset([END]),
        "vocabulary": V,
        "longest": 256,
        "batch_size": 8,
        "pad_id": 0,
    }
    return DraftTexts(share, **{**settings, **changes})


def rollouts(count: int, seed: int = 0) -> list[TextRow]:
    """Prompts of 1 to 6 tokens and completions of 1 to 12, without end tokens."""
    generator = torch.Generator().manual_seed(seed)

    def ids(most: int) -> list[int]:
        length = int(torch.randint(1, most + 1, (), generator=generator))
        return torch.randint(2, V, (length,), generator=generator).tolist()

    return [{"prompt_ids": ids(6), "completion_ids": ids(12)} for _ in range(count)]


# --- which rows


@pytest.mark.parametrize("share", [0.25, 0.3, 1.0])
def test_of_n_rows_the_draft_writes_n_times_the_share_rounded_and_each_is_as_likely(
    share: float,
) -> None:
    drawn, steps = texts(share), 1000
    written = [[drawn.carries(step, index) for index in range(13)] for step in range(steps)]
    for count in (1, 8, 13):
        least, most = int(share * count), -int(-share * count // 1)
        assert all(least <= sum(row[:count]) <= most for row in written)
    for carried in map(sum, zip(*written, strict=True)):
        counts = {True: carried, False: steps - carried}
        assert share == 1.0 or p_value(counts, {True: share, False: 1 - share}) > 1e-6


# --- what it writes


def test_completions_have_the_drafts_joint_distribution() -> None:
    draft, sampling = tiny_llama(0), SamplingConfig(0.7, 3)
    row = {"prompt_ids": [2, 3], "completion_ids": [2, 2, 3]}
    drawn = texts(sampling=sampling, vocabulary=4)
    written = drawn.write(draft, [row] * 1000, range(1000), step=3)
    assert {tuple(one["prompt_ids"]) for one in written} == {(2, 3)}
    counts = Counter(tuple(one["completion_ids"]) for one in written)
    assert p_value(counts, joint_distribution(draft, [2, 3], 3, sampling)) > 1e-6


def test_a_completion_is_at_most_as_long_as_the_rollouts_and_ends_with_an_end_token() -> None:
    rows = rollouts(60)
    drawn = texts(ends=frozenset([END, 7, 8, 9]))
    written = drawn.write(tiny_llama(1, vocab=V), rows, range(60), step=0)
    shorter = 0
    for row, new in zip(rows, written, strict=True):
        *before, last = new["completion_ids"]
        assert len(before) < len(row["completion_ids"])
        assert not {*before} & {END, 7, 8, 9}
        if len(before) + 1 < len(row["completion_ids"]):
            assert last in {END, 7, 8, 9}
            shorter += 1
    assert shorter > 5


# --- rows that leave no room


def test_rows_without_a_completion_and_prompts_that_fill_the_context_stay() -> None:
    rows = [
        {"prompt_ids": [2, 3], "completion_ids": []},
        {"prompt_ids": [2] * 16, "completion_ids": [3]},
        {"prompt_ids": [2] * 20, "completion_ids": [3, 4]},
    ]
    assert (
        texts(longest=16).write(tiny("gpt2", 0, vocab=V, n_positions=16), rows, range(3), step=0)
        == rows
    )


def test_no_row_is_longer_than_the_context() -> None:
    """A model with learned positions cannot read more, not even beside rows that go on."""
    rows = [
        {"prompt_ids": [2] * length, "completion_ids": [3] * (16 - length)}
        for length in range(1, 16)
    ]
    draft, drawn = tiny("gpt2", 0, vocab=V, n_positions=16), texts(longest=16, ends=frozenset())
    written = drawn.write(draft, rows, range(15), step=0)
    assert max(len(new["prompt_ids"] + new["completion_ids"]) for new in written) == 16
    for index, row in enumerate(rows):
        (alone,) = drawn.write(draft, [row], [index], 0)
        assert alone == written[index]


def test_the_draft_draws_ids_of_the_target_only_and_reads_the_targets_others() -> None:
    wide = tiny_llama(1, vocab=V + 30)
    drawn = texts(ends=frozenset())
    ids = drawn.write(wide, rollouts(30), range(30), step=0)
    assert max(token for row in ids for token in row["completion_ids"]) < V
    uniforms = torch.rand(30, 8, generator=torch.Generator().manual_seed(0))
    free = sample_batch(wide, [[2]] * 30, uniforms, SamplingConfig(), ends=[])
    assert max(token for row in free for token in row) >= V, "the draft would like to"
    narrow = tiny_llama(1, vocab=V - 10)
    written = drawn.write(narrow, rollouts(30), range(30), step=0)
    assert any(token >= V - 10 for row in written for token in row["prompt_ids"])


# --- in the trainer


def config(**changes: Any) -> DistilConfig:
    return changed(QUICK, epochs=1, **changes)


def trainer(
    work: Path, settings: DistilConfig, rows: Sequence[TextRow], sampling: SamplingConfig = PLAIN
) -> Trainer:
    models = tiny_llama(8, vocab=V, layers=2), tiny_llama(9, vocab=V)
    return trainer_of(*models, Dataset.from_list([*map(dict, rows)]), work, settings, sampling)


def step_batches(one: Trainer, batches: int) -> tuple[list[dict[str, Tensor]], Tensor]:
    """The batch of a trainer's first step, and the labels that it counts."""
    return one.get_batch_samples(iter(one.get_train_dataloader()), batches, torch.device("cpu"))


def test_the_loss_is_taken_and_counted_where_the_targets_top_tokens_and_the_drafted_tokens_are(
    tmp_path: Path,
) -> None:
    plain = trainer(tmp_path, config(batch_size=8), rollouts(8))
    drafting = trainer(tmp_path, config(batch_size=8, on_policy=0.5), rollouts(8))
    ((before,), _), ((after,), count) = step_batches(plain, 1), step_batches(drafting, 1)
    assert count == (after["labels"] != IGNORED).sum()
    assert before.keys() == after.keys()
    old = dict(zip(before["rows"].tolist(), rows_of(before), strict=True))
    new = dict(zip(after["rows"].tolist(), rows_of(after), strict=True))
    assert old.keys() == new.keys()
    assert sum(new[index] != old[index] for index in old) == 4
    assert drafting.texts is not None
    ordered = [old[index] for index in range(8)]
    written = drafting.texts.write(drafting.objective.draft, ordered, range(8), step=0)
    assert [new[index] for index in range(8)] == written
    # The labels are the completions of these rows.
    for ids, labels, row in zip(after["input_ids"], after["labels"], rows_of(after), strict=True):
        length = len(row["prompt_ids"] + row["completion_ids"])
        assert labels[: len(row["prompt_ids"])].eq(IGNORED).all()
        assert labels[len(row["prompt_ids"]) : length].tolist() == row["completion_ids"]
        assert ids[:length].tolist() == row["prompt_ids"] + row["completion_ids"]
        assert labels[length:].eq(IGNORED).all()


def gradients(one: Trainer) -> dict[str, Tensor]:
    """Those of a training's only step, not clipped: their size tells what they were divided by."""
    one.args.max_grad_norm = 0.0
    return step_gradients(one)


def test_any_split_of_a_step_into_batches_and_processes_has_the_same_texts() -> None:
    rows, drawn = rollouts(8), texts(0.5)
    draft = tiny_llama(9, vocab=V)
    (whole,) = drawn.into([collate(0)(rows)], draft, step=4)
    expected = sorted(map(repr, rows_of(whole)))
    assert expected != sorted(map(repr, rows))
    shares = [collate(0, process=index, processes=3)(rows) for index in range(3)]
    divided = [row for share in shares for row in rows_of(*drawn.into([share], draft, step=4))]
    assert sorted(map(repr, divided)) == expected
    (nothing,) = drawn.into([collate(0, process=2, processes=3)(rows[:2])], draft, step=4)
    assert nothing["labels"].eq(IGNORED).all()
    assert nothing["rows"].tolist() == [-1]
    halves = texts(0.5, batch_size=4).into(
        [collate(0)(rows[:4]), collate(0)(rows[4:])], draft, step=4
    )
    assert sorted(repr(row) for half in halves for row in rows_of(half)) == expected


def test_writing_leaves_the_drafts_mode_its_gradients_and_torchs_random_state() -> None:
    draft = tiny("gpt2", 0, vocab=V, n_positions=64, resid_pdrop=0.1)
    assert draft.config.resid_pdrop > 0
    drawn, rows = texts(longest=64), rollouts(8)
    written = drawn.write(draft, rows, range(8), step=0)
    state = torch.get_rng_state()
    assert drawn.write(draft.train(), rows, range(8), step=0) == written
    assert torch.equal(torch.get_rng_state(), state)
    assert draft.training
    assert all(parameter.grad is None for parameter in draft.parameters())


# --- the reference: GKD of TRL


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
def test_a_step_on_the_drafts_text_has_the_gradients_of_a_step_of_gkd(tmp_path: Path) -> None:
    """Both generate, GKD through `generate`: near temperature 0 both write the likeliest tokens.

    GKD compares the models at temperature 1 whatever it generates at, hence `raw` here. It divides
    by the labels of the rollouts that its text replaces, so rollouts are as long as the texts.
    """
    rows: list[TextRow] = [{**row, "completion_ids": [3] * 6} for row in rollouts(8)]
    settings = config(batch_size=8, objective="js", warp="raw", on_policy=1.0)
    ours = trainer(tmp_path / "ours", settings, rows, SamplingConfig(temperature=0.0))
    (batch,), _ = step_batches(ours, 1)
    assert (batch["labels"] != IGNORED).sum() == 8 * 6, "no text ends early"
    arguments = GKDConfig(
        output_dir=str(tmp_path / "theirs"),
        lmbda=1.0,
        beta=0.5,
        temperature=1e-4,
        max_new_tokens=6,
        max_steps=1,
        per_device_train_batch_size=8,
        report_to="none",
        use_cpu=True,
        bf16=False,
        **{CHECKPOINTING: False},
    )
    theirs = GKDTrainer(
        model=tiny_llama(9, vocab=V),
        teacher_model=tiny_llama(8, vocab=V, layers=2),
        args=arguments,
        data_collator=prompts_on_the_left,
        train_dataset=Dataset.from_list([dict(row) for row in rows]),
        processing_class=PreTrainedTokenizerFast(
            tokenizer_object=Tokenizer(WordLevel({str(token): token for token in range(V)})),
            pad_token="0",
            eos_token="1",
        ),
    )
    assert_same_gradients(gradients(ours), gradients(theirs), 200)


def prompts_on_the_left(rows: Sequence[TextRow]) -> dict[str, Tensor]:
    """A batch as GKD's own collator makes it, of token ids."""
    batch = collate(0)(rows)
    prompts = [row["prompt_ids"] for row in rows]
    width = max(map(len, prompts))
    return {
        **{name: batch[name] for name in ("input_ids", "attention_mask", "labels")},
        "prompts": torch.tensor([[0] * (width - len(ids)) + ids for ids in prompts]),
        "prompt_attention_mask": torch.tensor(
            [[0] * (width - len(ids)) + [1] * len(ids) for ids in prompts]
        ),
    }
