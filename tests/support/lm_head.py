"""What several files of tests use of `test_lm_head`."""

from typing import Any

import torch
from transformers import LlamaForCausalLM
from transformers.modeling_outputs import CausalLMOutputWithPast


class Capped(LlamaForCausalLM):
    """Does to its logits what no configuration tells: the identity only at small ones."""

    def forward(self, *ids: Any, **inputs: Any) -> CausalLMOutputWithPast:
        output = super().forward(*ids, **inputs)
        output.logits = 50 * torch.tanh(output.logits / 50)
        return output
