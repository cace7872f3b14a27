"""Training a head of either kind: it learns, and how it is run changes nothing."""

import json
import math
import os
import shutil
from dataclasses import asdict
from importlib.util import find_spec
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import heads.config
import heads.rows
from heads import BaseHead, ImmediateHead
from heads.config import HeadConfig
from heads.inputs import FEATURES, DraftedTokens
from heads.probe import probe_of
from heads.rows import LabelRows, TrainingInputs, feature_scales, labels_of, logits_of_states
from heads.train import HeadResult, learning_rate, train_head
from specdata.config import Config, read_config
from specdata.errors import ConfigError, TrainingDivergedError
from specdata.lm_head import hidden_states
from specdata.probability import SamplingConfig, probabilities
from specdata.processes import join_processes
from tests.support.drive_head import LEVELS, drive, synthetic_rows, tiny_draft
from tests.support.head_training import COMMON, IMMEDIATE
from tests.support.trainings import changed
from tests.support.two_processes import ZERO_3, finish, start_two


class Sections(Config):
    """A file with a head section, as recipes read it."""

    head: HeadConfig


CONFIG = HeadConfig.model_validate(COMMON)
CONFIDENCE = HeadConfig.model_validate(
    {**COMMON, "kind": "confidence", "depth": 0, "rejection_weight": 6, "micro_batch_size": 8}
)
OTHERS = {
    kind: HeadConfig.model_validate({**COMMON, "kind": kind, "depth": 0, "micro_batch_size": 8})
    for kind in heads.config.HEAD_KINDS
}
KINDS = {**OTHERS, "specdec++": CONFIG, "immediate": IMMEDIATE, "confidence": CONFIDENCE}
DRAWS = {kind: 2 - config.kind_facts.lag for kind, config in KINDS.items()}
TrainedHead = tuple[Path, HeadResult]


def keeping_checkpoints(out: Path) -> Path:
    """Let a run's checkpoints outlive it: it removes its own folder, not what a link leads to."""
    kept = out.with_name(f"{out.name}.checkpoints")
    kept.mkdir(parents=True)
    out.mkdir(parents=True)
    (out / "checkpoints").symlink_to(kept)
    return out


@pytest.fixture(scope="module")
def references(tmp_path_factory: pytest.TempPathFactory) -> dict[str, TrainedHead]:
    """A head of each kind, trained once, and its checkpoints."""
    trained = {}
    for kind, config in KINDS.items():
        out = keeping_checkpoints(tmp_path_factory.mktemp("reference") / "head")
        trained[kind] = (out, drive(out, config, draws=DRAWS[kind]))
    return trained


@pytest.fixture
def reference(references: dict[str, TrainedHead]) -> TrainedHead:
    return references["specdec++"]


def metrics(out: Path) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads((out / "metrics.json").read_text())
    return loaded


def assert_same_training(out: Path, reference: TrainedHead) -> None:
    losses = metrics(out)["losses"]
    torch.testing.assert_close(
        torch.tensor(losses), torch.tensor(reference[1].losses), rtol=1e-5, atol=1e-6
    )
    expected = load_file(reference[0] / "model.safetensors")
    found = load_file(out / "model.safetensors")
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-4, atol=1e-5)


# --- learning


LEARNING: dict[str, tuple[dict[str, Any], float]] = {
    "specdec++": ({"depth": 2, "epochs": 25, "learning_rate": 1e-2}, 0.1),
    "immediate": ({"width": 64, "epochs": 20, "learning_rate": 1e-2}, 0.2),
    "confidence": ({"epochs": 40, "learning_rate": 5e-2}, 0.5),
}
"""Settings of each kind, and the share of the untrained head's KL that is left at most."""


