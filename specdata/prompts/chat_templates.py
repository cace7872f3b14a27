"""Conversations as token ids: the model's own chat template, and loss masks."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import groupby
from typing import TYPE_CHECKING

from specdata.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Message = dict[str, str]  # {"role": ..., "content": ...}

_MARKER = re.compile(r"\{%-?\s*generation\s*-?%\}")


class TemplateRefusedError(ConfigError):
    """A chat template does not take a conversation, such as one with a system message."""


class UnmaskableError(ConfigError):
    """A chat template hides which tokens of a conversation the assistant wrote."""


def chat_ids(
    tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message], *, reply: bool = True
) -> list[int]:
    """Render a conversation with the target's chat template.

    The template writes every special token itself, so the tokenizer adds none: a beginning-of-text
    token comes once, or not at all. With `reply`, it ends with what opens the assistant's answer
    (the generation prompt).
    """
    require_template(tokenizer)
    try:
        text = tokenizer.apply_chat_template(
            list(messages), tokenize=False, add_generation_prompt=reply
        )
    except Exception as error:  # whatever a program of somebody else's may raise
        raise TemplateRefusedError(
            f"the chat template refuses a conversation of roles "
            f"{', '.join(message['role'] for message in messages)}: {error}"
        ) from error
    ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    return ids


def require_template(tokenizer: PreTrainedTokenizerBase | None) -> None:
    """Raise ConfigError if a tokenizer, None for one that is not loaded, has no chat template."""
    if tokenizer is None or not tokenizer.chat_template:
        raise ConfigError(
            f"the tokenizer of {getattr(tokenizer, 'name_or_path', '') or 'the target'} has no "
            "chat template, which conversations need: save one with it (chat_template.jinja in its "
            "folder), take a target that was tuned to chat, or use prompts that are plain text"
        )


def assistant_mask(
    tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message]
) -> tuple[list[int], list[int]]:
    """Which tokens of a conversation the assistant wrote, its end-of-turn tokens included.

    Where the template has `{% generation %}` markers they decide. Otherwise each answer is what the
    conversation's ids have beyond those of its prompt, which must be a prefix of them: that is also
    what makes training and serving see the same ids. Either way the masked text is compared with
    what the assistant said, up to outer white space. Returns the ids of the whole conversation, and
    a mask of 0 and 1 of the same length.
    """
    if tokenizer.chat_template and _MARKER.search(tokenizer.get_chat_template()):
        chat_ids(tokenizer, messages, reply=False)  # for its errors
        out = tokenizer.apply_chat_template(
            list(messages), tokenize=True, return_dict=True, return_assistant_tokens_mask=True
        )
        ids, mask = out["input_ids"], out["assistant_masks"]
    else:
        ids = chat_ids(tokenizer, messages, reply=False)
        mask = [0] * len(ids)
        added = set(tokenizer.get_added_vocab().values())
        for index, message in enumerate(messages):
            if message["role"] == "assistant":
                begin = _prefix(tokenizer, messages[:index], ids, reply=True)
                stop = _prefix(tokenizer, messages[: index + 1], ids, reply=False)
                # Up to its end token, without the white space that templates put after it.
                for end in range(stop, begin, -1):
                    if ids[end - 1] in added:
                        stop = end
                    if ids[end - 1] in added or tokenizer.decode([ids[end - 1]]).strip():
                        break
                mask[begin:stop] = [1] * (stop - begin)
    check_mask(tokenizer, messages, ids, mask)
    return ids, mask


def check_mask(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Message],
    ids: Sequence[int],
    mask: Sequence[int],
) -> None:
    """Raise UnmaskableError unless a mask (0 or 1 a token) covers the assistant's turns alone."""
    turns = [message["content"].strip() for message in messages if message["role"] == "assistant"]
    if len(set(mask)) < 2:
        which = "every token" if any(mask) else "no token"
        raise UnmaskableError(
            f"the loss mask trains on {which} of a conversation with {len(turns)} assistant "
            f"turns.\n{_shown(tokenizer, ids, mask)}"
        )
    added = set(tokenizer.get_added_vocab().values())
    masked, start = [], 0
    for bit, group in groupby(mask):
        span = list(ids[start : start + len(list(group))])
        start += len(span)
        if bit:  # a span without special tokens, and also without its end token if that is none
            bare = span[:-1] if span[-1] in added else span
            masked.append(
                [tokenizer.decode(each, skip_special_tokens=True).strip() for each in (span, bare)]
            )
    wrong = next(
        (pair for pair in zip(turns, masked, strict=False) if pair[0] not in pair[1]), None
    )
    if wrong or len(turns) != len(masked):
        detail = f"turn {wrong[0]!r}, trained on {wrong[1][0]!r}" if wrong else ""
        raise UnmaskableError(
            f"the loss mask does not cover what the assistant said: {len(turns)} turns, "
            f"{len(masked)} masked spans{'; ' * bool(detail)}{detail}. The chat template changes "
            "or moves the assistant's text; mark it with {% generation %} and {% endgeneration %}."
            f"\n{_shown(tokenizer, ids, mask)}"
        )


def _prefix(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Message],
    whole: Sequence[int],
    *,
    reply: bool,
) -> int:
    """Length of what these messages render to, which must begin the whole."""
    part = chat_ids(tokenizer, messages, reply=reply)
    if list(whole[: len(part)]) == part:
        return len(part)
    at = next((i for i, (a, b) in enumerate(zip(part, whole, strict=False)) if a != b), len(whole))
    raise UnmaskableError(
        f"the chat template does not continue what it rendered before: the first {len(messages)} "
        f"messages are no prefix of the conversation, from token {at} on "
        f"({tokenizer.decode(part[at : at + 8])!r}, then {tokenizer.decode(whole[at : at + 8])!r})."
        " It strips or rewrites text; mark the assistant's part of the template with "
        "{% generation %} and {% endgeneration %}, or keep white space as it comes"
    )


def _shown(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int], mask: Sequence[int]) -> str:
    runs = " ".join(f"{len(list(group))}x{bit}" for bit, group in groupby(mask))
    return f"text: {tokenizer.decode(list(ids))!r}\nmask: {runs or 'empty'}"
