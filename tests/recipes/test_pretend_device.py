"""On a GPU, or what refuses what CUDA refuses, everything gives what it gives on the CPU."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import yaml
from accelerate import dispatch_model
from safetensors.torch import load_file
from torch import Tensor

from distill.config import LossName
from eval.decode_config import DecodeConfig
from eval.decoder import SpeculativeDecoder
from eval.drafting.stopping import STOPPING_RULES
from heads import BaseHead
from recipes import make_rollouts, train_draft, train_head
from recipes.pipeline import RECIPE
from recipes.run_eval import Eval
from specdata.models import load_model
from tests.support.branching import SAMPLED
from tests.support.decoder import head
from tests.support.pretend_device import chosen, reads
from tests.support.random_pair import texts_of
from tests.support.stages import CONFIG, configuration, result
from tests.support.tiny import tiny_llama
from tests.support.trainings import (
    QUICK,
    assert_same_gradients,
    batch_gradients,
    changed,
    trainer_of,
)

HERE, PRETEND, ANOTHER = "cpu", "pretend:0", "pretend:1"
SPREAD = "one model over two devices"
THERE, OTHER = ("cuda:0", HERE) if torch.cuda.is_available() else (PRETEND, ANOTHER)
unpinned = pytest.mark.filterwarnings("ignore:'pin_memory' argument is set as true:UserWarning")


@pytest.mark.parametrize(
    "mistake",
    [
        lambda x: x + torch.ones(4),
        lambda x: x + x.to(ANOTHER),
        lambda x: torch.ones(4)[x.long()],
        lambda x: x[x.long().to(ANOTHER)],
        lambda x: torch.stack([x[0], torch.tensor(1.0)]),
        lambda x: torch.rand(4, generator=torch.Generator(), device=PRETEND),
        lambda x: torch.nn.functional.dropout(x),
        lambda x: x.numpy(),
        lambda x: torch.nn.Linear(4, 1).to(ANOTHER)(x),
    ],
)
@pytest.mark.parametrize("inference", [True, False])
def test_what_cuda_refuses_is_refused(mistake: Callable[[Tensor], object], inference: bool) -> None:
    x = torch.ones(4).to(PRETEND)
    with (
        torch.inference_mode(inference),
        pytest.raises((RuntimeError, TypeError), match=r"device|gener"),
    ):
        mistake(x)


def test_what_cuda_takes_is_taken_and_its_reads_are_counted() -> None:
    x = torch.arange(4.0).to(PRETEND)
    with reads() as waits:
        y = (x + torch.tensor(2.0))[torch.tensor([1, 2])] + x[[1, 3]].unsqueeze_(0)
        assert not waits
        assert y.tolist() == [[4.0, 7.0]]
        assert float(x[1]) == x[x > 0].to(ANOTHER).cpu()[0]
    assert len(waits) == 4


def spread(model: Any) -> Any:
    """A model of two layers as `device_map: auto` spreads it over two devices."""
    first = dict.fromkeys(("model.embed_tokens", "model.rotary_emb", "model.layers.0"), PRETEND)
    second = dict.fromkeys(("model.layers.1", "model.norm", "lm_head"), ANOTHER)
    return dispatch_model(model, first | second, main_device=PRETEND)


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", [*SAMPLED, *STOPPING_RULES])
def test_texts_of_a_method_are_those_of_the_cpu_also_on_two_devices(name: str) -> None:
    times = {"draft_seconds": 0.1, "token_seconds": 0.3} if name == "cost" else {}
    method = SAMPLED.get(name) or DecodeConfig(stop=name, **times)

    def decoded(config: DecodeConfig, target: str, draft: str) -> list[Any]:
        model, its_draft = tiny_llama(2, vocab=40, layers=2), tiny_llama(3, vocab=40).to(draft)
        model = spread(model) if target == SPREAD else model.to(target)
        drafts = None if name == "plain" else its_draft
        decoder = SpeculativeDecoder.from_config(model, drafts, config, head())
        prompts = [torch.tensor([2, 5]), torch.tensor([7, 4, 9])]
        seeds = [torch.Generator().manual_seed(seed) for seed in range(3)]
        outs = [decoder.generate(prompts[0], max_new_tokens=5, generator=seeds[2])]
        outs += decoder.generate_batch(prompts, max_new_tokens=5, generators=seeds[:2], size=2)
        return [(out.tokens.tolist(), [each.drafted for each in out.rounds]) for out in outs]

    for changes, *places in (
        ({"temperature": 1.0}, OTHER, THERE),
        ({"temperature": 0.0}, THERE, THERE),
        ({"top_p": 0.8}, HERE, THERE),
        ({"temperature": 1.0}, SPREAD, PRETEND),
    ):
        config = method.model_copy(update=changes)
        assert decoded(config, *places) == decoded(config, HERE, HERE)


@unpinned
@pytest.mark.exhaustive
@pytest.mark.parametrize("objective", get_args(LossName))
def test_every_objective_has_the_gradients_of_the_cpu(
    objective: str, pair: Path, tmp_path: Path
) -> None:
    found = []
    for place in (HERE, THERE):
        with chosen(place):
            config = changed(QUICK, objective=objective, batch_size=4)
            models = pair / "target", pair / "draft"
            trainer = trainer_of(*models, texts_of(pair, 4, seed=1), tmp_path / place[:3], config)
            _, gradients = batch_gradients(trainer, count=100)
            assert all(each.device.type == place.split(":")[0] for each in gradients)
            found.append({str(n): each.cpu() for n, each in enumerate(gradients)})
    assert_same_gradients(found[1], found[0], terms=100)


def assert_alike(ours: Path, theirs: Path) -> None:
    """Up to the order of sums, which may turn a draw in fifty."""
    for file in (*theirs.rglob("*.parquet"), *theirs.rglob("model.safetensors")):
        mine = ours / file.relative_to(theirs)
        if file.suffix == ".safetensors":
            actual = load_file(mine)
            for name, weight in load_file(file).items():
                difference = (actual[name].double() - weight.double()).norm()
                assert difference <= 1e-3 * weight.double().norm(), (mine, name)
            continue
        tables = [pq.read_table(each) for each in (file, mine)]
        for name in tables[0].column_names:
            one, other = (table[name].combine_chunks() for table in tables)
            if pa.types.is_list(one.type):
                one, other = one.flatten(), other.flatten()
                close = np.isclose(one, other, rtol=0, atol=2e-3, equal_nan=True)
                assert close.mean() > 0.98, (mine, name)
            else:
                assert one.equals(other), (mine, name)


@unpinned
@pytest.mark.exhaustive
def test_every_stage_makes_what_it_makes_on_the_cpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts = []
    for place, folder in ((HERE, tmp_path / "here"), (THERE, tmp_path / "there")):
        folder.mkdir()
        monkeypatch.chdir(folder)
        Path("pair.yaml").write_text(yaml.safe_dump(CONFIG))
        with chosen(place):
            assert RECIPE.run(["--config", "pair.yaml"]) == 0
        counts.append(result(Eval(configuration())))
    assert counts[0] == counts[1]
    assert_alike(tmp_path / "there", tmp_path / "here")


@unpinned
@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("init", "changes", "head_kind"),
    [
        ({"kind": "target", "layers": 1}, {"depths": 3, "optimizer": "muon"}, "immediate"),
        ({"kind": "target", "layers": 1}, {"lora": {"rank": 4}, "on_policy": 0.4}, "specdec++"),
        ({"taps": [1]}, {}, "immediate"),
        ({"layout": "eagle3", "taps": [0, 1, 2]}, {}, "immediate"),
        ({"layout": "dspark", "block": 3, "taps": [1]}, {}, "confidence"),
    ],
    ids=["depths, muon", "adapters, on policy", "states", "eagle3", "dspark"],
)
def test_a_draft_of_every_layout_with_its_head_is_that_of_the_cpu(
    init: Any,
    changes: Any,
    head_kind: str,
    pair: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Decoding last, with the target on another device."""
    eager = {"attn_implementation": "eager"}
    once: dict[str, Any] = {"epochs": 1, "batch_size": 4}
    sets = [{"name": "instruct", "split": split, "count": 12} for split in ("train", "dev")]
    config = {
        "output": "out",
        "models": {"target": str(pair / "target"), "load": {"target": eager, "draft": eager}},
        "rollouts": {"max_new_tokens": 8, "sets": sets},
        "draft": {"init": {"kind": "states", "layers": 1} | init} | once | changes,
        "head": {"kind": head_kind, **once},
        "eval": CONFIG["eval"],
    }
    texts = []
    for place, of_target in ((HERE, HERE), (THERE, OTHER)):
        folder = tmp_path / place.split(":")[0]
        folder.mkdir()
        monkeypatch.chdir(folder)
        Path("pair.yaml").write_text(yaml.safe_dump(config))
        with chosen(place):
            for recipe in (make_rollouts, train_draft, train_head):
                assert recipe.RECIPE.run(["--config", "pair.yaml"]) == 0
            target = load_model(str(pair / "target")).to(of_target)
            draft, scorer = (
                load_model("out/draft/model"),
                BaseHead.from_pretrained("out/head/model"),
            )
            stop = DecodeConfig(stop="head", threshold=0.7)
            decoder = SpeculativeDecoder.from_config(target, draft, stop, scorer)
            generator = torch.Generator().manual_seed(0)
            out = decoder.generate(torch.tensor([5, 9]), max_new_tokens=9, generator=generator)
            texts.append((out.tokens.tolist(), [each.drafted for each in out.rounds]))
    assert texts[0] == texts[1]
    assert_alike(tmp_path / THERE.split(":")[0], tmp_path / HERE)
