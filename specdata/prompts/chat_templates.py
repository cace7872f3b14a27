"""Conversations as token ids: the model's own chat template, and loss masks."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from datetime import date
from functools import cache, lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

from specdata.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Message = dict[str, Any]
"""`role` and `content`, which are texts, and of `FIELDS` what it has."""
THOUGHTS = ("reasoning_content", "reasoning", "thinking")
FIELDS = ("tool_calls", *THOUGHTS, "tool_call_id", "name")

_MARKER = re.compile(r"\{%-?\s*generation\s*-?%\}")
_TODAY = re.compile(r"""strftime_now\s*\(\s*(?:"([^"]+)"|'([^']+)')\s*\)""")
DAY = date(2024, 7, 26)
"""The date that templates write as today's (the one that Llama 3's have without a clock), where
they say how as a text: prompts are the same tomorrow. A template's own variable, such as Llama's
`date_string`, precedes."""
_NONE = re.compile(
    r"(?<![\w.\])])(\w+(?:\.\w+)*)"  # a whole name, such as loop.previtem
    r"(\.content\b|\[['\"]content['\"]\])\s*(\bis\s+not|\bis|==|!=)\s+([nN]one)\b"
)
_BLANK = "\ue000"  # stands for what somebody says; a private character, which no text holds


class Conversation(NamedTuple):
    """Messages, and what else their template is given: `tools`, and variables that it reads."""

    messages: list[Message]
    variables: dict[str, Any]


class TemplateRefusedError(ConfigError):
    """A chat template does not take a conversation, or would leave out a part of it."""


class UnmaskableError(ConfigError):
    """A chat template hides which tokens of a conversation the assistant wrote."""


def chat_text(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Message],
    variables: Mapping[str, Any] = {},
) -> str:
    """Render a conversation with the target's chat template, and what opens an answer after it.

    Raises TemplateRefusedError if the template fails, or leaves out what somebody says or a
    variable.
    """
    return _Template(tokenizer, variables).whole(messages, reply=True)


def chat_ids(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Message],
    variables: Mapping[str, Any] = {},
) -> list[int]:
    """The token ids of `chat_text`."""
    return text_ids(tokenizer, [chat_text(tokenizer, messages, variables)], is_chat=True)[0]


def unread_settings(tokenizer: PreTrainedTokenizerBase, variables: Mapping[str, Any]) -> list[str]:
    """The settings among these variables that are on and that the template ignores."""
    return [f"`chat_template_kwargs.{name}`" for name in _Template(tokenizer, variables).unread()]


def text_ids(
    tokenizer: PreTrainedTokenizerBase, texts: Sequence[str], *, is_chat: bool
) -> list[list[int]]:
    """Token ids of texts, which a fast tokenizer reads all at once, on every core.

    A chat template writes every special token itself, so the tokenizer adds none. Of a text to
    continue, what the tokenizer puts before a text comes once, and nothing after.
    """
    if not texts:  # which tokenizers refuse
        return []
    if is_chat or not tokenizer.is_fast:
        ids: list[list[int]] = tokenizer(list(texts), add_special_tokens=False)["input_ids"]
        if is_chat:
            return ids
        return list(map(_begun, ids, tokenizer(list(texts))["input_ids"]))
    out = tokenizer(list(texts), return_special_tokens_mask=True, return_attention_mask=False)
    return [
        _begun([token for token, is_added in zip(whole, added, strict=True) if not is_added], whole)
        for whole, added in zip(out["input_ids"], out["special_tokens_mask"], strict=True)
    ]


def _begun(ids: list[int], whole: list[int]) -> list[int]:
    """A text's ids, with what stands before them in `whole` unless they begin with it."""
    places = range(len(whole) - len(ids) + 1)
    before = next((n for n in places if whole[n : n + len(ids)] == ids), None)
    if before is None:  # what comes before changes the first token
        return whole
    return ids if ids[:before] == whole[:before] else whole[: before + len(ids)]


def require_template(tokenizer: PreTrainedTokenizerBase | None) -> None:
    """Raise ConfigError if a tokenizer, None for one that is not loaded, has no chat template."""
    if tokenizer is None or not tokenizer.chat_template:
        raise ConfigError(
            f"the tokenizer of {getattr(tokenizer, 'name_or_path', '') or 'the target'} has no "
            "chat template, which conversations need: save one with it (chat_template.jinja in its "
            "folder), take a target that was tuned to chat, or use prompts that are plain text"
        )


