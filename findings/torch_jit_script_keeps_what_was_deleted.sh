#!/bin/bash
# Guess: what torch.jit.script compiled is freed with the module that it returned, as its weights are.
# What happens: the code stays in one unit of the process for good. A program that compiles a forward anew whenever weights change, or for each kind
#   of input, grows by the code each time. The same code defined in a unit of its own (torch.jit.CompilationUnit) is freed with that unit, runs by
#   the same interpreter, and gives no deprecation warning.
# Packages: torch 2.13.0.
# Why met: forwards of drafts are traced again when a training changes the weights, and run by TorchScript's interpreter.
# Found: memory beside the number of recaptures, by both ways.
# Seen: of 60 modules of 1,500 operators, deleted one after the other, 120 functions stay and some 570 MB; of as many units of their own nothing.
set -euo pipefail
tmp=$(mktemp -d); trap 'rm -rf "$tmp"' EXIT
python3 -m venv "$tmp/v"; "$tmp/v/bin/pip" install -q torch==2.13.0 numpy psutil
cat > "$tmp/t.py" <<'PY'
import gc
import warnings

import psutil
import torch
from torch import fx

COUNT, OPERATORS = 60, 1500
warnings.simplefilter("ignore")
memory = psutil.Process().memory_info


class Long(torch.nn.Module):
    def forward(self, x):
        for _ in range(OPERATORS):
            x = torch.relu(x)
        return x


def kept():
    """Functions in the unit of the process that scripted modules are compiled into."""
    return len(torch.jit._state._python_cu.get_functions())


def scripted():
    torch.jit.script(fx.symbolic_trace(Long()))(torch.ones(2))


def in_its_own_unit():
    unit = torch.jit.CompilationUnit()
    lines = "\n".join(["    x = torch.relu(x)"] * OPERATORS)
    unit.define(f"def forward(x: torch.Tensor):\n{lines}\n    return x\n")
    unit.forward(torch.ones(2))


def grown(make):
    """Megabytes and functions that COUNT modules leave behind, after as many again."""
    for _ in range(COUNT):
        make()
    gc.collect()
    before, functions = memory().rss, kept()
    for _ in range(COUNT):
        make()
    gc.collect()
    return (memory().rss - before) / 1e6, kept() - functions


own, _ = grown(in_its_own_unit)
script, functions = grown(scripted)
print(f"torch {torch.__version__.split('+')[0]}: {COUNT} modules deleted, functions kept: {functions}")
print(f"grown by torch.jit.script: {script:.0f} MB, by units of their own: {own:.0f} MB")
assert functions >= COUNT and script > 3 * own, "what is deleted is freed now"
print("holds: the code of a deleted scripted module stays")
PY
"$tmp/v/bin/python" "$tmp/t.py" 2>"$tmp/err" || { tail -20 "$tmp/err" >&2; exit 1; }
