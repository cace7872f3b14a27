#!/bin/bash
# Guess: sampling with Gemma 4's assistant (the released drafts of the family) gives texts of the target's law, as with any other assistant_model; greedy
#   texts are the target's, and the paper that is followed ("Algorithm 1 from the speculative decoding paper") is proven.
# What happens: the assistant's tokens are always its most probable ones, never sampled, but handed over with its whole softmax as q, as if they had
#   been. A token is accepted with min(1, p/q) instead of p, and a rejected one is replaced from the positive part of p - q. So the token that the
#   assistant likes best comes too often and the others together too seldom, the less sure the assistant, the more; and q knows nothing of the
#   temperature and the other processors, which p has been through. Nothing is said, and the acceptance that this gains looks like a good draft.
# Packages: transformers 5.24.0, torch 2.13.0.
# Why met: each way of drafting in transformers was read for the q that its acceptance divides by.
# Found: SinglePositionMultiTokenCandidateGenerator read; then every draw of generate replaced by a branch and all branches walked (exact, no sampling).
# Seen, tiny models, total variation of two tokens from the target's: no draft and an ordinary draft 0.0000; the assistant 0.1496 at temperature 1, 0.0718 at
#   0.5; the second token's favourite 0.647 of 0.565 and 0.943 of 0.874.
set -euo pipefail
tmp=$(mktemp -d); trap 'rm -rf "$tmp"' EXIT
export HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 HF_HOME="$tmp/hf"
python3 -m venv "$tmp/v"; "$tmp/v/bin/pip" install -q torch==2.13.0; "$tmp/v/bin/pip" install -q transformers==5.24.0
cat > "$tmp/t.py" <<'PY'
import importlib.metadata as md, torch, transformers.generation.utils as generation
from transformers import Gemma4AssistantConfig, Gemma4AssistantForCausalLM, Gemma4ForCausalLM, Gemma4TextConfig
torch.set_num_threads(1); torch.set_grad_enabled(False)
V, PROMPT = 5, [1, 2, 3, 4]
size = dict(vocab_size=V, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1, head_dim=16, global_head_dim=16,
    layer_types=["sliding_attention", "full_attention"], hidden_size_per_layer_input=0, vocab_size_per_layer_input=0, max_position_embeddings=64,
    pad_token_id=None, eos_token_id=None, bos_token_id=None, initializer_range=0.2)
def made(seed, model_class, config):
    torch.manual_seed(seed); return model_class(config).eval()
target = made(0, Gemma4ForCausalLM, Gemma4TextConfig(**size))
plain = made(1, Gemma4ForCausalLM, Gemma4TextConfig(**size))                                       # an ordinary draft model
assistant = made(1, Gemma4AssistantForCausalLM, Gemma4AssistantConfig(text_config=Gemma4TextConfig(**size, num_kv_shared_layers=2), backbone_hidden_size=32))
class Walk:                                       # depth-first over all outcomes of all draws
    script, opts = [], []
    def choose(s, ps):
        ps = [max(0.0, float(x)) for x in ps]; ps = [x / sum(ps) for x in ps]
        if s.d == len(s.script): s.script.append(next(i for i, x in enumerate(ps) if x > 0)); s.opts.append(ps)
        i = s.script[s.d]; s.w *= s.opts[s.d][i]; s.d += 1; return i
    def runs(s, f):
        s.script, s.opts = [], []
        while True:
            s.d, s.w = 0, 1.0; yield f(), s.w
            while s.script:
                i, ps = s.script[-1], s.opts[-1]; j = next((k for k in range(i + 1, len(ps)) if ps[k] > 0), None)
                if j is not None: s.script[-1] = j; break
                s.script.pop(); s.opts.pop()
            if not s.script: return
W = Walk()
class Uniform:                                    # "r <= ratio" is true with probability min(1, ratio)
    def __le__(self, ratio): return torch.tensor([W.choose([1 - min(1.0, x), min(1.0, x)]) == 1 for x in ratio.flatten().tolist()]).view(ratio.shape)
class Torch:
    def __getattr__(self, k): return getattr(torch, k)
    def rand_like(self, *a, **k): return Uniform()
    def multinomial(self, p, num_samples=1, **k): return torch.tensor([[W.choose(row)] for row in p.tolist()])
generation.torch = Torch()
def law(temperature, **how):                      # of the first two tokens; a third is asked for, so that the second is drafted
    P, total = torch.zeros(V, V, dtype=torch.float64), 0
    for (a, b), w in W.runs(lambda: target.generate(torch.tensor([PROMPT]), do_sample=True, temperature=temperature, top_k=0, max_new_tokens=3, **how)[0, 4:6].tolist()):
        P[a, b] += w; total += 1
    return P
def p(ids, temperature): return (target(torch.tensor([ids])).logits[0, -1].double() / temperature).softmax(-1)
for draft in (plain, assistant): draft.generation_config.num_assistant_tokens, draft.generation_config.num_assistant_tokens_schedule = 1, "constant"
print("transformers", md.version("transformers"))
for temperature in (1.0, 0.5):
    exact = torch.stack([p(PROMPT, temperature)[a] * p([*PROMPT, a], temperature) for a in range(V)])
    print(f"temperature {temperature}: the second token must be", [round(x, 3) for x in exact.sum(0).tolist()])
    for name, how in (("no draft", {}), ("an ordinary draft", {"assistant_model": plain}), ("Gemma 4's assistant", {"assistant_model": assistant})):
        got = law(temperature, **how)
        tv = 0.5 * (got - exact).abs().sum().item()
        print(f"  {name}: {[round(x, 3) for x in got.sum(0).tolist()]}, total variation of the first two tokens {tv:.4f}", flush=True)
        assert abs(got.sum() - 1) < 1e-4 and (tv > 0.05 if name.startswith("Gemma") else tv < 1e-4), (name, tv)
print("holds: with Gemma 4's assistant the sampled law is not the target's; with an ordinary draft it is")
PY
"$tmp/v/bin/python" "$tmp/t.py"