@pytest.mark.parametrize("kind", LEARNING)
def test_a_head_learns_acceptance_that_what_it_reads_reveals(kind: str, tmp_path: Path) -> None:
    settings, share = LEARNING[kind]
    config = changed(KINDS[kind], micro_batch_size=16, **settings)
    train = synthetic_rows(64, seed=1, draws=3 if kind == "immediate" else 1)
    dev = synthetic_rows(30, seed=2, split="dev")
    if kind == "confidence":  # which sees the token before alone
        of_before = lambda row: {"accept_prob": row["overlap"]}  # noqa: E731
        train, dev = (rows.map(of_before, load_from_cache_file=False) for rows in (train, dev))
    given = {"train": train, "dev": dev, "sampling": SamplingConfig(top_k=50)}
    result = train_head(draft=tiny_draft(), out=tmp_path, config=config, seed=7, **given)
    assert result.after.kl < share * result.before.kl
    assert result.after.kl < (0.55 if kind == "confidence" else 0.2) * result.after.kl_constant
    assert result.after.ece < 0.08
    head = BaseHead.from_pretrained(tmp_path)
    assert type(head) is config.kind_facts.load()
    weight = 1.0 if kind == "immediate" else 6.0
    assert (head.rejection_weight, head.probe) == (weight, probe_of(tiny_draft().eval()))
    assert head.sampling == asdict(SamplingConfig(top_k=50))
    # The raw output is biased by the loss; the probability that users get is not.
    assert weight == 1.0 or result.after.kl_raw > 1.5 * result.after.kl
    if isinstance(head, ImmediateHead):  # scaled by what training saw
        assert head.scales.keys() == {*config.features}
        assert all(deviation not in (0.0, 1.0) for _, deviation in head.scales.values())


def test_training_asks_what_decoding_asks_of_every_drafted_token() -> None:
    """Each position and draw, by forwards of its own over prompt, X_<i and Y_i."""
    draft, sampling = tiny_draft().eval(), SamplingConfig(temperature=0.7, top_k=20)
    reads, to_logits = [*FEATURES], logits_of_states(draft)
    config = changed(IMMEDIATE, draws=2, features=reads)
    inputs = TrainingInputs(draft, reads, sampling, config, 99, seed=0)
    labels = synthetic_rows(3, seed=1, draws=3)
    rows = [inputs.row(labels[i], i, epoch=1) for i in range(3)]
    features = inputs.arguments(rows)
    dev = inputs.row(labels[0], 0, epoch=None)  # always the first draw
    assert dev.tokens[:, 0].tolist() == labels[0]["draft_ids"]
    accept, counts = labels_of(rows)
    assert accept.shape == (sum(len(row["draft_ids"]) for row in labels), 2)
    assert bool(counts.all())
    place = 0
    for row in labels:
        others = np.reshape(row["more_draft_ids"], (-1, 2))
        # The second pass of two draws each, of three: the third one and the first.
        for position, drawn in enumerate(zip(others[:, 1], row["draft_ids"], strict=True)):
            known = [*row["prompt_ids"], *row["completion_ids"][:position]]
            state = hidden_states(draft, torch.tensor([known]))[0, -1]
            for draw, token in enumerate(map(int, drawn)):
                expected = DraftedTokens(
                    tokens=torch.tensor(token),
                    before=lambda state=state: state,  # type: ignore[misc]
                    distributions=lambda state=state: probabilities(  # type: ignore[misc]
                        to_logits(state), sampling
                    ),
                    embeddings=lambda token=token: draft.get_input_embeddings()(  # type: ignore[misc]
                        torch.tensor(token)
                    ),
                )
                for name, values in zip(reads, features, strict=True):
                    torch.testing.assert_close(
                        values[place, draw], FEATURES[name].compute(expected), rtol=1e-5, atol=1e-5
                    )
                assert float(accept[place, draw]) == pytest.approx(LEVELS[token % 4])
            place += 1


def test_numbers_are_scaled_by_mean_and_deviation_and_vectors_by_their_root_mean_square() -> None:
    reads = ("hidden_before", "log_q")
    inputs = TrainingInputs(tiny_draft().eval(), reads, SamplingConfig(), IMMEDIATE, 99, seed=0)
    rows = LabelRows.read("train", synthetic_rows(20, seed=1), 99, with_draws=False)
    states, log_q = inputs.arguments([inputs.row(rows[i], i, 0) for i in range(20)])
    scales = feature_scales(inputs, rows)
    assert scales["hidden_before"] == (0.0, pytest.approx(float(states.square().mean().sqrt())))
    expected = float(log_q.mean()), float(log_q.std(correction=0))
    assert scales["log_q"] == pytest.approx(expected, rel=1e-5)


