"""Drafts in blocks: what one forward gives, how long a draft may be, what heads read, bad input.

What every draft must do is in `test_draft_decoding.py`, where they are a row.
"""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from eval.analysis.round_times import measure_times
from eval.analysis.verifier_table import drafted
from eval.decoder import DecodeConfig, SpeculativeDecoder
from heads import AcceptanceHead, BaseHead, ConfidenceHead, ImmediateHead
from heads.config import HeadConfig
from heads.probe import check_head
from heads.train import train_head
from recipes.command import run_tool
from specdata.drafts.draft_vocabulary import reduce_vocabulary
from specdata.drafts.states_network import states_input
from specdata.errors import ConfigError
from specdata.labels.make import Labeller
from specdata.lm_head import find_lm_head, width_of_states
from specdata.models import load_model
from specdata.probability import SamplingConfig, overlap
from specdata.texts import ModelSource
from tests.support.block_draft import RANK, block_draft, state_in_block
from tests.support.decoder import PROMPT
from tests.support.drive_head import LEVELS, VOCABULARY, synthetic_rows
from tests.support.eagle import learnt
from tests.support.initial import ROWS, make, stored
from tests.support.states_draft import DRAFTED, decoded_as_defined
from tests.support.tiny import tiny_llama

PAIR = tiny_llama(0, vocab=40, layers=3)
PAIR.generation_config.eos_token_id = None
TEXT = [2, 9, 31, 4, 17, 8, 22, 5, 30, 30, 7]


def decoded(draft: Any, config: DecodeConfig, seed: int = 0, **given: Any) -> Any:
    decoder = SpeculativeDecoder.from_config(PAIR, draft, config, **given)
    generator = torch.Generator().manual_seed(seed)
    return decoder.generate(torch.tensor(PROMPT), max_new_tokens=24, generator=generator)


@torch.no_grad()
def test_labels_are_of_the_slots_of_block_after_block() -> None:
    draft, sampling = block_draft(PAIR), SamplingConfig()
    row: dict[str, Any] = {"example_id": "a", "sample": 0, "split": "dev", "finish": "length"}
    row |= {"prompt_ids": TEXT[:4], "completion_ids": TEXT[4:]}
    source = ModelSource(find_lm_head(PAIR), sampling)
    (labelled,) = Labeller(source, find_lm_head(draft), sampling, 0, 64)([row])  # type: ignore[list-item]
    p = PAIR(torch.tensor([TEXT])).logits[0].softmax(-1)
    for at, found in enumerate(labelled["overlap"], start=3):
        begun = at - at % 3 + 1
        q = draft.lm_head(state_in_block(draft, TEXT[:begun], TEXT[begun : at + 1])).softmax(-1)
        assert found == pytest.approx(float(overlap(p[at], q)))


def test_a_draft_of_one_layer_and_few_tokens_drafts_as_it_is_defined_in_a_graph() -> None:
    draft, state = block_draft(PAIR, size=4), torch.randn(16 + RANK).double()
    whole = draft.lm_head(state)
    reduce_vocabulary(draft, range(0, 24, 2))
    torch.testing.assert_close(draft.lm_head(state)[0:24:2], whole[0:24:2])
    decoded_as_defined(PAIR, draft, DRAFTED["dynamic tree"], PROMPT, engine="captured")


@pytest.mark.parametrize("length", [2, 3])
def test_of_a_block_no_more_slots_are_read_than_are_drafted(length: int) -> None:
    """As engines read it: with fewer masks, which all slots see."""
    prompts, config, q = [torch.tensor(PROMPT)], DecodeConfig(length=length), []
    for size in (4, length):
        places = drafted(PAIR, block_draft(PAIR, size=size), prompts, config)
        q.append(torch.cat([each.tree.distributions for each in places if len(each.tree)]))
    torch.testing.assert_close(*q)
    decoder = SpeculativeDecoder.from_config(PAIR, block_draft(PAIR), DecodeConfig(length=1))
    assert decoder._draft.traits.depths == 1


