"""Tiny real models whose joint distributions can be enumerated."""

from pathlib import Path
from typing import Any

import torch
from transformers import Gemma3Config, Gemma3ForConditionalGeneration, LlamaConfig, LlamaForCausalLM
from transformers.modeling_outputs import CausalLMOutputWithPast

from specdata.probability import SamplingConfig, probabilities

END = 1


def tiny_llama(seed: int, *, vocab: int = 4, width: int = 16, layers: int = 1) -> LlamaForCausalLM:
    """A random Llama in float64 with peaked distributions; id 1 ends a text."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=vocab,
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=layers,
        num_attention_heads=2,
        max_position_embeddings=256,
        bos_token_id=0,
        eos_token_id=END,
        pad_token_id=0,
        initializer_range=0.4,
    )
    model = LlamaForCausalLM(config).double().eval()
    model.generation_config.eos_token_id = END
    model.generation_config.pad_token_id = 0
    return model


def tiny_gemma3(folder: Path) -> Gemma3ForConditionalGeneration:
    """Save a random model of texts and pictures, and load it; its text ends at 1 or 2."""
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    config = Gemma3Config(
        text_config=sizes
        | {"vocab_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8},
        vision_config=sizes | {"num_attention_heads": 2, "image_size": 28, "patch_size": 14},
        mm_tokens_per_image=4,
        eos_token_id=[1, 2],
        initializer_range=0.4,
    )
    torch.manual_seed(0)
    Gemma3ForConditionalGeneration(config).save_pretrained(folder)
    return Gemma3ForConditionalGeneration.from_pretrained(folder).eval()


@torch.inference_mode()
def joint_distribution(
    model: LlamaForCausalLM, prompt: list[int], length: int, sampling: SamplingConfig
) -> dict[tuple[int, ...], float]:
    """The exact distribution of plain sampling: every sequence of at most `length` tokens."""
    distribution: dict[tuple[int, ...], float] = {}
    stack: list[tuple[tuple[int, ...], float]] = [((), 1.0)]
    while stack:
        text, weight = stack.pop()
        if len(text) == length or (text and text[-1] == END):
            distribution[text] = distribution.get(text, 0.0) + weight
            continue
        logits = model(input_ids=torch.tensor([[*prompt, *text]])).logits[0, -1]
        for token, chance in enumerate(probabilities(logits, sampling).tolist()):
            if chance > 0:
                stack.append(((*text, token), weight * chance))
    return distribution


class Capped(LlamaForCausalLM):
    """Does to its logits what no configuration tells: the identity only at small ones."""

    def forward(self, *ids: Any, **inputs: Any) -> CausalLMOutputWithPast:
        output = super().forward(*ids, **inputs)
        output.logits = 50 * torch.tanh(output.logits / 50)
        return output
