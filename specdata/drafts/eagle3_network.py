"""Drafts in EAGLE-3's layout (Li et al. 2025, arXiv:2503.01840).

Engines serve these. The layer reads a token's embedding and a state beside each other: three states
of the target, through a matrix (`fc`), or the draft's own. In memory it is transformers' Llama with
another first layer, input and output embedding, so that it decodes as every draft on its target's
states does (`specdata.drafts.states_network`). `distill.drafts.eagle3` makes them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRMSNorm

from specdata.cache import cache_argument
from specdata.drafts.draft_vocabulary import ReducedOutput, install_output
from specdata.drafts.eagle3 import Norms
from specdata.drafts.states_network import StatesInput, TargetStates, hiding_first

if TYPE_CHECKING:
    from transformers import LlamaConfig, PreTrainedConfig, PreTrainedModel

CACHE = cache_argument(LlamaDecoderLayer)


class Eagle3Layer(LlamaDecoderLayer):  # type: ignore[misc]
    """A decoder layer over (B, T, 2 H): embeddings of tokens, and states."""

    def __init__(self, config: LlamaConfig, *, norm_before_residual: bool) -> None:
        super().__init__(config, 0)
        for name in ("q_proj", "k_proj", "v_proj"):
            old = getattr(self.self_attn, name)
            new = nn.Linear(2 * old.in_features, old.out_features, bias=old.bias is not None)
            setattr(self.self_attn, name, new)
        self.hidden_norm = LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.norm_before_residual = norm_before_residual

    def forward(self, hidden_states: Tensor, **named: Any) -> Tensor:
        """(B, T, 2 H) -> (B, T, H)."""
        tokens, states = hidden_states.chunk(2, dim=-1)
        normed = self.hidden_norm(states)
        read = torch.cat([self.input_layernorm(tokens), normed], dim=-1)
        attended, _ = self.self_attn(
            hidden_states=read, **hiding_first(hidden_states, named, CACHE)
        )
        x: Tensor = (normed if self.norm_before_residual else states) + attended
        return x + cast(Tensor, self.mlp(self.post_attention_layernorm(x)))


class Eagle3Input(StatesInput):
    """The input embedding: a token's embedding and a state, (..., 2 H), of `taps` states."""

    reads_first = False  # a draft begins with the second token, and the state at the first

    def __init__(
        self, tokens: nn.Embedding, taps: int, size: int, norms: Norms, epsilon: float
    ) -> None:
        super().__init__(tokens, tokens.embedding_dim, taps, size)
        del self.token, self.own_token, self.own_state
        self.input_norm = LlamaRMSNorm(taps * size, eps=epsilon) if norms.norm_before_fc else None
        each = [LlamaRMSNorm(size, eps=epsilon) for _ in range(taps)]
        self.fc_norm = nn.ModuleList(each) if norms.fc_norm else None

    def after_target(self, ids: Tensor, states: Tensor) -> Tensor:
        """(..., 2 H) inputs of tokens behind the target's states (..., F), which are not scaled."""
        states = states.to(self.weight.dtype)
        if self.input_norm is not None:
            states = self.input_norm(states)
        if self.fc_norm is not None:
            parts = states.chunk(self.taps, dim=-1)
            normed = (norm(part) for norm, part in zip(self.fc_norm, parts, strict=True))
            states = torch.cat([*normed], dim=-1)
        return self.after_own(ids, self.states(states))

    def after_own(self, ids: Tensor, states: Tensor) -> Tensor:
        """(..., 2 H) inputs of tokens behind the draft's states (..., H)."""
        return torch.cat([self.tokens(ids), states], dim=-1)


class Eagle3Output(ReducedOutput):
    """The output embedding, behind the final norm: what reaches it is what is fed back."""

    def __init__(
        self, weight: Tensor, vocabulary_ids: Tensor, vocabulary: int, norm: nn.Module
    ) -> None:
        super().__init__(weight, None, vocabulary_ids, vocabulary)
        self.norm = norm

    def before(self, states: Tensor) -> Tensor:
        """(..., H) states -> (..., H) normalised."""
        normed: Tensor = self.norm(states)
        return normed


def eagle3_class(architecture: type[PreTrainedModel]) -> type[PreTrainedModel]:
    """A class of models to make and load such drafts with; see `specdata.drafts.states_network`."""

    class Eagle3(architecture):  # type: ignore[misc]
        def __init__(self, config: PreTrainedConfig) -> None:
            super().__init__(config)
            record, model = TargetStates.of(config), self.base_model
            norms, taps = cast(Norms, record.kind_record), len(record.taps)
            model.layers[0] = Eagle3Layer(config, norm_before_residual=norms.norm_before_residual)
            size, epsilon = record.width // taps, config.rms_norm_eps
            tokens = self.get_input_embeddings()
            self.set_input_embeddings(Eagle3Input(tokens, taps, size, norms, epsilon))
            norm = model.norm
            if norms.norm_output:
                norm = nn.Identity()
            else:
                model.norm = nn.Identity()
            rows, width = self.get_output_embeddings().weight.shape
            ids = torch.arange(config.draft_vocab_size)
            weight = self.get_output_embeddings().weight.new_empty(len(ids), width)
            install_output(self, Eagle3Output(weight, ids.to(weight.device), rows, norm))

    return Eagle3
