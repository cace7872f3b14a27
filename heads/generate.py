"""Speculative decoding with block verification, for transformers' `generate`.

    output = target.generate(
        **inputs, assistant_model=draft, custom_generate=FOLDER, trust_remote_code=True,
        do_sample=True, max_new_tokens=128,
        acceptance_head=head, threshold=0.7,  # or without them: a fixed number of tokens a round
    )

FOLDER is a published draft or head, which carries this file. Each round the draft proposes tokens,
the target scores them in one forward, and block verification decides how many stay. The output has
the distribution of the target alone under the same temperature, top_k, top_p and min_p. p is always
the target's distribution, q the draft's; V is the size of the target's vocabulary, L the length of
a draft.

This project decodes with `eval/decoder.py`. This file is carried by published folders, so it
imports torch, transformers and what is carried with it only.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import (
    DynamicCache,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from specdata.block_verification import longest_prefix, prefix_ratios, residual

# They change each row of logits by itself, so all rows of a draft can be changed at once.
WARPERS = (TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper, MinPLogitsWarper)
# Arguments that would need more than is here.
UNSUPPORTED = ("inputs_embeds", "past_key_values", "cache", "position_ids", "stop_strings")
# What `generate` adds to the arguments of the model's forward by itself.
PREPARED = {
    "attention_mask",
    "cache",
    "cache_position",
    "logits_to_keep",
    "past_key_values",
    "position_ids",
    "use_cache",
}
# Layers that keep keys and values of every token, or could.
ATTENTION = {"full_attention", "sliding_attention"}
LESS_THAN_ONE = 1 - 1e-15


@torch.no_grad()
def generate(
    inputs: Tensor | None = None,
    *,
    model: Any,
    acceptance_head: Any = None,
    threshold: float = 0.7,
    num_assistant_tokens: int | None = None,
    generator: torch.Generator | None = None,
    streamer: Any = None,
    **arguments: Any,
) -> Any:
    """Continue one prompt: what `target.generate(custom_generate=FOLDER, ...)` calls.

    Args:
        inputs: (1, T) token ids, if they are not given as `input_ids`.
        model: the target; transformers passes it.
        acceptance_head: `AutoModel.from_pretrained(HEAD, trust_remote_code=True)`. None drafts a
            fixed number of tokens.
        threshold: a draft ends once the head gives a rejection in it more probability; in [0, 1].
        num_assistant_tokens: most tokens drafted in a round. By default 20 with a head, otherwise
            what the draft's generation configuration says, or 20.
        generator: source of all random numbers; None is torch's default one.
        streamer: is given the prompt, then the tokens of each round.
        **arguments: `assistant_model`, the draft, which shares the target's tokenizer; and what
            `generate` takes otherwise.

    Returns:
        (1, T + n) token ids, the prompt included.
    """
    if "assistant_model" not in arguments:
        # A draft that was loaded with trust_remote_code=True has this function as its `generate`,
        # and assisted generation calls it: it does then what it would have done.
        return type(model).generate(model, inputs, streamer=streamer, **arguments)
    draft = arguments.pop("assistant_model")
    if draft is None:
        raise ValueError("assistant_model must be the draft model, got None")
    longest = num_assistant_tokens
    if longest is None:
        default = draft.generation_config.num_assistant_tokens if acceptance_head is None else None
        longest = default or 20
    _check_arguments(arguments, threshold, longest)

    head = None if acceptance_head is None else acceptance_head.to(draft.device)

    # The usual `generate` prepares everything, then calls this in place of its own loop.
    def loop(
        model: Any,
        input_ids: Tensor,
        logits_processor: Any,
        stopping_criteria: Any,
        generation_config: Any,
        **prepared: Any,
    ) -> Tensor:
        _check_prepared(input_ids, logits_processor, generation_config, prepared)
        _check_models(model, draft)
        max_length, end = generation_config.max_length, generation_config.eos_token_id
        _check_rope(model.config.get_text_config(), max_length)
        vocabulary = model.config.get_text_config().vocab_size
        distributions = _distributions(logits_processor, generation_config.do_sample)
        large = _CachedModel(model, vocabulary)
        small = _CachedModel(draft, vocabulary, with_state=head is not None)
        drafter = _Drafter(small, distributions, head, threshold, end, generator)

        def put(tokens: Tensor) -> None:
            if streamer is not None:
                streamer.put(tokens.cpu())

        put(input_ids)
        ended = False
        while not ended:
            committed = input_ids[0].tolist()
            # The verification adds one token; the draft need not read its own last one.
            room = min(max_length - 1, small.positions + 1) - len(committed)
            tokens, q = drafter.draft(committed, min(room, longest))
            logits = large.read(committed[large.length :] + tokens, len(tokens) + 1)
            accepted, following = verify(tokens, q, distributions(logits), generator)
            for model_and_cache in (large, small):
                model_and_cache.crop(len(committed) + accepted)
            emitted: list[int] = []
            # A criterion may end the text within a round.
            for token in [*tokens[:accepted], following]:
                emitted.append(token)
                input_ids = torch.cat([input_ids, input_ids.new_tensor([[token]])], dim=1)
                if ended := bool(stopping_criteria(input_ids, None).all()):
                    break
            put(torch.tensor(emitted))
        if streamer is not None:
            streamer.end()
        return input_ids

    return type(model).generate(model, inputs, custom_generate=loop, **arguments)


def verify(
    tokens: list[int], q: list[Tensor], p: Tensor, generator: torch.Generator | None
) -> tuple[int, int]:
    """Block verification: how many of L tokens are accepted, and the token after them.

    Of L distributions q (V,), the one that each token was drawn from, and p (L + 1, V), the
    target's before each token and after the last.
    """
    q = [row.to(p.device) for row in q]
    ratios = prefix_ratios(
        [float(row[token]) for row, token in zip(p[:-1], tokens, strict=True)],
        [float(row[token]) for row, token in zip(q, tokens, strict=True)],
    )
    uniforms = _uniforms(generator)
    accepted = longest_prefix(
        ratios, p, lambda: torch.stack(q[1:]), lambda chance: next(uniforms) < chance
    )
    if accepted == len(tokens):
        return accepted, draw(p[accepted], generator)
    return accepted, draw(residual(ratios[accepted] * p[accepted], q[accepted]), generator)


@dataclass
class _Drafter:
    """A draft model, and the acceptance head that `threshold` is of, if there is one."""

    model: _CachedModel
    distributions: Callable[[Tensor], Tensor]
    head: Any
    threshold: float
    end: int | list[int] | None
    generator: torch.Generator | None

    def draft(self, committed: list[int], room: int) -> tuple[list[int], list[Tensor]]:
        """Draft at most `room` tokens: L tokens, and the L distributions (V,) they come from.

        With a head the draft ends once the head gives a rejection in it more probability than the
        threshold (SpecDec++, Huang et al., arXiv:2405.19715, section 4.3). A token that was drawn
        is kept whatever the head says of it, because dropping it would bias the output. A token
        that the head cannot judge yet counts as accepted.
        """
        tokens: list[int] = []
        q: list[Tensor] = []
        unread, chance = committed[self.model.length :], 1.0
        ends = self.end if isinstance(self.end, list) else [self.end]
        while len(tokens) < room:
            q.append(self.distributions(self.model.read(unread, 1))[0])
            unread = [draw(q[-1], self.generator)]
            tokens += unread
            if tokens[-1] in ends:
                break
            if self.head is not None and len(tokens) > self.head.lag:
                drawn = _Drawn(tokens[-1], q[-1], self.model.state, self.model.embed)
                chance *= float(torch.sigmoid(self.head.logit_on_device(drawn)))
                if 1.0 - chance > self.threshold:
                    break
        return tokens, q


class _Drawn(NamedTuple):
    """A token that was just drawn, as heads are asked about it."""

    token: int
    distribution: Tensor
    state: Tensor
    embed: Callable[[Tensor], Tensor]


class _CachedModel:
    """A model and its cache of one sequence, from which rejected tokens can be removed.

    Attributes:
        state: (H,) what the output embedding read at the last token.
    """

    def __init__(self, model: Any, vocabulary: int, *, with_state: bool = False) -> None:
        self.model, self.vocabulary, self.with_state = model, vocabulary, with_state
        config = model.config.get_text_config()
        self.own_vocabulary = config.vocab_size
        self.positions = getattr(config, "max_position_embeddings", None) or sys.maxsize
        # PEFT's wrapper hides the arguments of the forward that it wraps.
        base = model.get_base_model() if hasattr(model, "get_base_model") else model
        taken = inspect.signature(base.forward).parameters
        self.takes_count = "logits_to_keep" in taken
        self.cache_argument = "cache" if "cache" in taken else "past_key_values"
        # Made without a configuration, it forgets nothing that leaves an attention window.
        self.cache = DynamicCache()
        self.length, self.state = 0, torch.zeros(0)

    def read(self, tokens: list[int], count: int) -> Tensor:
        """Append tokens: the logits (count, V) after the last `count` of them."""
        # An id that only the target has is replaced: a worse guess, never another distribution.
        ids = [token if token < self.own_vocabulary else 0 for token in tokens]
        with self._keeping_state() if self.with_state else nullcontext():
            output = self.model(
                input_ids=torch.tensor([ids], device=self.model.device),
                use_cache=True,
                **{self.cache_argument: self.cache},
                **({"logits_to_keep": count} if self.takes_count else {}),
            )
        self.length += len(tokens)
        logits: Tensor = output.logits[0, -count:]
        # Matrices of one family are padded to different sizes: the draft has no other ids.
        missing = self.vocabulary - logits.shape[-1]
        return torch.nn.functional.pad(logits, (0, missing), value=float("-inf"))

    def crop(self, length: int) -> None:
        """Keep at most `length` tokens."""
        if self.length > length:
            self.cache.crop(length - self.length)
            self.length = length

    def embed(self, ids: Tensor) -> Tensor:
        """(..., E) the input embeddings of tokens (...)."""
        known = torch.where(ids < self.own_vocabulary, ids, 0)
        embeddings: Tensor = self.model.get_input_embeddings()(known)
        return embeddings

    def _keeping_state(self) -> Any:
        """A context in which a forward sets `state`."""

        def keep(_: Any, inputs: tuple[Tensor, ...]) -> None:
            self.state = inputs[0][0, -1]

        return self.model.get_output_embeddings().register_forward_pre_hook(keep)


def draw(distribution: Tensor, generator: torch.Generator | None) -> int:
    """Draw a token from a distribution (V,): its inverse CDF at one uniform."""
    cdf = distribution.cumsum(dim=-1, dtype=torch.float64)
    point = min(_random(1, generator)[0], LESS_THAN_ONE) * float(cdf[-1])
    return int(torch.searchsorted(cdf, point, right=True))


def _uniforms(generator: torch.Generator | None) -> Iterator[float]:
    """Uniforms in [0, 1), drawn in blocks, which is cheaper."""
    while True:
        yield from _random(32, generator)


def _random(count: int, generator: torch.Generator | None) -> list[float]:
    device = "cpu" if generator is None else generator.device
    uniforms = torch.rand(count, generator=generator, dtype=torch.float64, device=device)
    numbers: list[float] = uniforms.tolist()
    return numbers


def _distributions(logits_processor: Any, do_sample: bool) -> Callable[[Tensor], Tensor]:
    """A function that makes distributions of logits, (..., V) each; one-hot without sampling."""

    def distributions(logits: Tensor) -> Tensor:
        logits = logits if logits.dtype == torch.float64 else logits.float()
        if do_sample:
            return torch.softmax(logits_processor(None, logits), dim=-1)
        best = logits.argmax(dim=-1, keepdim=True)
        return torch.zeros_like(logits).scatter_(-1, best, 1.0)

    return distributions


def _check_arguments(arguments: Mapping[str, Any], threshold: float, longest: int) -> None:
    """Raise ValueError for arguments that cannot be used."""
    if given := [name for name in UNSUPPORTED if arguments.get(name) is not None]:
        raise ValueError(f"{', '.join(given)}: not supported by this generate, leave it out")
    if not 0.0 <= threshold <= 1.0:
        raise ValueError(f"threshold must be a probability in [0, 1], got {threshold}")
    if longest < 1:
        raise ValueError(f"num_assistant_tokens must be at least 1, got {longest}")


def _check_prepared(
    input_ids: Tensor, logits_processor: Any, generation_config: Any, prepared: Mapping[str, Any]
) -> None:
    """Raise ValueError for what one sequence of plain sampling does not need."""
    mask = prepared.get("attention_mask")
    if input_ids.shape[0] != 1 or (mask is not None and not bool(mask.all())):
        raise ValueError(
            "this generate continues one prompt without padding, got a batch of "
            f"{input_ids.shape[0]}; num_beams and num_return_sequences must be 1"
        )
    others = [type(item).__name__ for item in logits_processor if not isinstance(item, WARPERS)]
    if others:
        raise ValueError(
            "this generate samples with temperature, top_k, top_p and min_p only; switch off "
            f"what needs {', '.join(others)} (repetition_penalty=1.0, for example), also where "
            "the target's generation_config.json asks for it"
        )
    if generation_config.return_dict_in_generate:
        raise ValueError("return_dict_in_generate: only token ids are returned, leave it out")
    unknown = {name for name, value in prepared.items() if value is not None} - PREPARED
    if unknown:
        raise ValueError(f"the models read token ids only, got {', '.join(sorted(unknown))}")


def _check_models(*models: Any) -> None:
    """Raise ValueError for a model from whose cache rejected tokens cannot be removed."""
    for model in models:
        config = model.config.get_text_config()
        layers = {*(getattr(config, "layer_types", None) or ())} - ATTENTION
        if model._is_stateful or model.config.is_encoder_decoder or layers:
            raise ValueError(
                f"{model.config.model_type} does not keep keys and values of every token, so "
                "rejected tokens cannot be removed from its cache; decode without this generate"
            )


def _check_rope(config: Any, max_length: int) -> None:
    """Raise ValueError if the target's positions would depend on how many tokens it reads."""
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    for part in (rope, *(part for part in rope.values() if isinstance(part, Mapping))):
        kind, reach = part.get("rope_type"), config.max_position_embeddings
        if kind == "longrope":
            reach = part.get("original_max_position_embeddings") or getattr(
                config, "original_max_position_embeddings", reach
            )
        if kind in ("dynamic", "longrope") and max_length > reach:
            raise ValueError(
                f"the target's rope ({kind}) changes after {reach} tokens, so a draft would change "
                f"its distribution; max_length is {max_length}: lower max_new_tokens"
            )
