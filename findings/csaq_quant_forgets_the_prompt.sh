#!/bin/bash
# Guess: self-speculative decoding drafts with a cheaper form of the same weights and verifies with the better one, so at temperature 0 its text is that of
#   the model, whatever the draft is worth.
# What happens: CSAQInferenceEngine.generate(speculative=True) never runs the prompt: its first forward gets the prompt's last token and an empty
#   cache, so every prompt that ends in the same token gets the same text, word for word. With speculative=False the same
#   engine and weights answer eight prompts with eight texts. Nothing is raised or reported; the report has an acceptance rate as usual.
# Packages: csaq-quant 0.6.0, transformers 5.19.0, torch 2.13.0.
# Why met: packages that decode speculatively were checked for losslessness.
# Found: greedy texts of prompts that differ everywhere but in their last token.
# Seen: 8 prompts of 16 tokens that end in the same token: 8 texts without speculation, 1 with it, in all 8 the text of that last token alone.
set -euo pipefail
tmp=$(mktemp -d); trap 'rm -rf "$tmp"' EXIT
export HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 HF_HOME="$tmp/hf"
python3 -m venv "$tmp/v"; "$tmp/v/bin/pip" install -q torch==2.13.0; "$tmp/v/bin/pip" install -q transformers==5.19.0 csaq-quant==0.6.0
cat > "$tmp/t.py" <<'PY'
import importlib.metadata as md, torch
from csaq import CSAQConfig, CSAQInferenceEngine, quantize
from transformers import LlamaConfig, LlamaForCausalLM
torch.set_num_threads(1); torch.manual_seed(0)
V = 64
model = LlamaForCausalLM(LlamaConfig(vocab_size=V, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2,
    initializer_range=0.3, tie_word_embeddings=False, bos_token_id=None, eos_token_id=None, pad_token_id=None)).eval()
samples = [{"input_ids": torch.randint(0, V, (1, 32))} for _ in range(8)]
model, info = quantize(model, samples, config=CSAQConfig(target_bits=8.0, bit_options=[8, 16]), verbose=False)
engine = CSAQInferenceEngine(model, info["causal_map"], verbose=False)
prompts = [torch.cat([torch.randint(0, V, (1, 15)), torch.tensor([[5]])], dim=1) for _ in range(8)]
def texts(prompts, **how): return [tuple(engine.generate(x, temperature=0.0, max_new_tokens=16, **how)[0][0, x.shape[1]:].tolist()) for x in prompts]
print("csaq-quant", md.version("csaq-quant"))
alone, drafted = texts(prompts, speculative=False), texts(prompts, speculative=True, lookahead=4)
bare = texts([torch.tensor([[5]])], speculative=True, lookahead=4)
print(f"8 prompts of 16 tokens that end in the same token: {len(set(alone))} texts without speculation, {len(set(drafted))} with it; "
      f"equal to the text of the last token alone: {sum(t == bare[0] for t in drafted)} of 8")
assert len(set(alone)) == 8 and len(set(drafted)) == 1 and drafted[0] == bare[0]
print("holds: with speculation only the prompt's last token is read")
PY
"$tmp/v/bin/python" "$tmp/t.py" 2> "$tmp/err" || { cat "$tmp/err" >&2; exit 1; }
