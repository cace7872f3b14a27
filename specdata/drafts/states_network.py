"""Drafts that read their target's hidden states (Li et al. 2024, arXiv:2401.15077).

A token's input is a linear map of its embedding and of the target's states at the token before it
(`specdata.drafts.taps`). Where the target has not been yet, while drafting, another map of the
embedding and of the draft's own last state there stands in. What follows is an ordinary decoder
of one or two layers, so in memory it is the transformers model of its architecture with another
input embedding: all other code sees an ordinary draft. Along a text that is known, as in training
and labels, that embedding has the target read the text and answers with its states everywhere,
which is how the first token of each round is drafted.

Its config.json says `target_states`: the taps, the target's name, and a probe of its states.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, Self

import torch
from pydantic import Field, NonNegativeInt, PositiveInt, PrivateAttr
from torch import Tensor, nn
from torch.nn.utils import skip_init

from specdata.config import Config, read_stored
from specdata.drafts import kind_of, settings_in
from specdata.drafts.kind import KEY
from specdata.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

EPSILON = 1e-6
MODEL_TYPE = "on-target-states_load-with-draftsmith_see-README.md"
"""Its `model_type` on the disk: transformers, which would load a model with random embeddings,
knows none of this name and repeats it."""


class TargetStates(Config):
    """The record in config.json of the target whose states a draft reads (`taps.record_of`).

    `model_type` is that of the layers, where the file's own is `MODEL_TYPE`; `output_bias` is true
    where their architecture has no bias of the logits, and this draft has.
    """

    taps: list[NonNegativeInt] = Field(min_length=1)
    target: str
    width: PositiveInt
    probe: list[float] = Field(min_length=1)
    model_type: str = ""
    output_bias: bool = False
    _kind_record: Any = PrivateAttr(None)

    @property
    def kind_record(self) -> Any:
        """What the draft's kind adds (`DraftKind.record_class`); None if it adds nothing."""
        return self._kind_record

    @classmethod
    def of(cls, config: Any) -> Self:
        """Read a draft's configuration, or what its config.json holds. Raises ConfigError."""
        kind, values = kind_of(config), settings_in(config)[KEY]
        where, added = f"{KEY} in a draft's config.json", None
        if isinstance(values, dict):
            values = {key: each for key, each in values.items() if each is not None}
        if kind.record_class is not None:  # by whose key its kind is known
            of_kind = f"{kind.record_key} of {where}"
            added = read_stored(kind.record_class, values.pop(kind.record_key), of_kind)
        record = read_stored(cls, values, where)
        record._kind_record = added
        return record


class StatesInput(nn.Module):
    """The input embedding of a draft that reads its target's states: (V, E) tokens, H = `width`.

    Attributes:
        reads_first: whether the first token of a text, which nothing precedes, is read by others.
        read_target: ids (B, T) -> the target's taps (B, T, states) along them.
    """

    reads_first = True

    def __init__(self, tokens: nn.Embedding, width: int, taps: int, size: int) -> None:
        super().__init__()
        self.tokens = tokens
        self.taps = taps
        embedding = tokens.embedding_dim
        like: dict[str, Any] = {"device": tokens.weight.device, "dtype": tokens.weight.dtype}
        # Fitted or loaded later: nothing is drawn, which on a GPU would be from its own generator.
        linear = partial(skip_init, nn.Linear, bias=False, **like)
        self.token = linear(embedding, width)
        self.states = linear(taps * size, width)
        self.own_token = linear(embedding, width)
        self.own_state = linear(width, width)
        self.read_target: Callable[[Tensor], Tensor] = _no_target

    @property
    def weight(self) -> Tensor:
        """(V, E) of the tokens."""
        return self.tokens.weight

    @property
    def read_width(self) -> int:
        """F of the target's states that are read of a token."""
        width: int = self.states.in_features
        return width

    def borrow(self, target: PreTrainedModel) -> None:
        """Use what a target lends to a draft; most kinds have all of their own."""

    def share_target(self, other: StatesInput) -> None:
        """Read the target that another draft's input reads."""
        self.read_target = other.read_target

    def from_start(self, ids: Tensor, _first: int = 0) -> Tensor:
        """(..., n) tokens of a text from its `_first` on, as the two maps below take them."""
        return ids

    def after_target(self, ids: Tensor, states: Tensor) -> Tensor:
        """(..., H) inputs of tokens (...) whose predecessors the target has read.

        `states` are (..., states) the target's at the tokens before; 0 where there is none.
        """
        scaled = self.scaled(states).to(self.weight.dtype)
        x: Tensor = self.token(self.tokens(ids)) + self.states(scaled)
        return x

    def scaled(self, states: Tensor) -> Tensor:
        """(..., states) the target's as the maps read them."""
        return unit(states, self.taps)

    def after_own(self, ids: Tensor, states: Tensor) -> Tensor:
        """(..., H) inputs of tokens behind those that the draft alone has read: its (..., H)."""
        x: Tensor = self.own_token(self.tokens(ids)) + self.own_state(states)
        return x

    def forward(self, ids: Tensor) -> Tensor:
        """(B, T) texts -> (B, T, H), each token after the target."""
        taps = self.read_target(ids)
        return self.after_target(self.from_start(ids), before(taps))

    @contextmanager
    def reading(self, taps: Tensor) -> Iterator[None]:
        """Inside, the target's taps (B, T, states) are known of the one text that is read."""
        read, self.read_target = self.read_target, lambda ids: taps.to(ids.device)
        try:
            yield
        finally:
            self.read_target = read


