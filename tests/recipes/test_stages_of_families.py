"""Every stage works with every kind of cache: rollouts, states, labels, drafts and heads."""

from pathlib import Path
from typing import Any, get_args

import datasets
import pytest
import torch

from distill.config import DistilConfig, InitConfig
from distill.distillation import distil
from distill.initial import make_initial
from distill.training import save_model
from heads.config import HeadConfig, Kind
from heads.train import train_head
from specdata.config import LabelsConfig, PromptSet, RolloutConfig
from specdata.drafts.taps import read_taps
from specdata.labels.make import load_labels, make_labels
from specdata.lm_head import find_lm_head
from specdata.models import load_model
from specdata.probability import SamplingConfig, inverse_cdf, probabilities
from specdata.prompts.prompt import Prompt
from specdata.rollouts.backend import TransformersBackend, sample_batch
from specdata.rollouts.make import make_rollouts
from specdata.saving import copy_tokenizer
from specdata.storage.dataset import load_stored
from specdata.storage.resume import Settings
from tests.support.families import build

WARP = SamplingConfig(0.8, 0, 0.9)
ENDS = [5, 9, 17, 23, 31, 47, 61, 73]
# Absolute positions; windows, soft-capped or scaled; chunks; an indexer; sinks; recurrent layers
# beside attention, in the same layer, and alone, where no padding may be read before a text.
QUICK = ("gpt2", "gemma2", "llama4_text", "deepseek_v32", "gpt_oss", "falcon_h1", "mamba")
FAMILIES = [
    *QUICK,
    *(
        pytest.param(name, marks=pytest.mark.slow)
        for name in ("gemma3_text", "cohere2", "granitemoehybrid", "qwen3_next", "mamba2", "lfm2")
    ),
]
# Of many lengths, some longer than a window; the last begin alike, as chat templates make them.
PROMPTS = [[2 + (7 * n + i) % 90 for i in range(1 + 3 * n % 17)] for n in range(9)]
PROMPTS += [[*range(50, 62), *range(3, 4 + n)] for n in range(3)]
EXHAUSTIVE = pytest.mark.exhaustive


@pytest.mark.parametrize("name", FAMILIES)
def test_rows_are_sampled_from_the_models_own_forward_and_so_are_kept_states_and_taps(
    name: str,
) -> None:
    model, plain = build(name), SamplingConfig()
    model.generation_config.eos_token_id = ENDS
    head = find_lm_head(model)
    assert head.embedding is not None
    uniforms = torch.rand(12, 24, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    states: list[list[torch.Tensor]] = [[] for _ in PROMPTS]
    taps: list[list[torch.Tensor]] = [[] for _ in PROMPTS]
    drawn = sample_batch(model, PROMPTS, uniforms, plain, states=states, taps=([1, 2], taps))
    assert len({*map(len, drawn)}) > 3, "rows leave at different times"
    close: dict[str, Any] = {"rtol": 1e-3, "atol": 1e-3}
    for row, (prompt, text) in enumerate(zip(PROMPTS, drawn, strict=True)):
        ids = torch.tensor([[*prompt, *text]])[:, :-1]
        with torch.inference_mode():
            logits = model(input_ids=ids, use_cache=False).logits[0, len(prompt) - 1 :]
            remade = head.logits(torch.stack(states[row]))
            own = head.logits(head.states(ids))[0, len(prompt) - 1 :]
        expected = [
            inverse_cdf(probabilities(each, plain), point)
            for each, point in zip(logits, uniforms[row], strict=False)
        ]
        assert text == expected, (row, len(prompt))
        torch.testing.assert_close(own, logits, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(remade, logits, **close)
        torch.testing.assert_close(torch.cat(taps[row]), read_taps(model, [1, 2], ids)[0], **close)


@pytest.mark.smoke
@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        "falcon_h1",
        *(
            pytest.param(x, marks=EXHAUSTIVE)  # under the newest versions, too (make smoke-newest)
            for x in ("gemma2", "llama4_text", "gpt_oss", "mamba2")
        ),
    ],
)
def test_rollouts_become_labels_drafts_and_heads_in_families_of_every_cache(
    name: str, tmp_path: Path, tiny_pair: Path
) -> None:
    for seed, role in enumerate(("target", "draft")):
        model = build(name, seed)
        model.generation_config.eos_token_id = ENDS
        save_model(model, tmp_path / role)
        copy_tokenizer(str(tiny_pair / "target"), tmp_path / role)
    target, draft = (load_model(str(tmp_path / role)) for role in ("target", "draft"))

    def rollouts(**stored: bool) -> datasets.Dataset:
        folder = tmp_path / f"rollouts{len(stored)}"
        config = RolloutConfig(sets=[PromptSet("instruct")], max_new_tokens=12, **stored)
        backend = TransformersBackend(target, WARP, 12, batch_size=8, seed=3, **stored)
        splits = ["train"] * 8 + ["dev"] * 4
        prompts = [
            Prompt(f"{n}", "d", split, ids, ())
            for n, (split, ids) in enumerate(zip(splits, PROMPTS, strict=True))
        ]
        make_rollouts(backend, prompts, folder, config, settings=Settings({}))
        labels: dict[str, Any] = {"sampling": WARP, "seed": 0, "settings": Settings({})}
        labels["report"] = lambda rows: None
        rows, out = load_stored(folder), tmp_path / f"labels{len(stored)}"
        make_labels(target, draft, rows, out, LabelsConfig(draws=2), **labels)
        return load_labels(out, WARP)

    read, kept = rollouts(), rollouts(store_states=True)
    for of_forward, of_states in zip(read, kept, strict=True):
        assert of_states["draft_ids"] == of_forward["draft_ids"]
        assert of_states["overlap"] == pytest.approx(of_forward["overlap"], abs=1e-4)
    train, dev = (read.filter(lambda row, at=at: row["split"] == at) for at in ("train", "dev"))
    changes: dict[str, dict[str, Any]] = {"all": {}, "muon": {"optimizer": "muon"}}
    changes["lora"] = {"lora": {"rank": 2}, "on_policy": 0.5}
    common: dict[str, Any] = {"epochs": 1, "batch_size": 8, "report_to": []}
    models: dict[str, Any] = {"target": tmp_path / "target", "seed": 0}
    for key, change in changes.items():
        out, config = tmp_path / f"distilled-{key}", DistilConfig(**common, **change)
        data = {"train": train, "dev": dev, "sampling": WARP, "config": config, "out": out}
        assert distil(draft=tmp_path / "draft", **models, **data).steps == 1
        load_model(str(out))
    if name != "gemma2":  # whose cap would give the tokens left out a probability
        small = InitConfig(vocabulary=40)
        made = {"rollouts": train, "out": tmp_path / "reduced", "config": small}
        assert make_initial(draft=tmp_path / "draft", **models, **made)["vocabulary"] == 40
    for kind in get_args(Kind):
        settings = HeadConfig(kind=kind, epochs=1, batch_size=8, micro_batch_size=8)
        data = {"train": train, "dev": dev, "sampling": WARP, "config": settings}
        assert train_head(draft=draft, out=tmp_path / kind, seed=0, **data).steps == 1
