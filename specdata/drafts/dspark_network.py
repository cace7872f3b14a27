"""Drafts in DSpark's form: a block of tokens after one forward (published for Qwen3 by DeepSpec).

A block stands behind the context: the last token of the text, its anchor, and masks for the tokens
that are not known yet. Each layer makes keys and values of the context from the target's states
there (`fc`, then `hidden_norm`), and the block attends to the context and to the whole of itself.
Slot i gives logits of the token behind it, through the target's output matrix, and a bias by the
token that came before, W2 w1[token] (a Markov chain's, of rank r). So a block's tokens are drawn in
order, without another forward.

What enters the layers is [context; block; w1] of width 2 H + r, where a token has the one or the
other; what leaves them is [h; w1] of width H + r, of which logits are one linear map. So all other
code sees an ordinary draft, and a head on its states reads what DSpark's confidence head reads. In
decoding w1 is left out of a forward, and added behind it as each token is drawn.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn
from transformers.models.qwen3.modeling_qwen3 import (
    Qwen3DecoderLayer,
    Qwen3Model,
    Qwen3RMSNorm,
    rotate_half,
)

from specdata.cache import cache_argument
from specdata.drafts.attention import Seen, attention_along
from specdata.drafts.draft_vocabulary import SIZE, ReducedOutput, install_output
from specdata.drafts.dspark import Blocks
from specdata.drafts.kind import KEY
from specdata.drafts.states_network import StatesInput, TargetStates
from specdata.errors import ConfigError
from specdata.loading import reach

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

CACHE = cache_argument(Qwen3DecoderLayer)


class BlockInput(StatesInput):
    """The input embedding: of contexts the target's states, of a block's tokens the target's own.

    `markov` (V, r) is w1. The mask is one of the target's tokens, since engines embed it as such.
    `scale` (F,) makes the target's states about 1 in size: some are thousands, and a step of `fc`
    by them would be a leap of the draft. Engines get it as a part of `fc`.
    """

    scale: Tensor
    blocks: Blocks

    def __init__(
        self, tokens: nn.Embedding, taps: int, size: int, blocks: Blocks, epsilon: float
    ) -> None:
        super().__init__(tokens, tokens.embedding_dim, taps, size)
        del self.token, self.own_token, self.own_state
        self.hidden_norm = Qwen3RMSNorm(tokens.embedding_dim, eps=epsilon)
        self.markov = nn.Embedding(tokens.num_embeddings, blocks.rank)
        self.blocks, self.width = blocks, tokens.embedding_dim
        self.register_buffer("scale", tokens.weight.new_ones(taps * size))

    def contexts(self, states: Tensor) -> Tensor:
        """(..., 2 H + r) inputs of tokens of the context, by the target's states (..., F)."""
        context = self.hidden_norm(self.states(states.to(self.weight.dtype) * self.scale))
        return nn.functional.pad(context, (0, self.width + self.blocks.rank))

    def unread(self, taps: Tensor, block: Tensor) -> Tensor:
        """(n, F + H) what engines give the layers: (m, F) of contexts, (n - m,) ids of a block."""
        count, size = len(taps), len(self.scale)
        x = self.weight.new_zeros(count + len(block), size + self.width)
        x[:count, :size], x[count:, size:] = taps, self.tokens(block)
        return x

    def slots(self, ids: Tensor, before: Tensor) -> Tensor:
        """(..., 2 H + r) inputs of the tokens and masks (...) of blocks.

        `before` is the token before the one that each slot proposes; -1 where it is not known yet.
        """
        markov = self.markov(before.clamp(min=0)).masked_fill(before[..., None] < 0, 0.0)
        return nn.functional.pad(torch.cat([self.tokens(ids), markov], -1), (self.width, 0))


