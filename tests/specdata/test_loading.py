"""However a model is loaded, it is the same model; what cannot work is refused before it loads."""

from __future__ import annotations

import json
from collections.abc import Mapping
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from distill.teacher import Part, TargetTeacher
from eval.decode_config import DecodeConfig
from eval.decoder import SpeculativeDecoder
from recipes import make_rollouts, train_head
from recipes.config import PipelineConfig, build, parse
from recipes.make_rollouts import Rollouts
from recipes.run import Stage
from recipes.run_eval import Eval
from recipes.train_draft import Draft
from recipes.train_head import Head, Labels
from specdata.draft_models.taps import attach
from specdata.errors import ConfigError, OtherSettingsError
from specdata.labels.make import load_labels
from specdata.lm_head import find_lm_head
from specdata.loading import Loading
from specdata.models import load_model
from specdata.prepack import prepacked
from specdata.probability import SamplingConfig
from specdata.processes import is_main, leave_processes
from specdata.storage.dataset import load_stored
from specdata.storage.files import write_json
from specdata.storage.resume import Settings
from tests.support.states_draft import states_draft
from tests.support.tiny import tiny_llama
from tests.support.two_processes import ON_CPU, finish, start_two
from tests.support.word_pair import with_train_and_dev

ON_DISK = {"device_map": "auto"}
IDS = [2, 9, 5, 17, 30, 4]
CHAIN = DecodeConfig(verifier="block", stop="fixed", length=3)
TREE = DecodeConfig(verifier="traversal", drafter="tree", widths=(2, 2))


def seen(target: Any, draft: Any) -> dict[str, Any]:
    """The target's logits, and what it decodes with a draft: by a chain, a tree, and in a batch."""
    with torch.inference_mode():
        found = {"logits": target(input_ids=torch.tensor([IDS])).logits[0].tolist()}
    for name, config in (("chain", CHAIN), ("tree", TREE)):
        decoder = SpeculativeDecoder.from_config(target, draft, config)
        seed = torch.Generator().manual_seed(0)
        out = decoder.generate(torch.tensor(IDS), max_new_tokens=24, generator=seed)
        found[name] = out.tokens.tolist()
    decoder = SpeculativeDecoder.from_config(target, draft, CHAIN)
    prompts = [torch.tensor(IDS[: 2 + index]) for index in range(3)]
    seeds = [torch.Generator().manual_seed(index) for index in range(3)]
    outs = decoder.generate_batch(prompts, max_new_tokens=16, generators=seeds, size=3)
    return found | {"batch": [out.tokens.tolist() for out in outs]}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target of six layers, about 1 MB in float32, and a draft."""
    folder = tmp_path_factory.mktemp("models")
    target = tiny_llama(0, vocab=40, width=64, layers=6).float()
    target.save_pretrained(folder / "target")
    tiny_llama(1, vocab=40, width=16).float().save_pretrained(folder / "draft")
    return folder


def spread(name: Path, folder: Path, memory: str) -> Any:
    """A model of which only a part fits into the memory that it may use."""
    load = Loading(device_map="auto", max_memory={"cpu": memory}, offload_folder=str(folder))
    model = load_model(str(name), load=load)
    places = {weight.device.type for weight in model.parameters()}
    assert places == {"cpu", "meta"}, "this test means something if a part lies on the disk"
    return model


def test_a_model_partly_on_disk_gives_logits_texts_states_and_rows_of_the_whole_one(
    models: Path, tmp_path: Path
) -> None:
    draft = load_model(str(models / "draft"))
    whole = load_model(str(models / "target"))
    parted = spread(models / "target", tmp_path, "600KB")
    assert seen(parted, draft) == seen(whole, draft)
    reader = states_draft(whole)
    expected = seen(whole, reader)
    attach(reader, parted)
    assert seen(parted, reader) == expected
    with prepacked(parted), torch.inference_mode():
        logits = parted(input_ids=torch.tensor([IDS])).logits
        torch.testing.assert_close(logits, whole(input_ids=torch.tensor([IDS])).logits)
    # Its output matrix is on disk.
    assert parted.lm_head.weight.is_meta
    ids = torch.tensor([IDS])
    heads = [find_lm_head(model) for model in (parted, whole)]
    assert [head.embedding is not None for head in heads] == [True, True]
    states = [head.states(ids) for head in heads]
    assert torch.equal(*states)
    with torch.inference_mode():
        assert torch.equal(*(head.logits(states[0]) for head in heads))
    part = Part(torch.tensor([3, 7, 11]), 1.0)
    teachers = [TargetTeacher(model, part=part) for model in (parted, whole)]
    at = {"states": states[0][0], "rest": torch.zeros(len(IDS))}
    p_logits = [teacher.compared(torch.zeros(len(IDS), 3), at)[1] for teacher in teachers]
    assert torch.equal(*p_logits)


def test_a_model_of_which_nothing_is_in_memory_is_refused(models: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no layer of .* lies in memory: .*allow more in max"):
        spread(models / "target", tmp_path, "1KB")


def test_each_model_has_its_own_precision_and_attention(models: Path) -> None:
    tree = {"target": {"dtype": "bfloat16", "attn_implementation": "eager"}}
    config = built(models, load=tree).models
    target = load_model(config.target, load=config.loading("target"))
    assert (target.dtype, target.config._attn_implementation) == (torch.bfloat16, "eager")
    draft = load_model(str(config.draft), load=config.loading("draft"))
    assert (draft.dtype, draft.config._attn_implementation) == (torch.float32, "sdpa")


# --- what counts as the same run


def built(models: Path, **section: Any) -> PipelineConfig:
    """A run's configuration with a section `models`."""
    sets = [{"name": "maths", "split": split, "count": 2} for split in ("train", "dev")]
    return build(
        {
            "output": str(models / "out"),
            "models": {name: str(models / name) for name in ("target", "draft")} | section,
            "rollouts": {"sets": sets, "max_new_tokens": 8},
            "head": {},
            "eval": {
                "sets": [{"name": "maths", "split": "test", "count": 1}],
                "max_new_tokens": 8,
                "methods": [{"name": "plain", "decoder": "plain"}, {"name": "K=2", "length": 2}],
            },
        }
    )