def assistant_mask(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Message],
    variables: Mapping[str, Any] = {},
) -> tuple[list[int], list[int]]:
    """The tokens of a conversation that the assistant wrote, its end-of-turn tokens included.

    Where the template has `{% generation %}` markers they decide. Otherwise an answer is the part
    of the rendered text that changes with what the message says, from the end of its prompt on if
    the text begins with that, less an empty block of thoughts, which the template writes. Returns
    the ids of the whole conversation, and a mask of 0 and 1 of the same length.
    """
    template = _Template(tokenizer, variables)
    whole = template.whole(messages)
    for weight in (message.get("weight", 1) for message in messages):
        if weight not in (0, 1):
            raise UnmaskableError(f"an answer is learnt or not (0, 1, true, false), not {weight}")
    if not tokenizer.is_fast:
        raise ConfigError(
            "conversations need a tokenizer that tells where its tokens begin: save a fast one "
            f"(tokenizer.json) for {tokenizer.name_or_path or 'the target'}"
        )
    if _MARKER.search(template.program):
        if any(message.get("weight") == 0 for message in messages):
            raise UnmaskableError("an answer has weight 0, and the template marks every answer")
        for index, message in enumerate(messages):
            if message["role"] == "assistant" and template.cuts(messages, index, whole):
                raise UnmaskableError(
                    f"of turn {message['content'][:80]!r} the chat template leaves out a part, "
                    "such as its thoughts"
                )
        out = tokenizer.apply_chat_template(
            template.known(messages),
            chat_template=template.source,
            return_assistant_tokens_mask=True,
            **variables,
        )
        ids, mask = out["input_ids"], out["assistant_masks"]
    else:
        out = tokenizer(whole, add_special_tokens=False, return_offsets_mapping=True)
        ids, places = out["input_ids"], out["offset_mapping"]
        mask = [0] * len(ids)
        added = set(tokenizer.get_added_vocab().values())
        # Tokens that may end a turn.
        ends = [
            place
            for token, place in zip(ids, places, strict=True)
            if token in added and whole[slice(*place)].strip()
        ]
        for index, message in enumerate(messages):
            if message["role"] == "assistant" and message.get("weight") != 0:
                begin, stop, closing = template.answer(messages, index, whole)
                # Up to its end token, without the white space that templates put after it.
                closed = [last for first, last in ends if stop <= first and last <= closing]
                nearest = [last for first, last in ends if first == stop]
                stop = max(closed or nearest[:1] or [stop + len(whole[stop:closing].rstrip())])
                if cut := [place for place in places if place[0] < begin < place[1]]:
                    raise UnmaskableError(
                        f"the answer {message['content'][:80]!r} begins inside a token, "
                        f"{whole[slice(*cut[0])]!r}, which its prompt would end with: let the "
                        "chat template keep white space as it comes"
                    )
                for place_index, (first, last) in enumerate(places):
                    mask[place_index] |= begin < last and first < stop
    if len(set(mask)) < 2:
        raise UnmaskableError(
            f"the chat template marks {'every' if any(mask) else 'no'} token as the assistant's"
        )
    return ids, mask


