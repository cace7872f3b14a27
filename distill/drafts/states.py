"""Drafts that read their target's states: how they begin, and what they say along texts.

They begin without training: their inputs are linear maps that predict the target's own last state
(ridge regression), their layers are the target's last or others of Llama's kind
(`llama_draft`), silenced (the matrices that write to the residual stream are 0), and the
target's final norm and output matrix make tokens of it.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any

import torch
from datasets import Dataset
from torch import Tensor, nn
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM, PreTrainedModel, set_seed
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from distill.drafts import plain
from distill.rounds import Place, Texts, window
from distill.training import take_special_ids
from specdata.cache import cache_argument
from specdata.drafts.attention import Seen, attending_along
from specdata.drafts.draft_vocabulary import replace_output
from specdata.drafts.states_network import before, states_input, unit
from specdata.drafts.taps import decoder_layers, install, read_taps
from specdata.errors import ConfigError
from specdata.least_squares import fit_rows, ridge
from specdata.lm_head import LMHead, body_of, find_lm_head, hidden_states
from specdata.target_states import target_taps

LAYER_PARTS = {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}
SILENCED = ("self_attn.o_proj", "mlp.down_proj")
"""A layer of Llama's kind, and what in it writes to the residual stream."""


def begin(
    target: PreTrainedModel, source: plain.Source, rollouts: Dataset, seed: int
) -> tuple[PreTrainedModel, dict[str, Any]]:
    """A draft of the target's layers, or of as many of Llama's (`llama_draft`)."""
    layers, taps, _ = source
    differences: dict[str, Any] = {}
    model, normed = None, None
    if can_be_silenced(target):
        with suppress(ConfigError):  # a layer depends on its place
            model = plain.cut(target, layers)
            silence(model)
            replace_output(model, copy.deepcopy(model.get_output_embeddings()))  # was tied
    if model is None:
        differences = {"architecture": "llama", "layers": len(layers)}
        context = plain.context_of(target.config, rollouts)
        model, normed = llama_draft(target, len(layers), context, seed)
    install(model, target, taps)
    fit_inputs(model, target, taps, rollouts, normed)
    return model, differences


def of_shapes(target: PreTrainedModel, source: plain.Source) -> PreTrainedModel:
    """The draft that `begin` makes of a target on no device, there, too."""
    model = plain.of_shapes(target, source)
    install(model, target, source.taps)
    return model


def can_be_silenced(model: PreTrainedModel) -> bool:
    """True if a model's layers are of Llama's and Qwen's kind, without windows."""
    text = model.config.get_text_config()
    kinds = {*(getattr(text, "layer_types", None) or ())} - {"full_attention"}
    layers = [dict(layer.named_modules()) for layer in decoder_layers(model)[1]]
    return not (kinds or getattr(text, "sliding_window", None)) and all(
        {name for name in modules if name and "." not in name} == LAYER_PARTS
        and all(isinstance(modules.get(name), nn.Linear) for name in SILENCED)
        for modules in layers
    )


@torch.no_grad()
def silence(model: PreTrainedModel) -> None:
    """Make every layer of a model the identity, to begin with; other models may share its weights.

    They are of Llama's kind (`can_be_silenced`).
    """
    for layer in decoder_layers(model)[1]:
        for linear in map(layer.get_submodule, SILENCED):
            assert isinstance(linear, nn.Linear)
            linear.weight = nn.Parameter(torch.zeros_like(linear.weight))
            if linear.bias is not None:
                linear.bias = nn.Parameter(torch.zeros_like(linear.bias))


@torch.no_grad()
def fit_inputs(
    model: PreTrainedModel,
    target: PreTrainedModel,
    taps: Sequence[int],
    rollouts: Dataset,
    normed: Callable[[Tensor], Tensor] | None = None,
) -> None:
    """Set the maps of a draft's input by least squares.

    First those that read the target: x_t = A e_t + C g_(t-1) nearest to the target's last state at
    t, scaled as a tap is. Then those that read the draft itself: x_t = A' e_t + D h_(t-1), where h
    is what its output matrix reads with the first maps. The draft's layers are silent; `normed`
    makes its states of the target's last, where they are not the same.
    """
    input_embedding, last = states_input(model), len(decoder_layers(target)[1])
    assert input_embedding is not None

    def pairs(after_own: bool) -> Iterator[tuple[Tensor, Tensor]]:
        """Inputs and last states along each text."""
        for row, ids, first in fit_rows(rollouts, model.device):
            read = target_taps(model, [row], ids)
            assert read is not None
            width = read.shape[-1] // len(taps)
            final = read[..., -width:] if last in taps else read_taps(target, [last], ids)
            seen, final = input_embedding.scaled(read), unit(final, 1)
            if normed is not None:
                final = normed(final)
            if after_own:
                with input_embedding.reading(read):
                    seen = hidden_states(model, ids)
            # At the completion's tokens but the last, which a target that samples does not read.
            embedded = input_embedding.tokens(ids)[0, first:-1]
            yield torch.cat([embedded, seen[0, first - 1 : -2]], dim=-1), final[0, first:-1]

    _set(ridge(pairs(after_own=False)), input_embedding.token, input_embedding.states)
    _set(ridge(pairs(after_own=True)), input_embedding.own_token, input_embedding.own_state)


