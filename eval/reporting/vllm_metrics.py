"""The acceptance of an evaluation under the names that vLLM and specdec_bench give it.

Per request as vLLM 0.32.0 answers with `--per-request-spec-decode-metrics summary`, pooled as `vllm
bench serve` saves it (`spec_decode_*`) and as specdec_bench of NVIDIA's Model-Optimizer does
(`Average_AL`, ...). docs/results.md has every definition beside ours.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

from eval.measuring.results import Run


def vllm_metrics(run: Run) -> dict[str, Any]:
    """A run that drafted as JSON values, pooled and request by request."""
    records, requests = run.generations, []
    longest = max(
        run.method.deepest if run.draft else 0,
        *(len(each.accepted_by_position) for each in records),
    )
    pooled = [0] * (longest + 1)  # rounds that drafted and accepted at least 0, 1, ... tokens
    for record in records:
        # The last token of a budget is drafted for by none, so not every round is one.
        steps = sum(record.drafted_by_position[:1])
        reached = [steps, *record.accepted_by_position]
        reached += [0] * (longest + 1 - len(reached))
        pooled = [before + here for before, here in zip(pooled, reached, strict=True)]
        summary = {
            "mean_acceptance_length": 1 + record.accepted / max(1, steps),
            "draft_acceptance_rate": record.accepted / max(1, record.n_draft),
            "acceptance_histogram": [more - less for more, less in pairwise([*reached, 0])],
            "num_spec_steps": steps,
            "num_accepted_draft_tokens": record.accepted,
            "num_draft_tokens": record.n_draft,
            "num_spec_tokens": longest,
        }
        requests.append(
            {
                "id": record.prompt_id,
                "usage": {"completion_tokens": record.tokens},
                "metrics": {"speculative_decoding": summary},
            }
        )
    drafts, *by_position = pooled
    accepted = sum(record.accepted for record in records)
    # Every round emits a token, so a length of 1 or more is certain.
    joint = [run.rounds, *by_position]
    conditional = [1.0, *(now / before for before, now in pairwise(joint) if before)]
    return {
        "dataset": run.dataset,
        "method": run.name,
        "spec_decode_acceptance_length": 1 + accepted / drafts,
        "spec_decode_acceptance_rate": 100 * accepted / run.n_draft,
        "spec_decode_num_drafts": drafts,
        "spec_decode_draft_tokens": run.n_draft,
        "spec_decode_accepted_tokens": accepted,
        "spec_decode_per_position_acceptance_rates": [count / drafts for count in by_position],
        "Average_AL": sum(record.tokens / record.rounds for record in records) / len(records),
        "Joint_Acceptance_Rate": {str(n): count / run.rounds for n, count in enumerate(joint, 1)},
        "Conditional_Acceptance_Rate": {str(n): share for n, share in enumerate(conditional, 1)},
        "requests": requests,
    }