def test_texts_may_hold_ids_that_only_the_target_has() -> None:
    """Matrices of one family are padded to different sizes."""
    draft, row = tiny_draft().eval(), synthetic_rows(1, seed=1)[0]
    row["completion_ids"] = [draft.config.vocab_size + 3] * len(row["completion_ids"])
    for config, name in ((changed(CONFIG, mixing=0.5), "hidden"), (IMMEDIATE, "log_q")):
        inputs = TrainingInputs(draft, (name,), SamplingConfig(), config, 99, seed=0)
        read = inputs.row(row, 0, epoch=0)
        assert max(read.text["completion_ids"]) >= draft.config.vocab_size
        (values,) = inputs.arguments([read])
        assert bool(values.isfinite().all())


def test_of_mixed_texts_without_a_drafted_token_nothing_is_asked() -> None:
    config = changed(CONFIG, mixing=1 - 1e-9)
    inputs = TrainingInputs(tiny_draft(), ("hidden",), SamplingConfig(), config, 99, seed=0)
    rows = [inputs.row(labels, 0, epoch=0) for labels in synthetic_rows(3, seed=1)]
    (states,) = inputs.arguments(rows)
    assert states.shape == (0, 1, 32)


def test_the_draft_and_the_global_generator_are_left_as_they_were(tmp_path: Path) -> None:
    draft = tiny_draft().bfloat16()
    draft.train()
    before = {name: value.clone() for name, value in draft.state_dict().items()}
    state = torch.get_rng_state()
    rows = {"train": synthetic_rows(20, seed=1), "dev": synthetic_rows(10, seed=2)}
    train_head(draft=draft, out=tmp_path, config=CONFIG, seed=0, **rows)
    assert torch.equal(torch.get_rng_state(), state)
    assert draft.training
    assert all(parameter.grad is None for parameter in draft.parameters())
    assert all(torch.equal(before[name], value) for name, value in draft.state_dict().items())
    saved = load_file(tmp_path / "model.safetensors")
    assert {value.dtype for value in saved.values()} == {torch.float32}


def test_the_rate_rises_evenly_to_its_peak_and_falls_as_half_a_cosine() -> None:
    late = math.cos(math.pi / 4) / 2
    for warmup_ratio, expected in (
        (0.0, [1.0]),
        (0.0, [1.0, 0.5 + late, 0.5, 0.5 - late]),
        (0.2, [1.0, 1.0, 0.5]),
        (0.5, [0.5, 1.0, 1.0, 0.5]),
    ):
        steps = len(expected)
        rates = [learning_rate(step, steps, 1.0, warmup_ratio) for step in range(steps)]
        assert rates == pytest.approx(expected, abs=1e-12)


# --- invariance


@pytest.mark.parametrize("kind", KINDS)
def test_accumulation_does_not_change_losses_or_weights(
    kind: str, tmp_path: Path, references: dict[str, TrainedHead]
) -> None:
    result = drive(tmp_path, changed(KINDS[kind], micro_batch_size=3), draws=DRAWS[kind])
    assert_same_training(tmp_path, references[kind])
    assert result.after.kl == pytest.approx(references[kind][1].after.kl, rel=1e-4)


def test_the_seed_decides_everything(tmp_path: Path, reference: TrainedHead) -> None:
    drive(tmp_path / "same", CONFIG)
    same, weights = ((out / "model.safetensors") for out in (tmp_path / "same", reference[0]))
    assert same.read_bytes() == weights.read_bytes()
    other = drive(tmp_path / "other", CONFIG, seed=8)
    assert other.losses != reference[1].losses
    # Heads of different seeds are compared on the same mixing of the dev rows.
    assert other.after.tokens == reference[1].after.tokens
    assert other.after.kl_constant == reference[1].after.kl_constant


