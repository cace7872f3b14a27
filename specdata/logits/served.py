"""The target's largest logits from a server that reads given texts: vLLM's or SGLang's.

Ids go in and ids come out, so nothing is tokenized twice. Both give log probabilities of the
model's own softmax, at temperature 1 and without truncation: logits up to a constant. So the mass
of all other tokens is known, too: 1 minus the sum. One more than N is asked for, because what can
be made of the N depends on the largest of the others.

vLLM (`/v1/completions`, vllm/entrypoints/openai/completion/protocol.py): `prompt_logprobs: N`
gives, for every token of the prompt but the first, a mapping from ids (as text) to `logprob` and
`rank`, the N most probable and the token itself. The server must allow as many (`--max-logprobs`,
20 by default). SGLang (`/generate`, python/sglang/srt/managers/io_struct.py): `return_logprob`,
`logprob_start_len` and `top_logprobs_num` give, in `meta_info`, `input_token_logprobs` and
`input_top_logprobs`, lists of (log probability, id, text), null at the first token.

One token is generated after the text and thrown away: some versions refuse to generate none. A text
must therefore be a token shorter than the longest sequence that the server takes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast

import torch
from torch import Tensor

from specdata.errors import ConfigError
from specdata.server.client import SPARE_MASS, Answer, Completions, LogProbability, ServerClient
from specdata.storage.schema import Logits, Rollout

Place = tuple[dict[int, float], int, float]
"""Of one position: log probabilities by id, the text's own token, and that of it."""

# vLLM writes this for -inf, which JSON does not have.
LEAST = -9999.0
ASKED_MORE = "serve with --max-logprobs {count} or more"


class SglangMeta(Answer):
    """What SGLang says of one text."""

    input_token_logprobs: list[tuple[LogProbability | None, int, Any]] | None = None
    input_top_logprobs: list[list[tuple[LogProbability, int, Any]] | None] | None = None
    prompt_tokens: int | None = None


class SglangAnswer(Answer):
    """What /generate answers."""

    meta_info: SglangMeta


