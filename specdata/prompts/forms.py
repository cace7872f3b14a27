"""The way from a row of a set to prompts: texts from templates, questions, conversations."""

from __future__ import annotations

import dataclasses
import difflib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from string import Formatter
from typing import Any, NamedTuple

from specdata.config import PromptSet
from specdata.errors import ConfigError
from specdata.prompts.catalogue import CATALOGUE, NATURAL, Form
from specdata.prompts.chat_templates import Message

MESSAGES = Form(
    messages="messages", roles={"system": "system", "user": "user", "assistant": "assistant"}
)


@dataclass(frozen=True, slots=True)
class RawPrompt:
    """A prompt before it is tokenized: a text, or messages and the user's later turns.

    `reference` is what its answer is scored against, if the row has one.
    """

    text: str = ""
    messages: tuple[Message, ...] = ()
    follow_ups: tuple[str, ...] = ()
    reference: str | None = None


class Unusable(NamedTuple):
    """No prompt: the reason (one of `loading.REASONS`), and what is wrong in words."""

    reason: str
    why: str


def recorded_form(row: Mapping[str, Any]) -> Form | None:
    """The form of a row that holds a conversation, OpenAI's or ShareGPT's; None if it does not."""
    forms = (MESSAGES, CATALOGUE["sharegpt"].form)
    return next((form for form in forms if form.messages in row), None)


def form_of(dataset: PromptSet, row: Mapping[str, Any]) -> Form:
    """The way from rows of a set to prompts: as catalogued, by its template, or by its columns.

    A row with a conversation (`messages` or `conversations`) and a `prompt` is read by the former.
    """
    catalogued = CATALOGUE.get(dataset.name)
    if dataset.template is not None:
        asks = dataset.name in NATURAL or (
            catalogued is not None and bool(catalogued.form.ask or catalogued.form.questions)
        )
        form = Form(ask=(dataset.template,) if asks else (), plain=(dataset.template,))
        if catalogued:
            base = catalogued.form
            form = dataclasses.replace(form, keep=base.keep, reference=base.reference)
    elif catalogued:
        form = catalogued.form
    elif dataset.name in NATURAL:
        form = Form(ask=("{prompt}",), plain=("{prompt}",))
    else:
        form = recorded_form(row) or Form(plain=("{prompt}",))
        if not form.messages:
            require_columns(["prompt"], row, f"prompt set {dataset.name!r}")
    if reference := dataset.reference or form.reference or ("reference" in row and "{reference}"):
        if dataset.reference:
            names = [name.split(".")[0] for _, name in parse_template(reference) if name]
            require_columns(names, row, f"prompt set {dataset.name!r}")
        form = dataclasses.replace(form, reference=reference)
    if form.messages and dataset.chat is False:
        raise ConfigError(
            f"prompt set {dataset.name!r} holds conversations, which only a chat template renders: "
            "leave `chat` out, or give a `template` for their text"
        )
    if form.questions and dataset.chat is False and dataset.turns != "first":
        raise ConfigError(
            f"prompt set {dataset.name!r}: later turns need the chat template, so with `chat: "
            "false` give `turns: first`"
        )
    if form.questions and dataset.turns == "last":
        raise ConfigError(
            f"prompt set {dataset.name!r}: a later turn depends on the model's answer, so `turns` "
            "may be all (later ones are asked in order) or first"
        )
    return form


def uses_chat(dataset: PromptSet, form: Form, has_template: bool) -> bool:
    """True if prompts of a set are rendered with the chat template.

    Conversations always are. What is meant as an instruction or a question is if there is a
    template; a `prompt` column and text to continue are only if the set says `chat: true`.
    """
    if form.messages:
        return True
    if dataset.chat is not None:
        return dataset.chat
    if form.questions and not has_template and dataset.turns != "first":
        raise ConfigError(
            f"prompt set {dataset.name!r} has questions of several turns, and the target has no "
            "chat template, which later turns need: save one with its tokenizer "
            "(chat_template.jinja in its folder), or ask the first alone with `turns: first`"
        )
    if form.questions:
        return has_template
    return bool(form.ask) and has_template


