"""Training a head without lag: at every moment, in the target's own context, however it is run."""

from __future__ import annotations

import logging
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from accelerate.utils import is_tensorboard_available

import heads.contexts
from heads import BaseHead, ImmediateHead
from heads.config import KNOWN_FROM, HeadConfig
from heads.contexts import MixedContext, TargetContext
from heads.inputs import FEATURES, DraftedTokens, HeadInputs, Moment, logits_of_states
from heads.probe import probe_of
from heads.target_context import LONGEST_DRAFT, simulated_rounds, target_row
from heads.train import train_head
from specdata.config import read_config
from specdata.errors import ConfigError, ManifestError
from specdata.lm_head import hidden_states
from specdata.probability import SamplingConfig, probabilities
from tests.drive_head import LEVELS, drive, synthetic_rows, tiny_draft
from tests.test_head_training import (
    SCRIPT,
    Sections,
    assert_same_training,
    changed,
    environment,
    keeping_checkpoints,
    launch,
    metrics,
)

CONFIG = HeadConfig(
    kind="immediate",
    depth=1,
    width=16,
    batch_size=16,
    micro_batch_size=8,
    learning_rate=3e-3,
    epochs=2,
    save_steps=3,
)
ALL = ("before", "drawn", "consumed")


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Sums are ordered alike here and in the processes that the tests start."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


# --- learning


def test_one_head_learns_the_overlap_before_a_token_is_drawn_and_its_acceptance_after(
    tmp_path: Path,
) -> None:
    config = changed(
        CONFIG, width=64, moments=ALL, epochs=20, micro_batch_size=16, learning_rate=1e-2
    )
    result = drive(tmp_path, config, rows=64, draws=3)
    assert list(result.by_moment) == list(ALL)
    for judged in result.by_moment.values():
        assert judged.kl < 0.05 < 0.3 < judged.kl_constant
        assert judged.ece < 0.06
    assert result.after == result.by_moment["drawn"]
    assert result.after.kl < 0.2 * result.before.kl
    # A token says nothing of the overlap where it is drawn: the two are told apart.
    assert result.by_moment["before"].mean_accept != result.after.mean_accept
    head = BaseHead.from_pretrained(tmp_path)
    assert isinstance(head, ImmediateHead)
    assert head.rejection_weight == 1.0
    assert head.sampling == {"temperature": 1.0, "top_k": 50, "top_p": 1.0}
    assert head.probe == probe_of(tiny_draft().eval())
    # Standardised by what training saw.
    assert all(deviation not in (0.0, 1.0) for _, deviation in head.scales.values())
    assert head.scales.keys() == {"log_q", "log_q_max", "margin", "entropy", "log_mass_above"}


