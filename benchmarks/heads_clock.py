"""What acceptance heads save by the clock: from finished evaluations to docs/heads_clock.json.

    python benchmarks/heads_clock.py --demo DIR ... [--smollm2 DIR ...] --calls FILE [--out FILE]

How the evaluations are made is said in docs/evidence/head-clock.md; FILE is what
benchmarks/head_call.py wrote.
Of each evaluation: the fastest fixed length, the fastest rule without training, and the fastest
head, over all prompt sets together, paired by prompt, each chosen on the same prompts: there are
more rivals than heads, so that leans against the head.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from eval.measuring.intervals import Interval
from eval.measuring.pooled import PooledRow, pool
from eval.measuring.results import Results
from specdata.storage.files import write_json


def saved(head: PooledRow, rivals: Sequence[PooledRow]) -> dict[str, Any] | None:
    """The share of the fastest rival's time a token that a head saves; None without a rival."""
    if not rivals:
        return None
    rival = max(rivals, key=PooledRow.speed)
    time = Interval.of(rival.rates["tokens_per_second"] / head.rates["tokens_per_second"])
    tokens = head.over(rival, "block_efficiency")
    return {
        **Interval(1 - time.value, 1 - time.high, 1 - time.low).stored(),
        "method": head.name,
        "rival": rival.name,
        "tokens_a_call": tokens.stored(),
    }


def summary(results: Results) -> dict[str, Any]:
    """The comparisons of one evaluation."""
    rows = [
        row for row in pool(results) if row.method.lossless and row.method.decoder == "speculative"
    ]
    chains = [row for row in rows if row.method.is_chain and row.method.verifier == "token"]
    fixed = [row for row in chains if row.method.fixed_length]
    shares: dict[str, Any] = {
        "prompts": len({each.prompt_id for run in rows[0].runs for each in run.generations})
    }
    heads = [row for row in chains if row.runs[0].head]
    rules = [row for row in chains if not row.runs[0].head and row not in fixed]
    for name, rivals in (("over_best_k", fixed), ("over_best_rule", rules)):
        if heads and (share := saved(max(heads, key=PooledRow.speed), rivals)):
            shares[name] = share
    shares["methods"] = {
        row.name: {
            "tokens_per_second": row.speed(),
            "tokens_a_call": row.value("block_efficiency"),
            "speedup": row.value("speedup"),
        }
        for row in rows
    }
    return {**shares, "environment": results.environment.model_dump(mode="json")}


def main() -> None:
    """Read evaluations, print and write JSON."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--demo", type=Path, nargs="+", help="evaluations of the demo's pair")
    parser.add_argument("--smollm2", type=Path, nargs="+", help="evaluations of SmolLM2's pair")
    parser.add_argument("--calls", type=Path, default=Path("docs/head_call.json"))
    parser.add_argument("--out", type=Path, default=Path("docs/heads_clock.json"))
    options = parser.parse_args()
    made: dict[str, Any] = {}
    for name in ("demo", "smollm2"):
        if folders := getattr(options, name):
            made[name] = {"evaluations": []}
            for folder in folders:  # a head has an evaluation of its own; the first one found stays
                read = Results.model_validate_json((folder / "results.json").read_bytes())
                found = summary(read)
                compared = {key: found[key] for key in found if key.startswith("over_")}
                made[name] = {**compared, **made[name]}
                made[name]["evaluations"].append(found)
            for key, each in made[name].items():
                if key.startswith("over_"):
                    print(
                        f"{name}: {each['method']} saves {each['value']:.1%} "
                        f"[{each['low']:.1%}, {each['high']:.1%}] over {each['rival']}"
                    )
            called = json.loads(options.calls.read_text(encoding="utf-8"))["drafts"][name]
            made[name]["question_share"] = called["captured"]["immediate, drawn"]["share"]
    write_json(options.out, made)


if __name__ == "__main__":
    main()