def test_where_a_model_lies_is_no_other_run_and_its_precision_is(models: Path) -> None:
    before, elsewhere, rounded = (
        built(models, load={"target": target} if target else {})
        for target in ({}, {"device_map": "auto"}, {"dtype": "float16"})
    )
    for stage in (Rollouts, Labels, Eval):
        stored = dict(stage(before).stored_settings())
        assert "load" not in stored, "a run that was made before there was such a section"
        Settings(stage(elsewhere).stored_settings()).check(stored, "it")
        with pytest.raises(OtherSettingsError, match=r"load: absent -> .*'dtype': 'float16'"):
            Settings(stage(rounded).stored_settings()).check(stored, "it")
    # A head learns from the draft alone.
    assert Head(rounded).stored_settings() == Head(before).stored_settings()
    other = built(models, load={"draft": {"dtype": "bfloat16"}})
    assert Rollouts(other).stored_settings() == Rollouts(before).stored_settings()
    assert Head(other).stored_settings()["load"] == {"draft": {"dtype": "bfloat16"}}
    same = built(models, load={"draft": {"dtype": "float32"}})
    assert Eval(same).stored_settings() == Eval(before).stored_settings()


# --- refusals


@pytest.mark.parametrize(
    ("load", "message"),
    [
        ({"max_memory": {"cpu": "1GiB"}}, "say where device_map may put layers"),
        ({"device_map": "cpu", "offload_folder": "there"}, "say where device_map may put layers"),
        ({"device_map": "auto", "max_memory": {"cpu": "1Gb"}}, "must be a size such as 20GiB"),
        ({"device_map": "auto", "max_memory": {"cpu": 10}}, r"such as 20GiB or .*got '10'"),
        ({"device_map": "auto", "max_memory": {"gpu": "1GiB"}}, "numbers of GPUs or cpu"),
        ({"device_map": "auto", "tp_plan": "auto"}, "leave one of them out"),
    ],
)
def test_settings_that_contradict_each_other_are_refused_by_name(
    models: Path, load: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=rf"models\.load\.target.*{message}"):
        built(models, load={"target": load})


@pytest.mark.parametrize(
    ("stage", "load", "changes", "message"),
    [
        (Draft, {"tp_plan": "auto"}, {"draft": {}}, r"or distil on top logits \(draft\.logits\)"),
        (Eval, {"tp_plan": "auto"}, {}, "by the clock of one process"),
        (Eval, ON_DISK, {"eval": {"engine": "captured"}}, "set eval.engine to eager"),
    ],
)
def test_what_a_stage_cannot_do_with_a_loading_is_refused_with_the_remedy(
    models: Path,
    stage: type[Stage],
    load: dict[str, Any],
    changes: Mapping[str, Mapping[str, Any]],
    message: str,
) -> None:
    tree = built(models).model_dump(mode="json", exclude_unset=True)
    tree["models"]["load"] = {"target": load}
    for section, values in changes.items():
        tree[section] = {**(tree.get(section) or {}), **values}
    config = build(tree)
    with pytest.raises(ConfigError, match=message):
        stage(config).check()


