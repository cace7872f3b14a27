"""The target's states that rollouts keep are those of its forward, and stand in for it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
from transformers import PreTrainedModel

from distill.batches import Numbered, collate, fitted
from distill.config import DistilConfig
from distill.initial import align_output, cut
from distill.states import fit_inputs, silence
from distill.teacher import Part, Teacher
from distill.trainer import draft_trainer
from distill.watch import HeldOut
from specdata.errors import ConfigError
from specdata.labels.labeller import Labeller
from specdata.lm_head import find_lm_head, hidden_states
from specdata.probability import SamplingConfig
from specdata.prompts.config import PromptSet
from specdata.prompts.loading import Prompt
from specdata.rollouts.backend import Request, TransformersBackend
from specdata.rollouts.config import RolloutConfig
from specdata.rollouts.make import make_rollouts
from specdata.states_draft import states_input
from specdata.storage.dataset import load_stored
from specdata.storage.resume import Settings
from specdata.taps import install
from specdata.target_states import COLUMN, TAPPED, reading_stored, stored_states, to_bytes
from specdata.texts import ModelSource
from tests.test_states_draft import states_draft
from tests.tiny import tiny_llama

SAMPLING = SamplingConfig(0.8, 0, 0.9)
TARGET, DRAFT = tiny_llama(0, vocab=23).float(), tiny_llama(1, vocab=23).float()
TARGET.generation_config.eos_token_id = [5, 12, 17, 21]
CONFIG = RolloutConfig(
    sets=[PromptSet(name="instruct", split="dev", count=1)], max_new_tokens=9, store_states=True
)


TAPS = [0, 1]


def backend(**changes: Any) -> TransformersBackend:
    return TransformersBackend(
        TARGET, SAMPLING, CONFIG.max_new_tokens, batch_size=8, seed=3, **changes
    )


def prompts() -> list[Prompt]:
    """Of many lengths; the first ten all begin alike, as chat templates make them."""
    common = [1 + place % 4 for place in range(10)]
    texts = [[*common, 7, *range(6, 6 + n % 5)] for n in range(10)]
    texts += [[8 + n] * (n + 1) for n in range(6)]
    return [Prompt("instruct", "dev", f"prompt {n}", ids, ()) for n, ids in enumerate(texts)]


def sampled(folder: Path, **stored: Any) -> datasets.Dataset:
    """Rollouts that keep some of the target's states."""
    config = CONFIG.model_copy(update={"store_states": False, **stored})
    make_rollouts(
        backend(**stored),
        prompts(),
        folder,
        config,
        settings=Settings({}),
        report=lambda rows: None,
    )
    return load_stored(folder)


@pytest.fixture(scope="module")
def rollouts(tmp_path_factory: pytest.TempPathFactory) -> datasets.Dataset:
    return sampled(tmp_path_factory.mktemp("rollouts") / "made", store_states=True)


@pytest.fixture
def unread(monkeypatch: pytest.MonkeyPatch) -> None:
    """The target's layers must not run."""

    def refuse(*_: object) -> None:
        raise AssertionError("the target was run")

    handles = [layer.register_forward_pre_hook(refuse) for layer in TARGET.model.layers]
    yield  # type: ignore[misc]
    for handle in handles:
        handle.remove()


def test_stored_states_are_those_of_a_forward_over_the_whole_text(
    rollouts: datasets.Dataset,
) -> None:
    head = find_lm_head(TARGET)
    finishes = set()
    for row in rollouts:
        ids = torch.tensor([row["prompt_ids"] + row["completion_ids"]])
        expected = hidden_states(TARGET, ids)[0, len(row["prompt_ids"]) - 1 : -1]
        torch.testing.assert_close(stored_states(row, head), expected, rtol=1e-4, atol=1e-5)
        finishes.add((row["finish"], len(row["completion_ids"]) < 8))
    assert {("eos", True), ("length", False)} <= finishes  # some ended early, others ran on


def test_keeping_states_changes_no_token() -> None:
    asked = [Request(prompt.ids, (prompt.example_id, 0)) for prompt in prompts()]
    plain, kept = backend().complete(asked), backend(store_states=True).complete(asked)
    assert [each.ids for each in plain] == [each.ids for each in kept]
    assert {each.states for each in plain} == {None}
    assert [len(each.ids) for each in kept] == [
        len(each.states) for each in kept if each.states is not None
    ]


