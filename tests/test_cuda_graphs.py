"""CUDA graphs over a static cache give what the eager model gives.

The graphs are recorded by a stand-in (`tests/graph_recorder.py`); the rest is the code of a GPU.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import GPTNeoConfig, GPTNeoForCausalLM, PreTrainedModel

from eval.decoder import DecodeConfig, SpeculativeDecoder
from eval.runtime import cuda_graphs
from eval.runtime.engines import Engine
from eval.runtime.model import CachedModel
from specdata.errors import ConfigError
from specdata.probability import SamplingConfig
from tests.families import FAMILIES
from tests.graph_recorder import OperationRecorder
from tests.test_decoder import head
from tests.test_engines import CASES, medium_llama, tokens
from tests.tiny import tiny_llama

ENGINES: tuple[Engine, ...] = ("eager", "captured")


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> OperationRecorder:
    """Forwards are recorded on the CPU, as they are on a GPU."""
    made = OperationRecorder()
    monkeypatch.setattr(cuda_graphs, "recorder_for", lambda device: made)
    monkeypatch.setattr(cuda_graphs, "SMALLEST_BUCKET", 16)
    monkeypatch.setattr(cuda_graphs, "SMALLEST_CAPACITY", 32)
    return made


def pair() -> tuple[PreTrainedModel, PreTrainedModel]:
    return tiny_llama(2, vocab=40, layers=2), tiny_llama(1, vocab=40)


def decoders(config: DecodeConfig, *models: PreTrainedModel) -> list[SpeculativeDecoder]:
    """An eager one and one with graphs, of a target and perhaps a draft."""
    target, draft = (*models, None)[:2]
    return [
        SpeculativeDecoder.from_config(target, draft, config, head().double(), engine=engine)
        for engine in ENGINES
    ]


def generated(decoder: SpeculativeDecoder, prompt: list[int], budget: int, seed: int) -> list[int]:
    out = decoder.generate(
        torch.tensor(prompt),
        max_new_tokens=budget,
        generator=torch.Generator().manual_seed(seed),
    )
    return [int(token) for token in out.tokens]


@pytest.mark.parametrize("name", CASES)
def test_recorded_graphs_give_the_eager_tokens(name: str, recorder: OperationRecorder) -> None:
    """Several prompts one after the other, to ends of texts, past sizes that graphs read."""
    models = pair()[: 1 if name == "plain" else 2]
    eager, graphs = decoders(CASES[name], *models)
    for seed in range(3):
        assert tokens(graphs, seed, 30) == tokens(eager, seed, 30)
    assert recorder.replayed > recorder.recorded


def test_a_sequence_that_outgrows_its_cache_goes_on_in_a_larger_one(
    recorder: OperationRecorder,
) -> None:
    """And a long prompt, and a short one after it, which the larger cache serves."""
    target, draft = (model_without_end(model) for model in pair())
    eager, graphs = decoders(DecodeConfig(length=3), target, draft)
    for seed, length in enumerate((2, 50, 3)):
        prompt = [2 + place % 37 for place in range(length)]
        assert generated(graphs, prompt, 36, seed) == generated(eager, prompt, 36, seed)
    (pool,) = {cuda_graphs.shared_pool(target, recorder)}
    assert [graphs.capacity for graphs in pool._free] == [128]


def test_batches_fall_back_to_the_eager_forwards_and_give_the_same(
    recorder: OperationRecorder,
) -> None:
    """Alone first, then beside each other, then the last one alone again."""
    eager, graphs = decoders(DecodeConfig(length=3), *pair())
    prompts = [torch.tensor([2, 3 + seed]) for seed in range(3)]

    def texts(decoder: SpeculativeDecoder) -> list[list[int]]:
        out = decoder.generate_batch(
            prompts,
            max_new_tokens=24,
            generators=[torch.Generator().manual_seed(seed) for seed in range(3)],
            size=2,
        )
        return [[int(token) for token in each.tokens] for each in out]

    assert tokens(graphs, 7, 12) == tokens(eager, 7, 12)
    before = recorder.replayed
    assert texts(graphs) == texts(eager)
    assert recorder.replayed - before < 4
    assert tokens(graphs, 7, 12) == tokens(eager, 7, 12)


def test_bfloat16_graphs_give_the_eager_greedy_text(recorder: OperationRecorder) -> None:
    """Wide gaps between logits, so that rounding decides nothing."""
    target, draft = (medium_llama(seed).to(torch.bfloat16) for seed in (0, 1))
    eager, graphs = decoders(DecodeConfig(temperature=0.0, length=3), target, draft)
    assert tokens(graphs, 0, 20) == tokens(eager, 0, 20)
    assert recorder.replayed


@pytest.mark.parametrize("family", ["opt", "gpt_neox", "llama, grouped queries", "gemma"])
def test_other_families_are_recorded_too(family: str, recorder: OperationRecorder) -> None:
    make, config, sizes = FAMILIES[family]
    torch.manual_seed(0)
    model = make(config(vocab_size=40, **sizes)).double().eval()
    eager, graphs = decoders(DecodeConfig(length=3), model, model)
    assert tokens(graphs, 0) == tokens(eager, 0)


def test_after_the_warm_up_no_graph_is_made(recorder: OperationRecorder) -> None:
    for config in (CASES["chain"], CASES["dynamic tree"]):
        _, graphs = decoders(config, *(model_without_end(model) for model in pair()))
        graphs.warm_up(30)
        made = recorder.recorded
        for seed in range(3):
            tokens(graphs, seed, 28)
        assert recorder.recorded == made


def test_decoders_of_one_model_share_its_graphs_but_never_a_cache_at_work(
    recorder: OperationRecorder,
) -> None:
    """The target may be its own draft: both then have sequences at the same time."""
    target, _ = pair()
    eager, graphs = decoders(DecodeConfig(length=2), target, target)
    assert tokens(graphs, 0) == tokens(eager, 0)
    pool = cuda_graphs.shared_pool(target, recorder)
    assert len(pool._free) == 2
    made = recorder.recorded
    _, again = decoders(DecodeConfig(length=2), target, target)
    assert tokens(again, 0) == tokens(eager, 0)
    assert recorder.recorded == made


def test_graphs_are_made_again_when_the_weights_change(recorder: OperationRecorder) -> None:
    target, draft = medium_llama(0), medium_llama(1)
    config = DecodeConfig(temperature=0.0)
    eager, graphs = decoders(config, target, draft)
    before, made = tokens(graphs, 0), recorder.recorded
    target.load_state_dict(medium_llama(2).state_dict())
    assert tokens(graphs, 0) == tokens(eager, 0) != before
    assert recorder.recorded > made


def test_what_a_graph_returns_outlives_the_next_forward(recorder: OperationRecorder) -> None:
    """All graphs write to one memory pool, so results are copied out of it."""
    model = CachedModel(pair()[0], 40, engine="captured", capture_hidden=True)
    sequence = model.sequence(0, SamplingConfig())
    model.run(sequence.append([2, 3], 1))
    logits, hidden = model.run(sequence.append([4], 1)), sequence.hidden
    assert hidden is not None
    kept = logits.clone(), hidden.clone()
    model.run(sequence.append([5], 1))
    assert torch.equal(logits, kept[0])
    assert torch.equal(hidden, kept[1])


def frozen_index(self: Any, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> Any:
    """As `update`, with a cache position that Python read once: where the first forward wrote."""
    if not hasattr(self, "frozen"):
        self.frozen = self._index.clone()
    self.keys.index_copy_(2, self.frozen, key_states)
    self.values.index_copy_(2, self.frozen, value_states)
    return self.keys, self.values


def test_planted_mistakes_are_found(
    recorder: OperationRecorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A write index that is not read anew, inputs that are not filled in: the text changes."""
    eager, _ = decoders(DecodeConfig(length=3), *pair())
    expected = [tokens(eager, seed, 30) for seed in range(3)]
    with monkeypatch.context() as planted:
        planted.setattr(cuda_graphs._IndexedLayer, "update", frozen_index)
        _, graphs = decoders(DecodeConfig(length=3), *pair())
        assert [tokens(graphs, seed, 30) for seed in range(3)] != expected
    fill = cuda_graphs._fill

    def without_positions(numbers: Tensor, *given: Any) -> None:
        before = numbers[1].clone()
        fill(numbers, *given)
        if before.any():
            numbers[1] = before

    with monkeypatch.context() as planted:
        planted.setattr(cuda_graphs, "_fill", without_positions)
        _, graphs = decoders(DecodeConfig(length=3), *pair())
        assert [tokens(graphs, seed, 30) for seed in range(3)] != expected


