"""The one reader of rows: texts from templates, questions and conversations become prompts."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import chain
from string import Formatter
from typing import Any, NamedTuple

from specdata.config import PromptSet, nearest
from specdata.errors import ConfigError
from specdata.prompts.catalogue import CATALOGUE, EMBEDDED, NATURAL, Form
from specdata.prompts.chat_templates import FIELDS, Conversation, Message

CALLING = ("function_call", "tool_call")
ROLES = {name: name for name in ("system", "developer", "user", "assistant", "tool")}
ROLES |= {"human": "user", **dict.fromkeys(CALLING, "assistant")}
ROLES |= dict.fromkeys(("gpt", "chatgpt", "bing", "bard", "bot", "chatbot", "model"), "assistant")
ROLES |= dict.fromkeys(("function", "observation", "ipython", "tool_response"), "tool")
"""What exports call the roles of a conversation -> what chat templates call them. Those of
`CALLING` say the call of a tool as JSON text."""
FLAGS = ("weight", "loss", "loss_weight", "loss_mask", "train", "trainable")
_FLAG = re.compile(  # whether a message is to be learnt, or not to be
    r"(?P<no>(mask|ignore|skip|exclude)(d|ed|ped)?$|(mask|ignore|no|not|un)_?(loss|train|learn))"
    r"|(.*_)?(weight|loss|train|learn|supervis)"
)
_MEDIA = re.compile(r"(?<![a-z])(image|img|picture|photo|pixel|video|audio|speech)s?(?![a-z])")
_PLACEHOLDER = re.compile(  # at an end of a line, and not an element that is closed
    r"(?:^|(?=<[^>]{,20}> *$))<\|?(image|video|audio|vision)(_\w+| ?\d+)?\|?>(?![\s\S]*</\1)", re.M
)
QUESTIONS = (
    "instruction",
    "question",
    "problem",
    "query",
    "text",
    "article",
    "document",
    "goal",
    "input",
    "source",
    "sentence",
    "premise",
    "content",
    "task",
    "task_description",
)
"""What columns with a question, or a text to answer, are called."""
_GIVEN = ("system", "tools", "functions", "chat_template_kwargs", *FLAGS)
"""Columns that are read beside a conversation."""


@dataclass(frozen=True, slots=True)
class RawPrompt:
    """A prompt before it is tokenized: a text, or messages and the user's later turns.

    `variables` are what else the chat template is given, `reference` what its answer is scored
    against, if the row has them, and `unread` names what else it has. `row` is the number of a
    conversation's row, whose prompts begin alike.
    """

    text: str = ""
    messages: tuple[Message, ...] = ()
    follow_ups: tuple[str, ...] = ()
    reference: str | None = None
    variables: Mapping[str, Any] = field(default_factory=dict)
    unread: tuple[str, ...] = ()
    row: int | None = None


class Unusable(NamedTuple):
    """No prompt: the reason (one of `loading.REASONS`), and what is wrong in words."""

    reason: str
    why: str = ""


@dataclass(frozen=True, slots=True)
class RowReader:
    """The way from a set's rows to its prompts, which its first row decides (`of`).

    With `chat` a text is the user's message rather than the prompt.
    """

    dataset: PromptSet
    form: Form
    chat: bool

    @classmethod
    def of(cls, dataset: PromptSet, row: Mapping[str, Any], has_template: bool) -> RowReader:
        """Read rows as catalogued, by the set's template, or by their columns.

        A row with a conversation (`messages` or `conversations`) and a `prompt` is read by the
        former; a `prompt` may be a conversation, too. Conversations are rendered with the chat
        template; what is meant as an instruction or a question is if there is one; a `prompt`
        column and text to continue are only if the set says `chat: true`.
        """
        where, form = f"prompt set {dataset.name!r}", _form_of(dataset, row)
        if form.messages and dataset.chat is False:
            raise ConfigError(
                f"{where} holds conversations, which only a chat template renders: leave `chat` "
                "out, or give a `template` for their text"
            )
        chat = dataset.chat
        if chat is None:
            chat = bool(form.questions or form.ask) and has_template
        if form.questions and dataset.turns == "last":
            raise ConfigError(
                f"{where}: a later turn depends on the model's answer, so `turns` may be all "
                "(later ones are asked in order) or first"
            )
        if form.questions and dataset.turns == "all" and not chat:
            remedy = "leave `chat: false` out"
            if dataset.chat is None:
                remedy = "save one with its tokenizer (chat_template.jinja in its folder)"
            raise ConfigError(
                f"{where} has questions of several turns, and the target has no chat template for "
                f"the later ones, or may not use it: {remedy}, or ask the first alone with `turns: "
                "first`"
            )
        return cls(dataset, form, chat or bool(form.messages))

    def prompts(self, number: int, row: Mapping[str, Any]) -> Iterator[RawPrompt | Unusable]:
        """The prompts of a row, one at least, or why it has none."""
        dataset, form = self.dataset, self.form
        require_columns(columns_of(form), row, f"prompt set {dataset.name!r}, row {number},")
        unread: list[str] = []
        if dataset.template is None and dataset.name not in {*EMBEDDED, *CATALOGUE}:
            unread = unread_in(row, form)
        prompts: Iterable[RawPrompt | Unusable]
        if form.messages:
            prompts = self._of_conversation(row, form.messages)
        elif dataset.template is None and (media := _media(row, "prompt")):
            prompts = [media]
        elif form.questions and self.chat:
            prompts = [self._of_questions(row[form.questions])]
        else:
            prompts = [self._of_text(row)]
        for prompt in prompts:
            if isinstance(prompt, Unusable):
                yield prompt._replace(why=f"row {number}: {prompt.why}")
            else:
                row_number = number if form.messages else None
                yield dataclasses.replace(prompt, unread=tuple(unread), row=row_number)

    def _of_conversation(
        self, row: Mapping[str, Any], column: str
    ) -> Iterator[RawPrompt | Unusable]:
        """The conversation up to each of the user's turns, or up to one of them."""
        if row[column] is None and row.get("prompt"):
            raise ConfigError(
                f"a prompt set mixes rows that have `{column}` with rows that have a `prompt`: "
                "make two sets of them"
            )
        talk = conversation_of(row, column)
        if isinstance(talk, Unusable) and talk.reason != "unknown_role":
            yield talk
            return
        messages, variables = ([], {}) if isinstance(talk, Unusable) else talk
        ends = [end for end, message in enumerate(messages, 1) if message["role"] == "user"]
        if not ends:
            roles = ", ".join(ROLES)
            yield Unusable("no_user_turn", f"it needs a user's turn, and roles of {roles} alone")
        chosen = {"all": slice(None), "first": slice(1), "last": slice(-1, None)}
        for end in ends[chosen[self.dataset.turns]]:
            reference = _reference(self.form, row) if end == ends[-1] else None
            yield RawPrompt("", tuple(messages[:end]), (), reference, variables)

    def _of_questions(self, questions: Any) -> RawPrompt | Unusable:
        if (questions := _asked(questions)) is None:
            return Unusable("undecodable", f"`{self.form.questions}` must be a list of texts")
        later = tuple(questions[1:]) if self.dataset.turns == "all" else ()
        return RawPrompt(messages=({"role": "user", "content": questions[0]},), follow_ups=later)

    def _of_text(self, row: Mapping[str, Any]) -> RawPrompt | Unusable:
        form = self.form
        text = _fill((form.ask if self.chat else ()) or form.plain, row)
        if text is None:
            columns = ", ".join(f"`{name}`" for name in columns_of(form))
            return Unusable("undecodable", f"{columns} must hold text")
        if form.keep < 1:
            words = text.split()
            text = " ".join(words[: max(1, int(form.keep * len(words)))])
        reference = _reference(form, row)
        if self.chat:
            return RawPrompt(messages=({"role": "user", "content": text},), reference=reference)
        return RawPrompt(text, reference=reference)