def labels(rows: datasets.Dataset) -> list[dict[str, Any]]:
    label = Labeller(ModelSource(P, SAMPLING), find_lm_head(DRAFT), SAMPLING, 0, 64)
    return [dict(row) for row in label(rows.to_list())]  # type: ignore[arg-type]


P = find_lm_head(TARGET)


def test_labels_of_stored_states_are_those_of_a_forward_and_need_none(
    rollouts: datasets.Dataset, request: pytest.FixtureRequest
) -> None:
    expected = labels(rollouts.remove_columns(COLUMN))
    request.getfixturevalue("unread")
    for ours, theirs in zip(labels(rollouts), expected, strict=True):
        assert ours["draft_ids"] == theirs["draft_ids"]
        assert ours["accept_prob"] == pytest.approx(theirs["accept_prob"], abs=1e-4)
        assert ours["overlap"] == pytest.approx(theirs["overlap"], abs=1e-4)


@pytest.mark.parametrize("part", [None, Part(torch.arange(3, 20, 2), 0.8)])
def test_a_teacher_says_the_same_of_stored_states_and_reads_nothing(
    rollouts: datasets.Dataset, part: Part | None, request: pytest.FixtureRequest
) -> None:
    numbered = Numbered(rollouts)
    assert COLUMN not in numbered[0]
    batches = [collate(0)([numbered[n] for n in group]) for group in ((0, 3, 1), (2, 7), (3, 0))]
    live = Teacher(TARGET, part=part)
    expected = [live.states(batch) for batch in batches]
    teacher = Teacher(TARGET, rollouts, part)
    request.getfixturevalue("unread")
    for batch, wanted in zip(batches, expected, strict=True):
        torch.testing.assert_close(teacher.states(batch), wanted, rtol=1e-4, atol=1e-5)


def test_a_draft_is_measured_on_stored_states_as_on_a_forwards(
    rollouts: datasets.Dataset, request: pytest.FixtureRequest
) -> None:
    bare = HeldOut(TARGET, rollouts.remove_columns(COLUMN), SAMPLING, watched=5)
    held_out = HeldOut(TARGET, rollouts, SAMPLING, watched=5)
    expected = [bare.measure(DRAFT, watched_only=only) for only in (True, False)]
    request.getfixturevalue("unread")
    for only, wanted in zip((True, False), expected, strict=True):
        found = held_out.measure(DRAFT, watched_only=only)
        assert found.overall.acceptance == pytest.approx(wanted.overall.acceptance, abs=1e-5)
        assert found.overall.expected_tokens == pytest.approx(wanted.overall.expected_tokens)


def test_an_output_matrix_is_aligned_with_stored_states(rollouts: datasets.Dataset) -> None:
    def aligned(rows: datasets.Dataset) -> torch.Tensor:
        draft = cut(TARGET, [0])
        align_output(draft, TARGET, rows)
        return draft.get_output_embeddings().weight

    forward, kept = aligned(rollouts.remove_columns(COLUMN)), aligned(rollouts)
    torch.testing.assert_close(kept, forward, rtol=1e-3, atol=1e-4)

    def doubled(row: dict[str, Any]) -> dict[str, Any]:
        states = stored_states(row, P)
        assert states is not None
        return {COLUMN: to_bytes(2 * states)}

    # They are what it is made of, and not the target's own.
    torch.testing.assert_close(aligned(rollouts.map(doubled)), 2 * kept, rtol=1e-3, atol=1e-4)


def test_rollouts_that_are_cut_keep_the_states_of_what_is_left(rollouts: datasets.Dataset) -> None:
    longest = max(range(len(rollouts)), key=lambda n: len(rollouts[n]["completion_ids"]))
    whole = stored_states(rollouts[longest], P)
    limit = len(rollouts[longest]["prompt_ids"]) + 2
    cut = fitted(rollouts.select([longest]), limit).rollouts
    assert whole is not None
    assert len(whole) > 2
    assert torch.equal(stored_states(cut[0], P), whole[:2])


def test_states_of_another_precision_or_width_are_refused(rollouts: datasets.Dataset) -> None:
    with pytest.raises(ConfigError, match=r"made with another target or models\.dtype"):
        stored_states(rollouts[0], find_lm_head(tiny_llama(0, vocab=23)))  # float64
    row = dict(rollouts[0])
    row[COLUMN] = row[COLUMN][:-3]
    with pytest.raises(ConfigError, match="make the rollouts again"):
        stored_states(row, P)


# --- states inside, for drafts that read them