class BlockLayer(Qwen3DecoderLayer):  # type: ignore[misc]
    """A decoder layer over (B, n, 2 H + r), whose contexts stay as they are."""

    def __init__(self, config: Any, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        self.is_last = layer_idx + 1 == config.num_hidden_layers

    def forward(
        self,
        hidden_states: Tensor,
        *,
        contexts: int,
        unread: int = 0,
        seen: Seen | None = None,
        **named: Any,
    ) -> Tensor:
        """(B, n, 2 H + r) -> the same shape; the first `contexts` are the context.

        Nobody reads the `unread` slots behind them in the end, so the last layer makes only keys
        and values of these. Without `seen`, what slots attend to, there is one block.
        """
        first = contexts + unread * self.is_last
        context, x, markov = split(hidden_states, self.hidden_size)
        x = x[:, contexts:]
        read = torch.cat([context[:, :contexts], self.input_layernorm(x)], dim=1)
        x = x[:, first - contexts :] + self._attended(read, first, contexts, seen, **named)
        x = x + self.mlp(self.post_attention_layernorm(x))
        return torch.cat([context, nn.functional.pad(x, (0, 0, first, 0)), markov], dim=-1)

    def _attended(
        self,
        read: Tensor,
        first: int,
        contexts: int,
        seen: Seen | None,
        *,
        position_embeddings: tuple[Tensor, Tensor],
        **named: Any,
    ) -> Tensor:
        """The attention of slots, as `self_attn` gives it, without queries of others."""
        attention = self.self_attn
        heads = (-1, attention.head_dim)
        queries = attention.q_proj(read[:, first:]).unflatten(-1, heads)
        queries = attention.q_norm(queries).transpose(1, 2)
        keys = attention.k_norm(attention.k_proj(read).unflatten(-1, heads)).transpose(1, 2)
        values = attention.v_proj(read).unflatten(-1, heads).transpose(1, 2)
        cos, sin = (turn[:, None] for turn in position_embeddings)
        keys = keys * cos + rotate_half(keys) * sin
        cos, sin = cos[:, :, first:], sin[:, :, first:]
        queries = queries * cos + rotate_half(queries) * sin
        if seen is None:  # one block, which attends to everything
            if (cache := named.get(CACHE)) is not None:
                keys, values = cache.update(keys, values, attention.layer_idx)
            attended = nn.functional.scaled_dot_product_attention(
                queries, keys, values, enable_gqa=True
            )
        else:
            queried = slice(first - contexts, None)
            part = Seen(contexts, seen.last[:, queried], seen.extra_keys[:, queried])
            attended = attention_along(queries, keys, values, part)
        projected: Tensor = attention.o_proj(attended.transpose(1, 2).flatten(2))
        return projected


class BlockNorm(nn.Module):
    """The norm behind the last layer: (..., 2 H + r) -> (..., H + r)."""

    def __init__(self, norm: nn.Module, width: int) -> None:
        super().__init__()
        self.norm, self.width = norm, width

    def forward(self, states: Tensor) -> Tensor:
        """Normalise the block alone."""
        _, x, markov = split(states, self.width)
        return torch.cat([self.norm(x), markov], dim=-1)


class MarkovOutput(ReducedOutput):
    """The output embedding: (..., H + r) states -> logits, of which `markov` (N, r) is the bias."""

    is_matrix = False

    def __init__(self, weight: Tensor, markov: Tensor, ids: Tensor, vocabulary: int) -> None:
        super().__init__(weight, None, ids, vocabulary)
        self.markov = nn.Parameter(markov)

    @property
    def is_frozen(self) -> bool:  # type: ignore[override]
        """Whether it is the target's own, which is whole."""
        return len(self.vocabulary_ids) == self.vocabulary

    @property
    def in_features(self) -> int:
        """H + r."""
        return self.weight.shape[1] + self.markov.shape[1]

    def scores(self, states: Tensor) -> Tensor:
        """(..., H + r | H) states -> (..., N) logits of the tokens that can be proposed."""
        width = self.weight.shape[1]
        logits = nn.functional.linear(states[..., :width], self.weight)
        if states.shape[-1] == width:
            return logits
        return logits + self.bias_by(states[..., width:])

    def bias_by(self, markov: Tensor) -> Tensor:
        """(..., r) w1 of tokens -> (..., N) the bias of logits behind them."""
        return nn.functional.linear(markov, self.markov)

    def keep(self, rows: Tensor) -> None:
        """Propose some of the tokens alone; `rows` are those of `vocabulary_ids`."""
        super().keep(rows)
        self.markov = nn.Parameter(self.markov.detach()[rows].clone())


class BlockModel(Qwen3Model):  # type: ignore[misc]
    """The layers. Along a text, given as ids, it drafts block after block, from the first token on.

    So its state at t is that of slot t mod block, with the text's own token there as `before`.
    """

    def forward(self, input_ids: Tensor | None = None, contexts: int = 0, **named: Any) -> Any:
        """(B, T) ids -> the last states (B, T, H + r).

        Or (B, n, F + H) `inputs_embeds` -> (B, n, H): by `BlockInput.unread`, of so many contexts
        and of one block behind them, which attends to all; what w1 adds is known later.
        """
        input_embedding = cast(BlockInput, self.embed_tokens)
        if input_ids is None:
            read, size = named["inputs_embeds"], len(input_embedding.scale)
            blocks = nn.functional.pad(read[:, contexts:, size:], (input_embedding.width, 0))
            context = input_embedding.contexts(read[:, :contexts, :size])
            context = context[..., : 2 * input_embedding.width]
            x = torch.cat([context, blocks], dim=1)
            masks = dict.fromkeys(self.config.layer_types)
            named |= {"inputs_embeds": x, "attention_mask": masks}
            return super().forward(contexts=contexts, **named)
        length, size = input_ids.shape[1], input_embedding.blocks.size
        anchors = torch.arange(0, length, size, device=input_ids.device).expand(len(input_ids), -1)
        output = read_blocks(self, input_ids, input_embedding.read_target(input_ids), anchors, size)
        output.last_hidden_state = output.last_hidden_state.flatten(1, 2)[:, :length]
        return output


def read_blocks(
    body: BlockModel,
    ids: Tensor,
    taps: Tensor,
    anchors: Tensor,
    size: int,
    *,
    whole_count: int | None = None,
) -> Any:
    """The states of a draft's blocks along texts: `last_hidden_state` (B, A, size, H + r).

    Args:
        body: the draft's layers.
        ids: (B, T) texts, whose tokens count as drawn in the slots before.
        taps: (B, T, F) the target's states along them.
        anchors: (B, A) positions at which blocks begin; those of padding have no meaning.
        size: slots of a block.
        whole_count: how many blocks, from the first, have all slots read; of the others the first
            slot is, and the rest is 0 (default: all blocks).
    """
    input_embedding = cast(BlockInput, body.embed_tokens)
    (rows, length), device = ids.shape, ids.device
    count = anchors.shape[1]
    whole_count = count if whole_count is None else min(whole_count, count)
    # First what nobody reads in the end, then first slots alone, then whole blocks.
    every, slots = torch.arange(count, device=device), torch.arange(size, device=device)
    part, first = every[whole_count:], torch.zeros_like(every[whole_count:])
    rest = part.repeat_interleave(size - 1)
    block = torch.cat([rest, part, every[:whole_count].repeat_interleave(size)])
    slot = torch.cat([slots[1:].repeat(len(part)), first, slots.repeat(whole_count)])
    begin = anchors[:, block]
    index = begin + slot  # (B, A size)
    before = ids.gather(1, index.clamp(max=length - 1))
    tokens = torch.where(slot == 0, before, input_embedding.blocks.mask)
    places = torch.cat([torch.arange(length, device=device).expand(rows, -1), index], dim=1)
    x = torch.cat([input_embedding.contexts(taps), input_embedding.slots(tokens, before)], dim=1)
    # Where the slots of each slot's block stand: in the order of blocks, the first slot first.
    extra_keys = torch.argsort(block * size + slot).view(count, size)[block].expand(rows, -1, -1)
    output = Qwen3Model.forward(
        body,
        inputs_embeds=x,
        attention_mask=dict.fromkeys(body.config.layer_types),
        position_ids=places.clamp(max=cast(int, reach(vars(body.config))) - 1),
        use_cache=False,
        contexts=length,
        unread=len(rest),
        seen=Seen(length, begin - 1, extra_keys),
    )
    read = output.last_hidden_state[:, length + len(rest) :]
    states = read.new_zeros(rows, count, size, read.shape[-1])
    states[:, whole_count:, 0] = read[:, : len(part)]
    states[:, :whole_count] = read[:, len(part) :].unflatten(1, (whole_count, size))
    output.last_hidden_state = states
    return output


def split(states: Tensor, width: int) -> tuple[Tensor, Tensor, Tensor]:
    """(..., 2 H + r) -> context (..., H), block (..., H), w1 (..., r)."""
    rank = states.shape[-1] - 2 * width
    context, x, markov = torch.split(states, [width, width, rank], dim=-1)
    return context, x, markov


def dspark_class(architecture: type[PreTrainedModel]) -> type[PreTrainedModel]:
    """A class of models to make and load such drafts with; see `specdata.drafts.states_network`."""

    class DSpark(architecture):  # type: ignore[misc]
        def __init__(self, config: PreTrainedConfig) -> None:
            super().__init__(config)
            record = TargetStates.of(config)
            blocks = cast(Blocks, record.kind_record)
            if blocks.mask >= config.vocab_size:
                raise ConfigError(
                    f"blocks.mask in {KEY} of the draft's config.json must be below "
                    f"{config.vocab_size}, got {blocks.mask}: restore it"
                )
            taps, epsilon, width = len(record.taps), config.rms_norm_eps, config.hidden_size
            body = BlockModel(config)
            for index in range(config.num_hidden_layers):
                body.layers[index] = BlockLayer(config, index)
            body.norm = BlockNorm(body.norm, width)
            self.model = body
            size = record.width // taps
            tokens = body.embed_tokens
            self.set_input_embeddings(BlockInput(tokens, taps, size, blocks, epsilon))
            rows = tokens.num_embeddings
            ids = torch.arange(getattr(config, SIZE), device=tokens.weight.device)
            weight = tokens.weight.new_empty(len(ids), width)
            markov = weight.new_empty(len(ids), blocks.rank)
            install_output(self, MarkovOutput(weight, markov, ids, rows))

    return DSpark
