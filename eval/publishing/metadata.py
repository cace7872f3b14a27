"""The front matter of a model card: what the Hub reads."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from huggingface_hub import ModelCardData

from eval.reporting.rendering import hub_id, hub_refusal, public_name
from specdata.errors import ConfigError

# ISO 639 codes, and the Hub's own two words.
_LANGUAGE = re.compile(r"[a-z]{2,3}|code|multilingual")
# The Hub's identifiers, such as apache-2.0; "other" needs a name and a link that we do not know.
_LICENSE = re.compile(r"(?!other$)[a-z0-9][a-z0-9.+-]*")
ELSEWHERE = "/path/to/"
_TAGS = ("speculative-decoding", "assisted-generation")


@dataclass(frozen=True, slots=True)
class About:
    """The text of a card beside the measurements.

    Args:
        base_model: what it was made from: the draft before training, or the draft that a head
            reads. Like the target, it is left out of the metadata if it is no Hub id.
        language: codes of the languages of the training prompts; left out if not given.
        datasets: data sets that it was trained on; those that are no Hub id are left out.
        measures: figures of the training stage, such as a head's calibration error.
        certificate: what `draftsmith certify` found, in words; None if it was not run.
        chat: variables that the target's chat template was given.
    """

    base_model: str | None = None
    license: str | None = None
    language: Sequence[str] = ()
    datasets: Sequence[str] = ()
    measures: Mapping[str, float | None] = field(default_factory=dict)
    certificate: str | None = None
    chat: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.license is not None and not _LICENSE.fullmatch(self.license):
            raise ConfigError(
                "a license is given by its Hub identifier, such as apache-2.0, mit or llama3.1, "
                f"got {self.license!r}"
            )
        if wrong := [code for code in self.language if not _LANGUAGE.fullmatch(code)]:
            raise ConfigError(
                "a language is given by its ISO 639 code, such as en or de, or as code or "
                f"multilingual, got {wrong[0]!r}"
            )


def check_repository(push_to: str | None) -> None:
    """Raise ConfigError unless this is None or a Hub id that the Hub would take."""
    if push_to is not None and (reason := hub_refusal(push_to)):
        raise ConfigError(f"a repository is named OWNER/NAME on the Hub, got {push_to!r}: {reason}")


def loadable(name: str) -> str:
    """The name that code on a card loads: a Hub id as it is; for a folder a path in its place."""
    return name if hub_id(name) is not None else f"{ELSEWHERE}{public_name(name)}"


def metadata(
    about: About,
    *,
    target: str,
    library: str,
    tags: Sequence[str],
    relation: str,
) -> tuple[ModelCardData, list[str]]:
    """The front matter of a card, and what it does not name because it is no Hub id.

    `relation` is that of the artefact to the draft that it was made from.
    """
    # Of a draft cut from its target both are the same.
    names = list(dict.fromkeys(filter(None, [about.base_model, target])))
    bases = list(filter(None, map(hub_id, names)))
    # A relation is that to the draft; the target is a base model only as what it is made for.
    more: dict[str, Any] = {"base_model_relation": relation} if hub_id(about.base_model) else {}
    names = list(dict.fromkeys([*names, *about.datasets]))
    data = ModelCardData(
        base_model=bases[0] if len(bases) == 1 else bases or None,
        datasets=list(dict.fromkeys(filter(None, map(hub_id, about.datasets)))) or None,
        language=list(about.language) or None,
        library_name=library,
        # What transformers loads with a pipeline: no head, and no draft on its target's states.
        pipeline_tag="text-generation" if library == "transformers" else None,
        license=about.license,
        tags=[*_TAGS, *tags],
        **more,
    )
    return data, [name for name in names if hub_id(name) is None]
