"""Drafts in DSpark's form: how they begin and learn, and how engines hold them.

A random start learns little from few rollouts: the first token of a block is accepted as often as
the last, hardly ever. So the first layer begins as least squares, of the target's last state.

The first slot reads the anchor's embedding and the context before it; later slots read the same two
by maps of their own. Each of these four is a group of heads, which looks at the anchor or at the
nearest context, and which masks or anchors turn away from. What the token before adds to the state
of a later slot is the bias: a map of its embedding, of as many dimensions as the bias has.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Literal, cast

import torch
from datasets import Dataset
from pydantic import NonNegativeInt, PositiveFloat, PositiveInt
from scipy.optimize import nnls
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel, Qwen3Config, Qwen3ForCausalLM, set_seed

from distill import published
from distill.config import BLOCK, check_layout
from distill.drafts.plain import Source
from distill.published import Finding
from distill.rounds import Place, Texts, placed, ranks, window
from specdata.config import read_stored
from specdata.drafts.depths import unused_token
from specdata.drafts.draft_vocabulary import SIZE
from specdata.drafts.dspark_network import (
    BlockInput,
    BlockModel,
    MarkovOutput,
    dspark_class,
    read_blocks,
)
from specdata.drafts.kind import KEY
from specdata.drafts.states_network import TargetStates, states_input, unit
from specdata.drafts.taps import attach, decoder_layers, read_taps, record_of
from specdata.errors import ConfigError
from specdata.generation import special_ids
from specdata.least_squares import fit_rows, ridge
from specdata.lm_head import LMHead, body_of
from specdata.models import load_model, load_tokenizer, positions
from specdata.processes import in_group, largest_of_all
from specdata.storage.columns import value_counts

SCALE, ANCHOR = "model.embed_tokens.scale", "sample_from_anchor"
WHOLE_SHARE, BLOCKS = 0.25, 256
"""Share of the blocks of a text that training reads beyond their first slot, and blocks that are
read at a time, at most."""
ANCHORS = 512
"""Blocks of a text in DeepSpec's training, whose code refuses a config.json without it."""
LAYOUT_ROUNDING = 0.01
"""Relative error up to which a matrix is the target's, rounded to half precision or not."""
HANDED_OUT = (
    *("llama", "mistral", "qwen3", "qwen3_moe", "qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"),
    *("gemma3n_text", "gemma4_text", "gpt_oss", "lfm2", "nemotron_h", "minimax", "minimax_m2"),
)
"""`model_type` of targets inside of which llama.cpp b11434 lets drafts look."""
RANK = 64
"""Of the bias; published drafts have 256."""
GROUPS = 4
"""Of heads: the first slot's and later ones', at the anchor and at the nearest context."""
PEAK, REACH = 20.0, 6.0
"""Score of a head at the token that it looks at, and in how many tokens it falls e-fold, nearly.

A higher one begins nearer to the least squares, but a softmax that is sure has no gradient: such
heads hardly learn to look elsewhere, and the trained draft is worse.
"""


@torch.no_grad()
def begin(
    target: PreTrainedModel, source: Source, rollouts: Dataset, seed: int
) -> tuple[PreTrainedModel, dict[str, Any]]:
    """A new draft for a target of Llama's or Qwen's kind."""
    text = target.config.get_text_config()
    special = load_tokenizer(target.name_or_path).all_special_ids
    set_seed(seed)
    check_layout("dspark", text.model_type, target.name_or_path)
    used = {*special, *value_counts(rollouts, "prompt_ids", "completion_ids")}
    mask = unused_token(used, text.vocab_size)
    draft = _new(target, source, mask)
    draft.generation_config = special_ids(target.generation_config)
    draft = draft.float().to(target.device).eval()
    draft.model.embed_tokens.tokens.weight.copy_(target.get_input_embeddings().weight)
    draft.lm_head.weight.copy_(target.get_output_embeddings().weight)
    draft.model.norm.norm.weight.copy_(target.base_model.norm.weight)
    draft.d2t, draft.t2d = torch.zeros_like(draft.d2t), torch.ones_like(draft.t2d)
    attach(draft, target)
    for layer in draft.model.layers:
        layer.mlp.down_proj.weight.zero_()
        layer.self_attn.o_proj.weight.zero_()
    _fit(draft, target, source.taps, rollouts)
    return cast(PreTrainedModel, draft), {"layers": source.init.layers}  # new ones


