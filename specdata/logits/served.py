"""The target's largest logits from a vLLM server, which reads given texts.

Ids go in and ids come out, so nothing is tokenized twice. It gives log probabilities of the
model's own softmax, at temperature 1 and without truncation: logits up to a constant. So the mass
of all other tokens is known, too: 1 minus the sum. One more than N is asked for, because what can
be made of the N depends on the largest of the others.

`prompt_logprobs: N` of `/v1/completions` (vllm/entrypoints/openai/completion/protocol.py) gives,
for every token of the prompt but the first, a mapping from ids (as text) to `logprob` and `rank`,
the N most probable and the token itself. The server must allow as many (`--max-logprobs`, 20 by
default).

One token is generated after the text and thrown away: some versions refuse to generate none. A text
must therefore be a token shorter than the longest sequence that the server takes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from specdata.errors import ConfigError
from specdata.server.client import MASS_ROUNDING, Chance, Completions, ServerClient
from specdata.storage.schema import LogitRow, Rollout

# vLLM writes this for -inf, which JSON does not have.
NO_LOGPROB = -9999.0


@dataclass(frozen=True, slots=True)
class ServedLogits:
    """The N = `count` logits of rollouts by a server of the target, `model` there."""

    client: ServerClient
    model: str
    count: int
    vocabulary: int

    def __call__(self, rows: Sequence[Rollout]) -> list[LogitRow]:
        """Each rollout with its columns of `TOP_LOGITS`; many requests are under way at once."""
        return self.client.each(self._of, rows)

    @property
    def asked(self) -> int:
        """Log probabilities asked for at each position: one more than N, if there are more."""
        return min(self.count + 1, self.vocabulary)

    def _of(self, row: Rollout) -> LogitRow:
        ids = row["prompt_ids"] + row["completion_ids"]
        columns = self._columns(self._read(ids), row["completion_ids"])
        logit_columns = {name: values.flatten().tolist() for name, values in columns.items()}
        plain = {name: value for name, value in row.items() if name != "target_states"}
        return cast(LogitRow, {**plain, **logit_columns})

    def _read(self, ids: list[int]) -> Sequence[Mapping[str, Chance] | None]:
        """What the server says of each of a text's tokens but the first, by id."""
        body = {
            "model": self.model,
            "prompt": ids,
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
        if (read is not None and read != ids) or len(entries) != len(ids):
            raise ConfigError(
                f"{self.client} read another text ({len(entries if read is None else read)} "
                f"tokens) than it was sent ({len(ids)} tokens): it must not truncate or add tokens"
            )
        return entries

    def _columns(
        self, entries: Sequence[Mapping[str, Chance] | None], completion: Sequence[int]
    ) -> dict[str, Tensor]:
        """The columns of `top_logits`, and the text's own, from what was found at each position."""
        ids, values, text = [], [], []
        for token, entry in zip(completion, entries[-len(completion) :], strict=True):
            by_id = {int(name): value.logprob for name, value in (entry or {}).items()}
            if token not in by_id:
                raise ConfigError(
                    f"{self.client} returned no log probabilities at a position of the "
                    f"completion, but {str(entry)[:80]!r}"
                )
            if len(by_id) < self.asked:
                raise ConfigError(
                    f"{self.client} returned {len(by_id)} log probabilities at a position where "
                    f"{self.asked} were asked for (logits.top_logits {self.count} and the next "
                    f"one): serve with --max-logprobs {self.asked} or more, or lower "
                    "logits.top_logits"
                )
            self.client.check_ids(by_id, self.vocabulary)
            best = sorted(by_id.items(), key=lambda pair: (-pair[1], pair[0]))[: self.asked]
            ids.append([each for each, _ in best[: self.count]])
            values.append([value for _, value in best])
            text.append(by_id[token])
        found_values = torch.tensor(values, dtype=torch.float64)
        found_values = found_values.masked_fill(found_values <= NO_LOGPROB, -torch.inf)
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
        wrong = (rest < -MASS_ROUNDING) | (rest > at_most + MASS_ROUNDING)
        if bool(wrong.any()):
            first = int(wrong.nonzero()[0])
            raise ConfigError(
                f"{self.client} returned {self.count} probabilities that sum to "
                f"{1 - float(rest[first]):.4f} at {int(wrong.sum())} of {len(wrong)} positions, "
                f"and the others, of {self.vocabulary}, cannot make that 1: they must be the "
                "model's own at temperature 1, untruncated (vLLM: --logprobs-mode raw_logprobs), "
                "over the vocabulary of models.target"
            )


def check_lengths(rows: Mapping[str, Sequence[Sequence[int]]], limit: int | None) -> None:
    """Refuse texts that leave a server no room for the token it generates.

    `limit` is the longest sequence that it takes, in tokens, if it states one.
    """
    if limit is None:
        return
    lengths = zip(rows["prompt_ids"], rows["completion_ids"], strict=True)
    longest = max((len(prompt) + len(completion) for prompt, completion in lengths), default=0)
    if longest >= limit:
        raise ConfigError(
            f"the longest rollout has {longest} tokens, and the server takes {limit}, one of them "
            "generated: serve the target with a longer context (--max-model-len "
            f"{longest + 1})"
        )
