#!/bin/bash
# Guess: a draft changes a text's speed, not its law. Greedy texts with and without a draft are equal here, so sampling is right too; and when the
#   draft is the target itself, nothing can go wrong.
# What happens: with a draft model OpenVINO GenAI samples texts that are not the target's, even when the draft IS the target. Measured on the
#   pipeline's own texts: the mean log-probability of its tokens under the target falls far below minus the mean entropy, which it must equal, and the
#   target's favourite token comes about half as often as it must. Without a draft both agree. Greedy texts are equal in all cases, so a check
#   of greedy texts, which is what is usually made, sees nothing. All in float32, the cache too; prefix caching off.
# Packages: openvino-genai 2026.4.1.0, openvino 2026.4.1, optimum-intel 2.2.0, transformers 5.5.4, torch 2.13.0.
# Why met: every engine in which a draft is to be measured is first checked for losslessness on a tiny pair.
# Found: the texts' tokens scored by the same target in transformers; then one model at a time put in the draft's place.
# Seen: no draft: mean log p -0.76, must be -0.76; another model as draft: -2.81, must be -0.81; the target as draft: -2.42, must be -0.77; the
#   target's favourite token 0.71 of 0.72, 0.32 of 0.70, 0.40 of 0.71; greedy texts equal in 44 of 44 prompts each. (With a draft two runs of
#   the same seeds differ too: -2.66 and -2.37 in another run.)
set -euo pipefail
tmp=$(mktemp -d); trap 'rm -rf "$tmp"' EXIT
export HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 HF_HOME="$tmp/hf"
python3 -m venv "$tmp/v"; "$tmp/v/bin/pip" install -q torch==2.13.0
"$tmp/v/bin/pip" install -q torch==2.13.0 torchvision==0.28.0 transformers==5.5.4 optimum-intel==2.2.0 nncf==3.4.0 \
    openvino==2026.4.1 openvino-tokenizers==2026.4.1.0 openvino-genai==2026.4.1.0
"$tmp/v/bin/pip" uninstall -q -y torchvision      # not needed, and its operators may be built for another torch
cat > "$tmp/t.py" <<'PY'
import importlib.metadata as md, itertools, os, numpy as np, openvino as ov, openvino_genai as genai, torch
from openvino_tokenizers import convert_tokenizer
from optimum.exporters.openvino import main_export
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
torch.set_num_threads(1); torch.set_grad_enabled(False)
V, PROMPT = 6, [0, 1, 2, 3]
words = Tokenizer(models.BPE({c: i for i, c in enumerate("abcdef")}, []))
words.pre_tokenizer, words.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
words = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="a", pad_token="a")
def make(seed, folder):
    torch.manual_seed(seed)
    model = LlamaForCausalLM(LlamaConfig(vocab_size=V, hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, initializer_range=0.3, tie_word_embeddings=False, bos_token_id=None, eos_token_id=None, pad_token_id=None)).eval()
    model.save_pretrained(folder); main_export(folder, folder + "-ov", task="text-generation-with-past", convert_tokenizer=False)
    for part, name in zip(convert_tokenizer(words, with_detokenizer=True), ("tokenizer", "detokenizer")):
        ov.save_model(part, f"{folder}-ov/openvino_{name}.xml")
    return model
target = make(1, "target"); make(2, "other")
exact = dict(INFERENCE_NUM_THREADS=1, INFERENCE_PRECISION_HINT="f32", KV_CACHE_PRECISION="f32")
scheduler = genai.SchedulerConfig(); scheduler.enable_prefix_caching, scheduler.cache_size, scheduler.num_kv_blocks = False, 0, 200
def pipeline(draft):
    more = {} if draft is None else {"draft_model": genai.draft_model(draft + "-ov", "CPU", **exact)}
    return genai.LLMPipeline("target-ov", "CPU", scheduler_config=scheduler, **exact, **more)
def text(pipe, draft, prompt, n, seed=None):
    c = genai.GenerationConfig(); c.max_new_tokens, c.ignore_eos, c.eos_token_id, c.stop_token_ids = n, True, 0, {0}
    if seed is not None: c.do_sample, c.temperature, c.top_p, c.top_k, c.rng_seed = True, 1.0, 1.0, 0, seed
    if draft is not None: c.num_assistant_tokens = 2
    ids = np.array([prompt], dtype=np.int64)
    return list(pipe.generate(genai.TokenizedInputs(ov.Tensor(ids), ov.Tensor(np.ones_like(ids))), c).tokens[0])
prompts = list(itertools.islice(itertools.product(range(V), repeat=4), 0, V**4, 30))
print("openvino-genai", md.version("openvino-genai")); greedy = {}
for draft in (None, "other", "target"):
    pipe, rows = pipeline(draft), []
    for seed in range(1, 7):
        x = torch.tensor(text(pipe, draft, PROMPT, 600, seed))
        logp = target(torch.tensor([PROMPT + x.tolist()])).logits[0, len(PROMPT) - 1 : -1].double().log_softmax(-1); p = logp.exp()
        rows.append([logp.gather(1, x[:, None]).mean(), (p * logp).sum(-1).mean(), (x == p.argmax(-1)).double().mean(), p.max(-1).values.mean()])
    score, expected, hits, must = np.mean(rows, 0)
    greedy[draft] = [text(pipe, draft, list(p), 12) for p in prompts]
    same = sum(a == b for a, b in zip(greedy[draft], greedy[None]))
    print(f"draft {draft}: mean log p of 3,600 sampled tokens {score:.2f}, must be {expected:.2f}; favourite token {hits:.2f}, must be {must:.2f}; greedy texts equal {same}/{len(prompts)}")
    assert same == len(prompts)
    if draft is None: assert abs(score - expected) < 0.1 and abs(hits - must) < 0.05
    else: assert score < expected - 0.5 and hits < must - 0.15
print("holds: sampling with a draft is not sampling from the target")
PY
cd "$tmp"; "$tmp/v/bin/python" "$tmp/t.py" 2> "$tmp/err" || { cat "$tmp/err" >&2; exit 1; }