def of_shapes(target: PreTrainedModel, source: Source) -> PreTrainedModel:
    """The draft that `begin` makes of a target on no device, there, too."""
    return cast(PreTrainedModel, _new(target, source, 0))


def _new(target: PreTrainedModel, source: Source, mask: int) -> Any:
    """The draft as its class makes it."""
    text: Any = target.config.get_text_config()
    record, width = record_of(target, source.taps), text.hidden_size
    size = (getattr(text, "head_dim", None) or width // text.num_attention_heads) // 2 * 2 or 2
    groups = -(-width // size)
    blocks = {"size": source.init.block or BLOCK, "mask": mask, "rank": min(RANK, width)}
    config = Qwen3Config(
        vocab_size=text.vocab_size,
        hidden_size=width,
        intermediate_size=text.intermediate_size,
        num_hidden_layers=source.init.layers,
        num_attention_heads=GROUPS * groups,
        num_key_value_heads=groups,
        head_dim=size,
        max_position_embeddings=positions(text),
        rms_norm_eps=text.rms_norm_eps,
        tie_word_embeddings=False,
        **{KEY: {**record, "blocks": blocks}, SIZE: text.vocab_size},
    )
    draft: Any = dspark_class(Qwen3ForCausalLM)(config)
    draft.__class__ = Qwen3ForCausalLM
    return draft


def _fit(draft: Any, target: PreTrainedModel, taps: list[int], rollouts: Dataset) -> None:
    """Set the context's map, the bias and the attention of the first layer."""
    input_embedding, last = cast(BlockInput, states_input(draft)), len(decoder_layers(target)[1])
    width, size = input_embedding.width, input_embedding.blocks.size
    embedded, seen, final = [], [], []
    for _, ids, first in fit_rows(rollouts, draft.device, least=3):
        read = read_taps(target, [*taps, last], ids)[0]
        embedded.append(input_embedding.tokens(ids)[0, first:-1])
        seen.append(read[first - 1 : -2, :-width])
        final.append(unit(read[first:-1, -width:], 1))
    if not embedded:
        raise ConfigError(
            "a draft in DSpark's layout begins from completions of three tokens and more, and no "
            "rollout has one: raise rollouts.max_new_tokens and make the rollouts again"
        )
    largest = torch.cat(seen).square().mean(dim=0).sqrt().clamp(min=1e-6)
    tap_scale = input_embedding.scale
    tap_scale.copy_(2.0 ** -largest.log2().round())  # powers of two, so that nothing is rounded
    both = (torch.cat([x, g * tap_scale], dim=-1) for x, g in zip(embedded, seen, strict=True))
    input_embedding.states.weight.copy_(ridge(zip(both, final, strict=True))[width:].T)
    contexts = [input_embedding.contexts(each)[:, :width] for each in seen]
    tokens = [unit(each, 1) for each in embedded]
    mask = input_embedding.tokens.weight[input_embedding.blocks.mask]

    def later() -> Iterator[tuple[Tensor, Tensor]]:
        """Of a text and a later slot after the other: all together are many times the texts."""
        for token, context, state in zip(tokens, contexts, final, strict=True):
            for n in range(1, min(size, len(token))):
                x = (token[:-n], context[:-n], token[n:], token.new_ones(len(token) - n, 1))
                yield torch.cat(x, dim=-1), state[n:] - mask

    fitted = ridge(later()).float()
    of_anchor, of_context, of_before, constant = torch.split(fitted, [width, width, width, 1])
    # The token before, in as many dimensions as the bias has.
    left, strength, right = torch.linalg.svd(of_before)
    half = strength[: input_embedding.blocks.rank].sqrt()
    w1, w2 = left[:, : len(half)] * half, right[: len(half)].T * half
    input_embedding.markov.weight.copy_(unit(input_embedding.tokens.weight, 1) @ w1)
    # The final norm makes states of one size, which logits and the bias share.
    alone = torch.cat([of_anchor, of_context, torch.zeros_like(of_before), constant])
    scale = torch.cat([_sizes(x @ alone + mask) for x, _ in later()]).mean()
    head, norm = cast(MarkovOutput, draft.lm_head), draft.model.norm.norm.weight
    head.markov.copy_(head.weight * norm @ w2 / scale)

    now = [
        (torch.cat([token, context], dim=-1), state - x)
        for token, context, x, state in zip(tokens, contexts, embedded, final, strict=True)
    ]
    states = torch.cat([x for x, _ in now]) @ ridge(now).float() + torch.cat(embedded)
    bias = _sizes(states).mean() / scale * w1 @ w2.T  # which the first slot has, too
    now = [(x, y - x[:, :width] @ bias) for x, y in now]
    first_anchor, first_context = torch.split(ridge(now).float(), width)
    _set_attention(
        draft.model,
        torch.cat(contexts),
        torch.cat(tokens),
        unit(mask[None], 1),
        (first_anchor, first_context, of_anchor, of_context),
        constant[0],
    )


def _set_attention(
    body: Any,
    contexts: Tensor,
    tokens: Tensor,
    mask: Tensor,
    maps: tuple[Tensor, Tensor, Tensor, Tensor],
    constant: Tensor,
) -> None:
    """Have the first layer's groups of heads add linear maps of the anchor and of the context.

    Keys tell contexts, anchors and masks apart, and queries anchors and masks, by linear functions
    of what is read. In some pairs of dimensions, which turn with the position, scores fall with
    the distance; in the slowest they do not.
    """
    attention = body.layers[0].self_attn
    size, width = attention.head_dim, contexts.shape[1]
    groups = attention.k_proj.out_features // size
    many = mask.expand(len(tokens), -1)
    zeros, ones = tokens.new_zeros(len(tokens), 1), tokens.new_ones(len(tokens), 1)
    is_mask = ridge([(contexts, zeros), (tokens, zeros), (many, ones)])[:, 0].float()
    is_anchor = _one_but_on_masks(tokens, many)
    side = _one_but_on_masks(torch.cat([contexts, -tokens]), many)  # of contexts, not of tokens
    pairs = size // 2
    slow = max(1, pairs // 8)
    near, still = contexts.new_zeros(2, pairs)
    near[: pairs - slow] = _nearness(body.rotary_emb.inv_freq[: pairs - slow]).to(near).sqrt()
    still[pairs - slow :] = slow**-0.5
    near, still = near.repeat(2), still.repeat(2)
    key = torch.outer(near + still, side) + torch.outer(still - near, is_mask)
    at_context, at_anchor, at_mask = near, -still, still - near
    looks = [(at_anchor, at_mask), (at_context, at_mask)]  # of anchors and of masks
    looks += [(at_anchor, at_anchor), (at_anchor, at_context)]
    queries = [torch.outer(one, is_anchor) + torch.outer(other, is_mask) for one, other in looks]
    attention.k_proj.weight.copy_(key.repeat(groups, 1))
    attention.q_proj.weight.copy_(torch.cat(queries).repeat(groups, 1))
    for norm in (attention.q_norm, attention.k_norm):
        norm.weight.fill_((PEAK / size**0.5) ** 0.5)
    nn.init.eye_(attention.v_proj.weight)
    # Turned away, an anchor reads itself, and a mask a mask.
    first_anchor, first_context, of_anchor, of_context = maps
    first_anchor = first_anchor - of_anchor - of_context
    rest = constant - mask[0] @ (first_anchor + first_context)
    first_anchor = first_anchor + torch.outer(is_mask, rest)
    maps = (first_anchor, first_context, of_anchor, of_context)
    whole = torch.stack([nn.functional.pad(each.T, (0, groups * size - width)) for each in maps])
    parts = whole.view(GROUPS, width, groups, size).permute(1, 2, 0, 3)
    attention.o_proj.weight.copy_(parts.flatten(1))


def _one_but_on_masks(x: Tensor, masks: Tensor) -> Tensor:
    """(H,) a linear function, nearly 1 on vectors (n, H) and 0 on masks (m, H)."""
    wanted = [(x, x.new_ones(len(x), 1)), (10 * masks, masks.new_zeros(len(masks), 1))]
    return ridge(wanted)[:, 0].float()


def _nearness(frequencies: Tensor) -> Tensor:
    """(n,) shares of pairs of dimensions, 1 together, by which scores fall with the distance."""
    distance = torch.arange(512.0, dtype=torch.float64)
    turned = (distance[:, None] * frequencies.double().cpu()).cos()
    weight = 1.0 + 7.0 * (distance < 2 * REACH)  # near tokens matter most
    wanted = torch.exp(-distance / REACH)
    shares, _ = nnls((turned * weight[:, None]).numpy(), (wanted * weight).numpy())
    return torch.tensor(shares / shares.sum())


def _sizes(states: Tensor) -> Tensor:
    """(n,) root mean squares of states (n, H)."""
    return states.square().mean(dim=-1).sqrt()


def states_by_place(draft: LMHead, texts: Texts) -> Iterator[Place]:
    """The states of blocks that begin along texts.

    State s at position t is that of slot s of the block that began at t - s; beyond its last slot,
    that one, with the bias by the token at t. Training reads the first slot of all blocks, as a
    draft learns most from it, and the others of a share of them (`WHOLE_SHARE`).
    """
    model, (ids, count, _, taps, begins, dropping) = draft.model, texts
    input_embedding = cast(BlockInput, states_input(model))
    (rows, length), size = ids.shape, input_embedding.blocks.size
    index = torch.arange(length, device=ids.device).expand(rows, -1)
    begin = index if begins is None else window(begins)
    share, whole_count = 1.0, begin.shape[1]
    kept = torch.ones_like(begin, dtype=torch.bool)
    if dropping is not None:  # evenly spread, and the same ones whatever else is in the batch
        share = WHOLE_SHARE
        rank, order = ranks(begin, dropping).sort(dim=1)
        kept, begin = rank < share, begin.gather(1, order)
        whole_count = max(1, int(kept.sum(dim=1).max()))
    body, width = cast(BlockModel, body_of(model)), begin.shape[1]
    parts = math.ceil(width / BLOCKS)
    if dropping is not None and in_group():
        # ZeRO-3 gathers the layers for each, and again where they are read again, in all alike.
        parts = largest_of_all(parts)
    reading: Callable[..., Any] = read_blocks
    if dropping is not None and (parts > 1 or body.config.num_hidden_layers > 1):
        # Else what all layers make of all slots would be kept, most of the memory of a training.
        reading = partial(checkpoint, read_blocks, use_reentrant=False)
    found, first = [], 0
    padded = nn.functional.pad(begin, (0, max(0, parts - width)))
    for part in padded.tensor_split(parts, dim=1):
        found.append(reading(body, ids, taps, part, size, whole_count=max(0, whole_count - first)))
        first += part.shape[1]
    read = torch.cat([each.last_hidden_state for each in found], dim=1)[:, :width]
    # (B, A, size, H + r)
    for step in range(count):
        there = read[:, :, min(step, size - 1)]
        if step >= size:
            token = ids.gather(1, (begin + step).clamp(max=length - 1))
            bias = input_embedding.markov(token)
            there = torch.cat([there[..., : input_embedding.width], bias], dim=-1)
        shown = (kept, share) if step else (torch.ones_like(kept), 1.0)
        yield placed(there, begin, step, length, *shown)


class BlockLayers(published.Roped):
    """The layers of a draft in DSpark's layout, of Qwen3's kind."""

    model_type: Literal["qwen3"] = "qwen3"
    num_hidden_layers: PositiveInt
    hidden_size: PositiveInt
    intermediate_size: PositiveInt
    num_attention_heads: PositiveInt
    num_key_value_heads: PositiveInt
    head_dim: PositiveInt
    hidden_act: str = "silu"
    attention_bias: Literal[False] = False
    max_position_embeddings: PositiveInt
    rms_norm_eps: PositiveFloat
    layer_types: list[Literal["full_attention"]] | None = None


class _Blocks(published.PublishedConfig):
    block_size: PositiveInt
    mask_token_id: NonNegativeInt
    markov_rank: PositiveInt
    markov_head_type: Literal["vanilla"]
    target_layer_ids: list[NonNegativeInt] | None = None
    aux_hidden_state_layer_ids: list[PositiveInt] | None = None  # speculators': one more each
    num_target_layers: PositiveInt | None = None
    enable_confidence_head: bool = False
    confidence_head_with_markov: bool = False


def _taps_of(
    settings: dict[str, Any], target: PreTrainedModel
) -> tuple[list[int], dict[str, bool]]:
    """The taps of a config.json; no flag decides what is computed."""
    blocks, text = read_stored(_Blocks, settings, "config.json"), target.config.get_text_config()
    layers, vocabulary = text.num_hidden_layers, text.vocab_size
    meant = [id_ + 1 for id_ in blocks.target_layer_ids or ()]
    taps = blocks.aux_hidden_state_layer_ids or meant
    if meant and taps != meant:
        raise ConfigError(
            f"aux_hidden_state_layer_ids in config.json, {taps}, must be one more each than "
            f"target_layer_ids, {blocks.target_layer_ids}: take the wrong ones out"
        )
    if not taps or taps[-1] >= layers:
        raise ConfigError(
            f"target_layer_ids in config.json must be layers whose output enters another, of the "
            f"target's {layers} those from 0 to {layers - 2}, got {[tap - 1 for tap in taps]}: "
            "llama.cpp hands out nothing of the last one's"
        )
    if (blocks.num_target_layers or layers) != layers or blocks.mask_token_id >= vocabulary:
        raise ConfigError(
            f"config.json describes a target of {blocks.num_target_layers or layers} layers and "
            f"mask {blocks.mask_token_id}, and the target has {layers} layers and {vocabulary} "
            "tokens: give the one that the draft was trained for"
        )
    return taps, {}


def _build(
    given: published.Published, taps: Sequence[int], _flags: Mapping[str, bool]
) -> PreTrainedModel:
    read, record = (
        read_stored(_Blocks, given.settings, "config.json"),
        record_of(given.target, taps),
    )
    tensors = {**given.with_target_matrices().tensors, SCALE: torch.ones(record["width"])}
    blocks = {"size": read.block_size, "mask": read.mask_token_id, "rank": read.markov_rank}
    settings = {**given.layers(BlockLayers), KEY: {**record, "blocks": blocks}}
    given = given._replace(settings=settings, tensors=tensors)
    return published.filled(LAYOUT, Qwen3ForCausalLM, dspark_class, given)


def _to_engine_files(
    settings: dict[str, Any],
    record: TargetStates,
    given: dict[str, Tensor],
    confidence: tuple[Tensor, Tensor] | None = None,
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    model, blocks = load_model(record.target), record.kind_record
    given[published.FC] = given[published.FC] * given.pop(SCALE)
    vocabulary, tokens = settings["vocab_size"], settings[SIZE]
    shared = {published.TOKEN_ROWS: model.get_input_embeddings()}
    if tokens == vocabulary:
        shared["lm_head.weight"] = model.get_output_embeddings()
        given = {name: each for name, each in given.items() if name not in published.MAPS}
    for name, module in shared.items():
        weight, expected = given.pop(name).float(), module.weight.detach().float().cpu()
        if not (weight - expected).norm() <= LAYOUT_ROUNDING * expected.norm():
            raise ConfigError(
                f"{LAYOUT.theirs(name)} of the draft must be the target's, {record.target}, whose "
                "own engines take: train a draft with this target"
            )
    tensors = {LAYOUT.theirs(name): each for name, each in given.items()}
    if confidence is not None:
        tensors["confidence_head.proj.weight"], tensors["confidence_head.proj.bias"] = confidence
    ids = {"mask_token_id": blocks.mask, "target_layer_ids": [tap - 1 for tap in record.taps]}
    layer = {key: each for key, each in settings.items() if key != KEY}
    return tensors, {
        **layer,
        **ids,
        "architectures": ["Qwen3DSparkModel"],
        "model_type": record.model_type,
        "block_size": blocks.size,
        "num_target_layers": model.config.get_text_config().num_hidden_layers,
        "num_anchors": ANCHORS,
        "markov_rank": blocks.rank,
        "markov_head_type": "vanilla",
        "enable_confidence_head": confidence is not None,
        "confidence_head_with_markov": True,
        ANCHOR: True,
        "dflash_config": {**ids, "causal": False},
    }


def _traps(
    config: Mapping[str, Any], names: Collection[str], target: PreTrainedModel
) -> Iterator[Finding]:
    """What engines read without a word, and otherwise than was meant."""
    anchor = config.get(ANCHOR)
    if anchor is None:
        text = "is not said: vLLM's reader of speculators' folders takes false, SGLang true, and "
        yield Finding("problem", ANCHOR, f"{text}llama.cpp either: say it")
    elif anchor is not True:
        text = f"is {anchor}: a draft whose anchor proposes nothing cannot decode here"
        yield Finding("problem", ANCHOR, text)
    has = {part: any(part in name for name in names) for part in ("embed_tokens", "confidence")}
    vocabulary = target.config.get_text_config().vocab_size
    is_reduced = (config.get("draft_vocab_size") or vocabulary) < vocabulary
    if has["embed_tokens"] and not is_reduced:
        text = (
            "is in the folder: llama.cpp would take it as output matrix, which leaves lm_head out"
        )
        yield Finding("warning", "embed_tokens", f"{text}: remove it, engines take the target's")
    if is_reduced and "lm_head.weight" not in names:
        yield Finding("problem", "lm_head", "is missing, and vLLM refuses few tokens without it")
    if (kind := target.config.get_text_config().model_type) not in HANDED_OUT:
        text = f"llama.cpp lets no draft look inside of {kind}: it can be served elsewhere alone"
        yield Finding("warning", "target", text)
    for flag, what in {
        "enable_confidence_head": "drops the head without a word",
        "confidence_head_with_markov": "takes it for one of the state alone, by default",
    }.items():
        if has["confidence"] and config.get(flag) is not True:
            text = f"{flag} must be true, or vLLM {what}"
            yield Finding("warning", "confidence head", text)
    if config.get("enable_confidence_head") and not has["confidence"]:
        text = "enable_confidence_head is true and no tensor is there: vLLM then asks none silently"
        yield Finding("warning", "confidence head", text)


LAYOUT: published.Layout = published.Layout(
    {
        "layers.": "model.layers.",
        "fc.": "model.embed_tokens.states.",
        "hidden_norm.": "model.embed_tokens.hidden_norm.",
        "markov_head.markov_w1.": "model.embed_tokens.markov.",
        "markov_head.markov_w2.weight": "lm_head.markov",
        "embed_tokens.": "model.embed_tokens.tokens.",
        "norm.": "model.norm.norm.",
    },
    "dflash_config",
    (BlockLayers, _Blocks),
    {
        **{ANCHOR: True, "dspark_bonus_anchor": False, "causal": False},
        **{"is_causal": False, "use_swa": False, "speculators_model_type": "dspark"},
        **{"attention_mode": "gqa", "projector_type": "dspark"},
    },
    taps_of=_taps_of,
    build=_build,
    to_engine_files=_to_engine_files,
    required_keys={ANCHOR: "write true if the anchor's slot proposes the token behind it, as here"},
    traps=_traps,
)
