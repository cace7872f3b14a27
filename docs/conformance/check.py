"""Check an engine's verification of drafts against vectors.json, with Python alone.

    python check.py MODULE

MODULE has verify(case, rng) -> a tuple (node at which the accepted path ends, next token), or None
for a case that it does not implement; rng is a random.Random. README.md says what a case holds.
"""

import importlib
import json
import random
import sys
from collections import Counter
from pathlib import Path

DRAWS = 4000


def law(case):
    """(node, token) -> probability."""
    ends = enumerate(zip(case["stop"], case["next"], strict=True))
    return {(n, t): s * p for n, (s, row) in ends for t, p in enumerate(row) if s * p > 0}


def fault(case, verify, rng):
    """What is wrong with an engine's outcomes of a case; None if they follow the law."""
    found = Counter(verify(case, rng) for _ in range(DRAWS))
    expected = {outcome: DRAWS * chance for outcome, chance in law(case).items()}
    if impossible := found.keys() - expected.keys():
        return f"outcome {min(impossible)} has probability 0"
    chi_square = sum((found[each] - mean) ** 2 / mean for each, mean in expected.items())
    bound = 2 * (len(expected) - 1) + 40  # a sound engine exceeds it less than once in a million
    return f"chi-square {chi_square:.0f} of at most {bound}" if chi_square > bound else None


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    verify, rng = importlib.import_module(sys.argv[1]).verify, random.Random(0)
    given = json.loads((Path(__file__).parent / "vectors.json").read_text())["cases"]
    cases = [case for case in given if verify(case, rng) is not None]
    faults = {case["name"]: said for case in cases if (said := fault(case, verify, rng))}
    sys.stdout.writelines(f"{name}: {said}\n" for name, said in faults.items())
    sys.stdout.write(f"{len(cases) - len(faults)} of {len(cases)} hold; {len(given)} are there\n")
    sys.exit(bool(faults) or not cases)