def _set(fitted: Tensor, *maps: nn.Linear) -> None:
    parts = torch.split(fitted, [each.in_features for each in maps])
    for linear, part in zip(maps, parts, strict=True):
        linear.weight.copy_(part.T)


def states_by_place(draft: LMHead, texts: Texts) -> Iterator[Place]:
    """The draft's last states along texts, after the target's states and then after its own.

    Reading s at position t is what drafting gives at the (s + 1)-th token of a round that began at
    t - s: it attends to the readings of 0 up to there, and to reading r at t - s + r.

    As while decoding (training-time test: Li et al. 2025, arXiv:2503.01840).
    """
    ids, count, model = texts.ids, texts.place_count, draft.model
    input_embedding = states_input(model)
    assert input_embedding is not None
    assert texts.taps is not None
    body, cache, length = body_of(model), DynamicCache(), ids.shape[1]
    index = torch.arange(length, device=ids.device)
    rows, places = torch.arange(len(ids), device=ids.device)[:, None], index.expand(len(ids), -1)
    ids = input_embedding.from_start(ids)
    x, later = input_embedding.after_target(ids, before(texts.taps)), places
    if texts.begins is not None:
        later = window(texts.begins)  # (B, W) the positions of later readings
    extra_keys = index.new_zeros(*ids.shape, 0)
    for step in range(count):
        seen = Seen(length, places - step, extra_keys, input_embedding.reads_first)
        with attending_along(model, seen, step * places.shape[1], x.dtype) as mask:
            states: Tensor = body(
                inputs_embeds=x,
                attention_mask=mask,
                position_ids=places,
                use_cache=True,
                **{cache_argument(body): cache},
            )[0]
        if step:
            everywhere = states.new_zeros(*ids.shape, states.shape[-1])
            states = everywhere.index_put((rows, places), states)
        yield Place(states, torch.ones_like(ids, dtype=torch.bool))
        if step + 1 == count:
            return
        places = later
        x = input_embedding.after_own(ids[rows, places], before(states)[rows, places])
        width = places.shape[1]
        # Each sees reading r of its round, which is so many places before it.
        same = torch.arange(width, device=ids.device)[:, None] + torch.arange(-step, 1).to(index)
        other = width * torch.arange(step + 1, device=ids.device)
        extra_keys = torch.where(same < 0, -1, same + other).expand(len(ids), -1, -1)


SMALL = 1e-3
"""Size of a state at which a norm's epsilon shows, and of a logit which a soft cap leaves."""
HUGE = 2.0**10
"""Size of states at which the norms of a draft would show; exact in any precision."""


@torch.no_grad()
def llama_draft(
    target: PreTrainedModel, layers: int, positions: int, seed: int
) -> tuple[PreTrainedModel, Callable[[Tensor], Tensor]]:
    """A model of silent layers with the target's embedding and output rows.

    And what makes its states of those that leave the target's last layer. The draft's states are
    the *normed* ones (as in arXiv:2401.15077), so its own norms have an epsilon that makes
    them the identity: before its norm, states of Gemma 3 differ in size by 100 between dimensions
    and the norm's weights by 1,000, and one learning rate fits no two of them. A soft cap is left
    out: q need not have p's form.
    """
    text, head = target.config.get_text_config(), find_lm_head(target)
    embed = target.get_input_embeddings()
    ids = torch.arange(text.vocab_size, device=embed.get_parameter("weight").device)
    tokens, found = embed(ids), _final_norm(target, text.hidden_size)  # Gemma's tokens are scaled
    rows: Any = getattr(head.embedding, "weight", None)
    if rows is None or rows.shape != tokens.shape or found is None:
        raise ConfigError(
            "draft.init.kind states needs a target that makes logits of its last states by RMSNorm "
            f"or LayerNorm and a matrix as large as its input embedding, {[*tokens.shape]}, and "
            f"{type(target).__name__} does not: use kind target, fresh or model"
        )
    weight, bias, epsilon, is_centred = found
    set_seed(seed)
    sizes = _sizes(text) | {"num_hidden_layers": layers, "max_position_embeddings": positions}
    config = LlamaConfig(vocab_size=1, rms_norm_eps=HUGE**2, tie_word_embeddings=False, **sizes)
    draft: Any = LlamaForCausalLM._from_config(config, dtype=rows.dtype).to(rows.device)
    for module in draft.modules():
        if isinstance(module, LlamaRMSNorm):
            module.weight.fill_(HUGE)
    draft.set_input_embeddings(nn.Embedding(len(rows), text.hidden_size, _weight=tokens))
    slope = float(head.logit_transform(torch.tensor([SMALL], dtype=torch.float64))) / SMALL
    constant = nn.functional.linear(bias.to(rows), rows, getattr(head.embedding, "bias", None))
    output = nn.Linear(text.hidden_size, len(rows), bias=bool(constant.any()), device="meta")
    size = float(weight.abs().median())
    output.weight = nn.Parameter(slope * size * rows)
    if output.bias is not None:
        output.bias = nn.Parameter(slope * constant)
    replace_output(draft, output)
    silence(draft)
    take_special_ids(draft, target.generation_config)
    draft.config.vocab_size = text.vocab_size

    def normed(left: Tensor) -> Tensor:
        x = left.double() - is_centred * left.double().mean(dim=-1, keepdim=True)
        scale = torch.rsqrt(x.square().mean(dim=-1, keepdim=True) + epsilon)
        return (x * scale * (weight / size).to(x)).to(left)

    return draft.eval(), normed