def test_a_graph_that_differs_from_the_eager_forward_is_refused(
    recorder: OperationRecorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = OperationRecorder.record

    def with_noise(self: OperationRecorder, run: Any) -> Any:
        replay = record(self, run)
        return lambda: tuple(out * 1.01 for out in replay())

    monkeypatch.setattr(OperationRecorder, "record", with_noise)
    _, graphs = decoders(DecodeConfig(), *pair())
    with pytest.raises(ConfigError, match=r"differs from the eager one by .* use engine 'eager'"):
        tokens(graphs, 0)


def test_a_forward_that_reads_the_device_is_refused_with_what_to_do(
    recorder: OperationRecorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, draft = pair()
    forward = type(target.lm_head).forward

    def reading(self: Any, hidden: Tensor) -> Tensor:
        out: Tensor = forward(self, hidden)
        return out if bool(out.isfinite().all()) else -out

    monkeypatch.setattr(type(target.lm_head), "forward", reading)
    _, graphs = decoders(DecodeConfig(), target, draft)
    with pytest.raises(ConfigError, match=r"cannot be captured .*capturing.*: use engine 'eager'"):
        tokens(graphs, 0)


def test_attention_that_does_not_go_by_the_mask_is_refused(recorder: OperationRecorder) -> None:
    config = GPTNeoConfig(
        vocab_size=40, hidden_size=16, num_layers=2, num_heads=2, max_position_embeddings=64,
        attention_types=[[["global", "local"], 1]], window_size=8,
    )  # fmt: skip
    with pytest.raises(ConfigError, match="CUDA graphs need"):
        CachedModel(GPTNeoForCausalLM(config).eval(), 40, engine="captured")


def model_without_end(model: PreTrainedModel) -> PreTrainedModel:
    model.generation_config.eos_token_id = None
    return model
