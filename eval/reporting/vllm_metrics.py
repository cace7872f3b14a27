"""The acceptance of an evaluation under the names that vLLM and specdec_bench give it.

Per request as vLLM 0.32.0 answers with `--per-request-spec-decode-metrics summary`, pooled as `vllm
bench serve` saves it (`spec_decode_*`) and as specdec_bench of NVIDIA's Model-Optimizer does
(`Average_AL`, ...). docs/results.md has every definition beside ours.
"""

from __future__ import annotations

from typing import Any

from eval.measuring.records import PromptRecord
from eval.measuring.results import Results, Run

FORMAT = "vLLM 0.32.0"


def vllm_metrics(results: Results) -> dict[str, Any]:
    """The drafting runs of an evaluation as JSON values, pooled and request by request."""
    runs = [_pooled(run) for run in results.runs if run.n_draft]
    return {"format": FORMAT, "runs": runs}


def _pooled(run: Run) -> dict[str, Any]:
    records = run.generations
    by_position = _accepted(run)
    drafts = sum(_drafts(record) for record in records)
    accepted = sum(record.accepted for record in records)
    lengths = [record.tokens / record.rounds for record in records]
    # Every round emits a token, so a length of 1 or more is certain.
    at_least = [run.rounds, *by_position]
    return {
        "dataset": run.dataset,
        "method": run.method,
        "spec_decode_acceptance_length": 1 + accepted / drafts,
        "spec_decode_acceptance_rate": 100 * accepted / run.n_draft,
        "spec_decode_num_drafts": drafts,
        "spec_decode_draft_tokens": run.n_draft,
        "spec_decode_accepted_tokens": accepted,
        "spec_decode_per_position_acceptance_rates": [count / drafts for count in by_position],
        "Average_AL": sum(lengths) / len(lengths),
        "Joint_Acceptance_Rate": {
            str(length): count / run.rounds for length, count in enumerate(at_least, start=1)
        },
        "Conditional_Acceptance_Rate": {
            str(length): count / before
            for length, (count, before) in enumerate(
                zip(at_least, [run.rounds, *at_least], strict=False), start=1
            )
            if before
        },
        "requests": [_request(record, run.length or len(by_position)) for record in records],
    }


def _request(record: PromptRecord, longest: int) -> dict[str, Any]:
    """One generation as the part of a response that vLLM would have sent."""
    drafts = _drafts(record)
    at_least = [drafts, *record.accepted_by_position]
    at_least += [0] * (longest + 2 - len(at_least))
    histogram = [at_least[n] - at_least[n + 1] for n in range(longest + 1)]
    return {
        "id": record.prompt_id,
        "usage": {"completion_tokens": record.tokens},
        "metrics": {
            "speculative_decoding": {
                "mean_acceptance_length": 1 + record.accepted / drafts if drafts else 1.0,
                "draft_acceptance_rate": record.accepted / record.n_draft if drafts else 0.0,
                "acceptance_histogram": histogram,
                "num_spec_steps": drafts,
                "num_accepted_draft_tokens": record.accepted,
                "num_draft_tokens": record.n_draft,
                "num_spec_tokens": longest,
            }
        },
    }


def _drafts(record: PromptRecord) -> int:
    """Rounds that drafted anything; the last token of a budget is drafted for by none."""
    return record.drafted_by_position[0] if record.drafted_by_position else 0


def _accepted(run: Run) -> list[int]:
    """Rounds of a run that accepted at least 1, 2, ... drafted tokens."""
    deepest = max(len(record.accepted_by_position) for record in run.generations)
    return [
        sum(sum(record.accepted_by_position[position : position + 1]) for record in run.generations)
        for position in range(deepest)
    ]
