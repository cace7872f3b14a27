"""Completions by a vLLM server, a process of its own that speaks the OpenAI completions API.

    vllm serve MODEL --generation-config vllm

Ids go in and ids come out (`return_token_ids`, vLLM 0.10.2 or newer), so nothing is tokenized
twice. Field names: vllm/entrypoints/openai/completion/protocol.py of vllm-project/vllm. Every
sampling field is sent, because a server fills absent ones from the model's generation_config.json.

A request carries its own seed, so that sharding and resume change no seed. The bytes are less
certain than with transformers: a server's arithmetic depends on what it batches together, on its
version and on its GPU, so a shard that is made again may differ from the one that was lost. What
is stored is stored once, and no prompt comes twice or not at all.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import Any

import httpx2

from specdata.errors import ConfigError
from specdata.rollouts.backend import Completion, PartDone, Request, untold
from specdata.rollouts.config import VllmConfig
from specdata.sampling import SamplingConfig
from specdata.seeds import seed_for

# What a busy or restarting server answers; any other status that is not 200 is final.
PASSING = (408, 425, 429, 500, 502, 503, 504)


class VllmBackend:
    """A `Backend` whose sampling a server does.

    Temperature, then top-k, then top-p, as in `specdata.probability`.

    Args:
        config: the server.
        model: the name it serves the target under.
        sampling: the sampler of every token.
        max_new_tokens: longest completion, in tokens.
        ends: the target's end token ids.
        seed: the run's seed.
    """

    def __init__(
        self,
        config: VllmConfig,
        model: str,
        sampling: SamplingConfig,
        *,
        max_new_tokens: int,
        ends: frozenset[int],
        seed: int,
    ) -> None:
        self.config = config
        self.model = model
        self.seed = seed
        self.ends = ends
        self.max_new_tokens = max_new_tokens
        self._fixed: dict[str, Any] = {
            "model": model,
            "n": 1,
            "max_tokens": max_new_tokens,
            "temperature": sampling.temperature,
            "top_k": sampling.top_k,  # 0 keeps all, here and there
            "top_p": sampling.top_p,
            "min_p": 0.0,
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
            "repetition_penalty": 1.0,
            "stop_token_ids": sorted(ends),
            "add_special_tokens": False,
            "return_token_ids": True,
        }
        headers = {}
        self._secret = ""
        if config.key_variable:
            # A key that is read from a file often ends in a line break.
            if not (key := os.environ.get(config.key_variable, "").strip()):
                # Whatever does not look like a name may be the key itself.
                is_name = re.fullmatch(r"[A-Z_][A-Z0-9_]*", config.key_variable)
                named = f"names {config.key_variable}" if is_name else "names a variable"
                raise ConfigError(
                    f"rollouts.vllm.key_variable {named}, which is not set: it takes the NAME of "
                    "an environment variable that holds the key, not the key"
                )
            if not (key.isascii() and key.isprintable()):  # the client's refusal would repeat it
                raise ConfigError(
                    f"the key in {config.key_variable} (rollouts.vllm.key_variable) must be one "
                    "line of ASCII: set the variable again"
                )
            headers["Authorization"] = key if " " in key else f"Bearer {key}"
            self._secret = key
        self._client = httpx2.Client(
            base_url=config.url.rstrip("/").removesuffix("/v1"),
            headers=headers,
            timeout=config.timeout,
            limits=httpx2.Limits(max_connections=config.concurrency),
        )

    def check(self) -> int | None:
        """Make sure that the server serves this model.

        Returns:
            The longest sequence it takes (prompt and completion, in tokens), if it states one.

        Raises:
            ConfigError: if it serves another model.
            ConnectionError: if it cannot be reached.
        """
        answer = self._ask("GET", "/v1/models")
        try:
            served = {entry["id"]: entry for entry in answer["data"]}
        except (LookupError, TypeError) as error:
            raise ConfigError(
                f"the server at {self.config.url} does not speak the OpenAI API: its list of "
                f"models reads {str(answer)[:80]!r}"
            ) from error
        if self.model not in served:
            raise ConfigError(
                f"the server at {self.config.url} serves {', '.join(map(repr, served))}, not "
                f"{self.model!r}: start it with the target (vllm serve), or name it in "
                "rollouts.vllm.model as it is served"
            )
        length: int | None = served[self.model].get("max_model_len")
        return length

    def complete(
        self, requests: Sequence[Request], part_done: PartDone = untold
    ) -> list[Completion]:
        """See `Backend`; up to `config.concurrency` requests are under way at once.

        Raises:
            ConfigError: if an answer is refused or unusable.
            ConnectionError: if the server does not answer in `config.retries` tries.
        """
        with ThreadPoolExecutor(self.config.concurrency) as pool:
            futures = [pool.submit(self._complete, request) for request in requests]
            try:
                for future in as_completed(futures):
                    part_done(1, len(future.result().ids))
                return [future.result() for future in futures]
            except BaseException:
                pool.shutdown(cancel_futures=True)
                raise

    def close(self) -> None:
        """Close the connections."""
        self._client.close()

    def _complete(self, request: Request) -> Completion:
        body = {
            **self._fixed,
            "prompt": request.ids,
            "seed": seed_for(self.seed, "rollout", *request.key),
        }
        answer = self._ask("POST", "/v1/completions", body)
        try:
            choice = dict(answer["choices"][0])
        except (LookupError, TypeError, ValueError) as error:
            raise ConfigError(
                f"the server at {self.config.url} does not speak the OpenAI API: its completion "
                f"reads {str(answer)[:80]!r}"
            ) from error
        ids = choice.get("token_ids")
        if not ids:
            raise ConfigError(
                f"the server at {self.config.url} returned no token ids: it must know "
                "return_token_ids (vLLM 0.10.2 or newer)"
            )
        if not isinstance(ids, list) or any(type(token) is not int or token < 0 for token in ids):
            raise ConfigError(
                f"the server at {self.config.url} returned token ids that are not whole numbers of "
                f"0 or more: {str(ids)[:80]}"
            )
        read = choice.get("prompt_token_ids")
        if read is not None and read != request.ids:
            raise ConfigError(
                f"the server at {self.config.url} read another prompt ({len(read)} tokens) than it "
                f"was sent ({len(request.ids)} tokens): it must not truncate or add tokens"
            )
        if ids[-1] in self.ends:
            return Completion(ids, "eos")
        if len(ids) != self.max_new_tokens:
            raise ConfigError(
                f"the server at {self.config.url} ended a completion after {len(ids)} tokens "
                f"(finish_reason {choice.get('finish_reason')!r}) with neither an end token "
                f"({sorted(self.ends)}) nor max_new_tokens {self.max_new_tokens}: serve the target "
                "with its own generation_config.json and a max_model_len that holds the prompts"
            )
        return Completion(ids, "length")

    def _ask(self, method: str, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        """The server's JSON; after a failure that may pass, the request is sent again."""
        trouble = ""
        for attempt in range(self.config.retries):
            if attempt:
                time.sleep(2.0 ** (attempt - 1))
            try:
                response = self._client.request(method, path, json=body)
            except httpx2.TransportError as error:
                trouble = f"{type(error).__name__}: {error}"
                continue
            if response.status_code not in PASSING:
                return self._read(response)
            trouble = f"status {response.status_code}: {self._shown(response)[:200]}"
        raise ConnectionError(
            f"the vLLM server at {self.config.url} did not answer {path} in "
            f"{self.config.retries} tries ({trouble})"
        )

    def _read(self, response: httpx2.Response) -> dict[str, Any]:
        if response.status_code != httpx2.codes.OK:
            raise ConfigError(
                f"the server at {response.url} refuses (status {response.status_code}): "
                f"{self._shown(response)[:500]}"
            )
        try:
            answer: dict[str, Any] = response.json()
        except ValueError as error:
            raise ConfigError(
                f"{response.url} does not speak the OpenAI API: it answers "
                f"{self._shown(response)[:80]!r}"
            ) from error
        return answer

    def _shown(self, response: httpx2.Response) -> str:
        """What a server said, without the key: some proxies repeat the request that they refuse."""
        return response.text.replace(self._secret, "***") if self._secret else response.text
