"""Always the same number of tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from pydantic import Field

from eval.drafting.stopping.rule import ActiveRule, DraftedToken, Family, ShouldStop, StoppingRule

if TYPE_CHECKING:
    from eval.drafting.stopping.recorded import Lengths, RecordedTokens
    from heads import BaseHead


class Fixed(StoppingRule):
    """Draft `length` tokens a round: speculative decoding with a fixed K.

    Leviathan et al. 2023 (arXiv:2211.17192), Chen et al. 2023 (arXiv:2302.01318). The one rule of
    drafts that branch: `length` is then that of each path, and a tree's depth is in its widths.
    """

    name: ClassVar[str] = "fixed"
    adaptive: ClassVar[bool] = False
    family: ClassVar[Family] = "fixed"

    length: int = Field(default=4, ge=1, description="tokens drafted a round, on each path")

    @property
    def longest(self) -> int:
        """The length itself."""
        return self.length

    def recorded_lengths(self, tokens: RecordedTokens) -> Lengths:
        """The length, or what is left."""
        from eval.drafting.stopping.recorded import constant_length

        return constant_length(tokens, self.length)

    def start(self, head: BaseHead | None) -> ActiveRule:
        """Nothing is asked of the tokens."""
        return ActiveRule(self.length, _never)


def _never() -> ShouldStop:
    def should_stop(drafted: DraftedToken) -> bool:
        return False

    return should_stop