class _Template(NamedTuple):
    """A tokenizer's chat template, and the variables that it is given."""

    tokenizer: PreTrainedTokenizerBase
    variables: Mapping[str, Any]

    @property
    def source(self) -> str:
        """The template that renders a conversation, on `DAY`; see `_settled`."""
        require_template(self.tokenizer)
        return _settled(str(self.tokenizer.get_chat_template(tools=self.variables.get("tools"))))

    @property
    def program(self) -> str:
        """The template without comments."""
        return _without_comments(self.source)

    def known(self, messages: Sequence[Message]) -> list[Message]:
        """Messages as the template reads them.

        `developer` is `system` if it does not name that role, thoughts stand under a name that it
        reads, and contents and calls are in the form that it takes.
        """
        settings = {name: each for name, each in self.variables.items() if not _is_content(each)}
        in_parts, how = _forms(self.tokenizer, self.source, json.dumps(settings, default=str))
        known = []
        for message in map(dict, messages):
            if message["role"] == "developer" and not _reads(self.program, "developer"):
                message["role"] = "system"
            thoughts = {name: message[name] for name in THOUGHTS if name in message}
            if len({*thoughts.values()}) == 1:  # of two that differ, none is another's
                names = [name for name in THOUGHTS if _reads(self.program, name)]
                if name := next((name for name in (*thoughts, *names) if name in names), ""):
                    message = {key: message[key] for key in message if key not in thoughts}
                    message[name] = next(iter(thoughts.values()))
            known.append(_in_form(message, in_parts, how))
        return known

    def render(self, messages: Sequence[Message], *, reply: bool = False) -> str:
        """The text that it makes of messages."""
        try:
            return str(
                self.tokenizer.apply_chat_template(
                    self.known(messages),
                    chat_template=self.source,
                    tokenize=False,
                    add_generation_prompt=reply,
                    **self.variables,
                )
            )
        except Exception as error:  # whatever a program of somebody else's may raise
            raise TemplateRefusedError(
                f"the chat template refuses a conversation of roles "
                f"{', '.join(message['role'] for message in messages)}: {error}"
            ) from error

    def whole(self, messages: Sequence[Message], *, reply: bool = False) -> str:
        """The text. Raises TemplateRefusedError if it would leave out what was given."""
        text, tools = self.render(messages, reply=reply), self.variables.get("tools", ())
        # Of earlier turns templates drop thoughts on purpose, and a setting may change nothing.
        thoughts = {name for each in self.known(messages) for name in THOUGHTS if name in each}
        kept = self.unread()
        given = [name for name, value in self.variables.items() if value and name not in kept]
        is_read = {name: _reads(self.program, name) for name in thoughts}
        is_read |= {name: bool(re.search(rf"\b{name}\b", self.program)) for name in given}
        for name in given:
            if is_read[name] and name != "tools" and _is_content(self.variables[name]):
                rest = {key: each for key, each in self.variables.items() if key != name}
                with suppress(TemplateRefusedError):  # which cannot do without it
                    is_read[name] = (
                        self._replace(variables=rest).render(messages, reply=reply) != text
                    )
        lost = [f"`{name}`" for name in sorted(is_read) if not is_read[name]]
        names = [str(tool.get("function", tool).get("name")) for tool in tools]
        lost += ["`tools`"] * any(name not in text for name in names)
        for index, message in enumerate(messages):
            changes: dict[str, dict[str, Any]] = {}
            if calls := message.get("tool_calls"):
                other_name = {"function": {"name": _BLANK, "arguments": {}}}
                changes["`tool_calls`"] = {"tool_calls": [each | other_name for each in calls]}
            # Templates take thoughts that stand in the content for thoughts.
            if message["content"].rsplit("</think>")[-1].strip() not in text:
                changes[f"what the role {message['role']} says"] = {"content": _BLANK}
            for part, change in changes.items():
                changed = [*messages[:index], message | change, *messages[index + 1 :]]
                lost += [part] * (self.render(changed, reply=reply) == text)
        if lost:
            parts = ", ".join(dict.fromkeys(lost))
            raise TemplateRefusedError(f"the chat template leaves out {parts}")
        return text

    def unread(self) -> list[str]:
        """The settings that are on, and that it does not name: no text is lost."""
        kinds = (bool, int, float, str)
        given = {name: each for name, each in self.variables.items() if type(each) in kinds}
        on = [name for name, value in given.items() if value and not _is_content(value)]
        return [name for name in on if not re.search(rf"\b{name}\b", self.program)]

    def cuts(self, messages: Sequence[Message], index: int, whole: str) -> bool:
        """True if a part of an answer, its thoughts too, is not in the text that ends with it."""
        message = messages[index]
        parts = [*re.split("</?think>", message["content"]), *map(message.get, THOUGHTS)]
        with suppress(TemplateRefusedError):  # which may want a user's turn in every conversation
            whole = self.render(messages[: index + 1])
        return any((part or "").strip() not in whole for part in parts)

    def answer(self, messages: Sequence[Message], index: int, whole: str) -> tuple[int, int, int]:
        """The places in a rendered text where an answer begins and stops, and its closing ends."""
        message, before, after = messages[index], messages[:index], messages[index + 1 :]
        calls = message.get("tool_calls", [])
        thoughts = [name for name in THOUGHTS if name in message]
        no_calls = dict(message)
        if calls:
            empty = {"arguments": {_BLANK: _BLANK}}
            emptied = [each | {"function": each["function"] | empty} for each in calls]
            no_calls["tool_calls"] = emptied
        blank = {**no_calls, "content": _BLANK, **dict.fromkeys(thoughts, _BLANK)}
        last = no_calls if calls else blank  # calls come last; results of tools may follow
        common = _common(whole, self.render([*before, blank, *after]))
        stop = len(whole) - _common(whole[::-1], self.render([*before, last, *after])[::-1])
        begin, closing = common, whole[stop:]
        with suppress(TemplateRefusedError):  # which may want a user's turn in every conversation
            if after:
                closing = ""
                part = self.render(messages[: index + 1])
                without = self.render([*before, last])
                closing = part[len(part) - _common(part[::-1], without[::-1]) :]
            if before and whole.startswith(served := self.render(before, reply=True)):
                is_empty = whole[:common].rpartition("<think>")[2].strip() == "</think>"
                begin = common if is_empty else min(common, len(served))
        rendered, answer = whole[begin:stop], message["content"].rsplit("</think>")[-1].strip()
        needed = [answer, *(call["function"]["name"] for call in calls)]
        is_plain = not (calls or thoughts) and "</think>" not in message["content"]
        if (
            (is_plain and whole[common:stop].strip() != answer)
            or any(text not in rendered for text in needed)
            or self.cuts(messages, index, whole)
        ):
            raise UnmaskableError(
                f"turn {message['content'][:80]!r} is rendered as {rendered[:80]!r}: the chat "
                "template changes, moves or leaves out what the assistant says; mark its part of "
                "the template with {% generation %} and {% endgeneration %}"
            )
        return begin, stop, stop + _common(whole[stop:], closing)