@pytest.mark.parametrize(
    "settings",
    [
        {"length": 4},
        {"verifier": "rrs", "drafter": "tree", "widths": (2, 1, 1, 1)},
        {"verifier": "naive", "drafter": "dynamic_tree", "nodes": 4, "depth": 4},
    ],
)
def test_a_path_longer_than_the_block_is_refused_before_anything_runs(
    settings: dict[str, Any],
) -> None:
    config = DecodeConfig(**settings)
    SpeculativeDecoder.from_config(PAIR, block_draft(PAIR, size=4), config)
    with pytest.raises(ConfigError, match=r"blocks of 3 tokens .* and 4 tokens are asked .* to 3"):
        SpeculativeDecoder.from_config(PAIR, block_draft(PAIR), config)


@pytest.mark.parametrize(
    "settings",
    [
        {"stop": "confidence", "threshold": 0.0},
        {"stop": "head", "threshold": 1.0},
        {"stop": "cost", "draft_seconds": 1e-9, "token_seconds": 1.0},
    ],
)
def test_a_rule_that_ends_drafts_ends_them_at_the_block(settings: dict[str, Any]) -> None:
    draft = block_draft(PAIR)
    head = ConfidenceHead(hidden_size=width_of_states(draft)).double()
    asked = head if settings["stop"] == "head" else None
    out = decoded(draft, DecodeConfig(**settings), head=asked)
    assert out.rounds[1].drafted == max(each.drafted for each in out.rounds) == 3


@torch.no_grad()
def test_a_head_is_asked_of_the_slots_states_which_hold_the_token_before() -> None:
    """Drafts are as long as the head says of the states by definition."""
    draft = block_draft(PAIR, size=4)
    torch.manual_seed(1)
    head = ConfidenceHead(hidden_size=16 + RANK).double()
    torch.nn.init.normal_(head.output.weight)
    head.output.weight[:, 16:] *= 10  # the token before decides
    config = DecodeConfig(stop="head", threshold=0.8, temperature=0.0)
    out, committed, lengths = decoded(draft, config, head=head), list(PROMPT), []
    for each in out.rounds:
        if each.drafted:
            path: list[int] = []
            chance = torch.ones(())
            room = len(PROMPT) + 24 - 1 - len(committed)
            while len(path) < min(4, room) and 1 - chance <= 0.8:
                state = state_in_block(draft, committed, path)
                path.append(int(draft.lm_head(state).argmax()))
                chance = chance * head(state).sigmoid()
            lengths.append(len(path))
            assert each.drafted == len(path)
        done = len(committed) - len(PROMPT)
        committed += out.tokens[done : done + each.emitted].tolist()
    assert len({*lengths}) > 2
    check_head(draft, ImmediateHead(hidden_size=16 + RANK, embedding_size=16))
    with pytest.raises(ConfigError, match=r"after masks \(depths 4\) there is none"):
        check_head(draft, AcceptanceHead(hidden_size=16 + RANK))


@pytest.mark.parametrize("kind", ["immediate", "confidence"])
def test_heads_learn_from_the_states_of_slots(tmp_path: Path, kind: Any) -> None:
    draft = block_draft(tiny_llama(0, vocab=VOCABULARY, layers=3).float())
    levels = 4 * torch.tensor(LEVELS)[torch.arange(VOCABULARY) % 4]
    draft.get_input_embeddings().markov.weight.data[:, 0] = levels  # type: ignore[union-attr, index]
    labels = synthetic_rows(40, seed=0).map(lambda row: {"accept_prob": row["overlap"]})
    rows = {"train": labels, "dev": labels}  # accepted by the token before
    config = HeadConfig(kind=kind, epochs=12, batch_size=8)
    done = train_head(draft=draft, out=tmp_path / "head", config=config, seed=0, **rows)
    assert done.after.kl < 0.7 * done.after.kl_constant
    check_head(draft, BaseHead.from_pretrained(tmp_path / "head"))


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    sizes = {"hidden_size": 16, "head_dim": 4, "num_hidden_layers": 4}
    return stored(tmp_path_factory.mktemp("target") / "model", **sizes)