@pytest.mark.slow
def test_two_processes_train_the_same_head_as_one_and_one_can_go_on(
    tmp_path: Path, references: dict[str, TrainedHead], server: ForkServerContext
) -> None:
    config, out = changed(IMMEDIATE, micro_batch_size=3), keeping_checkpoints(tmp_path / "two")
    finish(start_two(server, drive, out, config, 50, 7, 2, **ZERO_3))
    assert (metrics(out)["engine"], metrics(out)["processes"]) == ("deepspeed-zero3", 2)
    assert_same_training(out, references["immediate"])
    # Its last checkpoint is of step 6 of 8.
    shutil.copytree(out / "checkpoints", tmp_path / "one" / "checkpoints")
    assert drive(tmp_path / "one", IMMEDIATE, draws=2).engine == "single"
    assert_same_training(tmp_path / "one", references["immediate"])


@pytest.mark.exhaustive
def test_deepspeed_that_was_silently_lost_is_an_error(server: ForkServerContext) -> None:
    process = server.Process(target=joined_without_deepspeed)
    process.start()
    process.join()
    assert process.exitcode == 3


def joined_without_deepspeed() -> None:
    os.environ.update(ACCELERATE_USE_DEEPSPEED="true", ACCELERATE_USE_CPU="true")
    with pytest.raises(RuntimeError, match="asked for DeepSpeed but accelerate runs without it"):
        join_processes()
    os._exit(3)


