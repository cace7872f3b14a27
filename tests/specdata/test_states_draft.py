"""Drafts that read their target's states: what they draft, how they begin, and what is refused."""

from __future__ import annotations

import copy
import json
from collections import Counter
from collections.abc import Iterable
from functools import partial
from math import isfinite
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from distill import dspark, least_squares, masks, rounds
from distill.config import DistilConfig, InitConfig
from distill.kinds import along_rounds
from distill.least_squares import ridge
from distill.masks import check_masks, with_masks
from distill.plain import cut
from distill.rounds import of_round
from distill.states import silence
from distill.trainer import draft_trainer
from distill.watch import HeldOut
from eval.analysis.traces import check_tree_states, tree_states
from eval.decoder import DecodeConfig, Generation, SpeculativeDecoder
from eval.drafting import drafters
from eval.runtime.model import CachedModel
from eval.verifiers import rule
from eval.verifiers.rule import Rng, outcomes
from heads import AcceptanceHead, ImmediateHead
from heads.probe import check_head
from recipes.command import RECIPES
from specdata import probability
from specdata.draft_models.depths import add_masks, depths_of
from specdata.draft_models.draft_vocabulary import reduce_vocabulary
from specdata.draft_models.states_draft import states_input, token_embedding, unit
from specdata.draft_models.taps import attach, read_taps
from specdata.errors import ConfigError
from specdata.lm_head import find_lm_head, hidden_states
from specdata.models import load_model
from specdata.probability import SamplingConfig
from specdata.target_states import reading_stored, target_taps
from tests.support.decoder import PROMPT
from tests.support.families import tiny
from tests.support.initial import ROWS, make, stored
from tests.support.random_pair import texts_of
from tests.support.states_draft import DRAFTED, decoded_as_defined, pair, state_after, states_draft
from tests.support.tiny import joint_distribution, tiny_llama
from tests.support.trainings import QUICK, changed, distilled

kinds = pytest.mark.parametrize("kind", ["states", "masks", "blocks"])
"""A forward for each token of a path; one for all, of which the third depth is repeated; one for a
block of four, of which a token adds a bias, and the fourth state stands for deeper ones."""


@pytest.mark.parametrize("widths", [(2,), (2, 1)])
def test_no_more_masks_are_read_than_a_path_needs(widths: tuple[int, ...]) -> None:
    config = DecodeConfig(verifier="traversal", drafter="tree", widths=widths, siblings="distinct")
    target, draft = pair(40, "masks")
    decoded_as_defined(target, draft, config, PROMPT)
    decoder = SpeculativeDecoder.from_config(target, draft, config)
    assert [each.traits.depths for each in decoder._drafts] == [len(widths)]


FEW = {"greedy_block", "traversal", "dynamic tree", "lookup, chain"}
EVERY = [
    pytest.param(
        name,
        kind,
        marks=[] if kind == "states" or name in FEW else pytest.mark.exhaustive,
    )
    for name in DRAFTED
    for kind in ("states", "masks", "blocks")
    if kind == "states" or name != "lookup"  # which has no draft
]
SHORT = [
    pytest.param(name, "short", marks=[] if name in FEW else pytest.mark.exhaustive)
    for name in DRAFTED
    if name != "lookup"
]


@pytest.mark.parametrize(("name", "kind"), EVERY)
def test_what_is_drafted_depends_on_the_text_and_the_path_alone(name: str, kind: str) -> None:
    """In every round: states of accepted tokens are the target's, and later ones the draft's."""
    decoded_as_defined(*pair(40, kind), DRAFTED[name], PROMPT)


