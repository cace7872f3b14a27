"""A served engine, measured as a method: its texts, its time, and its own count of what it drafted.

One request at a time, as our decoder is measured (`side_by_side`: several, for their time alone).
vLLM and llama-server count what they drafted and accepted, all requests together (`/metrics`); what
was added while a request was answered is that request's. Those counts have no order, so rounds are
in none, and what a last round accepted beyond the end of the text is taken off the longest. Rounds
that drafted nothing are not counted there, as that of the prompt, which gives the first token.
"""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import count, pairwise
from threading import Event

import torch
from transformers import PreTrainedModel

from eval.rounds import Generation, Round
from specdata.errors import ConfigError
from specdata.models import end_ids
from specdata.prompts.prompt import Prompt
from specdata.rollouts.backend import Request
from specdata.rollouts.vllm import VllmBackend
from specdata.sampling import SamplingConfig
from specdata.server.client import ServerClient

COUNTED = re.compile(
    r"^(?:vllm|llamacpp):spec_decode_num_(drafts|draft_tokens|accepted_tokens_per_pos)"
    r"(?:_total)?(?:\{([^}]*)\})? (\S+)",
    re.MULTILINE,
)
POSITION = re.compile(r'position="(\d+)"')
SETTLED = 1.2
"""Seconds after which a server has counted what it answered, and lets the next have its cores: a
worker of vLLM 0.32 keeps one busy for a second behind its last step."""
PROBED = 8
"""Greedy tokens that tell whether a server has the target's weights and tokens."""
FAR = 2.0
"""Nats: more is no rounding."""


@dataclass(frozen=True, slots=True)
class ServedEngine:
    """An engine that is asked for completions, one at a time."""

    backend: VllmBackend

    @classmethod
    def of(
        cls,
        client: ServerClient,
        name: str,
        target: PreTrainedModel,
        sampling: SamplingConfig,
        max_new_tokens: int,
        seed: int = 0,
    ) -> ServedEngine:
        """The engine that serves a target under a name, with the target's ends and vocabulary."""
        backend = VllmBackend(
            client=client,
            model=name,
            sampling=sampling,
            max_new_tokens=max_new_tokens,
            ends=frozenset(end_ids(target.generation_config)),
            vocabulary=target.config.get_text_config().vocab_size,
            seed=seed,
        )
        return cls(backend)

    def generate(self, ids: list[int], key: str, max_new_tokens: int) -> Generation:
        """Continue one prompt, timed; again if it was asked for twice, for it waited meanwhile."""
        backend, resent = replace(self.backend, max_new_tokens=max_new_tokens), -1
        while self.backend.client.resent != resent:
            resent = self.backend.client.resent
            counted, begun = self.counts(), time.perf_counter()
            [found] = backend.complete([Request(ids, (key,))])
            seconds = time.perf_counter() - begun
        time.sleep(SETTLED)
        new = self.counts()
        new.subtract(counted)
        if min(new.values(), default=0) < 0:
            raise ConfigError(
                f"{self.backend.client} counts fewer drafts than before: it was restarted while it "
                "was measured. Run the same command again once it is as it was"
            )
        rounds = rounds_of(new, len(found.ids))
        return Generation(torch.tensor(found.ids), rounds, found.finish, seconds)

    def side_by_side(self, prompts: Sequence[Prompt], requests: int) -> list[tuple[int, float]]:
        """Tokens and seconds of each prompt's answer while so many requests are under way.

        Prompts are asked for again, unmeasured, until the last answer, which has as many neighbours
        as the first then. All again if a request waited and was sent twice.
        """
        client, numbers, ended = self.backend.client, count(), Event()
        resent, found = client.resent, dict[int, tuple[int, float]]()

        def ask(_: int) -> None:
            try:
                while len(found) < len(prompts) and not ended.is_set():
                    number, begun = next(numbers), time.perf_counter()
                    prompt = prompts[number % len(prompts)]
                    [done] = self.backend.complete([Request(prompt.ids, (prompt.example_id,))])
                    if number < len(prompts):
                        found[number] = len(done.ids), time.perf_counter() - begun
            finally:
                ended.set()

        client.each(ask, range(requests))
        if client.resent != resent:
            return self.side_by_side(prompts, requests)
        return [found[number] for number in range(len(prompts))]

    def counts(self) -> Counter[str]:
        """Drafts ("drafts"), drafted tokens ("draft_tokens"), and accepted ones by position."""
        found: Counter[str] = Counter()
        for name, labels, value in COUNTED.findall(self.backend.client.page("/metrics")):
            place = POSITION.search(labels)
            found[place[1] if place else name] += int(float(value))
        return found

    def lost_since(self, before: Counter[str]) -> tuple[int, int, int]:
        """Drafted tokens since then, those of them that were not kept, and the longest draft."""
        new = self.counts()
        new.subtract(before)
        kept = [count for place, count in new.items() if place.isdigit()]
        return new["draft_tokens"], new["draft_tokens"] - sum(kept), len(kept)

    @torch.inference_mode()
    def probe(self, target: PreTrainedModel, ids: list[int]) -> None:
        """Make sure that it answers greedily as the target would, up to rounding."""
        greedy = replace(self.backend, sampling=SamplingConfig(0.0), max_new_tokens=PROBED)
        [found] = greedy.complete([Request(ids, ("probe",))])
        text = torch.tensor([[*ids, *found.ids]], device=target.device)
        logits = target(input_ids=text, use_cache=False).logits[0, len(ids) - 1 : -1].float()
        lacking = logits.amax(-1) - logits.gather(-1, text[0, len(ids) :, None]).squeeze(-1)
        if (most := float(lacking.max())) > FAR:
            raise ConfigError(
                f"{self.backend.client} must serve models.target, and continues a prompt greedily "
                f"with a token {most:.1f} nats less likely there than another: it has another "
                "model or tokenizer"
            )


def rounds_of(counted: Counter[str], tokens: int) -> tuple[Round, ...]:
    """The rounds of a text, in no order; of one that nothing was counted of, one a token.

    Counted are drafts, drafted tokens, and accepted tokens by position.
    """
    drafts, drafted = counted["drafts"], counted["draft_tokens"]
    reached = [drafts]
    while counted[str(len(reached) - 1)]:
        reached.append(counted[str(len(reached) - 1)])
    accepted = [
        place
        for place, (here, after) in enumerate(pairwise([*reached, 0]))
        for _ in range(here - after)
    ]
    longest = max(-(-drafted // max(1, drafts)), *accepted, 0)
    lengths, left = accepted.copy(), drafted - sum(accepted)
    for place, length in enumerate(accepted):
        more = min(left, longest - length)
        lengths[place], left = length + more, left - more
    over = max(0, 1 + sum(accepted) + drafts - tokens)  # beyond the end of the text
    emitted = [each + 1 for each in accepted]
    for place in reversed(range(drafts)):
        cut = min(over, emitted[place] - 1)
        over, emitted[place] = over - cut, emitted[place] - cut
        accepted[place] = min(accepted[place], emitted[place])
    drafting = [
        Round(length, length, right, new, length, 0.0, 0.0, 0.0)
        for length, right, new in zip(lengths, accepted, emitted, strict=True)
    ]
    alone = tokens - sum(emitted)
    if alone < (drafts > 0):
        raise ConfigError(
            f"the server counted {drafts} drafts for {tokens} tokens: it must answer nobody else "
            "while it is measured"
        )
    return (*drafting, *[Round(0, 0, 0, 1, 0, 0.0, 0.0, 0.0)] * alone)
