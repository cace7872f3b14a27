"""What rollouts keep of the target stands in for it: labels, training, measurements are the same.

Its last states, its top logits, and states inside it, for drafts that read them.
"""

import copy
from collections.abc import Callable, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
from transformers import PreTrainedModel

from distill.batches import Numbered, collate, fitted
from distill.drafts.plain import align_output, cut
from distill.drafts.states import fit_inputs, silence
from distill.watch import HeldOut
from specdata.config import PromptSet, RolloutConfig
from specdata.drafts.draft_vocabulary import reduce_vocabulary
from specdata.drafts.states_network import states_input
from specdata.drafts.taps import install
from specdata.errors import ConfigError
from specdata.labels.make import Labeller
from specdata.lm_head import find_lm_head, hidden_states
from specdata.logits.make import ModelLogits
from specdata.probability import SamplingConfig
from specdata.prompts.prompt import Prompt
from specdata.rollouts.backend import TransformersBackend
from specdata.rollouts.make import make_rollouts
from specdata.storage.dataset import load_stored
from specdata.storage.resume import Settings
from specdata.storage.schema import LOGITS
from specdata.target_states import COLUMN, TAPPED, reading_stored, stored_states
from specdata.texts import ModelSource, TopLogitSource
from specdata.top_logits import TopLogits
from tests.support.block_draft import block_draft
from tests.support.states_draft import states_draft
from tests.support.tiny import tiny_llama
from tests.support.trainings import QUICK, batch_gradients, changed, trainer_of

V, N = 23, 12
SAMPLING = SamplingConfig(0.8, 0, 0.9)
TARGET, DRAFT = tiny_llama(0, vocab=V).float(), tiny_llama(1, vocab=V).float()
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
    make_rollouts(backend(**stored), prompts(), folder, config, settings=Settings({}))
    return load_stored(folder)


@pytest.fixture(scope="module")
def rollouts(tmp_path_factory: pytest.TempPathFactory) -> datasets.Dataset:
    return sampled(tmp_path_factory.mktemp("rollouts") / "made", store_states=True)


@pytest.fixture
def unread() -> None:
    """The target's layers must not run."""

    def refuse(*_: object) -> None:
        raise AssertionError("the target was run")

    handles = [layer.register_forward_pre_hook(refuse) for layer in TARGET.model.layers]
    yield  # type: ignore[misc]
    for handle in handles:
        handle.remove()


P = find_lm_head(TARGET)
PLAIN = SamplingConfig()
SAMPLERS = {
    "plain": PLAIN,
    "warmer": SamplingConfig(0.8),
    "truncated": SamplingConfig(0.6, 5, 0.8),
    "top-k": SamplingConfig(top_k=N),
    "nucleus": SamplingConfig(top_p=0.3),
    "min-p": SamplingConfig(0.7, min_p=0.5),
    "greedy": SamplingConfig(0.0),
}
DECIDED = [*SAMPLERS][2:]  # by twelve logits


def said(
    draft: PreTrainedModel,
    rows: datasets.Dataset,
    folder: Path,
    sampling: SamplingConfig,
    warps: Sequence[str],
    top: TopLogits | None = None,
    begin: Callable[[], object] = lambda: None,
) -> list[dict[str, Any]]:
    """Labels of three draws, figures of a measurement, a training step's loss and gradients."""
    source = TopLogitSource(top.distributions(sampling)) if top else ModelSource(P, sampling)
    label = Labeller(source, find_lm_head(draft), sampling, 0, 64, draws=3)
    held_out = HeldOut(top.distributions(sampling) if top else TARGET, rows, sampling, watched=5)
    trainers = []
    for warp in warps:
        compared = sampling if warp == "sampler" else PLAIN
        teacher = top.distributions(compared) if top else TARGET
        config = changed(QUICK, epochs=1, batch_size=4, warp=warp, objective="lk_hybrid")
        trainers.append(trainer_of(teacher, draft, rows, folder, config, sampling))
    begin()
    found: list[dict[str, Any]] = [{**row} for row in label(rows.to_list())]  # type: ignore[arg-type]
    for only in (True, False):
        figures = held_out.measure(draft, watched_only=only).overall
        found.append({"acceptance": figures.acceptance, "kl": figures.kl} | figures.expected_tokens)
    for loss, gradients in map(batch_gradients, trainers):
        assert float(loss) > 1e-3
        found += [{"loss": float(loss)}, *({"gradient": x.flatten().tolist()} for x in gradients)]
    return found


