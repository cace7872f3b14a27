"""However a model is loaded, it is the same model; what cannot work is refused before it loads."""

from pathlib import Path
from typing import Any

import pytest
import torch

from distill.teacher import Part, TargetTeacher
from eval.decode_config import DecodeConfig
from eval.decoder import SpeculativeDecoder
from recipes.config import PipelineConfig, build
from recipes.make_rollouts import Rollouts
from recipes.run_eval import Eval
from recipes.train_head import Head, Labels
from specdata.drafts.taps import attach
from specdata.errors import ConfigError, OtherSettingsError
from specdata.lm_head import find_lm_head
from specdata.loading import Loading
from specdata.models import load_model
from specdata.prepack import prepacked
from specdata.sources import weight_files
from specdata.storage.resume import Settings
from tests.support.states_draft import states_draft
from tests.support.tiny import tiny_llama

IDS = [2, 9, 5, 17, 30, 4]
CHAIN = DecodeConfig(verifier="block", stop="fixed", length=3)
TREE = DecodeConfig(verifier="traversal", drafter="tree", widths=(2, 2))


@pytest.mark.parametrize("whole", ["model.safetensors", "pytorch_model.bin"])
def test_weights_in_one_file_and_by_an_index_that_does_not_name_it_are_refused(
    whole: str, tmp_path: Path
) -> None:
    (tmp_path / whole).touch()
    (tmp_path / "part").touch()
    (tmp_path / f"{whole}.index.json").write_text('{"weight_map": {"a": "part"}}')
    with pytest.raises(ConfigError, match=f"holds {whole}, which transformers reads"):
        weight_files(tmp_path, for_transformers=True)


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
    p_logits = [teacher.once(at)["p_logits"] for teacher in teachers]
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


def built(models: Path, engine: str = "eager", **section: Any) -> PipelineConfig:
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
                "engine": engine,
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
    ],
)
def test_settings_that_contradict_each_other_are_refused_by_name(
    models: Path, load: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=rf"models\.load\.target.*{message}"):
        built(models, load={"target": load})


def test_graphs_of_a_model_in_several_places_are_refused(models: Path) -> None:
    config = built(models, load={"target": {"device_map": "auto"}}, engine="captured")
    with pytest.raises(ConfigError, match=r"set eval\.engine to eager"):
        Eval(config).check()


def test_every_process_of_a_machine_spreading_its_own_target_is_refused(
    models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    stage = Rollouts(built(models, load={"target": {"device_map": "auto"}}))
    with pytest.raises(ConfigError, match="2 processes on this one would each do so"):
        stage.check()
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")  # one process on each of two machines
    stage.check()
