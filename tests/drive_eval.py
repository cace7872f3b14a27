"""Evaluate several times in one process; run by test_shared_evaluation.py under a launcher.

    accelerate launch --config_file launch/cpu-2.yaml tests/drive_eval.py '[["--config", ...], ...]'

The argument holds, as JSON, the command line of each evaluation.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

if __name__ == "__main__":  # as a script, only its own folder is on the path
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import recipes.run
from recipes.run_eval import RECIPE

GRACE = 3
"""Seconds that a process waits for a main one that is gone."""

if __name__ == "__main__":
    recipes.run.GRACE = GRACE
    sys.exit(max(RECIPE.run(line) for line in json.loads(sys.argv[1])))
