"""What distillation does for the embedded pair's draft: losses, data, sizes, and the real decoder.

    python benchmarks/distill.py [--run runs/distill] [--parts objectives data ...] [--out FILE]

Distils the demo's draft again and again from the same start, and measures every result on held-out
rollouts of the three embedded domains: acceptance sum min(p, q), expected tokens a round under
token and block verification, and the speed-up they promise at the best draft length. Intervals are
95 % bootstraps over prompts, with the same resamples for every comparison.

`objectives` compares losses, off-policy and mixed, trained on all three domains and on instructions
alone; `data` numbers and mixes of rollouts; `schedule` learning rates, batches and passes; `size`
drafts of other depths, widths and origins; `table5` acceptance of one and of four candidates, as
MCSD's Table 5; `live` decodes. What is missing is made: the pair (`--pair`, by default the demo's),
then rollouts and drafts in `--run`. Whatever is finished there is used again, so a killed benchmark
goes on; parts that are not asked for stay in FILE as they are.
"""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path

if __name__ == "distill":
    # Python looks into a script's own folder first: a script beside this file, which imports the
    # package of this name, finds this file. It gets the package.
    here = sys.path.pop(0)
    del sys.modules["distill"]
    import_module("distill")
    sys.path.insert(0, here)
elif __name__ == "__main__":
    sys.path[0] = str(Path(__file__).parent.parent)
    import_module("benchmarks.distill_figures.command").main(__doc__)
