"""Drafts that read their target's states: how they begin.

They begin without training: their inputs are linear maps that predict the target's own last state
(ridge regression), their layers are the target's last or others of Llama's kind
(`distill.llama_layers`), silenced (the matrices that write to the residual stream are 0), and the
target's final norm and output matrix make tokens of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain
from typing import Any

import torch
from datasets import Dataset
from torch import Tensor, nn
from transformers import PreTrainedModel

from specdata.errors import ConfigError
from specdata.lm_head import hidden_states
from specdata.states_draft import states_input, unit
from specdata.taps import decoder_layers, read_taps
from specdata.target_states import target_taps
from specdata.terminal import progress

FITTED_ROWS = 128
"""Rollouts that maps and output matrices are fitted on: some ten thousand positions."""
RIDGE = 1e-3
"""Added to the diagonal, of columns scaled to unit mean square."""
PART = 1 << 27
"""Numbers of inputs that the least squares hold at a time: a GiB in float64."""
LAYER = {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}
SILENCED = ("self_attn.o_proj", "mlp.down_proj")
"""A layer of Llama's kind, and what in it writes to the residual stream."""


def can_be_silenced(model: PreTrainedModel) -> bool:
    """True if a model's layers are of Llama's and Qwen's kind, without windows."""
    text = model.config.get_text_config()
    kinds = {*(getattr(text, "layer_types", None) or ())} - {"full_attention"}
    layers = [dict(layer.named_modules()) for layer in decoder_layers(model)[1]]
    return not (kinds or getattr(text, "sliding_window", None)) and all(
        {name for name in modules if name and "." not in name} == LAYER
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
    is what its output matrix reads with the first maps. Of EAGLE-1 both are the same maps, fitted
    to both kinds of states.

    Args:
        model: the draft, whose layers are silent.
        target: its target.
        taps: that it reads.
        rollouts: with `prompt_ids` and `completion_ids`, and the taps if they are stored.
        normed: makes the draft's states of the target's last, where they are not the same.
    """
    reads, last = states_input(model), len(decoder_layers(target)[1])
    assert reads is not None

    def pairs(after_own: bool) -> Iterator[tuple[Tensor, Tensor]]:
        """Inputs and last states along each text."""
        for row in fit_rows(rollouts):
            ids = torch.tensor([row["prompt_ids"] + row["completion_ids"]], device=model.device)
            first = len(row["prompt_ids"])
            read = target_taps(model, [row], ids)
            assert read is not None
            width = read.shape[-1] // len(taps)
            final = read[..., -width:] if last in taps else read_taps(target, [last], ids)
            seen, final = reads.scaled(read), unit(final, 1)
            if normed is not None:
                final = normed(final)
            if after_own:
                with reads.reading(read):
                    seen = hidden_states(model, ids)
            # At the completion's tokens but the last, which a target that samples does not read.
            embedded = reads.tokens(ids)[0, first:-1]
            yield torch.cat([embedded, seen[0, first - 1 : -2]], dim=-1), final[0, first:-1]

    _set(ridge(pairs(after_own=False)), reads.token, reads.states)
    if hasattr(reads, "own_token"):
        _set(ridge(pairs(after_own=True)), reads.own_token, reads.own_state)
    else:
        both = chain(pairs(after_own=False), pairs(after_own=True))
        _set(ridge(both), reads.token, reads.states)


def fit_rows(rollouts: Dataset) -> Iterator[dict[str, Any]]:
    """The rollouts that maps are fitted on, evenly of all."""
    count = min(FITTED_ROWS, len(rollouts))
    with progress(count, "states to fit the draft to", "row") as bar:
        for row in rollouts.select([index * len(rollouts) // count for index in range(count)]):
            yield row
            bar.update()


def ridge(pairs: Iterable[tuple[Tensor, Tensor]]) -> Tensor:
    """(n, F) and (n, H), several times -> (F, H), the map of least squares, in bounded memory."""
    scale = gram = cross = torch.zeros((), dtype=torch.float64)
    count = 0
    for inputs, outputs in _parts(pairs):
        x = inputs.double()
        if not count:
            scale = x.square().mean(dim=0).sqrt().clamp(min=torch.finfo(torch.float32).tiny)
        x = x / scale
        gram, cross = gram.to(x) + x.T @ x, cross.to(x) + x.T @ outputs.double()
        count += len(x)
    if not count:
        raise ConfigError(
            "maps of a draft are fitted to completions, and none has two tokens: raise "
            "rollouts.max_new_tokens and make the rollouts again"
        )
    gram.diagonal().add_(RIDGE * count)
    fitted: Tensor = torch.linalg.solve(gram, cross) / scale[:, None]
    return fitted


def _parts(pairs: Iterable[tuple[Tensor, Tensor]]) -> Iterator[tuple[Tensor, Tensor]]:
    """The same positions, as many together as have `PART` numbers."""
    inputs, outputs = list[Tensor](), list[Tensor]()
    for x, y in pairs:
        if inputs and sum(each.numel() for each in (*inputs, x)) > PART:
            yield torch.cat(inputs), torch.cat(outputs)
            inputs, outputs = [], []
        inputs.append(x)
        outputs.append(y)
    if inputs:
        yield torch.cat(inputs), torch.cat(outputs)


def _set(fitted: Tensor, *maps: nn.Linear) -> None:
    parts = torch.split(fitted, [each.in_features for each in maps])
    for linear, part in zip(maps, parts, strict=True):
        linear.weight.copy_(part.T)
