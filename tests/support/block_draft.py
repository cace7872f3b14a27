"""Random drafts in DSpark's form, and the states that one drafts from."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

from specdata.drafts.draft_vocabulary import SIZE
from specdata.drafts.dspark_network import dspark_class, read_blocks
from specdata.drafts.kind import KEY
from specdata.drafts.taps import attach, record_of

RANK = 5


def block_draft(
    target: PreTrainedModel,
    *,
    size: int = 3,
    layers: int = 1,
    taps: Sequence[int] = (0, 1, 2),
    seed: int = 7,
) -> PreTrainedModel:
    """In the target's precision; its mask is the last token."""
    text: Any = target.config
    blocks = {"size": size, "mask": text.vocab_size - 1, "rank": RANK}
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=text.vocab_size,
        hidden_size=text.hidden_size,
        intermediate_size=24,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=256,
        tie_word_embeddings=False,
        **{KEY: {**record_of(target, taps), "blocks": blocks}, SIZE: text.vocab_size},
    )
    draft: Any = dspark_class(Qwen3ForCausalLM)(config)
    draft.__class__ = Qwen3ForCausalLM
    for weight in draft.parameters():
        torch.nn.init.normal_(weight, float(weight.dim() == 1), 0.3)
    torch.nn.init.normal_(draft.lm_head.weight)
    draft.d2t, draft.t2d = torch.zeros_like(draft.d2t), torch.ones_like(draft.t2d)
    draft.generation_config = target.generation_config
    attach(draft.to(target.dtype).eval(), target)
    return draft


@torch.inference_mode()
def state_in_block(draft: Any, committed: list[int], path: list[int]) -> Tensor:
    """(H + r,) after a path; deeper than the block, its last slot's with the last token's bias.

    As training reads it, which `test_dspark_layout.py` holds equal to the published definition.
    """
    text, anchor = torch.tensor([committed + path]), torch.tensor([[len(committed) - 1]])
    reads = draft.get_input_embeddings()
    size = reads.blocks.size
    block = read_blocks(draft.model, text, reads.read_target(text), anchor, size)
    state = block.last_hidden_state[0, 0, min(len(path), size - 1)]
    return torch.cat([state[: reads.width], reads.markov.weight[text[0, -1]]])
