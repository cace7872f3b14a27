#!/bin/bash
# Guess: torch.ops.mkldnn._linear_pointwise, by which Inductor runs linear layers on a CPU and packed copies are multiplied, takes a bias as every
#   operator of torch does: by its strides. It does take input and weight so.
# What happens: it reads the bias as if its entries followed one another in memory. A bias that is a view of every second entry of a vector, as where
#   several layers' parameters lie interleaved in one buffer, is replaced by the first half of that vector, without an error, with the weight as it
#   is and packed alike. linear_dynamic_fp16, FBGEMM's packed layer, reads the same bias by its strides. `bias.contiguous()` is what must be passed.
# Packages: torch 2.13.0, on an x86 processor.
# Why met: float32 layers whose weights half precision cannot hold are packed by oneDNN, others by FBGEMM: the same model, two readings of a bias.
# Found: in a review of what packed layers do with views; then one layer by four operators.
set -euo pipefail
tmp=$(mktemp -d); trap 'rm -rf "$tmp"' EXIT
python3 -m venv "$tmp/v"; "$tmp/v/bin/pip" install -q torch==2.13.0 numpy
cat > "$tmp/t.py" <<'PY'
import torch, warnings
warnings.simplefilter("ignore"); torch.set_grad_enabled(False)
weight, x = torch.zeros(4, 8), torch.ones(2, 8)          # so the output is the bias
bias = torch.arange(8.0)[::2]                            # 0 2 4 6
onednn = lambda w, b: torch.ops.mkldnn._linear_pointwise(x, w, b, "none", [], "")[0].tolist()
packed = torch.ops.mkldnn._reorder_linear_weight(weight, None)
half = torch.ops.quantized.linear_prepack_fp16(weight, bias)
seen = {"aten.linear": torch.nn.functional.linear(x, weight, bias)[0].tolist(), "oneDNN": onednn(weight, bias),
        "oneDNN, packed": onednn(packed, bias), "FBGEMM, packed": torch.ops.quantized.linear_dynamic_fp16(x, half)[0].tolist(),
        "oneDNN, contiguous": onednn(weight, bias.contiguous())}
for name, values in seen.items(): print(f"{name}: {values}")
right, wrong = [0.0, 2.0, 4.0, 6.0], [0.0, 1.0, 2.0, 3.0]
assert [*seen.values()] == [right, wrong, wrong, right, right], seen
# And the strides of input and weight are read.
w, y = torch.arange(64.0).view(8, 8)[:, ::2], torch.arange(16.0).view(2, 8)[:, ::2]
assert torch.equal(torch.ops.mkldnn._linear_pointwise(y, w, None, "none", [], ""), y @ w.T)
print("input and weight: by their strides")
PY
"$tmp/v/bin/python" "$tmp/t.py"
# Output seen:
#   aten.linear: [0.0, 2.0, 4.0, 6.0]
#   oneDNN: [0.0, 1.0, 2.0, 3.0]
#   oneDNN, packed: [0.0, 1.0, 2.0, 3.0]
#   FBGEMM, packed: [0.0, 2.0, 4.0, 6.0]
#   oneDNN, contiguous: [0.0, 2.0, 4.0, 6.0]
#   input and weight: by their strides
