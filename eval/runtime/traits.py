"""What decoding must know of a model, read from it once."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from eval.runtime.kv_cache import LayerKind
from eval.runtime.recurrent import Mixer, mixers_of
from eval.runtime.transformers_models import (
    cached_layers,
    can_pack,
    check_forward,
    has_rules,
    takes_masks,
    takes_positions,
    uses_sdpa,
)
from specdata.cache import cache_argument
from specdata.draft_models.depths import depths_of
from specdata.draft_models.draft_vocabulary import draft_vocabulary_ids
from specdata.draft_models.states_draft import is_in_blocks, states_input
from specdata.errors import ConfigError
from specdata.models import positions


@dataclass(frozen=True, eq=False)
class Traits:
    """What decoding must know of a model.

    Attributes:
        vocabulary: V of the distributions: the target's.
        ids: (N,) the tokens that it has logits of; None if these are all V.
        has_fewer_ids: tokens of the target are unknown to it.
        reads_states: it reads its target's hidden states.
        in_blocks: it drafts in blocks; a block attends to everything.
        depths: D, the tokens that it proposes after one forward.
        layers: what each keeps of the tokens that it has read.
        mixers: its modules with recurrent states.
        takes_masks: its attention takes a given mask.
        has_rules: some of its layers make masks of their own, of what they are given.
        uses_sdpa: it attends by SDPA. Only SDPA needs no mask for a single token: of a mask that
            the model makes for itself, a graph would keep the length.
        packs: tokens of several sequences may stand in one row.
        in_pieces: a long text may be read in pieces; not blocks, which have no mask, nor what reads
            each token by itself from a state on.
        positions: the most tokens of a text that it has positions for.
    """

    device: torch.device
    dtype: torch.dtype
    vocabulary: int
    ids: Tensor | None
    has_fewer_ids: bool
    reads_states: bool
    in_blocks: bool
    depths: int
    layers: list[LayerKind]
    mixers: list[Mixer]
    takes_masks: bool
    takes_positions: bool
    has_rules: bool
    uses_sdpa: bool
    packs: bool
    in_pieces: bool
    cache_argument: str
    positions: int

    @property
    def looks_ahead(self) -> bool:
        """Whether drafted tokens are not read: what they add is known beforehand."""
        return self.depths > 1 or self.in_blocks

    @property
    def own_tokens(self) -> int:
        """N, the tokens that the model has logits of."""
        return self.vocabulary if self.ids is None else len(self.ids)

    @classmethod
    def of(cls, model: PreTrainedModel, vocabulary: int, deepest: int) -> Traits:
        """Of a model that drafts paths of at most `deepest` tokens; 1: a target, or no masks.

        Raises:
            CacheNotRewindableError: if tokens cannot be dropped from the model's cache.
            ConfigError: if its forward takes no positions, or it has masks and recurrent layers.
        """
        check_forward(model)
        layers = cached_layers(model.config)
        mixers = mixers_of(model) if any(layer.states for layer in layers) else []
        in_blocks = is_in_blocks(model)
        depths = min(depths_of(model), deepest) if deepest > 1 else 1
        if mixers and depths > 1:
            raise ConfigError(
                f"a draft with recurrent layers ({model.config.model_type}) cannot read masks: "
                "remove depths from its config.json"
            )
        ids = draft_vocabulary_ids(model)
        ids = None if ids is None else ids[ids < vocabulary]
        if ids is not None and torch.equal(ids, torch.arange(vocabulary, device=ids.device)):
            ids = None
        return cls(
            device=model.device,
            dtype=model.dtype,
            vocabulary=vocabulary,
            ids=ids,
            has_fewer_ids=model.config.get_text_config().vocab_size < vocabulary,
            reads_states=states_input(model) is not None,
            in_blocks=in_blocks,
            depths=depths,
            layers=layers,
            mixers=mixers,
            takes_masks=takes_masks(model),
            takes_positions=takes_positions(model),
            has_rules=takes_masks(model) and has_rules(model),
            uses_sdpa=uses_sdpa(model),
            packs=can_pack(model) and depths == 1 and not in_blocks,
            in_pieces=not (in_blocks or any(mixer.stepwise for mixer in mixers)),
            cache_argument=cache_argument(model),
            positions=positions(model.config),
        )
