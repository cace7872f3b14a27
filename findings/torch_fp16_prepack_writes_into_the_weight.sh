#!/bin/bash
# Guess: to pack a linear layer's weight in half precision (torch.ops.quantized.linear_prepack_fp16) makes a copy: the weight stays as it is.
# What happens: entries beyond ±65504, half precision's largest number, are cut to it in the given tensor itself. The float32 model that shares
#   the weight (a tied embedding, the eager forward that a packed one is compared with) gives other logits from then on, and the comparison passes,
#   because both now read the cut weight. A warning says "FOUND weight out of range", and not that the weight was changed. quantize_dynamic with
#   dtype=torch.float16 packs by the same operator, and leaves the model that it was given alone, because it works on a deep copy.
# Packages: torch 2.13.0, on an x86 processor (engine "x86" or "fbgemm").
# Why met: this operator halves the bytes that the few rows of a verification read on a CPU; packed copies of a model's own weights were made with it.
# Found: in a review of what packing does with weights that half precision can't hold; then one layer before and after.
# Seen: weight 1, 70000, -1000000, 2 -> 1, 65504, -65504, 2 after packing; the layer's output for ones -929997 -> 3; within range nothing changes.
set -euo pipefail
tmp=$(mktemp -d); trap 'rm -rf "$tmp"' EXIT
python3 -m venv "$tmp/v"; "$tmp/v/bin/pip" install -q torch==2.13.0 numpy
cat > "$tmp/t.py" <<'PY'
import torch, warnings
from torch import nn
print("torch", torch.__version__, torch.backends.quantized.engine)
assert torch.backends.quantized.engine in ("x86", "fbgemm"), "needs an x86 processor"
pack, layer = torch.ops.quantized.linear_prepack_fp16, nn.Linear(4, 1, bias=False)
ones = torch.ones(1, 4)
def set_to(values): layer.weight.data = torch.tensor([values])
set_to([1.0, 6e4, -6e4, 2.0]); pack(layer.weight.detach(), None)
assert layer.weight.tolist() == [[1.0, 6e4, -6e4, 2.0]], "within range it stays"
set_to([1.0, 7e4, -1e6, 2.0])
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    torch.ao.quantization.quantize_dynamic(nn.Sequential(layer), dtype=torch.float16)
assert layer.weight.tolist() == [[1.0, 7e4, -1e6, 2.0]], "quantize_dynamic leaves it alone"
before, said = layer.weight.tolist(), float(layer(ones))
packed = pack(layer.weight.detach(), None)
after, now = layer.weight.tolist(), float(layer(ones))
by_packed = float(torch.ops.quantized.linear_dynamic_fp16(ones, packed))
print(f"weight {before} -> {after}; output {said:.0f} -> {now:.0f}, packed {by_packed:.0f}")
assert after == [[1.0, 65504.0, -65504.0, 2.0]] and said == -929997.0 and now == by_packed == 3.0
print("holds: packing cuts the weight that it is given, so that the layer itself gives what the packed copy gives")
PY
"$tmp/v/bin/python" "$tmp/t.py" 2>"$tmp/err" || { tail -20 "$tmp/err" >&2; exit 1; }
