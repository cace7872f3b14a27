#!/bin/bash
# Guess: whoever keeps a copy of a model's weights (packed matrices, a traced graph, an engine's cache) sees that they changed by each parameter's
#   address and version counter, since torch counts every in-place operation on a tensor.
# What happens: PEFT merges through `.data`, which has a counter of its own. With LoRA, OFT, LoHa and VeRA merge_adapter(), unmerge_adapter() and
#   merge_and_unload() change the values of the base weight in place while its address and its counter stay: the copy goes on with the weights from
#   before. With DoRA and IA3 the counter stays, too, but the weight gets another address. disable_adapter() changes no parameter at all, and yet
#   what the model says. So a copy must be compared by some of the values, and by which adapters are active.
# Packages: peft 0.21.2, torch 2.13.0, transformers 5.24.0.
# Why met: a draft is tuned with LoRA and decoded with, merged and decoded with again, in one process.
# Found: a decoder by captured forwards gave, after a merge, tokens of neither the old model nor the new one.
set -euo pipefail
tmp=$(mktemp -d); trap 'rm -rf "$tmp"' EXIT
export HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1
python3 -m venv "$tmp/v"; "$tmp/v/bin/pip" install -q torch==2.13.0
"$tmp/v/bin/pip" install -q peft==0.21.2 transformers==5.24.0
cat > "$tmp/t.py" <<'PY'
import torch, warnings
from peft import IA3Config, LoHaConfig, LoraConfig, OFTConfig, VeraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM
warnings.simplefilter("ignore"); torch.set_grad_enabled(False)
both = {"target_modules": ["q_proj", "v_proj"]}
kinds = {"lora": LoraConfig(r=2, init_lora_weights=False, **both), "oft": OFTConfig(oft_block_size=4, init_weights=False, **both),
         "loha": LoHaConfig(r=2, init_weights=False, **both), "vera": VeraConfig(r=2, init_weights=False, **both),
         "dora": LoraConfig(r=2, use_dora=True, init_lora_weights=False, **both),
         "ia3": IA3Config(feedforward_modules=[], init_ia3_weights=False, **both)}
ids, found = torch.arange(5)[None], {}
for name, config in kinds.items():
    torch.manual_seed(0)
    sizes = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = get_peft_model(LlamaForCausalLM(LlamaConfig(**sizes)).eval(), config).eval()
    weights = [p for n, p in model.named_parameters() if "base_layer" in n]
    state = lambda: [(w.data_ptr(), w._version) for w in weights]
    first, values, adapted = state(), [w.clone() for w in weights], model(ids).logits
    with model.disable_adapter(): assert state() == first and not torch.allclose(model(ids).logits, adapted)
    model.merge_adapter()
    changed = all(not torch.allclose(w, v) for w, v in zip(weights, values)); assert changed and len(weights) == 2
    assert torch.allclose(model(ids).logits, adapted, atol=1e-5)
    found[name] = "".join("same " if all(a[i] == b[i] for a, b in zip(first, state())) else "new " for i in (0, 1)).strip()
    print(f"{name}: values changed, address and version {found[name]}")
assert found == {"lora": "same same", "oft": "same same", "loha": "same same", "vera": "same same", "dora": "new same", "ia3": "new same"}, found
PY
"$tmp/v/bin/python" "$tmp/t.py"
# Output seen:
#   lora: values changed, address and version same same
#   oft: values changed, address and version same same
#   loha: values changed, address and version same same
#   vera: values changed, address and version same same
#   dora: values changed, address and version new same
#   ia3: values changed, address and version new same
