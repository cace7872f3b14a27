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

from collections.abc import Sequence
from dataclasses import dataclass

from specdata.errors import ConfigError
from specdata.rollouts.backend import Completion, Report, Request
from specdata.sampling import SamplingConfig, seed_for
from specdata.server.client import Completions, ServerClient


@dataclass(frozen=True, slots=True, kw_only=True)
class VllmBackend:
    """A `Backend` whose sampling a server does, which serves the target as `model`.

    Temperature, top-k, top-p, min-p in the order of `specdata.probability`. vLLM has min-p before
    top-p, another distribution where both cut.
    """

    client: ServerClient
    model: str
    sampling: SamplingConfig
    max_new_tokens: int
    ends: frozenset[int]
    vocabulary: int
    seed: int

    def complete(
        self, requests: Sequence[Request], report: Report = lambda ended: None
    ) -> list[Completion]:
        """Complete many requests at once."""

        def one(request: Request) -> Completion:
            completion = self._complete(request)
            report(1)
            return completion

        return self.client.each(one, requests)

    def _complete(self, request: Request) -> Completion:
        body = {
            "model": self.model,
            "prompt": request.ids,
            "seed": seed_for(self.seed, "rollout", *request.key),
            "n": 1,
            "max_tokens": self.max_new_tokens,
            "temperature": self.sampling.temperature,
            "top_k": self.sampling.top_k,  # 0 keeps all, here and there
            "top_p": self.sampling.top_p,
            "min_p": self.sampling.min_p,
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
            "repetition_penalty": 1.0,
            "stop_token_ids": sorted(self.ends),
            # vLLM would end at the tokenizer's end token, too; llama-server would never draw it.
            "ignore_eos": not self.client.is_llama,
            "add_special_tokens": False,
            "return_token_ids": True,
            # llama-server's names, which vLLM reads over.
            "samplers": ["temperature", "top_k", "top_p", "min_p"],
            "return_tokens": True,
            "verbose": True,
        }
        answer = self.client.ask(Completions, "POST", "/v1/completions", body)
        choice, ids = answer.choices[0], answer.ids
        read = choice.prompt_token_ids
        if not ids:
            raise ConfigError(
                f"{self.client} returned no token ids: it must know return_token_ids (vLLM "
                "0.10.2 or newer) or return_tokens (llama-server)"
            )
        cuts = self.sampling.temperature > 0 and self.sampling.top_p < 1 and self.sampling.min_p > 0
        if cuts and answer.verbose is None:
            raise ConfigError(
                f"{self.client} is no llama-server, and vLLM cuts by min_p before top_p, where "
                "everything here cuts by top_p first: set sampling.top_p to 1 or sampling.min_p to "
                "0, or sample with transformers"
            )
        if answer.verbose and body["ignore_eos"]:  # behind something that does not say what it is
            self.client.is_llama = True
            return self._complete(request)
        self.client.check_ids(ids, self.vocabulary)
        if read is not None and read != request.ids:
            raise ConfigError(
                f"{self.client} read another prompt ({len(read)} tokens) than it "
                f"was sent ({len(request.ids)} tokens): it must not truncate or add tokens"
            )
        ended = ids[-1] in self.ends
        is_cut = len(ids) < self.max_new_tokens and not ended
        if is_cut or len(ids) > self.max_new_tokens or not self.ends.isdisjoint(ids[:-1]):
            raise ConfigError(
                f"{self.client} ended a completion after {len(ids)} tokens (finish_reason "
                f"{choice.finish_reason!r}): it must end at its first end token "
                f"({sorted(self.ends)}), else at max_new_tokens {self.max_new_tokens}. Serve the "
                "target with its own generation_config.json (llama-server: end tokens of the GGUF "
                "file) and a context that holds the prompts"
            )
        return Completion(ids, "eos" if ended else "length")
