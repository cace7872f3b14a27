#!/bin/bash
# Guess: a round that drafts K tokens costs one forward of the target for every K from 1 up, so that K = 1, the shortest, is the safe choice for a
#   draft that is seldom right.
# What happens: in ONNX Runtime GenAI with `max_draft_tokens` 1 every whole round is followed by a second forward of the target, which reads the last
#   token again, so the target can run more often than without a draft, and the draft is paid on top. With 2, 3 and 4 each round is one forward. Nothing says so
#   but the counter `target_reanchor_forward_passes`. The texts are the same for all K.
# Packages: onnxruntime-genai 0.18.0, onnxruntime 1.32.0, onnx 1.23.2, onnx-ir 1.1.0, transformers 5.19.0, torch 2.13.0.
# Why met: a plain draft was measured at several K, and K = 1 was slower than the target alone where K = 2 was faster.
# Found: forwards of the target counted by GenAI itself, beside the rounds.
# Seen (48 tokens): K = 1: 30 rounds and 59 forwards, 29 of them second ones; K = 2: 23 rounds, 23 forwards; K = 3: 20 and 20; K = 4: 19 and 19.
set -euo pipefail
tmp=$(mktemp -d); trap 'rm -rf "$tmp"' EXIT
export HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 HF_HOME="$tmp/hf"
python3 -m venv "$tmp/v"; "$tmp/v/bin/pip" install -q torch==2.13.0
"$tmp/v/bin/pip" install -q transformers==5.19.0 onnx==1.23.2 onnx-ir==1.1.0 onnxruntime==1.32.0 onnxruntime-genai==0.18.0
cat > "$tmp/make.py" <<'PY'
import copy, torch
from tokenizers import Tokenizer, models
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
V = 512; torch.manual_seed(0)
target = LlamaForCausalLM(LlamaConfig(vocab_size=V, hidden_size=64, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2,
    tie_word_embeddings=False, bos_token_id=1, eos_token_id=V - 1, pad_token_id=0, max_position_embeddings=256))
target.lm_head.weight.data[V - 1] = 0
draft = copy.deepcopy(target)
for weight in draft.parameters(): weight.data += 0.004 * torch.randn_like(weight)
tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE({str(i): i for i in range(V)}, [])), eos_token=str(V - 1), pad_token="0")
for name, model in (("target", target), ("draft", draft)): model.save_pretrained(name); tokenizer.save_pretrained(name)
PY
cat > "$tmp/t.py" <<'PY'
import importlib.metadata as md, json, numpy as np, onnxruntime, onnxruntime_genai as genai, os, shutil
PROMPT, NEW = [3, 4, 5, 6], 48
shutil.copytree("onnx-target", "both"); shutil.move("onnx-draft", "both/draft")
config, drafting = (json.load(open(f"both/{name}genai_config.json")) for name in ("", "draft/"))
decoder = drafting["model"]["decoder"]
config["model"] |= {"type": "speculative", "draft": {**decoder, "filename": "draft/" + decoder["filename"]}}
json.dump(config, open("both/genai_config.json", "w"))
def decode(folder, drafted):
    params = genai.GeneratorParams(genai.Model(folder))
    params.set_search_options(do_sample=False, max_length=len(PROMPT) + NEW, batch_size=1)
    if drafted: params.set_speculative_options(max_draft_tokens=drafted)
    g = genai.Generator(genai.Model(folder), params); g.append_tokens(np.array([PROMPT], dtype=np.int32)); made = 0
    while not g.is_done(): g.generate_next_token(); made += 1
    return [int(token) for token in g.get_sequence(0)], made, g.get_speculative_stats() if drafted else {}
print("onnxruntime-genai", md.version("onnxruntime-genai"))
alone, made, _ = decode("onnx-target", 0); print(f"alone: {made} tokens, a forward each")
for drafted in (1, 2, 3, 4):
    text, made, counts = decode("both", drafted); assert text == alone
    rounds, forwards, second = (counts[f"{name}"] for name in ("rounds", "target_forward_passes", "target_reanchor_forward_passes"))
    print(f"K = {drafted}: {made} tokens in {rounds} rounds, {counts['draft_tokens_accepted']} drafted tokens accepted; {forwards} forwards of the target, {second} of them second ones")
    assert 0 < counts["draft_tokens_accepted"] < rounds * drafted
    assert forwards == rounds + second and (second >= rounds - 2 if drafted == 1 else second == 0)
print("holds: with one drafted token the target reads twice a round")
PY
cd "$tmp"; run() { "$@" > out 2> err || { cat out err >&2; exit 1; }; }
run "$tmp/v/bin/python" make.py
for name in target draft; do run "$tmp/v/bin/python" -m onnxruntime_genai.models.builder -i $name -o onnx-$name -p fp32 -e cpu; done
run "$tmp/v/bin/python" t.py; cat out
