#!/bin/bash
# Guess: a GLM-4.5 model of any depth that has its own layer of multi-token prediction in its file, behind its last layer as published ones have
#   it, is decoded by transformers' generate(use_mtp=True).
# What happens: transformers looks for the layer by a class attribute that names the two published depths (layers 46 and 92). A model of two
#   layers that holds layer 2 is loaded without it, and generate ends in a RuntimeError that says its weights are missing from the folder,
#   where they are. With the attribute set to the model's own depth before it is loaded, the same folder gives the greedy text.
# Packages: transformers 5.24.0, torch 2.13.0, safetensors as transformers requires.
# Why met: small targets with such a layer, trained here, so that a draft of this kind can be tested and compared with a third party.
# Found: by reading a tiny model with its layer by transformers' class, whose logits were to be compared.
# Seen: as it is: RuntimeError, weights are missing; with the attribute: texts equal.
set -euo pipefail
tmp=$(mktemp -d); trap 'rm -rf "$tmp"' EXIT
export HF_HUB_OFFLINE=1 HF_HOME="$tmp/hf"
python3 -m venv "$tmp/v"; "$tmp/v/bin/pip" install -q torch==2.13.0 transformers==5.24.0
cat > "$tmp/t.py" <<'PY'
import sys

import torch
from safetensors.torch import load_file, save_file
from transformers import Glm4MoeConfig, Glm4MoeForCausalLM

folder = sys.argv[1]
sizes = dict(vocab_size=32, hidden_size=16, intermediate_size=24, moe_intermediate_size=8, num_attention_heads=2, num_key_value_heads=1,
             head_dim=8, n_routed_experts=4, num_experts_per_tok=2, n_shared_experts=1, n_group=1, topk_group=1, max_position_embeddings=64,
             eos_token_id=None, pad_token_id=None, bos_token_id=None)  # fmt: skip
torch.manual_seed(0)
Glm4MoeForCausalLM(Glm4MoeConfig(num_hidden_layers=2, first_k_dense_replace=1, **sizes)).save_pretrained(folder)
Glm4MoeForCausalLM(Glm4MoeConfig(num_hidden_layers=1, first_k_dense_replace=0, **sizes)).save_pretrained(f"{folder}/layer")
weights, to = load_file(f"{folder}/model.safetensors"), "model.layers.2."
for name, value in load_file(f"{folder}/layer/model.safetensors").items():
    if name.startswith("model.layers.0."):
        weights[to + name.removeprefix("model.layers.0.")] = value
for name in ("enorm", "hnorm", "shared_head.norm"):
    weights[f"{to}{name}.weight"] = torch.ones(16)
weights[f"{to}eh_proj.weight"] = torch.randn(16, 32) / 5
save_file(weights, f"{folder}/model.safetensors", metadata={"format": "pt"})
ids = torch.tensor([[3, 9, 27, 5]])

def decoded(**options):
    model = Glm4MoeForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()
    return model.generate(ids, max_new_tokens=12, do_sample=False, pad_token_id=0, **options)

plain = decoded()
try:
    decoded(use_mtp=True)
    seen = "decoded"
except RuntimeError as error:
    seen = "weights are missing" if "weights are missing" in str(error) else str(error)
Glm4MoeForCausalLM._keys_to_ignore_on_load_unexpected = [r"model\.layers\.2\..*"]
equal = torch.equal(plain, decoded(use_mtp=True))
print(f"as it is: {seen}; with the depth of this model named: texts equal {equal}")
assert seen == "weights are missing", "changed: the layer of another depth is found"
assert equal, "the same folder is decoded once its depth is named"
print("as found")
PY
"$tmp/v/bin/python" "$tmp/t.py" "$tmp/model" 2>/dev/null
