"""The kinds of draft that verifiers are compared on: how each is drawn, and what it is judged by.

To add one, declare it in `FORMS`: the table of verifiers, its report and the tests find it there.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from types import MappingProxyType
from typing import Any

from eval.decode_config import DecodeConfig
from eval.verifiers import VERIFIERS
from specdata.sampling import SamplingConfig


@dataclass(frozen=True, slots=True)
class DraftForm:
    """A kind of draft.

    Args:
        name: its key in `FORMS`; says "chain", "paths", "siblings" or "tree".
        drafting: how it is drawn, as settings of `DecodeConfig`.
        references: lossless verifiers, without parameters, that end its rounds in the table of
            verifiers; the others are compared with the first.
    """

    name: str
    drafting: Mapping[str, Any]
    references: tuple[str, ...]

    def config(
        self, sampling: SamplingConfig, verifier: str = "", **parameters: Any
    ) -> DecodeConfig:
        """Decoding with such drafts, by the first reference if no verifier is named."""
        return DecodeConfig(
            verifier or self.references[0],
            verifier_args=parameters,
            **self.drafting,
            **asdict(sampling),
        )

    def rows(self) -> list[tuple[str, dict[str, Any]]]:
        """Verifiers that take it, each with the settings worth trying; its references first.

        Those whose residual outlives a round are left out: one round does not tell what they do.
        """
        form = self.config(SamplingConfig()).kind
        rows: list[tuple[str, dict[str, Any]]] = [(name, {}) for name in self.references]
        for name, spec in VERIFIERS.items():
            if name in self.references or form not in spec.takes or spec.residual_persists:
                continue
            # With one candidate a choice among several is no choice: one setting is like all.
            several = spec.branching and form == "chain"
            rows += [(name, dict(each)) for each in (spec.grid[:1] if several else spec.grid)]
        return rows


_CHAIN = ("token", "block", "naive")
_SEVERAL = ("rrs", "traversal", "naive")
_APART = ("rrs_wor", "traversal", "naive")
_GREEDY = ("greedy_draft", "naive")


def _tree(*widths: int, siblings: str = "iid") -> dict[str, Any]:
    return {"drafter": "tree", "widths": widths, "siblings": siblings}


_FORMS = (
    DraftForm("chain of 4", {"length": 4}, _CHAIN),
    DraftForm("chain of 8", {"length": 8}, _CHAIN),
    DraftForm("2 paths of 4", {"drafter": "paths", "paths": 2, "length": 4}, _SEVERAL),
    DraftForm("4 paths of 4", {"drafter": "paths", "paths": 4, "length": 4}, _SEVERAL),
    DraftForm("4 siblings", _tree(4), _SEVERAL),
    DraftForm("4 siblings, distinct", _tree(4, siblings="distinct"), _APART),
    DraftForm("4 siblings, greedy", _tree(4, siblings="greedy"), _GREEDY),
    DraftForm("tree 2x2x1", _tree(2, 2, 1), _SEVERAL),
    DraftForm("tree 2x2x1, distinct", _tree(2, 2, 1, siblings="distinct"), _APART),
    DraftForm("tree 4x2x2", _tree(4, 2, 2), _SEVERAL),
    DraftForm("tree 4x2x2, distinct", _tree(4, 2, 2, siblings="distinct"), _APART),
    DraftForm("tree 4x2x2, greedy", _tree(4, 2, 2, siblings="greedy"), _GREEDY),
    DraftForm(
        "dynamic tree",
        {"drafter": "dynamic_tree", "nodes": 8, "depth": 4, "gain": 0.5},
        ("naive",),
    ),
)
FORMS: Mapping[str, DraftForm] = MappingProxyType({form.name: form for form in _FORMS})