def test_training_asks_what_decoding_asks_of_every_drafted_token() -> None:
    """Each position and draw, by forwards of its own over prompt, X_<i and Y_i."""
    draft, sampling = tiny_draft().eval(), SamplingConfig(temperature=0.7, top_k=20)
    reads = [*HeadConfig(kind="immediate").features]
    head = ImmediateHead(
        hidden_size=32,
        reads=reads,
        moments=ALL,
        sampling={"temperature": 0.7, "top_k": 20, "top_p": 1.0},
    )
    to_logits = logits_of_states(draft)
    context = TargetContext(head, draft, to_logits, draws=2, max_length=99, seed=0)
    labels = synthetic_rows(3, seed=1, draws=3)
    rows = [context.row(labels[i], i, epoch=1) for i in range(3)]
    asked = context.questions(rows)
    moment, *features = asked.arguments
    assert moment is not None
    assert moment.flatten().tolist() == [0, 1, 2]
    assert asked.accept.shape == (3, sum(len(row["draft_ids"]) for row in labels), 2)
    assert bool(asked.mask.all())
    place = 0
    for row in labels:
        others = np.reshape(row["more_draft_ids"], (-1, 2))
        # The second pass of two draws each, of three: the third one and the first.
        for position, chosen in enumerate(zip(others[:, 1], row["draft_ids"], strict=True)):
            known = [*row["prompt_ids"], *row["completion_ids"][:position]]
            for draw, token in enumerate(map(int, chosen)):
                states = hidden_states(draft, torch.tensor([[*known, token]]))[0]
                expected = HeadInputs.of(
                    reads,
                    DraftedTokens(
                        tokens=torch.tensor(token),
                        before=lambda states=states: states[-2],  # type: ignore[misc]
                        after=lambda states=states: states[-1],  # type: ignore[misc]
                        distributions=lambda states=states: probabilities(  # type: ignore[misc]
                            to_logits(states[-2]), sampling
                        ),
                        embeddings=lambda token=token: draft.get_input_embeddings()(  # type: ignore[misc]
                            torch.tensor(token)
                        ),
                    ),
                )
                for name, values in zip(reads, features, strict=True):
                    assert values is not None
                    torch.testing.assert_close(
                        values[place, draw], expected[name], rtol=1e-5, atol=1e-5
                    )
                overlap, accept = row["overlap"][position], LEVELS[token % 4]
                assert asked.accept[:, place, draw].tolist() == pytest.approx(
                    [overlap, accept, accept]
                )
            place += 1


def test_passes_take_one_draw_after_the_other_and_dev_rows_always_the_first() -> None:
    head = ImmediateHead(hidden_size=32, moments=["drawn"])
    draft = tiny_draft().eval()
    context = TargetContext(head, draft, logits_of_states(draft), draws=1, max_length=99, seed=0)
    row = synthetic_rows(1, seed=1, draws=3)[0]
    others = np.reshape(row["more_draft_ids"], (-1, 2))
    held = [row["draft_ids"], others[:, 0].tolist(), others[:, 1].tolist()]
    for epoch in range(4):
        assert context.row(row, 0, epoch).tokens[:, 0].tolist() == held[epoch % 3]
    assert context.row(row, 0, None).tokens[:, 0].tolist() == held[0]
    without = {name: value for name, value in row.items() if not name.startswith("more")}
    assert context.row(without, 0, 2).tokens[:, 0].tolist() == held[0]  # type: ignore[arg-type]


def test_simulated_rounds_end_at_rejections_and_at_their_length() -> None:
    generator = np.random.default_rng(0)
    position, since = simulated_rounds(np.zeros(30), generator)
    assert not position.any()
    assert not since.any()
    position, since = simulated_rounds(np.ones(2000), generator)
    assert since.tolist() == list(range(2000))  # never rejected
    ends = [int(position[i]) for i in range(1999) if position[i + 1] == 0]
    assert {*ends} == {*range(1, LONGEST_DRAFT + 1)}  # the place of the target's own token
    position, since = simulated_rounds(np.full(4000, 0.5), generator)
    for i in range(3999):
        assert position[i + 1] in (0, position[i] + 1)
        assert since[i + 1] in (0, since[i] + 1)
        assert since[i] >= position[i]
    # Half of the tokens are rejected, but for the few that targets add to whole drafts.
    assert 0.4 < float((since[1:] == 0).mean()) < 0.55


def test_places_in_the_draft_are_read_where_a_head_asks_for_them(tmp_path: Path) -> None:
    config = changed(CONFIG, features=("log_q", "position", "since_rejection"), moments=("drawn",))
    drive(tmp_path, config, rows=20)
    head = BaseHead.from_pretrained(tmp_path)
    assert isinstance(head, ImmediateHead)
    assert 0.0 < head.scales["since_rejection"][0] < 14.0


def test_a_mixed_context_is_still_to_be_had(tmp_path: Path) -> None:
    config = changed(CONFIG, mixing=0.15, epochs=10, learning_rate=1e-2)
    result = drive(tmp_path, config, rows=64)
    assert result.after.kl < 0.5 * result.after.kl_constant


