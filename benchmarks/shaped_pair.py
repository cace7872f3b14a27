"""Pairs of published shapes with random weights, whose distributions agree as much as is asked for.

Random models agree on nothing, so the pair is made to. The draft's embeddings are the first entries
of the target's, the rest of which are 0, and so are its output embeddings, scaled for the mean
over more entries in the last norm. In the draft, what attention and MLP add is multiplied by 0, in
the target by a number, the noise: with none, both have the same logits; the noise is searched for
with which the mean overlap sum min(p, q) on random text is the acceptance asked for. Every matrix
has its full size and is multiplied in full, and all hold random numbers but for the draft's last
ones and the embeddings' rest, so a forward reads and computes what a trained model's does. The
texts mean nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from eval.runtime.model import CachedModel
from eval.runtime.sequence import sequence_of
from specdata.models import device
from specdata.probability import SamplingConfig, overlap, probabilities

VOCABULARY = 32000
# Deviation of the logits: as peaked as the next token of a text is.
SPREAD = 4.0
REPLAYS = 50
# Tokens of a prompt, and of the text after it for which the noise is set.
PROMPT, TEXT = 64, 96

SHAPES: Mapping[str, Mapping[str, int]] = {
    # Llama-2-7B and TinyLlama-1.1B, as targets of a 68M draft
    "7b": {"hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32,
           "num_attention_heads": 32, "num_key_value_heads": 32},
    "1.1b": {"hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 22,
             "num_attention_heads": 32, "num_key_value_heads": 4},
    # For a CPU: tries the benchmark itself.
    "tiny": {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2,
             "num_attention_heads": 4, "num_key_value_heads": 4},
}  # fmt: skip
DRAFTS: Mapping[str, Mapping[str, int]] = {
    "68m": {"hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 2,
            "num_attention_heads": 12, "num_key_value_heads": 12},
    "tiny": {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1,
             "num_attention_heads": 2, "num_key_value_heads": 2},
}  # fmt: skip
AGREEMENT = (
    "random weights; the draft's embeddings are the first entries of the target's, its layers add "
    "nothing and the target's layers add noise, scaled until the mean overlap of the two "
    "distributions on random text is the acceptance asked for"
)


def shaped_pair(shape: str, acceptance: float, seed: int) -> tuple[LlamaForCausalLM, ...]:
    """Target and draft, bfloat16 on a GPU; no token ends a text."""
    tiny = shape == "tiny"
    vocabulary = 512 if tiny else VOCABULARY
    draft = _random(DRAFTS["tiny" if tiny else "68m"], vocabulary, seed)
    target = _random(SHAPES[shape], vocabulary, seed + 1)
    with torch.no_grad():
        width, wide = draft.config.hidden_size, target.config.hidden_size
        draft.model.embed_tokens.weight.normal_()
        draft.lm_head.weight.normal_(std=SPREAD / width**0.5)
        for name, scale in (("model.embed_tokens", 1.0), ("lm_head", (width / wide) ** 0.5)):
            small, large = draft.get_submodule(name).weight, target.get_submodule(name).weight
            large.zero_()[:, :width] = scale * small
        _scale_layers(draft, 0.0)
    _set_noise(target, draft, acceptance, seed)
    return target, draft


def _random(sizes: Mapping[str, int], vocabulary: int, seed: int) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    with torch.device(device()):
        config = LlamaConfig(vocab_size=vocabulary, max_position_embeddings=2048, **sizes)
        dtype = torch.bfloat16 if device().type == "cuda" else torch.float32
        model = LlamaForCausalLM(config).to(dtype).eval()
    # No end token: every sequence has its full length.
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model


def _scale_layers(model: LlamaForCausalLM, factor: float) -> None:
    """Multiply what every layer adds."""
    for layer in model.model.layers:
        layer.self_attn.o_proj.weight.mul_(factor)
        layer.mlp.down_proj.weight.mul_(factor)


@torch.inference_mode()
def _set_noise(
    target: LlamaForCausalLM, draft: LlamaForCausalLM, acceptance: float, seed: int
) -> None:
    """Bisect, on a scale of logarithms, for the noise that gives the overlap."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, target.config.vocab_size, (1, PROMPT + TEXT), generator=generator)
    ids = ids.to(target.device)

    def distributions(model: LlamaForCausalLM) -> Tensor:
        # Attention averages, so early tokens have more noise: those that are decoded count.
        return probabilities(model(ids).logits[0, PROMPT:], SamplingConfig())

    q = distributions(draft)
    low, high, now = -8.0, 8.0, 0.0
    for _ in range(14):
        middle = (low + high) / 2
        _scale_layers(target, 2.0 ** (middle - now))
        now = middle
        agree = float(overlap(distributions(target), q).mean())
        low, high = (middle, high) if agree > acceptance else (low, middle)


@torch.inference_mode()
def forward_seconds(model: CachedModel, context: int, count: int) -> float:
    """Seconds of one forward of `count` tokens behind a context, one right after the other."""
    prompt = [3 + place % 400 for place in range(context)]
    sequence = sequence_of(model, 0, SamplingConfig())
    sequence.append(prompt, 1).run()
    tokens = prompt[:count]

    def forward() -> object:
        logits = sequence.append(tokens, count).run()
        sequence.crop(context)
        return logits

    forward()  # makes the graph
    seconds = _seconds(forward, model.device)
    model.kv_cache.free()
    return seconds


def _seconds(work: Callable[[], object], where: torch.device) -> float:
    """Of one call, from `REPLAYS` of them."""
    for _ in range(3):
        work()
    if where.type != "cuda":
        begun = time.perf_counter()
        for _ in range(REPLAYS):
            work()
        return (time.perf_counter() - begun) / REPLAYS
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(REPLAYS):
        work()
    end.record()
    torch.cuda.synchronize(where)
    return float(start.elapsed_time(end)) / 1e3 / REPLAYS


def limits(
    models: Sequence[PreTrainedModel], engine: Any, lengths: Sequence[int], context: int
) -> dict[int, dict[str, float]]:
    """For each draft length: the forwards of a round with no time between them.

    Args:
        models: target and draft.
        engine: how forwards run.
        lengths: K, drafted tokens a round.
        context: tokens of the sequence.
    """
    vocabulary = models[0].config.vocab_size
    target, draft = (CachedModel(model, vocabulary, engine=engine) for model in models)
    step = forward_seconds(draft, context, 1)
    rounds = {}
    for length in lengths:
        scoring = forward_seconds(target, context, length + 1)
        rounds[length] = {
            "draft_step_ms": 1e3 * step,
            "target_ms": 1e3 * scoring,
            "round_ms": 1e3 * (length * step + scoring),
        }
    return rounds


def prompts_of(target: LlamaForCausalLM, seed: int) -> list[tuple[str, Tensor]]:
    """Four random prompts, by name."""
    generator = torch.Generator().manual_seed(seed)
    vocabulary = target.config.vocab_size
    return [
        (str(index), torch.randint(3, vocabulary, (PROMPT,), generator=generator))
        for index in range(4)
    ]
