"""Decoding's needs of the models of transformers; the one file that reads their private names.

Models that cannot be decoded with are refused here. The attention of packed sequences is here, too:
sequences whose drafts differ in length would fill a rectangle with padding, so their tokens follow
each other in one row through every layer of the model (`eval.runtime.layout.pack`). Only the
attention lays them out by slot, because each slot attends to its own keys and values. It is called
through transformers' `AttentionInterface`; not all models pass on keyword arguments to it, so it is
told in a context variable which token is whose.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from inspect import signature
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, DynamicCache, PretrainedConfig, PreTrainedModel
from transformers import __version__ as transformers_version
from transformers.cache_utils import (
    DynamicIndexedLayer,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionAndSlidingWindowAttentionLayer,
    LinearAttentionLayer,
)
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from eval.runtime.kv_cache import DummyLayer, LayerKind
from eval.runtime.recurrent import Mixer, mixers_of
from specdata.cache import cache_argument
from specdata.drafts.depths import depths_of, most_tokens
from specdata.drafts.draft_vocabulary import draft_vocabulary_ids
from specdata.drafts.states_network import is_in_blocks, states_input
from specdata.errors import CacheNotRewindableError, ConfigError
from specdata.models import length_dependent_rope, positions

PACKED = "draftsmith_packed"
"""The name by which transformers knows the attention."""

_ATTENDING = {
    DynamicLayer,
    DynamicSlidingWindowLayer,
    DynamicIndexedLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionAndSlidingWindowAttentionLayer,
}
"""Layers of transformers' cache with keys and values of the tokens."""

_PLACES: ContextVar[tuple[Tensor, Tensor]] = ContextVar("places of packed tokens")

WeightVersions = tuple[Any, ...]
"""What is the same as long as a model's weights are."""


def weight_versions(model: PreTrainedModel) -> WeightVersions:
    """What tells that a model's weights have changed: every in-place operation counts.

    Not those on `.data`, as PEFT's merging of adapters is: they show in some of the values. And
    PEFT switches adapters off and on, and scales them.
    """
    weights = [(w.data_ptr(), w._version, _some_of(w)) for w in model.parameters()]
    tuners: Any = sys.modules.get("peft.tuners.tuners_utils")  # who has no adapters never waits
    layers = [m for m in model.modules() if tuners and isinstance(m, tuners.BaseTunerLayer)]
    return weights, [
        (*layer.active_adapters, layer.disable_adapters, str(getattr(layer, "scaling", "")))
        for layer in layers
    ]