def test_a_mixed_context_may_hold_ids_that_only_the_target_has() -> None:
    """Matrices of one family are padded to different sizes."""
    draft, row = tiny_draft().eval(), synthetic_rows(1, seed=1)[0]
    row["completion_ids"] = [draft.config.vocab_size + 3] * len(row["completion_ids"])
    head = ImmediateHead(hidden_size=32, reads=["log_q", "embedding"], moments=["drawn"])
    context = MixedContext(head, draft, logits_of_states(draft), rate=0.5, max_length=99, seed=0)
    mixed = context.row(row, 0, epoch=0)
    assert int(mixed.input_ids.max()) >= draft.config.vocab_size
    _, log_q, _ = context.questions([mixed]).arguments
    assert log_q is not None
    assert bool(log_q.isfinite().all())


# --- invariance


@pytest.fixture(scope="module")
def reference(one_thread: None, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, object]:
    out = tmp_path_factory.mktemp("immediate") / "head"
    return out, drive(keeping_checkpoints(out), CONFIG, draws=2)


def test_accumulation_does_not_change_losses_or_weights(
    tmp_path: Path, reference: tuple[Path, object]
) -> None:
    drive(tmp_path, changed(CONFIG, micro_batch_size=3), draws=2)
    assert_same_training(tmp_path, reference)  # type: ignore[arg-type]