@pytest.mark.parametrize("kept", [None, range(3, 20, 2)], ids=["whole", "reduced"])
@pytest.mark.parametrize(
    ("source", "which"),
    [
        *product(["states", "all logits"], ["plain", "truncated", "greedy"]),
        ("states", "warmer"),
        *product(["top logits"], DECIDED),
    ],
)
def test_labels_measurements_and_training_are_those_of_the_target_run_here(
    source: str,
    which: str,
    kept: range | None,
    rollouts: datasets.Dataset,
    tmp_path: Path,
    request: pytest.FixtureRequest,
) -> None:
    """Whatever tells p: a draft with a reduced vocabulary is told a part of it where it can be."""
    draft, sampling = copy.deepcopy(DRAFT), SAMPLERS[which]
    if kept is not None:
        reduce_vocabulary(draft, kept)
    warps = ["sampler"] if source == "top logits" else ["sampler", "raw"]
    bare, top = rollouts.remove_columns(COLUMN), None
    expected = said(draft, bare, tmp_path, sampling, warps)
    if source != "states":
        top = TopLogits(N if source == "top logits" else V, V)
        rollouts = datasets.Dataset.from_list(ModelLogits(P, top.count)(bare.to_list()))
    begin = partial(request.getfixturevalue, "unread")  # what is made above may probe the target
    found = said(draft, rollouts, tmp_path, sampling, warps, top, begin)
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.keys() == theirs.keys() | ours.keys() & {COLUMN, *LOGITS.names}
        for name, value in theirs.items():
            close = value if isinstance(value, str) else pytest.approx(value, rel=1e-4, abs=1e-4)
            assert ours[name] == close, name


def test_an_output_matrix_is_aligned_with_stored_states(rollouts: datasets.Dataset) -> None:
    def aligned(rows: datasets.Dataset) -> torch.Tensor:
        draft = cut(TARGET, [0])
        align_output(draft, TARGET, rows)
        return draft.get_output_embeddings().weight

    forward, kept = aligned(rollouts.remove_columns(COLUMN)), aligned(rollouts)
    torch.testing.assert_close(kept, forward, rtol=1e-3, atol=1e-4)


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
    tapped: datasets.Dataset, rollouts: datasets.Dataset, tmp_path: Path
) -> None:
    plain = sampled(tmp_path / "plain")["completion_ids"]
    assert tapped["completion_ids"] == rollouts["completion_ids"] == plain
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


def figures(draft: PreTrainedModel, rows: datasets.Dataset, work: Path) -> list[float]:
    """Acceptance as it is measured, labelled, and the loss of a training step."""
    measured = HeldOut(TARGET, rows, SAMPLING).measure(draft).overall.acceptance
    label = Labeller(ModelSource(P, SAMPLING), find_lm_head(draft), SAMPLING, 0, 64)
    labelled = [x for row in label(rows.to_list()) for x in row["overlap"]]
    config = changed(QUICK, epochs=1, batch_size=4)
    trainer = trainer_of(TARGET, draft, rows, work, config, SAMPLING)
    batch = collate(0)([Numbered(rows)[index] for index in range(4)])
    loss = trainer.compute_loss(trainer.model, batch).detach()
    return [measured, sum(labelled) / len(labelled), float(loss)]


@pytest.mark.parametrize("made", [states_draft, block_draft])
def test_drafts_are_taught_measured_and_labelled_with_stored_taps(
    tapped: datasets.Dataset, caplog: pytest.LogCaptureFixture, tmp_path: Path, made: Any
) -> None:
    draft = made(TARGET, taps=TAPS)
    read = figures(draft, tapped.remove_columns([TAPPED, "taps"]), tmp_path)
    assert figures(draft, tapped, tmp_path) == pytest.approx(read, rel=2e-3)
    others = tapped.map(lambda row: {TAPPED: bytes(len(row[TAPPED]))})
    for other, right in zip(figures(draft, others, tmp_path), read, strict=True):
        assert other != pytest.approx(right, rel=1e-2)
    # Those of other taps are not taken for these, which is said.
    unlike = others.map(lambda row: {"taps": [0]})
    assert not caplog.messages
    assert figures(draft, unlike, tmp_path) == pytest.approx(read)
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
    torch.testing.assert_close(*found, rtol=0.0, atol=0.01)  # float16's
    assert found[0].abs().mean() > 0.5
