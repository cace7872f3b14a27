"""What several files of tests use of `test_metrics`."""

from eval.measuring.records import PromptRecord, record_prompt
from eval.rounds import Round


def one_round(
    drafted: int, accepted: int, *, depth: int | None = None, emitted: int | None = None
) -> Round:
    return Round(
        drafted=drafted,
        depth=drafted if depth is None else depth,
        accepted=accepted,
        emitted=accepted + 1 if emitted is None else emitted,
        draft_forwards=drafted,
        draft_seconds=0.1 * drafted,
        target_seconds=0.5,
        overhead_seconds=0.01,
    )


def by_hand() -> list[PromptRecord]:
    return [
        record_prompt(
            "a", [one_round(3, 3), one_round(3, 1), one_round(2, 0)], seconds=4.0, finish="length"
        ),
        record_prompt("b", [one_round(1, 1, emitted=1)], seconds=1.0, finish="eos"),
    ]