def test_states_on_the_disk_change_the_head_by_rounding_only_and_go_when_it_is_done(
    tmp_path: Path, reference: tuple[Path, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(heads.contexts, "ROWS_IN_SHARD", 16)
    drive(tmp_path, changed(CONFIG, cache="disk"), draws=2)
    losses, expected = metrics(tmp_path)["losses"], metrics(reference[0])["losses"]
    torch.testing.assert_close(torch.tensor(losses), torch.tensor(expected), rtol=1e-3, atol=1e-3)
    assert losses != expected  # the states were rounded, so they were used
    assert not (tmp_path / "states").exists()


def test_states_of_a_killed_run_are_used_again_and_other_settings_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(heads.contexts, "ROWS_IN_SHARD", 16)
    config = changed(CONFIG, cache="disk")
    made: list[int] = []
    compute = TargetContext.of_draft
    is_down = True

    def counted(context: TargetContext, batch: object) -> object:
        if is_down and len(made) == 5:
            raise KeyboardInterrupt  # in the third shard
        made.append(len(batch.rows))  # type: ignore[attr-defined]
        return compute(context, batch)  # type: ignore[arg-type]

    monkeypatch.setattr(TargetContext, "of_draft", counted)
    monkeypatch.setattr("heads.train.scales_of", lambda *_: None)
    with pytest.raises(KeyboardInterrupt):
        drive(tmp_path, config, draws=2)
    kept = sorted(path.name for path in (tmp_path / "states").glob("*.safetensors"))
    assert kept == ["states-00000.safetensors", "states-00001.safetensors"]
    is_down = False
    made.clear()
    with pytest.raises(ManifestError, match="made with other settings"):
        drive(tmp_path, config, draws=3)
    drive(tmp_path, config, draws=2)
    dev = 2 * 32  # the dev rows twice, filled up to whole batches
    assert sum(made) == 50 - 32 + dev


@pytest.mark.slow
def test_a_run_killed_in_the_middle_ends_with_the_same_bytes(tmp_path: Path) -> None:
    config = changed(CONFIG, epochs=12, cache="disk")
    command = [sys.executable, str(SCRIPT), "--out", str(tmp_path / "killed"), "--cache", "disk"]
    command += ["--epochs", str(config.epochs), "--save-steps", str(config.save_steps)]
    command += ["--kind", "immediate", "--draws", "2"]
    checkpoints = tmp_path / "killed" / "checkpoints"
    with subprocess.Popen(
        command, env=environment(), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    ) as process:
        deadline = time.monotonic() + 120
        while not list(checkpoints.glob("checkpoint-*6/complete.json")):
            assert process.poll() is None, process.stderr and process.stderr.read()
            assert time.monotonic() < deadline
            time.sleep(0.005)
        process.send_signal(signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL
    assert not (tmp_path / "killed" / "config.json").exists()
    resumed = drive(tmp_path / "killed", config, draws=2)
    assert resumed == drive(tmp_path / "whole", config, draws=2)
    for name in ("model.safetensors", "config.json", "metrics.json"):
        expected = (tmp_path / "whole" / name).read_bytes()
        assert (tmp_path / "killed" / name).read_bytes() == expected


@pytest.mark.exhaustive
@pytest.mark.parametrize("profile", ["cpu-2", "zero3"])
def test_two_processes_train_the_same_head_as_one_and_one_can_go_on(
    profile: str, tmp_path: Path, reference: tuple[Path, object]
) -> None:
    out = keeping_checkpoints(tmp_path / "two")
    done = launch(profile, out, "--kind", "immediate", "--draws", "2")
    assert done.returncode == 0, done.stderr
    assert metrics(out)["processes"] == 2
    assert_same_training(out, reference)  # type: ignore[arg-type]
    assert "Warning" not in done.stderr
    # Its last checkpoint is of step 6 of 8.
    shutil.copytree(out / "checkpoints", tmp_path / "one" / "checkpoints")
    assert drive(tmp_path / "one", CONFIG, draws=2).engine == "single"
    assert_same_training(tmp_path / "one", reference)  # type: ignore[arg-type]


# --- what cannot be used, and what is said


def test_a_maximum_length_that_cuts_labels_says_how_many(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    whole = drive(tmp_path / "whole", changed(CONFIG, epochs=1), rows=20)
    assert (whole.cut_labels, caplog.messages) == (0, [])
    rows = [*synthetic_rows(20, seed=1), *synthetic_rows(30, seed=2, split="dev")]
    labels = sum(len(row["draft_ids"]) for row in rows)
    assert whole.labels == labels
    kept = sum(max(0, min(len(row["draft_ids"]), 8 - len(row["prompt_ids"]))) for row in rows)
    with caplog.at_level(logging.WARNING):
        cut = drive(tmp_path / "cut", changed(CONFIG, epochs=1, max_length=8), rows=20)
    assert cut.cut_labels == labels - kept > 0
    assert caplog.messages == [
        f"head.max_length of 8 tokens cuts off {labels - kept} of {labels} labels: leave it out to "
        "learn from whole rows"
    ]
    assert cut.by_moment["drawn"].tokens < whole.by_moment["drawn"].tokens


def test_whole_rows_are_learned_from_by_default(tmp_path: Path) -> None:
    """A prompt of 60 tokens and a completion of 60 of a draft with 128 positions: all of it."""
    row = synthetic_rows(1, seed=0)[0]
    ids = list(range(1, 48)) + list(range(1, 14))
    long = {**row, "prompt_ids": ids, "completion_ids": ids, "draft_ids": ids}
    long |= {"accept_prob": [0.5] * 60, "overlap": [0.5] * 60, "more_draft_ids": []}
    rows = type(synthetic_rows(1, seed=0)).from_list([{**long, "more_accept_prob": []}] * 2)
    result = train_head(
        draft=tiny_draft(), train=rows, dev=rows, out=tmp_path, config=CONFIG, seed=0
    )
    assert (result.after.tokens, result.labels, result.cut_labels) == (120, 240, 0)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"width": 64}, r"kind specdec\+\+ does not read width \(got 64\)"),
        ({"moments": ["drawn"]}, r"kind specdec\+\+ does not read moments"),
        ({"kind": "immediate", "rejection_weight": 6}, "kind immediate does not read rejection_w"),
        ({"mixing": None}, "mixing must be a number, got null"),
        ({"kind": "immediate", "mixing": 0.1, "draws": 2}, "mixing 0.1 cannot be with draws 2"),
        ({"kind": "immediate", "features": ["log_q", "log_q"]}, "features must name each once"),
        ({"kind": "immediate", "features": ["log_p"]}, "head.features"),
        ({"kind": "immediate", "features": ["hidden"]}, "hidden none is known at the moment drawn"),
        ({"kind": "linear"}, "head.kind: must be 'specdec\\+\\+' or 'immediate'"),
    ],
)
def test_settings_that_a_kind_does_not_read_are_refused(
    settings: dict[str, object], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        read_config(Sections, {"head": settings})


def test_every_feature_and_moment_can_be_named() -> None:
    everything = HeadConfig(kind="immediate", features=[*FEATURES], moments=ALL)  # type: ignore[arg-type]
    assert {*everything.features} == {*FEATURES}
    assert [name.upper() for name in everything.moments] == [moment.name for moment in Moment]
    for name, feature in FEATURES.items():
        assert KNOWN_FROM.get(name, "before") == feature.moment.name.lower()  # type: ignore[call-overload]


@pytest.mark.parametrize("rows", [48, 512, 1536, 40_000])
@pytest.mark.parametrize("kind", ["specdec++", "immediate"])
def test_few_rows_are_passed_over_more_often(kind: str, rows: int) -> None:
    """5e-5 in 3 passes over 512 rows, 48 steps, left a head untrained."""
    config = read_config(Sections, {"head": {"kind": kind}}).head
    steps = config.passes(rows) * -(-rows // config.batch_size)
    assert steps >= (400 if kind == "specdec++" else 1500) or rows < 750
    least, most = (3, 200) if kind == "specdec++" else (12, 24)  # more, and it knows them by heart
    assert least <= config.passes(rows) <= most
    assert changed(config, epochs=2).passes(rows) == 2
    # Of the paper's draft the paper's rate, of smaller ones a larger one.
    assert HeadConfig().peak_rate(4096) == 5e-5
    assert HeadConfig().peak_rate(128) == 1e-3
    assert config.peak_rate(128) <= 2e-3
    assert changed(config, learning_rate=0.5).peak_rate(128) == 0.5


def test_a_tracker_that_is_not_installed_is_named_before_any_work(tmp_path: Path) -> None:
    config = changed(CONFIG, report_to="tensorboard", epochs=1)
    if is_tensorboard_available():
        drive(tmp_path, config, rows=20)
        assert list((tmp_path / "logs").rglob("events*"))
        return
    with pytest.raises(ConfigError, match="pip install tensorboard, or set it to none"):
        drive(tmp_path, config, rows=20)
    assert not (tmp_path / "metrics.json").exists()
    assert drive(tmp_path, changed(config, report_to="none"), rows=20).steps == 2


def test_a_row_without_a_prompt_is_refused() -> None:
    row = {**synthetic_rows(1, seed=1)[0], "prompt_ids": []}
    with pytest.raises(ValueError, match="prompt_ids must hold a token"):
        target_row(row, index=0, draws=(0,), max_length=99, key=())  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("column", "message"),
    [("overlap", r"for 2 draft_ids.*got 3, 4 and 4"), ("more_draft_ids", "got 2, 5 and 4")],
)
def test_columns_that_do_not_fit_each_other_are_refused(column: str, message: str) -> None:
    row = {
        **synthetic_rows(1, seed=1)[0],
        "completion_ids": [1, 2],
        "draft_ids": [1, 2],
        "accept_prob": [0.5, 0.5],
        "overlap": [0.5, 0.5],
        "more_draft_ids": [1, 2, 3, 4],
        "more_accept_prob": [0.5] * 4,
    }
    row[column] = [*row[column], 1]
    with pytest.raises(ValueError, match=message):
        target_row(row, index=0, draws=(0,), max_length=99, key=())  # type: ignore[arg-type]