def _form_of(dataset: PromptSet, row: Mapping[str, Any]) -> Form:
    catalogued = CATALOGUE.get(dataset.name)
    if dataset.template is not None:
        base = catalogued.form if catalogued else Form()
        asks = dataset.name in NATURAL or bool(base.ask or base.questions)
        template = _templates(dataset.template)
        ask = template if asks else ()
        form = Form(ask, template, keep=base.keep, reference=base.reference)
    elif catalogued:
        form = catalogued.form
    elif dataset.name in NATURAL:
        form = Form(ask=("{prompt}",), plain=("{prompt}",))
    elif recorded := recorded_in(row):
        form = Form(messages=recorded)
    else:
        form = Form(plain=("{prompt}",))
        lists = [name for name in ("turns", "prompt") if _asked(row.get(name))]
        if lists and ("prompt" not in row or lists == ["prompt"]):
            form = Form(plain=(f"{{{lists[0]}.0}}",), questions=lists[0])
        else:
            require_columns(["prompt"], row, f"prompt set {dataset.name!r}")
    if dataset.reference:
        names = columns_of(Form(plain=(dataset.reference,)))
        require_columns(names, row, f"prompt set {dataset.name!r}")
    reference = dataset.reference or form.reference or ("{reference}" if "reference" in row else "")
    return dataclasses.replace(form, reference=reference) if reference else form


