"""Captured forwards give what the eager model gives."""

import gc
import weakref
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from peft.tuners.lora import LoraLayer

from eval.decoder import DecodeConfig, SpeculativeDecoder
from eval.runtime.graphs import EagerWarning, shared_graphs
from eval.runtime.prepack import SMALLEST_PREPACKED
from specdata.errors import ConfigError
from specdata.prepack import multiplies
from tests.support.batches import CASES
from tests.support.decoder import head
from tests.support.families import tiny
from tests.support.tiny import tiny_llama


def medium_llama(seed: int) -> Any:
    """In float32 and just large enough that its matrices are prepacked."""
    sizes = {"hidden_size": 128, "intermediate_size": 1024, "max_position_embeddings": 2048}
    biases = {"attention_bias": True, "mlp_bias": True, "initializer_range": 0.1}
    assert sizes["hidden_size"] * sizes["intermediate_size"] >= SMALLEST_PREPACKED
    family = "llama, grouped queries"
    return tiny(family, seed, vocab=512, dtype=torch.float32, **sizes, **biases)


def tokens(decoder: SpeculativeDecoder, seed: int, budget: int = 20) -> list[int]:
    out = decoder.generate(
        torch.tensor([2, 3 + seed]),
        max_new_tokens=budget,
        generator=torch.Generator().manual_seed(seed),
    )
    return [int(token) for token in out.tokens]


@pytest.mark.slow
@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16], ids=str)
def test_prepacked_matrices_with_biases_give_the_eager_logits(stored: torch.dtype) -> None:
    """Greedy, over lengths that outgrow the first buffers: a wrong logit would show in a token.

    Of weights that were stored in bfloat16 half the bytes are read.
    """
    target, draft = medium_llama(0), medium_llama(1)
    for weight in (*target.parameters(), *draft.parameters()):
        weight.data = weight.data.to(stored).float()
    first, second = (layer.self_attn for layer in target.model.layers[:2])
    for name in ("q_proj", "k_proj", "v_proj"):  # one matrix, and a bias of each
        getattr(second, name).weight = getattr(first, name).weight
    config = DecodeConfig(temperature=0.0, length=3)
    eager, graph = (
        SpeculativeDecoder.from_config(target, draft, config, engine=engine)
        for engine in ("eager", "captured")
    )
    assert tokens(eager, 0, 270) == tokens(graph, 0, 270)


@pytest.mark.slow
def test_bfloat16_matrices_are_prepacked_where_the_processor_multiplies_them() -> None:
    model = medium_llama(0).to(torch.bfloat16)
    supported = bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    assert multiplies(model.device, model.dtype) == supported
    assert not multiplies(model.device, torch.float16)
    # A graph whose logits differ from the eager ones by more than rounding is refused.
    config = DecodeConfig(temperature=0.0, length=3)
    decoder = SpeculativeDecoder.from_config(
        model, medium_llama(1).to(torch.bfloat16), config, engine="captured"
    )
    assert len(tokens(decoder, 0, 40)) == 40
    graphs = shared_graphs(model, "captured")
    assert graphs._graphs
    linear = {layer for layer, _ in graphs.prepacker._joined.values()}
    assert (torch.ops.mkldnn._linear_pointwise.default in linear) == supported


def test_a_forward_that_asks_about_values_runs_eagerly_and_says_so_in_a_line() -> None:
    model, config = tiny_llama(0, vocab=40), DecodeConfig(temperature=0.0)
    model.model.norm.register_forward_hook(
        lambda _layer, _inputs, states: states if states.sum() < 1e9 else -states
    )
    eager, graph = (
        SpeculativeDecoder.from_config(model, None, config, engine=engine)
        for engine in ("eager", "captured")
    )
    said = r"^llama runs eagerly: the forward of llama cannot be captured \([^\n]+\)$"
    with pytest.warns(EagerWarning, match=said):
        assert tokens(graph, 0) == tokens(eager, 0)


def test_graphs_are_shared_by_decoders_until_the_weights_change() -> None:
    model = tiny_llama(0, vocab=40)
    first = shared_graphs(model, "captured")
    assert shared_graphs(model, "captured") is first
    assert shared_graphs(model, "captured", (1,)).prepacker is first.prepacker
    config = DecodeConfig(temperature=0.0)
    decoder = SpeculativeDecoder.from_config(model, None, config, engine="captured")
    before = tokens(decoder, 0)
    torch.manual_seed(0)
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(torch.randn_like(weight) * 0.3)
    after = tokens(decoder, 0)
    assert after == tokens(SpeculativeDecoder.from_config(model, None, config), 0)
    assert before != after
    assert shared_graphs(model, "captured") is not first
    assert shared_graphs(model, "captured", (1,)).prepacker is not first.prepacker


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
def test_adapters_that_are_merged_or_switched_off_after_a_capture_are_noticed() -> None:
    """PEFT merges through `.data`, which no version counter tells."""
    base, config = tiny_llama(0, vocab=40), DecodeConfig(temperature=0.0)
    settings = LoraConfig(r=4, init_lora_weights=False, target_modules="all-linear")
    adapted = get_peft_model(base, settings).double().eval()

    def both() -> list[int]:
        eager, graph = (
            tokens(SpeculativeDecoder.from_config(base, None, config, engine=engine), 0)
            for engine in ("eager", "captured")
        )
        assert graph == eager
        return graph

    with_adapter = both()
    with adapted.disable_adapter():
        assert both() != with_adapter
    assert both() == with_adapter
    scaled = [layer for layer in base.modules() if isinstance(layer, LoraLayer)]
    for layer in scaled:
        layer.scale_layer(4.0)
    assert both() != with_adapter
    for layer in scaled:
        layer.scale_layer(0.25)
    adapted.merge_adapter()
    assert both() == with_adapter
    adapted.unmerge_adapter()
    before = shared_graphs(base, "captured")
    adapted.merge_and_unload()
    assert both() == with_adapter
    assert shared_graphs(base, "captured") is not before


def test_graphs_may_be_made_in_several_threads_at_once() -> None:
    config = DecodeConfig(temperature=0.0)
    decoders = [
        SpeculativeDecoder.from_config(tiny_llama(seed, vocab=40), None, config, engine="captured")
        for seed in range(3)
    ]
    with ThreadPoolExecutor(3) as pool:
        made = list(pool.map(tokens, decoders, [0] * 3))
    assert made == [tokens(decoder, 0) for decoder in decoders]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["head", "dynamic tree"])
def test_after_the_warm_up_no_graph_is_made(name: str) -> None:
    target, draft = tiny_llama(2, vocab=40, layers=2), tiny_llama(1, vocab=40)
    decoder = SpeculativeDecoder.from_config(
        target, draft, CASES[name], head().double(), engine="captured"
    )
    decoder.warm_up()
    graphs = [shared_graphs(model, "captured")._graphs for model in (target, draft)]
    before = [set(kinds) for kinds in graphs]
    for seed in range(4):
        tokens(decoder, seed)
    assert [set(kinds) for kinds in graphs] == before


@pytest.mark.slow
def test_graphs_do_not_keep_a_model_alive() -> None:
    model = medium_llama(0)
    tokens(SpeculativeDecoder.from_config(model, None, DecodeConfig(), engine="captured"), 0)
    alive = weakref.ref(model)
    del model
    gc.collect()
    assert alive() is None


def test_an_unknown_engine_is_refused() -> None:
    with pytest.raises(ConfigError, match="unknown engine 'fast'"):
        SpeculativeDecoder.from_config(tiny_llama(0), None, DecodeConfig(), engine="fast")  # type: ignore[arg-type]
