"""Rounds along texts: a draft learns and is measured on what it drafts at each place."""

from math import isfinite
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from torch import Tensor

from distill import rounds
from distill.config import DistilConfig
from distill.distillation import draft_trainer
from distill.drafts import dspark, masks, round_places
from distill.drafts.masks import check_masks, with_masks
from distill.rounds import of_round
from distill.watch import HeldOut
from eval.runtime.model import CachedModel
from specdata.drafts.depths import add_masks, depths_of
from specdata.drafts.draft_vocabulary import reduce_vocabulary
from specdata.errors import ConfigError
from specdata.lm_head import find_lm_head
from specdata.models import load_model
from specdata.probability import SamplingConfig
from specdata.target_states import target_taps
from tests.support.families import tiny
from tests.support.initial import ROWS
from tests.support.random_pair import texts_of
from tests.support.states_draft import pair, state_after
from tests.support.trainings import QUICK, changed, distilled

kinds = pytest.mark.parametrize("kind", ["states", "masks", "blocks"])
"""A forward for each token of a path; one for all, of which the third depth is repeated; one for a
block of four, of which a token adds a bias, and the fourth state stands for deeper ones."""


@kinds
def test_a_reading_is_what_a_round_drafts_at_its_place(kind: str) -> None:
    _, draft = pair(40, kind)
    ids = torch.tensor([[2, 9, 31, 4, 17, 8, 22], [6, 6, 5, 38, 3, 0, 0]])
    head, taps = find_lm_head(draft), target_taps(draft, [], ids)

    def read(count: int, begins: Tensor | None = None) -> list[Tensor]:
        places = round_places(head, ids, count, taps=taps, begins=begins)
        return [place.states for place in places]

    with torch.inference_mode():
        found = read(5)
    for row, length in ((0, 7), (1, 5)):
        for step, states in enumerate(found):
            for at in range(step, length):
                text = ids[row, : at + 1].tolist()
                began = at + 1 - step
                expected = state_after(draft, text[:began], text[began:])
                torch.testing.assert_close(states[row, at], expected, rtol=1e-9, atol=1e-9)
    # Those of the rounds that are asked for alone are the same.
    wanted = torch.zeros(ids.shape, dtype=torch.bool)
    wanted[0, 3:6] = wanted[1, 1:3] = True
    with torch.inference_mode():
        some = read(3, wanted)
    for step, states in enumerate(some):
        for row, first, end in ((0, 3, 6), (1, 1, 3)):
            here = slice(first + step, end)
            torch.testing.assert_close(states[row, here], found[step][row, here])