@pytest.fixture(scope="module")
def tapped(tmp_path_factory: pytest.TempPathFactory) -> datasets.Dataset:
    return sampled(tmp_path_factory.mktemp("tapped") / "made", store_taps=TAPS)


def test_stored_taps_are_those_of_a_forward_over_prompt_and_completion(
    tapped: datasets.Dataset, rollouts: datasets.Dataset
) -> None:
    assert tapped["completion_ids"] == rollouts["completion_ids"]
    assert len({*map(len, tapped["completion_ids"])}) > 3  # some end early, and leave the batch
    for taps in (TAPS, TAPS[1:]):  # a draft may read few of them
        draft = states_draft(TARGET, taps=taps)
        reads = states_input(draft)
        assert reads is not None
        for row in tapped:
            ids = torch.tensor([row["prompt_ids"] + row["completion_ids"]])
            with reading_stored(draft, [row], ids.shape[1]):
                stored = reads.read_target(ids)[:, :-1]
            read = reads.read_target(ids)[:, :-1]
            assert torch.equal(stored, read) is False  # of float16, and with the target's sizes
            each = read.unflatten(-1, (len(taps), -1))
            close = 2e-3 * each.square().mean(dim=-1, keepdim=True).sqrt()
            assert ((stored.view_as(each) - each).abs() <= close + 2e-3 * each.abs()).all()


def figures(draft: PreTrainedModel, rows: datasets.Dataset) -> list[float]:
    """Acceptance as it is measured, labelled, and the loss of a training step."""
    measured = HeldOut(TARGET, rows, SAMPLING).measure(draft).overall.acceptance
    label = Labeller(ModelSource(P, SAMPLING), find_lm_head(draft), SAMPLING, 0, 64)
    labelled = [x for row in label(rows.to_list()) for x in row["overlap"]]
    config = DistilConfig(epochs=1, batch_size=4, report_to=[])
    trainer = draft_trainer(TARGET, draft, rows, Path("unused"), config, SAMPLING, 0)
    batch = collate(0)([Numbered(rows)[index] for index in range(4)])
    loss = trainer.compute_loss(draft, batch).detach()
    return [measured, sum(labelled) / len(labelled), float(loss)]


def test_drafts_are_taught_measured_and_labelled_with_stored_taps(
    tapped: datasets.Dataset, caplog: pytest.LogCaptureFixture
) -> None:
    draft = states_draft(TARGET, taps=TAPS)
    read = figures(draft, tapped.remove_columns([TAPPED, "taps"]))
    assert figures(draft, tapped) == pytest.approx(read, rel=2e-3)
    others = tapped.map(lambda row: {TAPPED: bytes(len(row[TAPPED]))})
    for other, right in zip(figures(draft, others), read, strict=True):
        assert other != pytest.approx(right, rel=1e-2)
    # Those of other taps are not taken for these, which is said.
    unlike = others.map(lambda row: {"taps": [0]})
    assert not caplog.messages
    assert figures(draft, unlike) == pytest.approx(read)
    assert "keep the taps [0], and the draft reads [0, 1]" in caplog.text


def test_taps_cut_short_or_of_a_server_are_refused(tapped: datasets.Dataset) -> None:
    draft = states_draft(TARGET, taps=TAPS)
    row = {**tapped[0], TAPPED: tapped[0][TAPPED][:-64]}
    with (
        pytest.raises(ConfigError, match=r"keep \d+ numbers .*cut; make the rollouts again"),
        reading_stored(draft, [row], 40),
    ):
        pass
    with pytest.raises(ValueError, match="store_states and store_taps need backend transformers"):
        RolloutConfig(sets=CONFIG.sets, store_taps=[1], backend="vllm")
    with pytest.raises(ConfigError, match=r"taps must be from 0 .* to 1 .*got 4"):
        backend(store_taps=[1, 4])


def test_a_draft_begins_with_stored_taps_as_with_the_targets(tapped: datasets.Dataset) -> None:
    found = []
    for rows in (tapped, tapped.remove_columns([TAPPED, "taps"])):
        draft = cut(TARGET, [0])
        silence(draft)
        install(draft, TARGET, TAPS)
        fit_inputs(draft, TARGET, TAPS, rows)
        found.append(hidden_states(draft, torch.tensor([[3, 9, 14, 2, 20, 7]])))
    torch.testing.assert_close(*found, rtol=0.05, atol=0.05)
    assert found[0].abs().mean() > 0.5
