"""What acceptance heads save on the embedded pair, in replay by exact expectation and by the clock.

    python benchmarks/heads.py [--run runs/heads] [--parts goals ablation curve clock] [--out FILE]

Trains heads on labelled rollouts of the three embedded domains and replays them on held-out ones:
against the best fixed draft length and every rule without training, with every threshold chosen on
dev rows and judged on test rows. Intervals are 95 % bootstraps over prompts, with the same
resamples for every comparison.

`goals` trains the shipped head on all three domains and on instructions alone; `ablation` drops one
ingredient at a time; `curve` trains on fewer rollouts; `clock` decodes. What is missing is made:
the pair and the draft (`--pair`, `--draft`; by default the demo's), then rollouts, labels and heads
in `--run`. Whatever is finished there is used again, so a killed benchmark goes on; parts that are
not asked for stay in FILE as they are.
"""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path

if __name__ == "heads":
    # Python looks into a script's own folder first: a script beside this file, which imports the
    # package of this name, finds this file. It gets the package.
    here = sys.path.pop(0)
    del sys.modules["heads"]
    import_module("heads")
    sys.path.insert(0, here)
elif __name__ == "__main__":
    sys.path[0] = str(Path(__file__).parent.parent)
    import_module("benchmarks.head_figures.command").main(__doc__)