@pytest.mark.parametrize(
    ("kind", "shares"),
    [("masks", (1, 0.7, 0.49)), ("masks", (1, 0.3, 0.2)), ("blocks", (1, 0.25, 0.25))],
)
def test_masks_are_read_of_some_rounds_other_ones_in_each_step_as_without_dropping(
    kind: str, shares: tuple[float, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    if shares[1] != masks.KEPT:  # the least share is 0.2 however few are kept
        monkeypatch.setattr(masks, "KEPT", shares[1])
    draft = pair(40, kind)[1]
    ids = torch.arange(80).reshape(2, 40) % 40
    head, taps = find_lm_head(draft), target_taps(draft, [], ids)
    begins = torch.zeros_like(ids, dtype=torch.bool)
    begins[:, 5:35] = True

    def read(step: int | None, begins: Tensor = begins, rows: int = 2) -> list[rounds.Place]:
        of_rows = None if taps is None else taps[:rows]
        asked: dict[str, Any] = {"taps": of_rows, "begins": begins[:rows], "dropping": step}
        with torch.inference_mode():
            return [*round_places(head, ids[:rows], 3, **asked)]

    seen, whole = torch.zeros(3, *ids.shape, dtype=torch.int), read(None)
    for step in range(60):
        for depth, (states, kept, _) in enumerate(read(step)):
            seen[depth] += kept
            of_30 = 30 * shares[depth]
            assert shares[depth] == 1 or ((kept.sum(dim=1) - of_30).abs() <= 2).all()
            torch.testing.assert_close(states[kept], whole[depth].states[kept])
    for depth, share in enumerate(shares):  # none is left out for long
        counts = seen[depth][:, 5 + depth : 35 + depth] / 60
        assert counts.min() > share - 0.2
        assert counts.max() < share + 0.2
    longer = begins.clone()  # another text of the batch decides nothing
    longer[1] = True
    for step in range(12):
        for alone, beside in zip(read(step, rows=1), read(step, longer), strict=True):
            assert alone.kept[0, 7:35].equal(beside.kept[0, 7:35])
    for step in (10**5, 10**7):  # no two share a rank, however far a training is
        assert len(rounds.ranks(torch.arange(2048), step).unique()) == 2048


@kinds
def test_the_loss_weighs_each_reading_and_each_is_of_the_tokens_that_rounds_draft_there(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(masks, "KEPT", 1.0)
    monkeypatch.setattr(dspark, "WHOLE_SHARE", 1.0)
    target, draft = pair(40, kind)
    rows = [
        {"prompt_ids": [2, 9], "completion_ids": [31, 4, 17, 8, 22]},
        {"prompt_ids": [6, 6, 5], "completion_ids": [38, 3]},
    ]
    config = DistilConfig(objective="forward_kl", readings=3, batch_size=2, report_to=[])
    data, plain = Dataset.from_list(rows), SamplingConfig()
    trainer = draft_trainer(target, draft, data, tmp_path, config, plain, 0)
    total, weights = 0.0, (1, 0.8, 0.64, 0.512)  # EAGLE-3's decay
    weights = weights if kind == "blocks" else weights[:3]
    with torch.no_grad():
        for row in rows:
            first, text = len(row["prompt_ids"]), row["prompt_ids"] + row["completion_ids"]
            p = target(torch.tensor([text])).logits[0].log_softmax(-1)
            for step, weight in enumerate(weights):
                for at in range(first + step, len(text)):  # its round began after the prompt
                    began = at - step
                    state = state_after(draft, text[:began], text[began:at])
                    q = draft.get_output_embeddings()(state).log_softmax(-1)
                    divergence = (p[at - 1].exp() * (p[at - 1] - q)).sum()
                    total += weight / sum(weights) * float(divergence)
    batch = next(iter(trainer.get_train_dataloader()))
    loss = trainer.compute_loss(trainer.model, batch, num_items_in_batch=torch.tensor(7))
    assert loss.item() == pytest.approx(total / 7, rel=1e-6)
    every = torch.ones(1, 3, dtype=torch.bool)
    assert not of_round(every, 20).any()  # more readings than the text has tokens


@torch.inference_mode()
@kinds
@pytest.mark.parametrize("vocabulary", [40, 12])
def test_expected_tokens_of_a_round_are_of_what_is_drafted_at_each_place(
    vocabulary: int, kind: str
) -> None:
    target, draft = pair(40, kind)
    if vocabulary < 40:
        reduce_vocabulary(draft, range(0, 24, 2))
    prompt, text = [2, 9, 31], [4, 17, 8, 22, 6, 30]
    rows = Dataset.from_list([{"prompt_ids": prompt, "completion_ids": text}])
    found = HeldOut(target, rows, SamplingConfig()).measure(draft).overall
    p = target(input_ids=torch.tensor([prompt + text])).logits[0].softmax(-1)[2:]
    acceptance, emitted = 0.0, 0.0
    for begin in range(len(text)):
        emitted += 1.0
        accepted = 1.0
        for place in range(min(4, len(text) - 1 - begin)):  # the last token ends the round
            state = state_after(draft, prompt + text[:begin], text[begin : begin + place])
            q = draft.lm_head(state).softmax(-1)
            acceptance += float(torch.minimum(p[begin], q).sum()) if place == 0 else 0.0
            token = text[begin + place]
            accepted *= min(1.0, float(q[token] / p[begin + place, token]))
            emitted += accepted
        if begin == len(text) - 1:
            state = state_after(draft, prompt + text[:begin], [])
            acceptance += float(torch.minimum(p[begin], draft.lm_head(state).softmax(-1)).sum())
    assert isfinite(found.kl)  # also where the draft cannot propose a token
    assert found.acceptance == pytest.approx(acceptance / len(text), rel=1e-6)
    assert found.expected_tokens["token_4"] == pytest.approx(emitted / len(text), rel=1e-6)


def test_depths_that_a_draft_cannot_have_are_refused() -> None:
    target, draft = pair(40)
    with pytest.raises(ConfigError, match=r"at most 3, the tokens of the longest completion, got"):
        with_masks(draft, 4, [], ROWS.map(lambda row: {"completion_ids": [1, 2, 3]}))
    with pytest.raises(ConfigError, match="must be a token that no text holds, and all 40"):
        add_masks(target, 3, range(40))
    for depths, mask in ((3, None), (3, 40), (3, "x"), (0, 1), ("x", 1), (10**9, 1)):
        target.config.depths, target.config.pard_token = depths, mask
        with pytest.raises(ConfigError, match=f"this one's are {depths!r} and {mask!r}"):
            depths_of(target)
    recurrent = tiny("falcon_mamba", 0)
    add_masks(recurrent, 3, range(30))
    with pytest.raises(ConfigError, match=r"recurrent layers .* cannot read masks"):
        CachedModel(recurrent, 40)
    with pytest.raises(ConfigError, match="needs a draft whose attention takes any mask"):
        check_masks(recurrent, 9)


def test_a_plain_draft_learns_what_its_mask_stands_for(tiny_pair: Path, tmp_path: Path) -> None:
    """Another token that no text holds would do as well in a draft that had not learnt it."""
    train, dev = texts_of(tiny_pair, 64, seed=1), texts_of(tiny_pair, 16, seed=2)
    sampling = SamplingConfig(temperature=0.2)
    config = changed(QUICK, depths=3, epochs=4, learning_rate=1e-2)
    distilled(tiny_pair, tmp_path / "out", config, sampling, train=train, dev=dev)
    learnt = load_model(str(tmp_path / "out"))
    assert learnt.config.depths == 3
    texts = [*train["prompt_ids"], *train["completion_ids"], *dev["completion_ids"]]
    free = {*range(learnt.config.vocab_size)} - {token for text in texts for token in text}
    mask = learnt.config.pard_token
    assert mask in free
    held_out = HeldOut(load_model(str(tiny_pair / "target")), dev, sampling)
    by_mask = held_out.measure(learnt).overall.expected_tokens["token_4"]
    learnt.config.pard_token = max(free - {mask})
    assert by_mask > 1.1 * held_out.measure(learnt).overall.expected_tokens["token_4"]