def _final_norm(target: PreTrainedModel, width: int) -> tuple[Tensor, Tensor, float, bool] | None:
    """Weight (H,), bias (H,), epsilon of a target's last norm, and whether it takes the mean off.

    Found by trying states in the place of what leaves the last layer; None if it is no such norm.
    """
    signs = torch.ones(width, dtype=torch.float64).index_fill_(0, torch.arange(1, width, 2), -1.0)
    tried = torch.randn(8, width, generator=torch.Generator().manual_seed(0)).double()
    states = torch.cat(
        [torch.outer(torch.tensor([1.0, -1.0, SMALL, -SMALL]).to(signs), signs), tried]
    )

    def instead(_module: nn.Module, _inputs: object, output: Any) -> Any:
        left = output if isinstance(output, Tensor) else output[0]
        given = states.to(left)[None]
        if left.shape != given.shape:
            return output
        return given if left is output else (given, *output[1:])

    hook = decoder_layers(target)[1][-1].register_forward_hook(instead)
    try:
        ids = torch.zeros(1, len(states), dtype=torch.long, device=target.device)
        outputs = hidden_states(target, ids)[0].double().cpu()
    finally:
        hook.remove()
    if outputs.shape != states.shape:
        return None
    bias = (outputs[0] + outputs[1]) / 2
    twice, small = outputs[0] - outputs[1], outputs[2] - outputs[3]
    left = max(SMALL**2, float((small.norm() / twice.norm()) ** 2))  # s^2 (1 + e) / (s^2 + e)
    epsilon = float(f"{SMALL**2 * max(0.0, 1 - left) / max(SMALL**2, left - SMALL**2):.3g}")
    weight = twice / 2 * signs * (1 + epsilon) ** 0.5
    accuracy = 1e-3 if target.dtype in (torch.float32, torch.float64) else 3e-2
    for is_centred in (False, True):
        x = states - is_centred * states.mean(dim=-1, keepdim=True)
        remade = x * torch.rsqrt(x.square().mean(dim=-1, keepdim=True) + epsilon) * weight + bias
        if (remade - outputs)[4:].abs().amax() <= accuracy * outputs[4:].abs().amax():
            return weight, bias, epsilon, is_centred
    return None


def _sizes(text: Any) -> dict[str, Any]:
    """Sizes of a layer: the target's, where it has such. Attention is full."""

    def size(name: str, otherwise: int) -> int:
        value = getattr(text, name, None)
        return value if type(value) is int and value > 0 else otherwise

    width = text.hidden_size
    choices = (size("num_attention_heads", width), max(1, width // 64))
    heads = next((each for each in choices if width % (2 * each) == 0), 1)
    groups = size("num_key_value_heads", heads)
    rope = getattr(text, "rope_parameters", None) or {}  # of each kind of layer, if they differ
    theta = rope.get("full_attention", rope).get("rope_theta", 10_000.0)
    return {
        "hidden_size": width,
        "intermediate_size": size("intermediate_size", 4 * width),
        "num_attention_heads": heads,
        "num_key_value_heads": groups if heads % groups == 0 else heads,
        "head_dim": size("head_dim", width // heads) // 2 * 2 or 2,
        "rope_parameters": {"rope_type": "default", "rope_theta": theta},
    }
