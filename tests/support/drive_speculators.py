"""The logits that the package speculators gives of a released EAGLE-3 draft.

Arguments: the folder; a safetensors file of the target's states (1, T, F) and the ids (1, T) of the
tokens after them; a file for the logits (T, N) of the first and the second reading.
"""

from __future__ import annotations

import sys

import torch
from safetensors.torch import load_file, save_file
from speculators.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig

folder, inputs, out = sys.argv[1:]
config = Eagle3SpeculatorConfig.from_pretrained(folder)
config.transformer_layer_config._attn_implementation = "eager"  # its default is compiled
model = Eagle3DraftModel.from_pretrained(folder, config=config).eval()
seen: list[torch.Tensor] = []
model.lm_head.register_forward_hook(lambda _module, _inputs, logits: seen.append(logits[0]))
given = load_file(inputs)
with torch.no_grad():
    model(
        hidden_states=given["states"],
        input_ids=given["ids"],
        document_ids=torch.zeros_like(given["ids"]),
        ttt_steps=2,
    )
save_file({"first": seen[0].contiguous(), "second": seen[1].contiguous()}, out)