def test_a_model_is_split_over_several_processes_alone(models: Path) -> None:
    with pytest.raises(ConfigError, match="this is one process: start several"):
        load_model(str(models / "target"), load=Loading(tp_plan="auto"))


@pytest.mark.parametrize(
    ("load", "message"),
    [
        (ON_DISK, "2 processes on this one would each do so: start one process a machine"),
        ({"tp_plan": "auto"}, "num_attention_heads 3, which 2 processes cannot share"),
    ],
)
def test_what_several_processes_cannot_do_is_refused(
    models: Path,
    load: dict[str, Any],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    (tmp_path / "target").mkdir()
    odd = {"num_attention_heads": 3, "max_position_embeddings": 256}
    (tmp_path / "target" / "config.json").write_text(json.dumps(odd))
    with pytest.raises(ConfigError, match=message):
        Rollouts(built(tmp_path, load={"target": load})).check()
    if "device_map" in load:  # one process on each of two machines
        monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
        Rollouts(built(tmp_path, load={"target": load})).check()


# --- tensor parallelism


def run_in_halves(arguments: list[str], out: Path) -> None:
    """Make a run of a target whose layers two processes share; what the main one sees of it."""
    config = parse(arguments).config
    for recipe in (make_rollouts, train_head):
        recipe.RECIPE.main(config)
    target = load_model(config.models.target, load=config.models.loading("target"))
    found = seen(target, load_model(str(config.models.draft)))
    divided: list[Any] = [each for each in target.parameters() if hasattr(each, "to_local")]
    share = sum(each.to_local().numel() for each in divided) / sum(e.numel() for e in divided)
    if is_main():
        write_json(out, found | {"share": share})
    leave_processes()


@pytest.mark.exhaustive
def test_two_processes_with_half_a_target_each_give_its_logits_and_texts_and_the_run_of_one(
    word_pair: Path, server: ForkServerContext, tmp_path: Path
) -> None:
    tree = with_train_and_dev(word_pair, tmp_path)
    tree |= {"labels": {"shard_size": 4}, "head": {"depth": 1, "epochs": 1}}
    tree["rollouts"]["store_taps"] = [1, 2]
    (tmp_path / "pair.yaml").write_text(yaml.safe_dump(tree))
    asked = [f"--config={tmp_path / 'pair.yaml'}"]
    for recipe in (make_rollouts, train_head):
        assert recipe.RECIPE.run([*asked, f"--output={tmp_path / 'one'}"]) == 0
    asked += [f"--output={tmp_path / 'two'}", "--models.load.target.tp_plan=auto"]
    finish(start_two(server, run_in_halves, asked, tmp_path / "seen.json", **ON_CPU))
    found = json.loads((tmp_path / "seen.json").read_text())
    whole = seen(load_model(str(word_pair / "target")), load_model(str(word_pair / "draft")))
    assert found.pop("share") == 0.5
    torch.testing.assert_close(
        torch.tensor(found.pop("logits")), torch.tensor(whole.pop("logits")), rtol=1e-5, atol=1e-4
    )
    assert found == whole
    one, two = (load_stored(tmp_path / run / "rollouts") for run in ("one", "two"))
    for stored in zip(one["target_taps"], two["target_taps"], strict=True):
        taps = [torch.frombuffer(bytearray(each), dtype=torch.float16) for each in stored]
        states = [each.view(-1, 2, 32 + 2)[..., :32] for each in taps]  # without scales
        torch.testing.assert_close(*states, rtol=0.0, atol=5e-3)  # of unit size
    one, two = (each.remove_columns("target_taps") for each in (one, two))
    assert one.to_list() == two.to_list()
    one, two = (load_labels(tmp_path / run / "labels", SamplingConfig()) for run in ("one", "two"))
    assert one["draft_ids"] == two["draft_ids"]
    for mine, theirs in zip(one["accept_prob"], two["accept_prob"], strict=True):
        assert mine == pytest.approx(theirs, abs=1e-4)