@pytest.mark.parametrize(("layers", "vocabulary"), [(1, None), (2, 40)])
def test_a_new_draft_learns_and_a_stored_one_is_the_one_that_was_made(
    target: Path, tmp_path: Path, layers: int, vocabulary: int | None
) -> None:
    init: dict[str, Any] = {"layers": layers, "vocabulary": vocabulary, "block": 3}
    made = learnt(target, tmp_path, layout="dspark", **init)  # compares the logits itself
    assert (made["layers"], made["taps"]) == (layers, [1, 2])
    new, draft = (load_model(str(tmp_path / each)) for each in ("new", "draft"))
    assert draft.config.num_hidden_layers == layers
    # Engines take the target's rows, if the draft can propose every token.
    same = new.lm_head.weight.equal(draft.lm_head.weight)
    assert same == (vocabulary is None)
    for moved in ("lm_head.markov", "model.embed_tokens.markov.weight"):
        assert not new.get_parameter(moved).equal(draft.get_parameter(moved)), moved
    reads = states_input(draft)
    assert reads is not None
    assert reads.blocks is not None
    texts = [*ROWS["prompt_ids"], *ROWS["completion_ids"]]
    assert reads.blocks.mask not in {token for text in texts for token in text}


def test_states_that_leave_the_last_layer_are_refused(target: Path, tmp_path: Path) -> None:
    init: dict[str, Any] = {"kind": "states", "layout": "dspark", "layers": 1}
    with pytest.raises(ConfigError, match=r"taps must be from 1 to 3 .*got \[1, 4\]"):
        make(target, tmp_path / "draft", taps=[1, 4], **init)
    make(target, tmp_path / "draft", taps=[1, 3], **init)


@pytest.fixture(scope="module")
def stored_draft(target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("blocks") / "draft"
    make(target, folder, kind="states", layout="dspark", layers=1, block=3)
    return folder


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"blocks": None}, "of which it says nothing|are missing"),
        ({"blocks": {"size": 3, "mask": 2}}, "blocks of .*: rank: is missing"),
        (
            {"blocks": {"size": 1, "mask": 2, "rank": 64}},
            "blocks of .*: size: must be greater than .* 2",
        ),
        (
            {"blocks": {"size": 3, "mask": -1, "rank": 64}},
            "blocks of .*: mask: must be greater than",
        ),
        ({"blocks": {"size": 3, "mask": 999, "rank": 64}}, "blocks.mask .* must be below 298"),
        ({"blocks": {"size": 3, "mask": 2, "rank": 9}}, "cannot load the model"),
    ],
)
def test_a_draft_says_how_it_drafts_or_is_refused(
    stored_draft: Path, tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    path = shutil.copytree(stored_draft, tmp_path / "draft") / "config.json"
    config = json.loads(path.read_text())
    config["target_states"] |= change
    path.write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=message):
        load_model(str(tmp_path / "draft"))


def test_comparisons_leave_out_what_is_longer_than_a_block(
    target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make(target, tmp_path / "draft", kind="states", layout="dspark", layers=1, block=4)
    draft, model = load_model(str(tmp_path / "draft")), load_model(str(target))
    prompts = [torch.tensor([5, 6, 7])]
    times = measure_times(model, draft, prompts, SamplingConfig(), engine="eager", seed=0)
    assert times.keys() == {False, True}
    pair = ["--target", str(target), "--draft", str(tmp_path / "draft"), "--count", "1"]
    pair += ["--max-new-tokens", "4"]
    assert run_tool("certify", pair) == 0
    said = capsys.readouterr().out
    assert "without drafts longer than a block of 4" in said
    assert "length: 4" in said
    assert "length: 8" not in said