def _some_of(weight: Tensor) -> Any:
    """A few values of a plain weight on the CPU, from all over it; graphs are of no others."""
    if weight.device.type != "cpu" or type(weight.data) is not Tensor:
        return None
    return weight.detach()[tuple(slice(None, None, max(1, n // 2)) for n in weight.shape)].tolist()


@dataclass(frozen=True, eq=False)
class Traits:
    """What decoding must know of a model, read from it once."""

    device: torch.device
    dtype: torch.dtype
    vocabulary: int  # V of the distributions: the target's
    ids: Tensor | None  # (N,) the tokens that it has logits of; None if these are all V
    has_fewer_ids: bool  # tokens of the target are unknown to it
    reads_states: bool  # it reads its target's hidden states
    in_blocks: bool  # it drafts in blocks; a block attends to everything
    depths: int  # D, the tokens that it proposes after one forward
    layers: list[LayerKind]
    mixers: list[Mixer]  # its modules with recurrent states
    takes_masks: bool  # its attention takes a given mask
    takes_positions: bool
    has_rules: bool  # some of its layers make masks of their own, of what they are given
    # Only SDPA needs no mask for a single token: of one that the model makes, a graph would keep
    # the length.
    uses_sdpa: bool
    packs: bool  # tokens of several sequences may stand in one row
    # A long text may be read in pieces: not blocks, which have no mask, nor what reads each token
    # by itself from a state on.
    in_pieces: bool
    cache_argument: str
    positions: int  # the most tokens of a text that it has positions for
    longest: int  # the longest path that it drafts: a block, where it drafts in blocks

    @classmethod
    def of(cls, model: PreTrainedModel, vocabulary: int, deepest: int) -> Traits:
        """Of a model that drafts paths of at most `deepest` tokens; 1: a target, or no masks.

        Raises:
            CacheNotRewindableError: if tokens cannot be dropped from the model's cache.
            ConfigError: if its forward takes no positions, or it has masks and recurrent layers.
        """
        check_forward(model)
        config, layers = model.config, cached_layers(model.config)
        mixers = mixers_of(model) if any(layer.states for layer in layers) else []
        in_blocks = is_in_blocks(model)
        depths = min(depths_of(model), deepest) if deepest > 1 else 1
        if mixers and depths > 1:
            raise ConfigError(
                f"a draft with recurrent layers ({config.model_type}) cannot read masks: "
                "remove depths from its config.json"
            )
        ids = draft_vocabulary_ids(model)
        ids = None if ids is None else ids[ids < vocabulary]
        if ids is not None and torch.equal(ids, torch.arange(vocabulary, device=ids.device)):
            ids = None
        uses_sdpa = config._attn_implementation == "sdpa"
        # What reads all tokens of a row as those of one text decodes one at a time.
        alone = depths > 1 or in_blocks or any(layer.states or layer.indexed for layer in layers)
        alone = alone or hasattr(config, "keep_window_size")  # Doge's masks are of its rows
        return cls(
            device=model.device,
            dtype=model.dtype,
            vocabulary=vocabulary,
            ids=ids,
            has_fewer_ids=config.get_text_config().vocab_size < vocabulary,
            reads_states=states_input(model) is not None,
            in_blocks=in_blocks,
            depths=depths,
            layers=layers,
            mixers=mixers,
            takes_masks=takes_masks(model),
            takes_positions=takes_positions(model),
            has_rules=takes_masks(model) and has_rules(model),
            uses_sdpa=uses_sdpa,
            packs=model._supports_attention_backend and uses_sdpa and not alone,
            in_pieces=not (in_blocks or any(mixer.stepwise for mixer in mixers)),
            cache_argument=cache_argument(model),
            positions=positions(config),
            longest=most_tokens(model),
        )


def takes_graphs(model: PreTrainedModel) -> bool:
    """False of recurrent or indexed layers, which are no part of a graph."""
    return not any(layer.states or layer.indexed for layer in cached_layers(model.config))


def check_forward(model: PreTrainedModel) -> None:
    """Refuse models whose cache is unknown, or that are not told where a token stands."""
    # A wrapper (PEFT) hides the arguments of the forward that it wraps.
    if not isinstance(model, PreTrainedModel):
        return
    kind = model.config.model_type
    cache_argument(model)
    if _remembers_elsewhere(model):
        raise CacheNotRewindableError(
            f"{kind} keeps a state of its own kind, from which rejected tokens cannot be removed; "
            "speculative decoding needs transformers' cache of keys and values or recurrent states"
        )
    cached_layers(model.config)
    # Falcon's ALiBi is made of a mask of padding, and CPM-Ant puts learned tokens before a text.
    if getattr(model.config, "alibi", False) or hasattr(model.config, "prompt_length"):
        raise ConfigError(
            f"{kind} derives positions from what is not its text, so drafts cannot be scored; use "
            "a model with learned or rotary positions"
        )


def _remembers_elsewhere(model: PreTrainedModel) -> bool:
    """True if a model keeps something of its texts outside of transformers' own cache."""
    code = sys.modules[type(model).__module__]
    classes = [each for each in vars(code).values() if isinstance(each, type)]
    names = [each.__name__ for each in classes if each.__module__ == code.__name__]
    return (
        any(name.endswith("Cache") for name in names)  # MiniMax
        or any(hasattr(module, "recurrent_states") for module in model.modules())  # RecurrentGemma
        or hasattr(model.config, "indexer_compress_ratio")  # Qwen4's positions of indexed keys
        or hasattr(model.config, "cross_attention_layers")  # Mllama's images
        or hasattr(model.config, "n_recurrent_loops")  # Dory's layers that are run again
    )


def takes_positions(model: PreTrainedModel) -> bool:
    """True if the model is told where tokens stand; Mamba needs not know. PEFT's pass it on."""
    return (
        not isinstance(model, PreTrainedModel)
        or "position_ids" in signature(model.forward).parameters
    )


def cached_layers(config: PretrainedConfig) -> list[LayerKind]:
    """What each layer of a model keeps of the tokens that it has read."""
    kinds = []
    layers = _layers(config)
    # A layer may take the choice of an indexer before it (GLM-5, Hy 4).
    indexers = getattr(config.get_text_config(), "indexer_types", None) or [""] * len(layers)
    for layer, indexer in zip(layers, indexers, strict=True):
        states = layer.number_of_states if isinstance(layer, LinearAttentionLayer) else 0
        in_blocks = hasattr(layer, "update_index")  # MiniMax M3
        indexed = in_blocks or (type(layer) is DynamicIndexedLayer and indexer != "shared")
        attends = type(layer) in _ATTENDING or in_blocks
        if not (attends or states or isinstance(layer, DummyLayer)):
            raise _unknown(config, type(layer).__name__)
        kinds.append(LayerKind(attends, indexed, states))
    # Mixers of older versions do not go on with several tokens from a state that was put back.
    if any(kind.states for kind in kinds) and not hasattr(DynamicCache, "get_conv_state"):
        raise CacheNotRewindableError(
            f"{config.model_type} has recurrent layers, which need transformers 5.21 or newer, and "
            f"this is {transformers_version}: install a newer one"
        )
    return kinds


def _layers(config: PretrainedConfig) -> list[Any]:
    """The layers of transformers' cache for a model."""
    try:
        layers: list[Any] = DynamicCache(config=config).layers
    except KeyError as error:  # known once the model's code is imported; of a kind of its own
        raise _unknown(config, str(error)) from error
    return layers


def _unknown(config: PretrainedConfig, kind: str) -> CacheNotRewindableError:
    return CacheNotRewindableError(
        f"{config.model_type} keeps a cache of a kind from which rejected tokens cannot be removed "
        f"({kind}); speculative decoding needs keys and values, or recurrent states, of "
        "transformers' own kinds"
    )


def has_rules(model: PreTrainedModel) -> bool:
    """True if a model makes masks of its own: of windows, chunks, indexers, ALiBi, ..."""
    plain = all(type(layer) is DynamicLayer for layer in _layers(model.config))
    local = "local" in getattr(model.config, "attention_layers", ())
    return not plain or local or not takes_positions(model)


def takes_masks(model: PreTrainedModel) -> bool:
    """True if the model's attention takes a given mask; flash attention does not."""
    return "flash" not in str(model.config._attn_implementation)


def check_trees(model: PreTrainedModel) -> None:
    """Raise ConfigError if the model cannot read a tree by a mask."""
    check_forward(model)  # the advice to draft chains is for models that can
    if not takes_masks(model):
        raise ConfigError(
            f"{model.config._attn_implementation} takes no tree mask: load the model "
            "with attn_implementation='sdpa' (or 'eager'), or draft chains"
        )
    kind = model.config.model_type
    if any(layer.states for layer in cached_layers(model.config)):
        raise ConfigError(
            f"{kind} has recurrent layers, whose state is of one text, so they cannot read a tree: "
            "draft chains"
        )
    in_blocks = any(hasattr(layer, "update_index") for layer in _layers(model.config))
    if in_blocks or not takes_positions(model):
        raise ConfigError(
            f"{kind} takes the place of a token in its cache for that in the text, which in a tree "
            "it is not: draft chains"
        )


def check_assisted(target: PreTrainedModel) -> None:
    """Raise ConfigError for a target that transformers' assisted generation does not take."""
    if target._is_stateful:
        raise ConfigError(
            f"transformers' assisted generation refuses {target.config.model_type}, which keeps a "
            "recurrent state: leave methods with decoder assisted out of eval.methods"
        )


def check_rope(model: PreTrainedModel, longest: int) -> None:
    """Refuse sequences whose distributions would depend on how many tokens a forward reads.

    A length-dependent rope takes the frequencies of a whole forward from its last position, and the
    keys in the cache keep those that they were written with.
    """
    rope, reach = length_dependent_rope(model.config), positions(model.config)
    if rope is not None and longest > reach:
        raise ConfigError(
            f"{model.config.model_type} has a rope ({rope['rope_type']}) whose frequencies change "
            f"after {reach} tokens, so the distribution of a sequence of up to {longest} would "
            "depend on how it is read: shorten the prompt or max_new_tokens"
        )


def attention_name(model: PreTrainedModel) -> str:
    """The name by which transformers knows the model's attention."""
    name: str = model.config.get_text_config()._attn_implementation
    return name


@contextmanager
def attending_packed(model: PreTrainedModel, slots: Tensor, columns: Tensor) -> Iterator[None]:
    """Inside, the model attends by `packed_attention`.

    Of (n,) slots and (n,) columns, the place of each token among the tokens of its slot.
    """
    config = model.config.get_text_config()
    before = config._attn_implementation
    AttentionInterface.register(PACKED, packed_attention)
    config._attn_implementation = PACKED
    places = _PLACES.set((slots, columns))
    try:
        yield
    finally:
        _PLACES.reset(places)
        config._attn_implementation = before


def packed_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attend from packed tokens to the keys and values of their own slots.

    (1, heads, n, size) queries, (B, key heads, end, size) keys and values of every slot and a
    (B, 1, m, end) additive mask -> (1, n, heads, size).
    """
    slots, columns = (places.to(query.device) for places in _PLACES.get())
    _, heads, _, size = query.shape
    by_slot = query.new_zeros(key.shape[0], attention_mask.shape[2], heads, size)
    by_slot[slots, columns] = query[0].transpose(0, 1)
    attended, _ = sdpa_attention_forward(
        module, by_slot.transpose(1, 2), key, value, attention_mask, **kwargs
    )
    return attended[slots, columns].unsqueeze(0), None
