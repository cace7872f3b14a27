"""Requests to a server of the target: sent again where that may help, refused where it will not."""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, as_completed
from contextlib import suppress
from threading import Event, Thread
from typing import Annotated, Any, TypeVar

import httpx2
from pydantic import BaseModel, ConfigDict, Field, PositiveInt, ValidationError

from specdata.config import ServerConfig
from specdata.errors import ConfigError

# Tries of a request, 1, 2, 4 ... s apart, and seconds that a server may be silent in each.
TRIES, FIRST_PAUSE, ANSWER_TIMEOUT = 6, 1.0, 600.0
REQUEST_GRACE = 1.0
"""Seconds that requests have to end in after trouble, so that few are left under way."""
# Seconds for what takes no forward.
LIST_TIMEOUT = 10.0
# What a busy or restarting server answers; any other status that is not 200 is final.
PASSING = (408, 425, 429, 500, 502, 503, 504)

T = TypeVar("T")
R = TypeVar("R")


# Mass that may be missing or too much in float32 sums; more means that it is another distribution.
MASS_ROUNDING = 1e-3
Id = Annotated[str, Field(pattern=r"^\d{1,9}$")]


class Answer(BaseModel):
    """The part of a server's JSON that is read: types are not converted, other fields may be there.

    Whatever a server sends, what `ServerClient.ask` returns has these types.
    """

    model_config = ConfigDict(strict=True, frozen=True)


A = TypeVar("A", bound=Answer)


class ServedModel(Answer):
    """A model that a server has."""

    id: str
    owned_by: str | None = None
    max_model_len: PositiveInt | None = None


class Models(Answer):
    """The models that a server has."""

    data: list[ServedModel]


class Chance(Answer):
    """The log probability of a token, as vLLM gives it."""

    logprob: float = Field(le=MASS_ROUNDING, allow_inf_nan=False)


class AnsweredChoice(Answer):
    """One completion, and what is said of its prompt: of each token but the first, by id."""

    token_ids: list[int] | None = None
    finish_reason: str | None = None
    prompt_token_ids: list[int] | None = None
    prompt_logprobs: list[dict[Id, Chance] | None] | None = None


class Verbose(Answer):
    """The part that llama-server adds if it is asked to be verbose."""

    tokens: list[int]


class Completions(Answer):
    """The answer of /v1/completions: one completion, whose ids vLLM and llama-server give."""

    choices: list[AnsweredChoice] = Field(min_length=1)
    verbose: Verbose | None = Field(None, alias="__verbose")

    @property
    def ids(self) -> list[int] | None:
        """The ids of the completion."""
        return self.verbose.tokens if self.verbose else self.choices[0].token_ids