@pytest.mark.parametrize("room", [60_000, 0], ids=["some rows", "none"])
def test_what_is_kept_of_the_draft_fits_its_memory_and_changes_nothing(
    room: int, tmp_path: Path, references: dict[str, TrainedHead], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reference has memory for all rows."""
    monkeypatch.setattr(heads.rows, "ROWS_AT_ONCE", 16)
    monkeypatch.setattr(heads.rows, "STATES_BYTES", room)
    inputs = TrainingInputs(
        tiny_draft().eval(), ("hidden", "log_q"), SamplingConfig(), IMMEDIATE, 128, seed=0
    )
    rows = LabelRows.read("train", synthetic_rows(50, seed=1, draws=2), 128, with_draws=True)
    inputs.plan(rows)
    inputs.keep(rows, range(len(rows)))
    kept = sum(each.nbytes for features in inputs.kept.values() for each in features.values())
    assert 0.9 * room <= kept <= room
    drive(tmp_path, IMMEDIATE, draws=2)
    assert_same_training(tmp_path, references["immediate"])


# --- resuming


@pytest.mark.parametrize("kind", KINDS)
def test_a_checkpoint_is_gone_on_from_and_goes_when_the_head_is_done(
    kind: str, references: dict[str, TrainedHead], tmp_path: Path
) -> None:
    whole, result = references[kind]
    kept = {path.name for path in (whole / "checkpoints").glob("checkpoint-*")}
    assert kept == {"checkpoint-3", "checkpoint-6"}
    shutil.copytree(whole / "checkpoints", tmp_path / "checkpoints")
    state = tmp_path / "checkpoints" / "checkpoint-6" / "state.safetensors"
    state.write_bytes(state.read_bytes()[:-1])  # so it is gone on from step 3
    assert drive(tmp_path, KINDS[kind], draws=DRAWS[kind]) == result
    for name in ("model.safetensors", "config.json", "metrics.json"):
        assert (tmp_path / name).read_bytes() == (whole / name).read_bytes()
    assert not (tmp_path / "checkpoints").exists()


def test_a_head_that_diverges_ends_with_a_message_and_keeps_the_last_good_checkpoint(
    tmp_path: Path,
) -> None:
    wild = changed(CONFIG, depth=3, learning_rate=2e8, save_steps=1)
    with pytest.raises(TrainingDivergedError, match=r"loss is inf .*checkpoint-\d+ is kept"):
        drive(tmp_path, wild)
    for path in (tmp_path / "checkpoints").glob("checkpoint-*"):
        assert all(v.isfinite().all() for v in load_file(path / "state.safetensors").values())
    assert not (tmp_path / "metrics.json").exists()
    assert not (tmp_path / "model.safetensors").exists()


@pytest.mark.slow
def test_a_head_that_is_worse_than_chance_is_refused(tmp_path: Path) -> None:
    """Acceptance is pure chance: there is nothing to learn but the rows."""
    draw = np.random.default_rng(0)

    def hard_labels(row: dict[str, Any]) -> dict[str, Any]:
        drawn = draw.integers(0, 2, len(row["accept_prob"])).astype(float).tolist()
        return {"accept_prob": drawn, "overlap": drawn}

    train, dev = (
        synthetic_rows(count, seed).map(hard_labels, load_from_cache_file=False)
        for count, seed in ((4, 0), (8, 1))
    )
    config = HeadConfig(kind="immediate", epochs=120, learning_rate=3e-2, save_steps=50)
    with pytest.raises(TrainingDivergedError, match="know its 4 rows by heart: then give it more"):
        train_head(draft=tiny_draft(), train=train, dev=dev, out=tmp_path, config=config, seed=0)
    assert not list(tmp_path.glob("**/metrics.json"))


def test_a_finished_run_is_not_trained_again(reference: TrainedHead, tmp_path: Path) -> None:
    shutil.copytree(reference[0], tmp_path / "head")
    written = (tmp_path / "head" / "model.safetensors").stat().st_mtime_ns
    assert drive(tmp_path / "head", CONFIG) == reference[1]
    assert (tmp_path / "head" / "model.safetensors").stat().st_mtime_ns == written


# --- what cannot be used, and what is said


def test_rows_without_labels_or_whose_prompts_fill_the_context_are_refused_or_counted(
    tmp_path: Path,
) -> None:
    rows = synthetic_rows(4, seed=1).remove_columns("accept_prob")
    with pytest.raises(ValueError, match="accept_prob missing; label the rollouts first"):
        train_head(draft=tiny_draft(), train=rows, dev=rows, out=tmp_path, config=CONFIG, seed=0)
    with pytest.raises(ValueError, match="none of the 50 train rows has a completion token"):
        drive(tmp_path, CONFIG, context=2)
    result = drive(tmp_path, CONFIG, context=5)  # prompts have 2 to 5 tokens
    assert 0 < result.skipped_rows < 80
    assert result.train_rows < 50


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"width": 32}, r"kind specdec\+\+ does not read width \(got 32\)"),
        ({"kind": "immediate", "rejection_weight": 6}, "kind immediate does not read rejection_w"),
        ({"batch_size": 0}, r"head\.batch_size: must be "),
        ({"kind": "immediate", "features": ["log_q", "log_q"]}, "features must name each once"),
        ({"kind": "immediate", "features": ["log_p"]}, "head.features"),
        ({"kind": "confidence", "depth": 1}, r"kind confidence does not read depth \(got 1\)"),
        ({"kind": "linear"}, r"head.kind: must be 'specdec\+\+', 'immediate'"),
    ],
)
def test_settings_that_a_kind_does_not_read_are_refused(
    settings: dict[str, object], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        read_config(Sections, {"head": settings})


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_known_of_a_kind_without_torch_is_so(kind: str) -> None:
    known = heads.config.HEAD_KINDS[kind]
    head = known.load()
    assert (head.kind, head.lag) == (kind, known.lag)
    taken = {"features" if name == "reads" else name for name in head.settings()}
    of_any = {"depth", "width", "features", "rejection_weight", "mixing", "draws"}
    assert {*known.unread} == of_any - taken - {"mixing" if known.lag else "draws"}


@pytest.mark.parametrize("kind", KINDS)
def test_few_rows_are_passed_over_more_often(kind: str) -> None:
    """5e-5 in 3 passes over 512 rows, 48 steps, left a head untrained."""
    config = read_config(Sections, {"head": {"kind": kind}}).head
    least, most = (3, 200) if kind == "specdec++" else (12, 24)  # more, and it knows them by heart
    for rows in (48, 512, 1536, 40_000):
        steps = config.passes(rows) * -(-rows // config.batch_size)
        assert steps >= (400 if kind == "specdec++" else 1500) or rows < 750
        assert least <= config.passes(rows) <= most
    # Of the paper's draft the paper's rate, of smaller ones a larger one.
    assert HeadConfig().peak_rate(4096) == 5e-5
    assert config.peak_rate(4096) <= config.peak_rate(128) <= 2e-2


@pytest.mark.skipif(find_spec("trackio") is not None, reason="trackio is installed here")
def test_a_tracker_that_is_not_installed_is_named_before_any_work(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="pip install trackio, or set it to none"):
        drive(tmp_path, changed(IMMEDIATE, report_to="trackio"), rows=20)
    assert not (tmp_path / "metrics.json").exists()