@dataclass(frozen=True, slots=True)
class ServedLogits:
    """The logits of rollouts by a server that runs the target.

    Attributes:
        client: asks it.
        kind: what it is.
        model: the name it serves the target under.
        count: N.
        vocabulary: V of the target.
    """

    client: ServerClient
    kind: Literal["vllm", "sglang"]
    model: str
    count: int
    vocabulary: int

    def __call__(self, rows: Sequence[Rollout]) -> list[Logits]:
        """Each rollout with its columns of `TOP_LOGITS`; many requests are under way at once.

        Raises:
            ConfigError: if an answer is refused or unusable.
            ConnectionError: if the server does not answer.
        """
        return self.client.each(self._of, rows)

    @property
    def asked(self) -> int:
        """Log probabilities asked for at each position: one more than N, if there are more."""
        return min(self.count + 1, self.vocabulary)

    def _of(self, row: Rollout) -> Logits:
        ids = row["prompt_ids"] + row["completion_ids"]
        read: Callable[[Sequence[int], int], list[Place]]
        read = {"vllm": self._by_vllm, "sglang": self._by_sglang}[self.kind]
        columns = self._columns(read(ids, len(row["completion_ids"])))
        logit_columns = {name: values.flatten().tolist() for name, values in columns.items()}
        plain = {name: value for name, value in row.items() if name != "target_states"}
        return cast(Logits, {**plain, **logit_columns})

    def _by_vllm(self, ids: Sequence[int], last: int) -> list[Place]:
        body = {
            "model": self.model,
            "prompt": list(ids),
            "max_tokens": 1,
            "temperature": 1.0,
            "top_k": 0,
            "top_p": 1.0,
            "prompt_logprobs": self.asked,
            "add_special_tokens": False,
            "return_token_ids": True,
        }
        choice = self.client.ask(Completions, "POST", "/v1/completions", body).choices[0]
        entries, read = choice.prompt_logprobs, choice.prompt_token_ids
        if entries is None:
            raise ConfigError(
                f"{self.client} returned no prompt_logprobs: it must be vLLM 0.10.2 or newer"
            )
        if (read is not None and read != list(ids)) or len(entries) != len(ids):
            raise self._other_text(len(entries if read is None else read), len(ids))
        places = []
        for token, entry in zip(ids[-last:], entries[-last:], strict=True):
            by_id = {int(name): value.logprob for name, value in (entry or {}).items()}
            if token not in by_id:
                raise self._missing(entry)
            places.append((by_id, token, by_id[token]))
        return places

    def _by_sglang(self, ids: Sequence[int], last: int) -> list[Place]:
        body = {
            "input_ids": list(ids),
            "sampling_params": {"max_new_tokens": 1, "temperature": 1.0},
            "return_logprob": True,
            # The first entry is of the last token of the prompt, and null.
            "logprob_start_len": len(ids) - last - 1,
            "top_logprobs_num": self.asked,
            "return_text_in_logprobs": False,
            "stream": False,
        }
        meta = self.client.ask(SglangAnswer, "POST", "/generate", body).meta_info
        tokens, tops = meta.input_token_logprobs, meta.input_top_logprobs
        if not tokens or not tops:
            raise ConfigError(
                f"{self.client} returned no input_top_logprobs: is it SGLang's own /generate?"
            )
        read = [entry[1] for entry in tokens]
        count = len(ids) if meta.prompt_tokens is None else meta.prompt_tokens
        if count != len(ids) or len(tops) != len(tokens) or read[-last:] != list(ids[-last:]):
            raise self._other_text(count, len(ids))
        places = []
        for entry, (chance, token, _) in zip(tops[-last:], tokens[-last:], strict=True):
            if entry is None or chance is None:
                raise self._missing(entry)
            places.append(({each: value for value, each, _ in entry}, token, chance))
        return places

    def _columns(self, places: Sequence[Place]) -> dict[str, Tensor]:
        """The columns of `top_logits`, and the text's own, from what was found at each position."""
        ids, values, text = [], [], []
        for by_id, token, log_probability in places:
            if len(by_id) < self.asked:
                raise ConfigError(
                    f"{self.client} returned {len(by_id)} log probabilities at a position where "
                    f"{self.asked} were asked for (logits.top_logits {self.count} and the next "
                    f"one): {ASKED_MORE.format(count=self.asked)}, or lower logits.top_logits"
                )
            if beyond := [each for each in by_id if not 0 <= each < self.vocabulary]:
                raise ConfigError(
                    f"{self.client} gave token {beyond[0]} a probability, and the vocabulary of "
                    f"models.target has {self.vocabulary}: serve that model"
                )
            # Rounding aside, the text's own token is among the listed or less likely than they are.
            listed, least = by_id.get(token), min(by_id.values())
            off = log_probability - least if listed is None else abs(log_probability - listed)
            if not (math.isfinite(log_probability) and off <= SPARE_MASS):
                raise ConfigError(
                    f"{self.client} gave the text's own token {token} a log probability of "
                    f"{log_probability:g}, and among the {len(by_id)} largest "
                    f"{f'at least {least:g}' if listed is None else f'{listed:g}'}: they must agree"
                )
            best = sorted(by_id.items(), key=lambda pair: (-pair[1], pair[0]))[: self.asked]
            ids.append([each for each, _ in best[: self.count]])
            values.append([value for _, value in best])
            text.append(log_probability)
        found_values = torch.tensor(values, dtype=torch.float64)
        found_values = found_values.masked_fill(found_values <= LEAST, -torch.inf)
        top, beyond_top = found_values[:, : self.count], found_values[:, self.count :]
        rest, after = self._rest(top, beyond_top)
        return {
            "top_ids": torch.tensor(ids),
            "top_logits": top.float(),
            "rest_logit": rest.float(),
            "next_logit": after.float(),
            "text_logit": torch.tensor(text, dtype=torch.float64).float(),
        }

    def _rest(self, top: Tensor, beyond: Tensor) -> tuple[Tensor, Tensor]:
        """Log of the mass outside, (C,), and of the largest probability there.

        Rounding of 1 - sum is undone as far as the largest of the others tells: their mass is at
        least that, and at most as much for each of them.
        """
        rest = 1.0 - top.exp().sum(dim=-1)
        if not beyond.shape[-1]:
            self._check_mass(rest, torch.zeros_like(rest))
            nothing = torch.full_like(rest, -torch.inf)
            return nothing, nothing
        most = beyond[:, 0].exp()
        at_most = most * (self.vocabulary - self.count)
        self._check_mass(rest, at_most)
        return rest.clamp(min=most).minimum(at_most).log(), beyond[:, 0]

    def _check_mass(self, rest: Tensor, at_most: Tensor) -> None:
        wrong = (rest < -SPARE_MASS) | (rest > at_most + SPARE_MASS)
        if bool(wrong.any()):
            first = int(wrong.nonzero()[0])
            raise ConfigError(
                f"{self.client} returned {self.count} probabilities that sum to "
                f"{1 - float(rest[first]):.4f} at {int(wrong.sum())} of {len(wrong)} positions, "
                f"and the others, of {self.vocabulary}, cannot make that 1: they must be the "
                "model's own at temperature 1, untruncated (vLLM: --logprobs-mode raw_logprobs), "
                "over the vocabulary of models.target"
            )

    def _other_text(self, read: int, sent: int) -> ConfigError:
        return ConfigError(
            f"{self.client} read another text ({read} tokens) than it was sent ({sent} tokens): "
            "it must not truncate or add tokens"
        )

    def _missing(self, entry: object) -> ConfigError:
        return ConfigError(
            f"{self.client} returned no log probabilities at a position of the completion, but "
            f"{str(entry)[:80]!r}"
        )


def check_lengths(rows: Mapping[str, Sequence[Sequence[int]]], limit: int | None) -> None:
    """Refuse texts that leave a server no room for the token it generates.

    Args:
        rows: `prompt_ids` and `completion_ids`.
        limit: the longest sequence that it takes, in tokens, if it states one.

    Raises:
        ConfigError: naming the longest.
    """
    if limit is None:
        return
    lengths = zip(rows["prompt_ids"], rows["completion_ids"], strict=True)
    longest = max((len(prompt) + len(completion) for prompt, completion in lengths), default=0)
    if longest >= limit:
        raise ConfigError(
            f"the longest rollout has {longest} tokens, and the server takes {limit}, one of them "
            "generated: serve the target with a longer context (vLLM: --max-model-len "
            f"{longest + 1}, SGLang: --context-length {longest + 1})"
        )