def unit(states: Tensor, taps: int) -> Tensor:
    """(..., F) taps, each scaled to unit mean square: those of later layers are much larger."""
    each = states.view(*states.shape[:-1], taps, -1)
    wide = each.float() if each.dtype in (torch.bfloat16, torch.float16) else each
    scale = torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + EPSILON)
    scaled: Tensor = (wide * scale).to(states.dtype).flatten(-2)
    return scaled


def before(states: Tensor) -> Tensor:
    """(B, T, F) states, each moved to the token after it; 0 at the first."""
    return nn.functional.pad(states[:, :-1], (0, 0, 1, 0))


def states_input(model: Any) -> StatesInput | None:
    """The input embedding of a draft that reads its target's states; None of any other model."""
    embedding = model.get_input_embeddings()
    return embedding if isinstance(embedding, StatesInput) else None


def is_in_blocks(model: Any) -> bool:
    """True of a draft that drafts in blocks."""
    return kind_of(model.config).in_blocks


def without_first(visible: Tensor) -> Tensor:
    """(..., n, T) bool what tokens attend to, but the first, which itself has nothing else."""
    alone = visible.sum(dim=-1, keepdim=True) == 1
    visible = visible.clone()
    visible[..., :1] &= alone
    return visible


def hiding_first(hidden_states: Tensor, named: dict[str, Any], cache: str) -> dict[str, Any]:
    """A layer's arguments, by whose mask no token of whole texts reads the first.

    Whoever keeps a cache, which the layer takes by the name `cache`, says what tokens attend to.
    """
    mask = named.get("attention_mask")
    if named.get(cache) is not None:
        return named
    index = torch.arange(hidden_states.shape[1], device=hidden_states.device)
    visible = (index <= index[:, None])[None, None]
    if mask is not None:
        visible = mask if mask.dtype == torch.bool else mask == 0
    added = torch.zeros(visible.shape, dtype=hidden_states.dtype, device=visible.device)
    least = torch.finfo(hidden_states.dtype).min
    return {**named, "attention_mask": added.masked_fill(~without_first(visible), least)}


def token_embedding(model: Any) -> nn.Module:
    """A model's embedding of tokens alone, whatever else it reads."""
    embedding: nn.Module = model.get_input_embeddings()
    return embedding.tokens if isinstance(embedding, StatesInput) else embedding


def reads_states(config: PreTrainedConfig) -> bool:
    """True if a configuration is that of a draft that reads its target's states."""
    return kind_of(config).reads_states


def states_class(architecture: type[PreTrainedModel]) -> type[PreTrainedModel]:
    """A class of models to load such drafts with, of what `save_pretrained` wrote.

    It takes classes of `specdata.drafts.draft_vocabulary.reduced_class`, too.
    """

    class ReadsStates(architecture):  # type: ignore[misc]
        def __init__(self, config: PreTrainedConfig) -> None:
            super().__init__(config)
            width = config.get_text_config().hidden_size
            tokens, record = self.get_input_embeddings(), TargetStates.of(config)
            taps = len(record.taps)
            self.set_input_embeddings(StatesInput(tokens, width, taps, record.width // taps))
            if record.output_bias:
                self.set_output_embeddings(nn.Linear(width, tokens.num_embeddings))

    return ReadsStates


def _no_target(_ids: Tensor) -> Tensor:
    raise ConfigError(
        "this draft reads its target's states, and has no target here: load it with "
        "specdata.models.load_model, which finds the target by the name in its config.json"
    )