def recorded_in(row: Mapping[str, Any]) -> str | None:
    """The column of a row that holds a conversation; None if none does."""
    messages = objects_in(row.get("prompt")) or [{}]
    prompt = "prompt" if all({"role", "from"} & {*each} for each in messages) else None
    named = next(
        (name for name in ("messages", "conversations", "conversation") if name in row), ""
    )
    talks = objects_in(row.get("turns")) and not _asked(row["turns"]) and "prompt" not in row
    return named or prompt or ("turns" if talks else None)


def _asked(value: Any) -> list[str] | None:
    """The user's turns in a list of texts, or of {content} alone; None if it is none.

    The list may be JSON text.
    """
    value = _read_json(value)
    if value and _is_list_of(Mapping, value) and all({*each} == {"content"} for each in value):
        value = [each["content"] for each in value]  # Arena-Hard's
    return list(value) if value and _is_list_of(str, value) else None


def _templates(template: str) -> tuple[str, ...]:
    """A template, and without its last columns, each after white space alone: they may be empty."""
    shorter = re.sub(r"(?<=\})\s+\{[\w.]+\}$", "", template)
    return (template, *(_templates(shorter) if shorter != template else ()))


def template_for(row: Mapping[str, Any]) -> str:
    """The template that reads a row's question, and what it is about; "{column}" if unknown.

    A space joins them: a line break would be written otherwise in YAML, in a shell and in Python.
    """
    names = {name.lower(): name for name, value in row.items() if isinstance(value, str)}
    asked = next((names[name] for name in QUESTIONS if name in names), None)
    if asked is None:  # the first of a list of texts
        asked = next((f"{name}.0" for name, value in row.items() if _asked(value)), None)
    about = [names[name] for name in ("input", "context") if name in names and names[name] != asked]
    return " ".join(f"{{{name}}}" for name in [asked, *about]) if asked else "{column}"


def _is_list_of(kind: type, values: Any) -> bool:
    """True for a sequence of values of a kind that is no text itself."""
    is_list = isinstance(values, Sequence) and not isinstance(values, str)
    return is_list and all(isinstance(value, kind) for value in values)


