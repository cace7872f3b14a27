"""What-if: from the counts of one run to the speed-up at other forward times."""

from __future__ import annotations

from eval.measuring.records import record_prompt
from eval.rounds import Round


def test_a_record_keeps_the_targets_seconds_by_the_tokens_that_it_scored() -> None:
    rounds = [
        Round(2, 2, 1, 2, 3, 0.5, 4.0, 0.1),  # reads the prompt
        Round(2, 2, 2, 3, 2, 0.2, 1.25, 0.1),
        Round(0, 0, 0, 1, 0, 0.0, 1.0, 0.1),
        Round(2, 2, 0, 1, 2, 0.2, 1.5, 0.1),
    ]
    record = record_prompt("a", rounds, seconds=9.0, finish="length", prompt_tokens=7)
    assert record.prompt_tokens == 7
    assert record.first_draft_forwards == 3
    assert (record.first_draft_seconds, record.first_target_seconds) == (0.5, 4.0)
    assert record.later_rounds == [1, 0, 2]
    assert record.later_target_seconds == [1.0, 0, 2.75]
    only = record_prompt("b", rounds[:1], seconds=9.0, finish="length")
    assert (only.later_rounds, only.later_target_seconds) == ([], [])