@cache
def _settled(template: str) -> str:
    """A template on `DAY`, to which no content beside calls is none: it can be given no None."""
    none = r"(\1\2 if \1\2 or not \1.tool_calls else none) \3 \4"
    template = _NONE.sub(none, template)
    return _TODAY.sub(lambda day: repr(DAY.strftime(day[1] or day[2])), template)


@cache
def _without_comments(template: str) -> str:
    return re.sub(r"\{#.*?#\}", "", template, flags=re.DOTALL)


def _common(one: str, other: str) -> int:
    """The number of characters with which both texts begin."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((n for n, (a, b) in pairs if a != b), min(len(one), len(other)))


@cache
def _reads(program: str, key: str) -> bool:
    """True if a template names a key of messages, or a role."""
    return bool(re.search(rf"\.{key}\b|['\"]{key}['\"]", program))


def _is_content(value: Any) -> bool:
    """True for a variable that says something, rather than set something: lists, and sentences."""
    return len(value.split()) > 1 if isinstance(value, str) else isinstance(value, Collection)


_CALL_FORMS = (("", False), (None, False), ("", True), (None, True))
"""A call's content where nothing is said beside it, and whether its arguments are JSON text."""


@lru_cache(maxsize=64)
def _forms(
    tokenizer: PreTrainedTokenizerBase, source: str, settings: str
) -> tuple[frozenset[str], tuple[str | None, bool]]:
    """The roles whose content a template reads as parts alone, and the first of `_CALL_FORMS`.

    Found by what it shows of `_BLANK`: what it shows in neither form stays as it is.
    """

    def shows(roles: Sequence[str], parts: Collection[str], how: Any = None) -> bool:
        talk: list[Message] = [{"role": role, "content": "x"} for role in roles]
        if how is None:
            talk[-1]["content"] = _BLANK
        else:
            call = {"name": _BLANK, "arguments": {"x": "x"}}
            talk[-1] |= {"content": "", "tool_calls": [{"type": "function", "function": call}]}
        try:
            return _BLANK in str(
                tokenizer.apply_chat_template(
                    [_in_form(each, parts, how or _CALL_FORMS[0]) for each in talk],
                    chat_template=source,
                    tokenize=False,
                    **json.loads(settings),
                )
            )
        except Exception:  # noqa: BLE001 - whatever a program of somebody else's may raise
            return False

    parts: set[str] = set()
    for role in ("user", "assistant", "system", "developer", "tool"):
        roles = {"user": ["user"], "assistant": ["user", role], "tool": ["user", "assistant", role]}
        talk = roles.get(role, [role, "user"])
        if not shows(talk, parts) and shows(talk, {*parts, role}):
            parts.add(role)
    called = (how for how in _CALL_FORMS if shows(["user", "assistant"], parts, how))
    return frozenset(parts), next(called, _CALL_FORMS[0])


def _in_form(message: Message, parts: Collection[str], how: tuple[str | None, bool]) -> Message:
    """A message whose content is a text part if its role is in `parts`, and its calls as `how`."""
    content, as_text = how
    message = dict(message)
    if message["role"] in parts and message["content"]:
        message["content"] = [{"type": "text", "text": message["content"]}]
    if calls := message.get("tool_calls"):
        message["content"] = message["content"] or ([] if "assistant" in parts else content)
        if as_text:
            texts = [
                json.dumps(each["function"]["arguments"], ensure_ascii=False) for each in calls
            ]
            message["tool_calls"] = [
                each | {"function": each["function"] | {"arguments": text}}
                for each, text in zip(calls, texts, strict=True)
            ]
    return message
