#!/bin/bash
# Guess: speculative decoding in batches, where each row advances by as many tokens as it accepted, gives each row the text that it gets alone; the batch is
#   aligned to the right, and what then stands left of a shorter row is masked: its code makes a mask of it.
# What happens: the mask is made and handed to no layer. As soon as rows have accepted different numbers of tokens, the shorter ones attend to
#   what stands there, their own rejected tokens (the indices that align a row are negative there, so they read its end), before the prompt, in the target
#   and in the draft. So a prompt's greedy text depends on who else is in the batch. One prompt at a time is right, plain decoding in batches too, and
#   nothing is said.
# Packages: speculative-decoding 0.2.0 (lucidrains), torch 2.13.0, einops 0.8.2, beartype 0.23.1.
# Why met: packages that decode speculatively were checked for losslessness, one prompt at a time and in batches.
# Found: greedy texts in batches against those of each prompt alone; then the mask handed to the layers from outside.
# Seen, 16 prompts of the same length, 40 tokens each, target alone in a batch of 16: 16 texts right; with the draft, batches of 1, 2, 4, 16: 16, 14, 10, 10
#   right; the same with the mask handed over: 16, 16, 16, 16.
set -euo pipefail
tmp=$(mktemp -d); trap 'rm -rf "$tmp"' EXIT
export OMP_NUM_THREADS=1
python3 -m venv "$tmp/v"; "$tmp/v/bin/pip" install -q torch==2.13.0; "$tmp/v/bin/pip" install -q speculative-decoding==0.2.0 einops==0.8.2 beartype==0.23.1
cat > "$tmp/t.py" <<'PY'
import importlib.metadata as md, sys, torch
from speculative_decoding.speculative_decoding import CausalAttention, Decoder, base_decoding, speculative_decoding
torch.set_num_threads(1); torch.set_grad_enabled(False)
V, PROMPTS, LENGTH = 32, 16, 40
def net(depth):
    torch.manual_seed(0)
    model = Decoder(num_tokens=V, dim=32, depth=depth, heads=2, dim_head=16).eval()
    model.to_logits[1].weight.mul_(3); return model
target, draft = net(2), net(1)
shared = {name: value for name, value in target.state_dict().items() if not name.startswith("layers.1.")}
draft.load_state_dict(shared)                                   # the target without its last layer: right often, not always
torch.manual_seed(5)
prompts = torch.randint(1, V, (PROMPTS, 8))
greedy = {"temperature": 1e-3, "filter_thres": 0.99}            # of 32 tokens one is kept
alone = [base_decoding(target, prompts[i : i + 1], LENGTH, **greedy)[0].tolist() for i in range(PROMPTS)]
def right(texts): return sum(a == b for a, b in zip(alone, texts, strict=True))
def drafted(rows): return right([text for i in range(0, PROMPTS, rows) for text in speculative_decoding(target, draft, prompts[i : i + rows], LENGTH, gamma=4, **greedy)[0].tolist()])
print("speculative-decoding", md.version("speculative-decoding"))
batched = right(base_decoding(target, prompts, LENGTH, **greedy).tolist())
seen = {rows: drafted(rows) for rows in (1, 2, 4, 16)}
print(f"texts right of {PROMPTS}: target alone in one batch {batched}; with the draft, by rows in a batch", seen)
mask, decoder, attention = [None], Decoder.forward, CausalAttention.forward
def decoder_that_masks(self, x, *args, seq_start_pos=None, **kwargs):                # the package's own mask: its lines, and handed on
    mask[0] = None if seq_start_pos is None else torch.arange(x.shape[1]) >= seq_start_pos[:, None]
    return decoder(self, x, *args, seq_start_pos=seq_start_pos, **kwargs)
def masked_attention(self, x, cache=None, context_mask=None, rotary_emb=None): return attention(self, x, cache=cache, context_mask=mask[0], rotary_emb=rotary_emb)
Decoder.forward, CausalAttention.forward = decoder_that_masks, masked_attention
masked = {rows: drafted(rows) for rows in (1, 2, 4, 16)}
print("the same with the mask handed to the layers", masked)
assert batched == seen[1] == PROMPTS and all(n == PROMPTS for n in masked.values())
assert seen[2] < PROMPTS and seen[4] < PROMPTS - 3 and seen[16] < PROMPTS - 3
print("holds: in batches rows read their rejected tokens; masked, they do not")
PY
"$tmp/v/bin/python" "$tmp/t.py"
