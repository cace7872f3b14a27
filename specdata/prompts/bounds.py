"""Bounds on what a foreign chat template may take: processor time, memory and length.

A chat template is a program (Jinja's sandbox keeps it from files and from attributes that matter,
not from working without end), and it comes with a tokenizer that somebody else made.
"""

from __future__ import annotations

import resource
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from itertools import pairwise
from pathlib import Path

from specdata.errors import ConfigError

# A rendering takes milliseconds and some kilobytes; these are for those that never end.
SECONDS = 10.0
BYTES = 1 << 30
CHARACTERS = 10_000_000
_MEMORY = Path("/proc/self/statm")


class _OutOfTime(BaseException):
    """Not an Exception, which one of Jinja's filters might catch."""


@contextmanager
def bounded_rendering() -> Iterator[None]:
    """Bound the time and the memory that the rendering of a template in this block may take.

    Memory is bounded where the system counts it (Linux), time in the main thread, which is the one
    that gets signals.

    Raises:
        ConfigError: if a bound is exceeded, or calls are nested without end.
    """
    try:
        with _bounded_memory(), _bounded_time():
            yield
    except _OutOfTime:
        reason = f"it takes more than {SECONDS:g} s of processor time"
    except MemoryError:
        reason = f"it takes more than {BYTES >> 20} MiB"
    except RecursionError:
        reason = "it calls itself without end"
    else:
        return
    raise ConfigError(
        f"the chat template cannot be rendered: {reason}. Mend it (chat_template.jinja or "
        "chat_template in tokenizer_config.json, beside the tokenizer), take another target, or "
        "use prompts that are plain text"
    )


@cache
def check_operators(template: str) -> None:
    """Refuse a template with powers: one such operation cannot be interrupted once it has begun.

    Raises:
        ConfigError: if it has one.
    """
    from jinja2 import Environment, TemplateSyntaxError

    try:
        lexed = Environment(autoescape=True).lex(template)
        tokens = [(kind, text) for _, kind, text in lexed if kind != "whitespace"]
    except TemplateSyntaxError:
        return  # rendering it says so
    # After an opening parenthesis or a comma it unpacks arguments instead.
    if any(
        token == ("operator", "**") and before not in {("operator", "("), ("operator", ",")}
        for before, token in pairwise(tokens)
    ):
        raise ConfigError(
            "the chat template cannot be rendered: it computes powers (**), which may take "
            "any time and memory: write the number itself"
        )


@contextmanager
def _bounded_time() -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(_signal: int, _frame: object) -> None:
        raise _OutOfTime

    before = signal.signal(signal.SIGVTALRM, stop)
    try:
        # Of processor time: a machine that is busy or asleep does not count.
        signal.setitimer(signal.ITIMER_VIRTUAL, SECONDS)
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)


@contextmanager
def _bounded_memory() -> Iterator[None]:
    if not _MEMORY.exists():
        yield
        return
    pages = int(_MEMORY.read_text().split()[0])
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    bound = pages * resource.getpagesize() + BYTES
    if soft != resource.RLIM_INFINITY:  # -1, were it compared
        bound = min(bound, soft)
    resource.setrlimit(resource.RLIMIT_AS, (bound, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