def conversation_of(row: Mapping[str, Any], column: str) -> Conversation | Unusable:
    """A row's conversation, with its `system`, `tools`, `functions`, `chat_template_kwargs`.

    Or why there is none (one of `conversations.REASONS`). Any list may be JSON text, in whole or
    each of it. An answer that is not to be learnt (such as OpenAI's `weight: 0`, or `loss: false`)
    has weight 0.
    """
    undecodable = Unusable(
        "undecodable",
        f"`{column}` must be a list of {{role, content}} or {{from, value}}, which are texts; "
        "`tools` and `functions` lists of objects; no documents",
    )
    if media := _media(row, column):
        return media
    recorded, system = objects_in(row[column]), row.get("system")
    tools, functions = objects_in(row.get("tools") or []), objects_in(row.get("functions") or [])
    variables = _read_json(row.get("chat_template_kwargs")) or {}
    if recorded is None or tools is None or functions is None or row.get("documents"):
        return undecodable
    functions = [{"type": "function", "function": each} for each in functions]
    tools = [_schema(each) for each in (*tools, *functions)]
    flags = {name: _read_json(row[name]) for name in FLAGS if row.get(name) is not None}
    if not _is_list_of(Mapping, [variables, *(each.get("function", {}) for each in tools)]):
        return undecodable
    messages: list[Message] = []
    first = [{"role": "system", "content": system}] if system else []
    for place, turn in enumerate((*first, *recorded), start=-len(first)):
        for name, each in flags.items():  # of all answers, or of each message
            in_list = isinstance(each, list) and len(each) == len(recorded)
            turn = {name: each[place] if in_list else each, **turn}
        role = str(first_of(turn, "role", "from")).lower()
        content = first_of(turn, "content", "value")
        call = content if role in CALLING else turn.get("function_call")
        called = [objects_in(each or []) for each in (turn.get("tool_calls"), call)]
        calls = [_call(each) for each in chain(*(objects or [] for objects in called))]
        text = "" if calls and (content is None or role in CALLING) else _text(content)
        fields = {name: turn[name] for name in FIELDS if name != "tool_calls" and turn.get(name)}
        if text is None or None in (*called, *calls) or not _is_list_of(str, [*fields.values()]):
            return undecodable
        if role not in ROLES:
            return Unusable("unknown_role")
        message = {"role": ROLES[role], "content": text, **fields}
        message |= _weight(turn) if ROLES[role] == "assistant" else {}
        last = messages[-1] if messages and role in CALLING else {}
        if (last.get("role"), last.get("weight")) == ("assistant", message.get("weight")):
            last["tool_calls"] = [*last.get("tool_calls", ()), *calls]
        else:
            messages.append(message | ({"tool_calls": calls} if calls else {}))
    if system and messages[:1] == messages[1:2]:
        del messages[0]
    variables = {name: each for name, each in variables.items() if each is not None}
    variables |= {"tools": tools} if tools else {}
    is_whole = is_unicode(json.dumps([messages, variables], ensure_ascii=False, default=str))
    return Conversation(messages, variables) if is_whole else undecodable


def first_of(values: Mapping[str, Any], *names: str) -> Any:
    """The first of these keys' values that is not None; None if all are."""
    return next((values[name] for name in names if values.get(name) is not None), None)


def _text(content: Any) -> str | None:
    """A message's content, a text or a list of text parts (lines of one text); None if neither."""
    parts: Any = [content] if isinstance(content, str) else content
    if _is_list_of(Mapping, parts):
        parts = [part.get("text") if part.get("type") == "text" else None for part in parts]
    return "\n".join(parts) if _is_list_of(str, parts) else None


def _call(recorded: Mapping[str, Any]) -> dict[str, Any] | None:
    """A call of a tool, its arguments as templates want them: a mapping; None if it is none."""
    function = _read_json(recorded.get("function")) or recorded
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        return None
    arguments = _read_json(first_of(function, "arguments", "parameters", "input")) or {}
    call = {"name": function["name"], "arguments": arguments}
    whole = {"type": "function", "id": recorded.get("id"), "function": call}
    kept = {name: each for name, each in whole.items() if each is not None}
    return kept if isinstance(arguments, Mapping) else None


def _schema(tool: Mapping[str, Any]) -> dict[str, Any]:
    """A tool's schema, whose parts a table may hold as JSON text."""
    parts = {name: _read_json(tool[name]) for name in ("function", "parameters") if tool.get(name)}
    if isinstance(parts.get("function"), Mapping):
        parts["function"] = _schema(parts["function"])
    return {**tool, **parts}


