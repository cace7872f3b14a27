"""The heads that targets bring along (MTP), as drafts on their target's states.

One layer of the target's kind reads a token's embedding and a state, each normalised, through a
projection. Embedding, output matrix and final norm are the target's own, and stay there: a draft
borrows them (`Lent`), so they are neither stored, trained, moved nor copied with it. In memory it
is the transformers model of the target's architecture with one layer, so that it decodes as every
draft on its target's states does (`states_network`). `distill.drafts.mtp` reads them.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from specdata.cache import cache_argument
from specdata.drafts.draft_vocabulary import SIZE, install_output, is_reduced, replace_output
from specdata.drafts.eagle3_network import Eagle3Output
from specdata.drafts.mtp import Convention
from specdata.drafts.states_network import StatesInput, TargetStates, hiding_first

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel


class Lent:
    """The target that a draft borrows from; not a part of it, and none until `borrow`."""

    target: Any = None

    def __deepcopy__(self, _: object) -> Lent:
        return self  # a copy of a draft has the same target


class MTPInput(StatesInput):
    """The input embedding: of a token's embedding and a state, (..., H)."""

    def __init__(
        self, lent: Lent, tokens: nn.Embedding, norm: nn.Module, convention: Convention
    ) -> None:
        width = tokens.embedding_dim
        super().__init__(tokens, width, 2, width)
        self.fc = self.states  # both halves
        for name in ("tokens", "token", "states", "own_token", "own_state"):
            delattr(self, name)
        self.embedding_norm, self.state_norm = copy.deepcopy(norm), copy.deepcopy(norm)
        self.lent, self.convention = lent, convention

    @property
    def reads_first(self) -> bool:  # type: ignore[override]
        """False where a head begins with the second token, and the state at the first."""
        return self.convention.reads_first

    @property
    def tokens(self) -> nn.Embedding:  # type: ignore[override]
        """The target's embedding."""
        embedding: nn.Embedding = self.lent.target.get_input_embeddings()
        return embedding

    @property
    def read_width(self) -> int:
        """H of the target's last state."""
        return cast(int, self.fc.out_features)

    def borrow(self, target: PreTrainedModel) -> None:
        """Use a target's embedding, final norm and output matrix."""
        self.lent.target = target

    def share_target(self, other: StatesInput) -> None:
        """Read the target that another draft's input reads, and borrow from it."""
        super().share_target(other)
        self.borrow(cast(MTPInput, other).lent.target)

    def from_start(self, ids: Tensor, first: int = 0) -> Tensor:
        """(..., n) tokens from the text's `first` on, -1 where no embedding is read."""
        if self.convention.zero_first and first <= 1 < first + ids.shape[-1]:
            ids = ids.clone()
            ids[..., 1 - first] = -1
        return ids

    def after_target(self, ids: Tensor, states: Tensor) -> Tensor:
        """(..., H) inputs of tokens behind the target's states (..., H)."""
        if self.convention.normed_target:
            states = self.lent.target.base_model.norm(states.to(self.lent.target.dtype))
        return self.after_own(ids, states)

    def after_own(self, ids: Tensor, states: Tensor) -> Tensor:
        """(..., H) inputs of tokens behind the head's own states (..., H)."""
        tokens = self.tokens(ids.clamp(min=0)).masked_fill(ids[..., None] < 0, 0.0)
        dtype = self.fc.weight.dtype
        halves = [self.embedding_norm(tokens.to(dtype)), self.state_norm(states.to(dtype))]
        if self.convention.state_first:
            halves.reverse()
        x: Tensor = self.fc(torch.cat(halves, dim=-1))
        return x


class LentOutput(nn.Module):
    """The target's output matrix, behind the head's last norm if its own states are before that."""

    def __init__(self, lent: Lent, norm: nn.Module) -> None:
        super().__init__()
        self.lent, self.norm = lent, norm

    @property
    def weight(self) -> Tensor:
        """(V, H) of the target."""
        weight: Tensor = self.lent.target.get_output_embeddings().weight
        return weight

    def forward(self, states: Tensor) -> Tensor:
        """(..., H) states -> (..., V) logits."""
        output = self.lent.target.get_output_embeddings()
        logits: Tensor = output(self.norm(states).to(output.weight.dtype))
        return logits

    def of_rows(self, ids: Tensor) -> LentRows:
        """Propose some of the tokens alone, by a copy of their rows."""
        weight = self.weight.detach()
        return LentRows(weight[ids].clone(), ids, len(weight), self.norm)


class LentRows(Eagle3Output):
    """The same of a reduced vocabulary: a copy of some of the target's rows, not trained either."""

    is_frozen = True


def mtp_class(architecture: type[PreTrainedModel]) -> type[PreTrainedModel]:
    """A class of models to make and load such drafts with; see `specdata.drafts.states_network`."""

    class MTP(architecture):  # type: ignore[misc]
        def __init__(self, config: PreTrainedConfig) -> None:
            super().__init__(config)
            convention = cast(Convention, TargetStates.of(config).kind_record)
            tokens, body, lent = self.get_input_embeddings(), self.base_model, Lent()
            self.set_input_embeddings(MTPInput(lent, tokens, body.norm, convention))
            norm = body.norm if convention.last_norm else nn.Identity()
            body.norm, norm = (
                (norm, nn.Identity()) if convention.normed_own else (nn.Identity(), norm)
            )
            if is_reduced(config):
                ids = torch.arange(getattr(config, SIZE), device=tokens.weight.device)
                weight = tokens.weight.new_empty(len(ids), tokens.embedding_dim)
                install_output(self, LentRows(weight, ids, tokens.num_embeddings, norm))
            else:
                replace_output(self, LentOutput(lent, norm))
            (layer,) = body.layers
            cache = cache_argument(type(layer))

            def hide_first(_layer: nn.Module, inputs: Any, named: dict[str, Any]) -> Any:
                states = inputs[0] if inputs else named["hidden_states"]
                return inputs, hiding_first(states, named, cache)

            if not convention.reads_first:
                layer.register_forward_pre_hook(hide_first, with_kwargs=True)

    return MTP