class ServerClient:
    """Asks one server, up to `config.concurrency` requests at once.

    `section` is where `config` stands in the configuration, for messages ("rollouts.vllm"). Raises
    ConfigError if the variable that should hold its key holds none, or the address of the server or
    of a proxy is none.
    """

    def __init__(self, config: ServerConfig, section: str) -> None:
        self.config = config
        self.section = section
        self.resent = 0  # requests, until now
        self.is_llama = False  # whether it is a llama-server, as `check` finds out
        self._ended = Event()  # set when what is under way is of no use any more
        self._secret = _key(config.key_variable, section) if config.key_variable else ""
        key = self._secret
        headers = {"Authorization": key if " " in key else f"Bearer {key}"} if key else {}
        try:
            self._client = httpx2.Client(
                base_url=config.url.rstrip("/").removesuffix("/v1"),
                headers=headers,
                timeout=ANSWER_TIMEOUT,
                limits=httpx2.Limits(max_connections=None),  # one that stalls blocks no other
            )
        except (httpx2.InvalidURL, ValueError) as error:
            raise ConfigError(
                f"cannot ask the server at {config.url} ({section}.url): {error}; see the "
                "environment's HTTP_PROXY, HTTPS_PROXY and ALL_PROXY, too"
            ) from error

    def __str__(self) -> str:
        return f"the server at {self.config.url}"

    def check(self, model: str) -> int | None:
        """Make sure that the server serves a model, by the name that it has there.

        Returns the longest sequence it takes (prompt and completion, in tokens), if it states one.
        """
        answer = self.ask(Models, "GET", "/v1/models")
        served = {entry.id: entry for entry in answer.data}
        if model not in served:
            raise ConfigError(
                f"{self} serves {', '.join(map(repr, served)) or 'nothing'}, not "
                f"{model!r}: start it with the target (vllm serve), or say which name it has "
                "there (--model; `model` in rollouts.vllm, `served_model` of a method)"
            )
        self.is_llama = served[model].owned_by == "llamacpp"
        return served[model].max_model_len

    def check_ids(self, ids: Iterable[int], vocabulary: int) -> None:
        """Raise ConfigError if the server answered with a token that the target does not have."""
        if foreign := [token for token in ids if not 0 <= token < vocabulary]:
            raise ConfigError(
                f"{self} returned token {foreign[0]}, and the vocabulary of models.target has "
                f"{vocabulary}: serve that model"
            )

    def each(self, work: Callable[[T], R], items: Sequence[T]) -> list[R]:
        """The results of `work`, which asks the server, for each item, requests side by side.

        The first trouble, or Ctrl-C, ends all at once: what is under way is neither waited for,
        which a pool of `concurrent.futures` would do, but for a moment, nor sent again.
        """
        futures: list[Future[R]] = [Future() for _ in items]
        waiting = deque(zip(futures, items, strict=True))
        ended = self._ended = Event()

        def ask() -> None:
            with suppress(IndexError):  # nothing is waiting any more
                while not ended.is_set():
                    future, item = waiting.popleft()
                    try:
                        future.set_result(work(item))
                    except BaseException as error:  # noqa: BLE001 - raised below
                        future.set_exception(error)

        threads = [
            Thread(target=ask, name="request", daemon=True)
            for _ in range(min(self.config.concurrency, len(items)))
        ]
        try:
            for thread in threads:
                thread.start()
            for future in as_completed(futures):
                future.result()
        except BaseException:
            ended.set()
            until = time.monotonic() + REQUEST_GRACE
            for thread in threads:
                if thread.is_alive():
                    thread.join(max(0.0, until - time.monotonic()))
            raise
        return [future.result() for future in futures]

    def ask(self, kind: type[A], method: str, path: str, body: dict[str, Any] | None = None) -> A:
        """The server's answer; after a failure that may pass, the request is sent again."""
        trouble, ended = "", self._ended
        for attempt in range(TRIES):
            if attempt:
                if ended.wait(FIRST_PAUSE * 2.0 ** (attempt - 1)):
                    break
                self.resent += 1
            try:
                # An answer comes at once: at least a token of it in a second.
                limit = max(ANSWER_TIMEOUT, body.get("max_tokens", 0)) if body else LIST_TIMEOUT
                response = self._client.request(method, path, json=body, timeout=limit)
            except (httpx2.HTTPError, httpx2.InvalidURL) as error:
                trouble = f"{type(error).__name__}: {error}"
                continue
            if response.status_code not in PASSING:
                return self._read(kind, response)
            trouble = f"status {response.status_code}: {self._shown(response)[:200]}"
        raise ConnectionError(f"{self} did not answer {path} in {TRIES} tries ({trouble})")

    def page(self, path: str) -> str:
        """A page of text, such as what it counts; "" if it has none."""
        try:
            response = self._client.get(path, timeout=LIST_TIMEOUT)
        except httpx2.HTTPError:
            return ""
        return response.text if response.status_code == httpx2.codes.OK else ""

    def close(self) -> None:
        """Close the connections."""
        self._client.close()

    def _read(self, kind: type[A], response: httpx2.Response) -> A:
        if response.status_code != httpx2.codes.OK:
            raise ConfigError(
                f"the server at {response.url} refuses (status {response.status_code}): "
                f"{self._shown(response)[:200]!r}; is it vLLM's or llama-server's?"
            )
        try:
            return kind.model_validate_json(response.content)
        except ValidationError as error:
            first = error.errors(include_url=False, include_input=False)[0]
            where = ".".join(map(str, first["loc"])) or "the answer"
            raise ConfigError(
                f"{response.url} does not speak the API of this server: {where}: {first['msg']}; "
                f"it answers {self._shown(response)[:80]!r}"
            ) from error

    def _shown(self, response: httpx2.Response) -> str:
        """A server's answer, without the key: some proxies repeat the request that they refuse."""
        return response.text.replace(self._secret, "***") if self._secret else response.text


def _key(variable: str, section: str) -> str:
    """The key that an environment variable holds."""
    # A key that is read from a file often ends in a line break.
    if not (key := os.environ.get(variable, "").strip()):
        raise ConfigError(  # without its value, which may be the key itself
            f"key_variable of {section} must be the NAME of an environment variable that holds "
            "the key, not the key, and no variable of its name is set"
        )
    if not (key.isascii() and key.isprintable()):  # the client's refusal would repeat it
        raise ConfigError(
            f"the key in {variable} ({section}.key_variable) must be one line of ASCII: set the "
            "variable again"
        )
    return key