@pytest.mark.parametrize(("name", "kind"), [*EVERY, *SHORT])
def test_the_joint_distribution_over_rounds_is_that_of_plain_sampling(
    name: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By enumeration: the whole decoder is run for every outcome of every draw, over all rounds.

    Of a draft with few positions, too, which the last rounds go on without.
    """
    target, draft = pair(3, kind)
    small: dict[str, Any] = {"nodes": 2, "depth": 2}
    small |= {"widths": (2, 1)} if DRAFTED[name].drafter == "tree" else {}
    small |= {"paths": 2} if DRAFTED[name].drafter == "paths" else {}
    config = DRAFTED[name].model_copy(update=small)
    decoder = SpeculativeDecoder.from_config(target, draft, config)
    text, rounds = torch.tensor(PROMPT) % 3, 0
    length = 3 if config.drafter in {"tree", "paths"} else 4  # other drafts are many

    def decoded(rng: Rng) -> tuple[int, ...]:
        def drawn(probs: Tensor, count: int, _: object) -> list[int]:
            return [rng.categorical(probs.tolist()) for _ in range(count)]

        with monkeypatch.context() as scripted:
            for module in (probability, drafters):
                scripted.setattr(module, "draw_several", drawn)
            scripted.setattr(rule, "GeneratorRng", lambda _: rng)
            out = decoder.generate(text, max_new_tokens=length, generator=torch.Generator())
        nonlocal rounds
        rounds = max(rounds, len(out.rounds))
        return tuple(out.tokens.tolist())

    found: Counter[tuple[int, ...]] = Counter()
    for weight, tokens in outcomes(decoded):
        found[tokens] += weight  # type: ignore[assignment]
    plain = joint_distribution(target, text.tolist(), length, config.sampling)
    assert rounds >= (2 if kind == "short" else 3)
    assert found == pytest.approx(plain, rel=1e-9)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        *((name, "states") for name in (*sorted(FEW), "rrs", "multipath_block")),
        *((name, "masks") for name in sorted(FEW)),
        *((name, "blocks") for name in ("greedy_block", "traversal")),
    ],
)
def test_batches_and_engines_decode_as_one_sequence_does(name: str, kind: str) -> None:
    target, draft = pair(40, kind)
    prompts = [torch.tensor([2, 5, 9 + n, 3][: 1 + n]) for n in range(4)]

    def decoded(engine: Any, size: int | None = None) -> list[list[int]]:
        decoder = SpeculativeDecoder.from_config(target, draft, DRAFTED[name], engine=engine)
        draws = [torch.Generator().manual_seed(n) for n in range(4)]
        if size is None:
            made: Iterable[Generation] = (
                decoder.generate(prompt, max_new_tokens=16, generator=draw)
                for prompt, draw in zip(prompts, draws, strict=True)
            )
        else:
            made = decoder.generate_batch(prompts, max_new_tokens=16, generators=draws, size=size)
        return [out.tokens.tolist() for out in made]

    alone = decoded("eager")
    assert decoded("eager", size=3) == alone
    assert decoded("captured") == decoded("captured", size=3) == alone


def test_a_captured_draft_reads_through_packed_maps_and_leaves_its_own_as_they_were() -> None:
    target = tiny("llama", 0, vocab=40, hidden_size=256, dtype=torch.float32)
    draft, packed = states_draft(target, taps=[0, 1]), []
    maps = [each for each in draft.get_input_embeddings().children() if type(each) is nn.Linear]
    for each in maps:
        each.register_forward_hook(lambda module, *_: packed.append("forward" in module.__dict__))
    texts = []
    for engine, expected in (("eager", {False}), ("captured", {True})):
        packed.clear()
        decoder = SpeculativeDecoder.from_config(
            target,
            draft,
            DecodeConfig(length=3, temperature=0.0),
            engine=engine,  # type: ignore[arg-type]
        )
        out = decoder.generate(torch.tensor([2, 5]), max_new_tokens=24, generator=torch.Generator())
        texts.append(out.tokens.tolist())
        assert {*packed} == expected
    assert texts[0] == texts[1]
    assert not any("forward" in each.__dict__ for each in maps)


@kinds
def test_a_reading_is_what_a_round_drafts_at_its_place(kind: str) -> None:
    _, draft = pair(40, kind)
    ids = torch.tensor([[2, 9, 31, 4, 17, 8, 22], [6, 6, 5, 38, 3, 0, 0]])
    head, taps = find_lm_head(draft), target_taps(draft, [], ids)

    def read(count: int, begins: Tensor | None = None) -> list[Tensor]:
        along = along_rounds(head, ids, count, taps=taps, begins=begins)
        return [place.states for place in along]

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
    ("kind", "shares"), [("masks", (1, 0.7, 0.49)), ("blocks", (1, 0.25, 0.25))]
)
def test_masks_are_read_of_some_rounds_other_ones_in_each_step_as_without_dropping(
    kind: str, shares: tuple[float, ...]
) -> None:
    draft = pair(40, kind)[1]
    ids = torch.arange(80).reshape(2, 40) % 40
    head, taps = find_lm_head(draft), target_taps(draft, [], ids)
    begins = torch.zeros_like(ids, dtype=torch.bool)
    begins[:, 5:35] = True

    def read(step: int | None, begins: Tensor = begins, rows: int = 2) -> list[rounds.Place]:
        of_rows = None if taps is None else taps[:rows]
        asked: dict[str, Any] = {"taps": of_rows, "begins": begins[:rows], "dropping": step}
        with torch.inference_mode():
            return [*along_rounds(head, ids[:rows], 3, **asked)]

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
    monkeypatch.setattr(dspark, "WHOLE", 1.0)
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


def test_a_token_drafted_along_a_text_is_read_with_the_drafts_own_state() -> None:
    _, draft = pair(40)
    ids = torch.tensor([[2, 9, 31, 4, 17]])
    check_tree_states(draft, 5)
    tokens, places = torch.tensor([[7, 30]]), torch.tensor([[3, 5]])
    along, after = tree_states(draft, ids, tokens, places)
    text = ids[0].tolist()
    for at in range(5):
        torch.testing.assert_close(along[0, at], state_after(draft, text[: at + 1], []))
    for index, place in enumerate((3, 5)):
        expected = state_after(draft, text[:place], tokens[0, index : index + 1].tolist())
        torch.testing.assert_close(after[0, index], expected)


@pytest.mark.parametrize("part", [least_squares.PART, 90])
def test_least_squares_finds_a_linear_map_of_columns_of_any_size(
    part: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(least_squares, "PART", part)  # numbers that are held at a time
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(400, 6, generator=generator, dtype=torch.float64) * torch.logspace(-3, 2, 6)
    wanted = torch.randn(6, 3, generator=generator, dtype=torch.float64)
    wanted /= torch.logspace(-3, 2, 6)[:, None]
    found = ridge(zip(x.split(10), (x @ wanted).split(10), strict=True))
    torch.testing.assert_close(found, wanted, rtol=3e-3, atol=0.0)


def test_silent_layers_pass_on_what_they_are_given_and_leave_the_target_alone() -> None:
    target = tiny_llama(0, vocab=40, layers=3)
    before = {name: each.clone() for name, each in target.state_dict().items()}
    model = cut(target, [1, 2])
    silence(model)
    x = torch.randn(1, 4, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(model.base_model(inputs_embeds=x)[0], model.model.norm(x))
    for name, each in target.state_dict().items():
        assert torch.equal(each, before[name])


def test_taps_are_the_hidden_states_of_transformers() -> None:
    target = tiny_llama(0, vocab=40, layers=3)
    ids = torch.tensor([[2, 9, 31, 4]])
    theirs = target(input_ids=ids, output_hidden_states=True).hidden_states[:3]
    taps = read_taps(target, [0, 1, 2, 3], ids)
    ours, scaled = taps.split(16, dim=-1), unit(taps, 4).split(16, dim=-1)
    for mine, small, state in zip(ours, scaled, theirs, strict=False):
        torch.testing.assert_close(mine, state)
        size = state.square().mean(dim=-1, keepdim=True).sqrt()
        torch.testing.assert_close(small, state / size, rtol=1e-3, atol=1e-3)
    # The last one leaves the last layer: the final norm gives what the output matrix reads.
    torch.testing.assert_close(
        target.model.norm(ours[3]), hidden_states(target, ids), rtol=1e-3, atol=1e-3
    )
    assert InitConfig(kind="states").taps_of(30) == [2, 15, 27, 30]
    assert InitConfig(kind="states").taps_of(1) == [0, 1]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return stored(tmp_path_factory.mktemp("target") / "model", num_hidden_layers=4)


made = partial(make, kind="states", layers=1)


@pytest.mark.parametrize("vocabulary", [None, 40])
def test_a_stored_draft_is_the_one_that_was_made_and_finds_its_target(
    target: Path, tmp_path: Path, vocabulary: int | None
) -> None:
    found = made(target, tmp_path / "draft", vocabulary=vocabulary)  # compares the logits itself
    assert (found["layers"], found["taps"]) == ([3], [1, 2, 4])
    draft, theirs = load_model(str(tmp_path / "draft")), load_model(str(target))
    assert torch.equal(token_embedding(draft).weight, theirs.get_input_embeddings().weight)
    ids = torch.tensor([[2, 9, 31, 4]])
    with torch.inference_mode():
        lazily = draft(input_ids=ids).logits
        attach(draft, theirs)
        assert torch.equal(draft(input_ids=ids).logits, lazily)
    # The taps are those recorded, wherever the draft is read.
    assert made(target, tmp_path / "draft", vocabulary=vocabulary) == found


def test_states_of_another_target_and_weights_that_nothing_is_said_of_are_refused(
    target: Path, tmp_path: Path
) -> None:
    made(target, tmp_path / "draft")
    other = stored(tmp_path / "other", num_hidden_layers=3)
    draft = load_model(str(tmp_path / "draft"))
    with pytest.raises(ConfigError, match=r"made for, .*model .*and those of .*other are others"):
        SpeculativeDecoder.from_config(load_model(str(other)), draft, DecodeConfig())
    (target_moved := tmp_path / "moved").symlink_to(target)  # another name is no other target
    SpeculativeDecoder.from_config(load_model(str(target_moved)), draft, DecodeConfig())
    path = tmp_path / "draft" / "model.safetensors"
    weights = load_file(path) | {"model.embed_tokens.masks.weight": torch.zeros(2, 2)}
    save_file(weights, path, {"format": "pt"})
    with pytest.raises(ConfigError, match=r"weights hold .*masks.weight, of which it says nothing"):
        load_model(str(tmp_path / "draft"))


def test_a_draft_on_states_loaded_as_another_and_a_target_that_is_gone_are_refused(
    target: Path, tmp_path: Path
) -> None:
    made(target, tmp_path / "draft", vocabulary=None)
    with pytest.raises(ValueError, match=r"load-with-draftsmith_see-README\.md"):
        AutoModelForCausalLM.from_pretrained(tmp_path / "draft")
    plain = AutoModelForCausalLM.from_pretrained(target)
    plain.config.target_states = load_model(str(tmp_path / "draft")).config.target_states
    with pytest.raises(ConfigError, match=r"reads none: load it with specdata\.models\.load_model"):
        SpeculativeDecoder.from_config(load_model(str(target)), plain, DecodeConfig())
    draft = load_model(str(tmp_path / "draft"), target=str(tmp_path / "gone"))
    with pytest.raises(ConfigError, match=r"reads the states of its target, .*gone"):
        draft(input_ids=torch.tensor([[1, 2]]))


def test_a_draft_and_its_copies_load_the_target_once(
    target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made(target, tmp_path / "draft")
    draft, loaded = load_model(str(tmp_path / "draft")), list[str]()
    monkeypatch.setattr(
        "specdata.models.load_model",
        lambda name, **rest: loaded.append(name) or load_model(name, **rest),
    )
    copied, ids = copy.deepcopy(draft), torch.tensor([[5, 6]])
    logits = [model(input_ids=ids).logits for model in (copied, copied, draft)]
    assert loaded == [str(target)]
    assert all(torch.equal(logits[0], each) for each in logits)


@pytest.mark.parametrize("value", [0, -3, 10**18])
def test_a_model_of_no_or_endless_layers_is_refused_before_it_is_made(
    target: Path, tmp_path: Path, value: int
) -> None:
    config = json.loads((target / "config.json").read_text()) | {"num_hidden_layers": value}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=f"from 1 to 4096, it is {value}"):
        load_model(str(tmp_path))


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        *((key, ..., f"{key}: is missing") for key in ("taps", "target", "width", "probe")),
        ("taps", "abc", "taps: must be a valid list"),
        ("taps", [], "taps: .* at least 1 item"),
        ("taps", [-1, 2], "or equal to 0"),
        ("taps", [9, 1, 2], "states of the target that it was made for"),
        ("probe", [None], "probe.0: must be a valid number"),
        ("probe", [1.0], "states of the target that it was made for"),
        ("target", 3, "target: must be a valid string"),
        ("width", 0, "width: must be greater than 0"),
        ("width", 7, "cannot load the model"),
        ("layout", "eagle3", r"layout.*must be a section"),
        ("depths", 2, "depths: unknown key"),
        ("output_bias", True, "1 are missing"),
        (None, [], "must be a section"),
    ],
)
def test_a_draft_says_which_states_of_which_target_it_reads_or_is_refused(
    target: Path, tmp_path: Path, key: str | None, value: Any, message: str
) -> None:
    made(target, tmp_path / "draft")
    path = tmp_path / "draft" / "config.json"
    config = json.loads(path.read_text())
    record = config["target_states"] | {key: value}
    kept = {name: each for name, each in record.items() if each is not ...}
    path.write_text(json.dumps(config | {"target_states": value if key is None else kept}))
    with pytest.raises(ConfigError, match=message):
        attach(load_model(str(tmp_path / "draft")), load_model(str(target)))


def test_taps_that_cannot_be_had_and_rollouts_of_other_tokens_or_taps_are_refused_or_read_again(
    target: Path, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=r"from 0 .* to 4 .*; got 5"):
        made(target, tmp_path / "draft", taps=[1, 5])
    for name, ids, message in (
        ("none", [], "at least one completion token"),
        ("negative", [[-1]], "from 0 to .* a text has -1 to"),
        ("beyond", [[100_000]], "from 0 to .* to 100000"),
    ):
        rows = Dataset.from_dict({"prompt_ids": ids, "completion_ids": ids})
        with pytest.raises(ValueError, match=message):
            made(target, tmp_path / name, rows)
    theirs = load_model(str(target))
    with pytest.raises(ConfigError, match=r"from 0 to .* to 100000"):
        HeldOut(theirs, rows, SamplingConfig()).measure(theirs)
    made(target, tmp_path / "draft")
    draft = load_model(str(tmp_path / "draft"), target=str(target))
    row = {"prompt_ids": [5], "completion_ids": [6, 7], "target_taps": b"abc"}
    for more in ({}, {"taps": None}):
        with reading_stored(draft, [{**row, **more}], 2):  # without their taps: read of the target
            draft(input_ids=torch.tensor([[5, 6]]))
    taps = draft.config.target_states["taps"]
    with pytest.raises(ConfigError, match="numbers of the target's states"):
        reading_stored(draft, [{**row, "taps": taps}], 2).__enter__()


OTHER_TRAININGS = {"logits": "a", "on_policy": 0.5, "finetune": {}, "lora": {}, "depths": 4}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        *(
            ({"init": {"kind": "states"}, key: value}, f"{key}.* must be left out with init.kind")
            for key, value in OTHER_TRAININGS.items()
        ),
        ({"init": {"kind": "states", "taps": [3, 1]}}, "in order, each once"),
        ({"init": {"kind": "states", "block": 3}}, "block needs layout dspark, got none"),
        (
            {"init": {"kind": "states", "layout": "dspark", "block": 1}},
            "greater than or equal to 2",
        ),
        ({"init": {"kind": "states", "layout": "dspark", "layers": [2]}}, "must be how many with"),
        ({"init": {"kind": "target", "layout": "dspark"}}, "dspark needs kind states, got target"),
        (
            {"init": {"kind": "states", "layout": "dspark"}, "readings": 3},
            "readings must be left out",
        ),
        ({"init": {"kind": "target", "taps": [1]}}, "taps needs kind states"),
        ({"depths": 3, "freeze_embeddings": True}, "embeddings must be left out with depths"),
        ({"depths": 3, "lora": {}}, "lora must be left out with depths"),
    ],
)
def test_settings_that_exclude_each_other_are_refused(
    settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        DistilConfig(**settings)


@pytest.mark.parametrize("key", OTHER_TRAININGS)
def test_a_given_draft_on_states_is_not_trained_otherwise_either(
    target: Path, tmp_path: Path, key: str, capsys: pytest.CaptureFixture[str]
) -> None:
    made(target, tmp_path / "draft")
    sets = "[{name: maths, split: train, count: 2}, {name: code, split: dev, count: 2}]"
    models = f"{{target: {target}, draft: {tmp_path / 'draft'}}}"
    given = ["--output", str(tmp_path / "out"), "--models", models, "--rollouts.sets", sets]
    given += [f"--draft.{key}", json.dumps(OTHER_TRAININGS[key])]
    assert RECIPES["train-draft"].run([*given, "--plan"]) == 2
    assert f"draft: {key} must be left out with models.draft" in capsys.readouterr().err


def test_depths_that_a_draft_cannot_have_are_refused() -> None:
    target, draft = pair(40)
    with pytest.raises(ConfigError, match=r"at most 3, the tokens of the longest completion, got"):
        with_masks(draft, 4, [], ROWS.map(lambda row: {"completion_ids": [1, 2, 3]}))
    with pytest.raises(ConfigError, match="is for drafts that read tokens alone: leave it out"):
        add_masks(draft, 3, [])
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


def test_masks_are_of_drafts_and_may_stand_behind_the_last_position() -> None:
    target, draft = pair(40, "masks")
    learnt = tiny("gpt2", 0, n_positions=24, depths=8, pard_token=39)
    check_masks(learnt, 24)
    prompt = torch.tensor(PROMPT)

    def decoded(*models: PreTrainedModel) -> list[int]:
        config = DecodeConfig(temperature=0.0, length=4)
        decoder = SpeculativeDecoder.from_config(*models, config)
        generator = torch.Generator().manual_seed(0)
        room = 24 - len(PROMPT)
        return decoder.generate(prompt, max_new_tokens=room, generator=generator).tokens.tolist()

    plain = decoded(target, draft)
    assert plain == decoded(target, learnt)
    target.config.depths, target.config.pard_token = 3, 39  # as a draft that is decoded itself
    assert plain == decoded(target, draft)


def test_a_head_that_judges_by_the_state_after_a_token_is_refused_where_there_is_none() -> None:
    _, draft = pair(40, "masks")
    check_head(draft, ImmediateHead(hidden_size=16))
    with pytest.raises(ConfigError, match=r"after masks .* there is none"):
        check_head(draft, AcceptanceHead(hidden_size=16))


def test_a_plain_draft_learns_what_its_mask_stands_for(tiny_pair: Path, tmp_path: Path) -> None:
    """Another token that no text holds would do as well in a draft that had not learnt it."""
    train, dev = texts_of(tiny_pair, 64, seed=1), texts_of(tiny_pair, 16, seed=2)
    sampling = SamplingConfig(temperature=0.2)
    config = changed(QUICK, depths=3, epochs=4, learning_rate=1e-2, keep="last")
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


def test_a_target_is_needed_and_reads_a_text_once_and_what_it_said_is_learnt_from() -> None:
    target, draft = pair(40)
    reads = states_input(draft)
    assert reads is not None
    ids, seen = torch.tensor([[2, 9, 31, 4]]), list[int]()
    target.model.register_forward_hook(lambda *_: seen.append(1))
    with torch.inference_mode():
        first = reads.read_target(ids)
    reads.after_target(ids, reads.read_target(ids)).sum().backward()
    assert reads.read_target(ids) is first
    assert len(seen) == 1
    assert copy.deepcopy(draft).get_input_embeddings().read_target(ids) is first
    with pytest.raises(ConfigError, match="has no target here: load it with"):
        type(reads)(reads.tokens, 16, 3, 16)(ids)
    # Another shape of the same ids is another text.
    assert reads.read_target(ids.view(2, 2)).shape[:2] == (2, 2)