def _weight(turn: Mapping[str, Any]) -> dict[str, Any]:
    """`weight` for a message that is not to be learnt, 0, or what it says that is neither."""
    for name, value in turn.items():
        if (flag := _FLAG.match(name)) and (value := _read_json(value)) is not None:
            if value not in (0, 1) or (flag["no"] and not isinstance(value, bool)):
                return {"weight": f"`{name}`: {value!r}"}
            if bool(value) == bool(flag["no"]):
                return {"weight": 0}
    return {}


def _media(row: Mapping[str, Any], column: str) -> Unusable | None:
    """The first key of a row, message or part, or text in one, that stands for more than text."""
    turns = objects_in(row.get(column)) or []
    contents = [first_of(turn, "content", "value") for turn in turns]
    parts = [part for each in contents if _is_list_of(Mapping, each) for part in each]
    contents += [part.get("text") for part in parts]
    held = [item for each in (row, *turns, *parts) for item in each.items()]
    held += [(str(part.get("type")), part) for part in parts]
    shown = [_PLACEHOLDER.search(each) for each in contents if isinstance(each, str)]
    names = [name for name, value in held if value and _MEDIA.search(name)]
    found = [*names, *(each[0].strip() for each in shown if each)]
    return Unusable("media", f"`{found[0]}` stands for more than text") if found else None


def unread_in(row: Mapping[str, Any], form: Form) -> list[str]:
    """The keys of a row and of its messages that hold something and that nothing reads.

    An `id` is not named, nor is a `completion`, which the target writes itself.
    """
    turns = objects_in(row[form.messages]) or [] if form.messages else []
    read = {*columns_of(form), "id", "completion"}
    if not form.questions and _reference(form, row):
        read |= {*columns_of(Form(plain=(form.reference or "",)))}
    read |= {*_GIVEN} if form.messages else set()
    held = [(name, "", row[name]) for name in row if name not in read]
    read = {"id", "role", "from", "content", "value", "function_call", *FIELDS}
    for turn in turns:
        names = (name for name in turn if name not in read and not _FLAG.match(name))
        held += [(name, " of messages", turn[name]) for name in names]
    shown = (f"`{name}`{of}" for name, of, value in held if value not in (None, "", [], {}))
    return [*dict.fromkeys(shown)]


def objects_in(value: Any) -> list[Mapping[str, Any]] | None:
    """The objects of a list, or one, which may be JSON text, in whole or each; None if others."""
    value = _read_json(value)
    values = [value] if isinstance(value, Mapping) else value
    if isinstance(values, Sequence) and not isinstance(values, str):
        values = [_read_json(each) for each in values]
    return values if _is_list_of(Mapping, values) else None


def _read_json(value: Any) -> Any:
    """What a text holds that is JSON; any other value as it is."""
    try:
        return json.loads(value) if isinstance(value, str) else value
    except (ValueError, RecursionError):
        return value


def require_columns(needed: Iterable[str], row: Mapping[str, Any], where: str) -> None:
    """Raise ConfigError for a column that is not there, naming the nearest or those that are."""
    for name in needed:
        if name not in row:
            remedy = f"rename it, or give a `template` such as {template_for(row)!r}"
            if talk := _conversation_in(row):
                remedy = f"`{talk}` holds a conversation, which must be a column `messages`"
            raise ConfigError(f"{where} has no column {name!r} ({nearest(name, row)}): {remedy}")


def _conversation_in(row: Mapping[str, Any]) -> str:
    """The first column, or key of one, that holds messages; empty if none does."""
    inside = ((n, value) for n, value in row.items() if isinstance(value, Mapping))
    keys = [(f"{n}.{key}", each) for n, value in inside for key, each in value.items()]
    for name, value in (*row.items(), *keys):
        messages = objects_in(value) if not isinstance(value, Mapping) else None
        if messages and all({"role", "from"} & {*each} for each in messages):
            return name
    return ""


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


def _reference(form: Form, row: Mapping[str, Any]) -> str | None:
    """What a row's answer is scored against, a text or a number; None if it has none."""
    values = {name: str(each) if type(each) in (int, float) else each for name, each in row.items()}
    return (_fill([form.reference], values) or None) if form.reference else None


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
    return not re.search("[\ud800-\udfff]", text)
