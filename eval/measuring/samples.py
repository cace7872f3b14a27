"""samples.json: the texts that each method made of a few prompts.

The tokens are kept with the records of a prompt, so an interrupted evaluation loses none. Texts are
made of them once all prompts are done, so that a report needs no tokenizer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from pydantic import ValidationError

from eval.measuring.records import Strict, record_file
from specdata.errors import ManifestError
from specdata.storage.files import write_json
from specdata.storage.resume import read_record

if TYPE_CHECKING:
    from specdata.prompts.prompt import Prompt

SAMPLES = "samples.json"
SCHEMA_VERSION: Literal[1] = 1
PER_SET = 3
"""Prompts of each set whose text is kept: its first."""


class Sample(Strict):
    """One prompt, the name of its set, and by method the text that it made, but the target's."""

    dataset: str
    prompt_id: str
    prompt: str
    methods: dict[str, str]


class Samples(Strict):
    """The whole file."""

    schema_version: Literal[1]
    samples: list[Sample]

    def of(self, dataset: str) -> list[Sample]:
        """Those of one set."""
        return [sample for sample in self.samples if sample.dataset == dataset]


def shown_prompts(prompts: Sequence[Prompt]) -> list[Prompt]:
    """The first prompts of each set."""
    sets: dict[str, list[Prompt]] = {}
    for prompt in prompts:
        sets.setdefault(prompt.dataset, []).append(prompt)
    return [prompt for some in sets.values() for prompt in some[:PER_SET]]


def write_samples(
    prompts: Sequence[Prompt], folder: Path, decode: Callable[[Sequence[int]], str]
) -> Samples:
    """Write the texts of prompts whose tokens were kept; none of an evaluation that kept none.

    `decode` is the tokenizer's, with special tokens and as it is.
    """
    samples = []
    for prompt in shown_prompts(prompts):
        path = record_file(folder / "prompts", prompt)
        if not path.is_file():
            continue
        remedy = "remove it, and run again"
        kept = read_record(path, (), remedy).get("tokens", {})
        try:
            texts = {name: decode(tokens) for name, tokens in kept.items()}
        except (AttributeError, TypeError, ValueError) as error:
            raise ManifestError(f"{path} is damaged ({error!r}): {remedy}") from error
        if texts:
            samples.append(
                Sample(
                    dataset=prompt.dataset,
                    prompt_id=prompt.example_id,
                    prompt=decode(prompt.ids),
                    methods=texts,
                )
            )
    made = Samples(schema_version=SCHEMA_VERSION, samples=samples)
    write_json(folder / SAMPLES, made.model_dump(mode="json"))
    return made


def read_samples(path: Path) -> Samples | None:
    """The samples of an evaluation; None if there is no such file, or it cannot be read."""
    try:
        return Samples.model_validate_json(path.read_bytes())
    except (FileNotFoundError, ValidationError):
        return None
