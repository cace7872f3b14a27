"""Records of generations, and the files they are stored in.

An evaluation writes a file for each finished prompt, so one that was interrupted goes on with the
next. `eval.measuring.metrics` turns the records into the published metrics.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import BaseModel, ConfigDict

from specdata.errors import ManifestError
from specdata.storage.files import write_json
from specdata.storage.resume import Settings, read_record

if TYPE_CHECKING:
    from eval.rounds import Generation, Round
    from specdata.prompts.prompt import Prompt

RECORD_REMEDY = "remove it, and run again"


class Strict(BaseModel):
    """Base of what is stored: no unknown field, no silent conversion, no NaN."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


@dataclass(frozen=True, slots=True)
class PromptRecord:
    """The record of one generation; every published metric is a function of these.

    Args:
        prompt_id: names the prompt; the generations of one prompt are resampled together.
        tokens: emitted tokens (N in the paper's letters).
        finish: "eos" or "length".
        rounds: forwards of the target (N_target).
        n_draft: drafted nodes, of which `n_discarded` were not accepted.
        depth: sum over rounds of the deepest drafted position; equals n_draft for chains.
        drafted_by_position: rounds that drafted at least i + 1 deep, for i = 0, 1, ...
        accepted_by_position: rounds that accepted at least i + 1 tokens.
        seconds: wall time of the whole call, prefill included; 0 if it was not measured.
        prompt_seconds: those of the first target's forward, which reads the prompt.
        cpu_seconds: those in which the decoding thread ran on a core; 0 if it was not measured.
        variation: for a biased verifier, the summed total variation between the distributions of
            emitted tokens and the target's, over `variation_tokens` of them.
        scores: name -> score of the text (`eval.measuring.scores`), those that were asked for.
        beyond: rounds whose text was longer than the draft has positions: nothing drafted.
    """

    prompt_id: str
    tokens: int
    finish: str
    rounds: int
    n_draft: int
    n_discarded: int
    accepted: int
    depth: int
    drafted_by_position: list[int]
    accepted_by_position: list[int]
    draft_forwards: int
    seconds: float
    draft_seconds: float
    target_seconds: float
    overhead_seconds: float
    prompt_seconds: float = 0.0
    cpu_seconds: float = 0.0
    variation: float = 0.0
    variation_tokens: int = 0
    scores: dict[str, float] = field(default_factory=dict)
    beyond: int = 0


@dataclass(frozen=True, slots=True)
class Text:
    """What one generation wrote.

    Attributes:
        rounds: of each its accepted tokens, its emitted tokens, and its forwards of the draft.
    """

    tokens: list[int]
    rounds: list[list[int]]

    @classmethod
    def of(cls, out: Generation) -> Text:
        """That of a generation."""
        rounds = [[each.accepted, each.emitted, each.draft_forwards] for each in out.rounds]
        return cls(out.tokens.tolist(), rounds)


def record_prompt(
    prompt_id: str,
    rounds: Sequence[Round],
    *,
    seconds: float | None,
    finish: str,
    cpu_seconds: float = 0.0,
) -> PromptRecord:
    """Sum the rounds of one generation, in order, of a prompt that is named within its dataset.

    The seconds are wall time of the whole call, after the caller has synchronised the device; None
    if it was not measured, as of prompts that are decoded together.
    """
    deepest = range(max(r.depth for r in rounds))
    drafted, accepted = sum(r.drafted for r in rounds), sum(r.accepted for r in rounds)
    return PromptRecord(
        prompt_id=prompt_id,
        tokens=sum(r.emitted for r in rounds),
        finish=finish,
        rounds=len(rounds),
        n_draft=drafted,
        n_discarded=drafted - accepted,
        accepted=accepted,
        depth=sum(r.depth for r in rounds),
        drafted_by_position=[sum(r.depth > i for r in rounds) for i in deepest],
        accepted_by_position=[sum(r.accepted > i for r in rounds) for i in deepest],
        draft_forwards=sum(r.draft_forwards for r in rounds),
        seconds=seconds or 0.0,
        cpu_seconds=cpu_seconds if seconds else 0.0,
        draft_seconds=sum(r.draft_seconds for r in rounds),
        target_seconds=sum(r.target_seconds for r in rounds),
        overhead_seconds=sum(r.overhead_seconds for r in rounds),
        prompt_seconds=rounds[0].target_seconds,
    )


def check_identity(record: PromptRecord) -> None:
    """Check N_draft + N_target = N + N_discarded, one more if the last bonus was not emitted.

    That bonus is missing exactly when the sequence ended with an accepted token: every round pays
    for its emitted tokens with drafted ones and one forward of the target. Raises ValueError.
    """
    excess = record.n_draft + record.rounds - record.tokens - record.n_discarded
    if excess not in (0, 1) or record.accepted != record.n_draft - record.n_discarded:
        raise ValueError(
            f"prompt {record.prompt_id!r}: n_draft + n_target must equal tokens + n_discarded (or"
            f" one more after an accepted last token), got {record.n_draft} + {record.rounds} and"
            f" {record.tokens} + {record.n_discarded}; count drafted, accepted and emitted tokens"
            " of the same rounds"
        )


def record_file(folder: Path, prompt: Prompt) -> Path:
    """The file of a prompt in a folder of records."""
    return folder / f"{prompt.dataset}-{prompt.example_id}.json"


class RecordStore:
    """The records of finished prompts on disk, one JSON file a prompt.

    Args:
        methods: names of the methods that every prompt has a record of.
        settings: where they are made; stored in every file, and compared when it is read.
    """

    def __init__(self, folder: Path, methods: Sequence[str], settings: Settings) -> None:
        self._folder = folder
        self._methods = tuple(methods)
        self._settings = settings

    def has(self, prompt: Prompt) -> bool:
        """True if this prompt is done."""
        return record_file(self._folder, prompt).exists()

    def put(
        self, prompt: Prompt, records: Mapping[str, PromptRecord], texts: Mapping[str, Text]
    ) -> None:
        """Keep the records of a prompt, one a method: all of them or none; and texts of some."""
        rows, written = (
            {name: asdict(each) for name, each in of_method.items()}
            for of_method in (records, texts)
        )
        stored = {"settings": self._settings.values, "records": rows, "texts": written}
        write_json(record_file(self._folder, prompt), stored)

    def texts(self, prompt: Prompt) -> dict[str, Text]:
        """Method -> text after a prompt that is done, if its texts were kept."""
        stored = read_record(record_file(self._folder, prompt), ("texts",), RECORD_REMEDY)
        return {name: Text(**text) for name, text in stored["texts"].items()}

    def get(self, prompt: Prompt) -> dict[str, PromptRecord]:
        """Method -> record of a prompt that is done."""
        path = record_file(self._folder, prompt)
        stored = read_record(path, ("settings", "records"), RECORD_REMEDY)
        self._settings.check(stored["settings"], self._folder)
        try:
            return {name: PromptRecord(**stored["records"][name]) for name in self._methods}
        except (KeyError, TypeError) as error:
            raise ManifestError(f"{path} is damaged ({error!r}): {RECORD_REMEDY}") from error