def prompts_in(
    row: Mapping[str, Any], form: Form, *, chat: bool, turns: str
) -> Iterator[RawPrompt | Unusable]:
    """The prompts of a row, or why it has none.

    With `chat` a text is the user's message rather than the prompt; `turns` is "all", "first" or
    "last" of a user's turns.
    """
    if form.messages:
        recorded = row[form.messages]
        if recorded is None and row.get("prompt"):
            raise ConfigError(
                f"a prompt set mixes rows that have `{form.messages}` with rows that have a "
                "`prompt`: make two sets of them"
            )
        messages = messages_of(recorded, form)
        # The conversation up to each of the user's turns, or up to one of them.
        ends = [at for at, message in enumerate(messages or (), 1) if message["role"] == "user"]
        ends = ends[{"all": slice(None), "first": slice(1), "last": slice(-1, None)}[turns]]
        role, content = form.keys
        if messages is None:
            must = f"`{form.messages}` must be a list of {{{role}, {content}}}, which are texts"
            yield Unusable("undecodable", must)
        elif not ends:
            roles = ", ".join(form.roles)
            yield Unusable("no_user_turn", f"it needs a user's turn, and roles of {roles} alone")
        for end in ends:
            yield RawPrompt(messages=tuple((messages or ())[:end]))
    elif form.questions and chat:
        asked = row[form.questions]
        if not asked or not _are_texts(asked):
            yield Unusable("undecodable", f"`{form.questions}` must be a list of texts")
        else:
            later = tuple(asked[1:]) if turns == "all" else ()
            yield RawPrompt(messages=({"role": "user", "content": asked[0]},), follow_ups=later)
    else:
        text = _fill((form.ask if chat else ()) or form.plain, row)
        if text is None:
            columns = ", ".join(f"`{name}`" for name in columns_of(form))
            yield Unusable("undecodable", f"{columns} must hold text")
            return
        if form.keep < 1:
            words = text.split()
            text = " ".join(words[: max(1, int(form.keep * len(words)))])
        reference = (_fill([form.reference], row) or None) if form.reference else None
        if chat:
            yield RawPrompt(messages=({"role": "user", "content": text},), reference=reference)
        else:
            yield RawPrompt(text, reference=reference)


def _are_texts(values: Any) -> bool:
    return (
        isinstance(values, Sequence)
        and not isinstance(values, str)
        and all(isinstance(value, str) for value in values)
    )


def messages_of(recorded: Any, form: Form) -> list[Message] | None:
    """A recorded conversation as messages; None if it is not made of texts.

    It has no messages if it has a role that the form does not know.
    """
    role, content = form.keys
    if not isinstance(recorded, Sequence) or not all(
        isinstance(turn, Mapping) for turn in recorded
    ):
        return None
    if not _are_texts([turn.get(content) for turn in recorded]):
        return None
    roles = [form.roles.get(str(turn.get(role))) for turn in recorded]
    messages = [
        {"role": name, "content": turn[content]}
        for name, turn in zip(roles, recorded, strict=True)
        if name
    ]
    return messages if len(messages) == len(recorded) else []


def require_columns(needed: Iterable[str], row: Mapping[str, Any], where: str) -> None:
    """Raise ConfigError for a column that is not there, naming those that are and the nearest."""
    for name in needed:
        if name not in row:
            near = difflib.get_close_matches(name, row, n=1, cutoff=0.5)
            raise ConfigError(
                f"{where} has no column {name!r}; it has {', '.join(map(repr, row)) or 'none'}"
                f"{f' (did you mean {near[0]!r}?)' if near else ''}. Rename it, or give a "
                "`template` such as '{" + (near[0] if near else next(iter(row), "column")) + "}'"
            )


def columns_of(form: Form) -> list[str]:
    """The columns that a form reads."""
    if single := form.questions or form.messages:
        return [single]
    texts = (*form.ask, *form.plain)
    names = [name for text in texts for _, name in parse_template(text) if name]
    return list(dict.fromkeys(name.split(".")[0] for name in names))


@cache
def parse_template(template: str) -> tuple[tuple[str, str | None], ...]:
    """Pairs of literal text and the name in braces after it. Raises ConfigError if unusable."""
    try:
        parts = list(Formatter().parse(template))
    except ValueError as error:
        raise ConfigError(
            f"unusable template {template!r}: {error}; write {{column}} for a column's text, and "
            "{{ or }} for a brace"
        ) from error
    for _, name, form, conversion in parts:
        if name is not None and (form or conversion or not re.fullmatch(r"\w+(\.\w+)*", name)):
            raise ConfigError(
                f"unusable template {template!r}: braces may hold a column's name or column.key, "
                f"got {name!r}"
            )
    if all(name is None for _, name, _, _ in parts):
        raise ConfigError(f"unusable template {template!r}: it names no {{column}}")
    return tuple((text, name) for text, name, _, _ in parts)


def _fill(templates: Sequence[str], row: Mapping[str, Any]) -> str | None:
    """The first template whose columns are all filled.

    None if a column is no text; empty if none is filled, or what fills one has no letter or digit
    (the template's own words do not make a prompt of an empty question).
    """
    for template in templates:
        values = [_value(row, name) for _, name in parse_template(template) if name]
        if not all(value is None or isinstance(value, str) for value in values):
            return None
        if all(value and value.strip() for value in values):
            if not any(map(str.isalnum, "".join(values))):
                return ""
            rest = iter([*values, ""])
            return "".join(
                text + (next(rest) if name else "") for text, name in parse_template(template)
            )
    return ""


def _value(row: Mapping[str, Any], name: str) -> Any:
    """The value of `column`, `column.key` or `column.0`; None if there is none."""
    value: Any = row
    for key in name.split("."):
        if isinstance(value, Mapping):
            value = value.get(key)
        elif isinstance(value, list | tuple) and key.isdigit() and int(key) < len(value):
            value = value[int(key)]
        else:
            return None
    return value


def is_unicode(text: str) -> bool:
    """False if a text holds half of a surrogate pair, as JSON may."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
