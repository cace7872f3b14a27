"""Hidden states inside a target, for drafts that read them (`specdata.drafts.states_network`).

Tap i of a model of n layers is the hidden state that enters layer i, and tap n the one that leaves
the last layer, before the final norm. vLLM counts so; SGLang's explicit ids are one less.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from specdata.config import checked_taps
from specdata.drafts.kind import KEY
from specdata.drafts.state_store import StateStore
from specdata.drafts.states_network import StatesInput, TargetStates, states_input
from specdata.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# Which model states are of: heads record some of their draft's, and drafts of their target's.
# Another model of equal width would be taken without an error, and its states would mean nothing.
TOKENS = 8
# A vocabulary that was padded to a multiple, which is no other model, has the same ids.
STEP = 127
# Relative error |other - recorded| / |recorded| up to which states are of the same model. Measured
# on the demo drafts, one block of width 128: float16 .0008, bfloat16 .007, weights rounded to 8
# bits .01 to .014 and to 4 bits .13 to .15; on ten families of tiny random models, bfloat16 .005 to
# .025. Different drafts: the demo's before and after distillation .49 to .53, other seeds 1.2 to
# 1.5.
BOUND = 0.25


def probe_ids(model: PreTrainedModel) -> Tensor:
    """(1, 8) the fixed tokens."""
    size = model.config.get_text_config().vocab_size
    ids: Tensor = 1 + STEP * torch.arange(TOKENS, device=model.device) % (size - 1)
    return ids.unsqueeze(0)


def probe_values(states: Tensor, count: int) -> list[float]:
    """`count` values of each of (n, H) states, evenly spread, in five digits.

    Rounded by less than half precision changes.
    """
    spread = torch.linspace(0, states.shape[-1] - 1, count, device=states.device).long()
    return [float(f"{value:.5g}") for value in states[:, spread].flatten().tolist()]


def probe_error(found: Sequence[float], recorded: Sequence[float]) -> float:
    """The relative error of as many values; up to `BOUND`, they are of the same model."""
    values, expected = torch.tensor(found), torch.tensor(recorded)
    return float((values - expected).norm() / expected.norm())


VALUES = 32
"""Of a target's taps after the last token of a probe."""


def decoder_layers(model: PreTrainedModel) -> tuple[str, nn.ModuleList]:
    """The name and the list of a model's decoder layers, found by their number."""
    count = getattr(model.config.get_text_config(), "num_hidden_layers", None)
    lists = [
        (name, module)
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList)
        and len(module) == count
        and not any(part.isdigit() for part in name.split("."))  # within a layer
    ]
    if len(lists) != 1:
        names = ", ".join(name for name, _ in lists) or "none"
        raise ConfigError(
            f"{type(model).__name__} must have one list of {count} decoder layers to cut a draft "
            f"from, found: {names}. Give draft.init another kind: model or fresh"
        )
    return lists[0]


@contextmanager
def capturing_taps(
    model: PreTrainedModel, taps: Sequence[int], capture: Callable[[Tensor], object]
) -> Iterator[None]:
    """Pass the taps to `capture` in every forward in the `with` block.

    In increasing order, (B, T, taps x H), at every token that the forward reads.
    """
    if not taps:
        yield
        return
    _, layers = decoder_layers(model)
    seen: list[Tensor] = []

    def take(state: Tensor) -> None:
        if state.dim() != 3:
            raise ConfigError(
                f"states inside {type(model).__name__} must have one vector a token to be read by "
                f"a draft, they are {[*state.shape]}: use another draft.init.kind, without taps"
            )
        seen.append(state.to(seen[0].device if seen else state.device))
        if len(seen) == len(taps):
            capture(torch.cat(seen, dim=-1))
            seen.clear()

    def entering(_module: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any]) -> None:
        take(inputs[0] if inputs else named["hidden_states"])

    def leaving(_module: nn.Module, _inputs: object, output: Any) -> None:
        take(output if isinstance(output, Tensor) else output[0])

    hooks = [
        layers[tap].register_forward_pre_hook(entering, with_kwargs=True)
        if tap < len(layers)
        else layers[-1].register_forward_hook(leaving)
        for tap in taps
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


@torch.no_grad()
def read_taps(model: PreTrainedModel, taps: Sequence[int], ids: Tensor) -> Tensor:
    """(B, T, taps x H) of texts (B, T); padding on the right needs no mask.

    A draft that reads them was cut from the model, so it has the same ids.
    """
    captured: list[Tensor] = []
    with capturing_taps(model, taps, captured.append):
        model.base_model(input_ids=ids.to(model.device), use_cache=False)
    return captured[0].to(ids.device)


def install(model: PreTrainedModel, target: PreTrainedModel, taps: Sequence[int]) -> StatesInput:
    """Make of a model cut from its target a draft that reads the target's states, in place.

    It has the target's input embedding; its new maps are not set yet.
    """
    record, width = record_of(target, taps), model.config.get_text_config().hidden_size
    if model.get_output_embeddings().bias is not None:
        record["output_bias"] = True
    size = record["width"] // len(taps)
    input_embedding = StatesInput(model.get_input_embeddings(), width, len(taps), size)
    model.set_input_embeddings(input_embedding)
    setattr(model.config, KEY, record)
    input_embedding.read_target = _Reader(target, taps)
    return input_embedding


def record_of(target: PreTrainedModel, taps: Sequence[int]) -> dict[str, Any]:
    """The record in a draft's config.json of the target whose taps it reads."""
    checked_taps(taps, len(decoder_layers(target)[1]))
    probe, width = _probe_of(target, taps)
    return {"taps": list(taps), "target": target.name_or_path, "width": width, "probe": probe}


def attach(
    draft: PreTrainedModel, target: PreTrainedModel, store: StateStore | None = None
) -> list[int]:
    """Let a draft read states of a target, and keep them in a store; returns the taps."""
    record, input_embedding = TargetStates.of(draft.config), states_input(draft)
    if input_embedding is None:
        raise ConfigError(
            "the draft's config.json says that it reads its target's states, and it was loaded as "
            "a model that reads none: load it with specdata.models.load_model"
        )
    taps = record.taps
    if max(taps) <= target.config.get_text_config().num_hidden_layers:
        probe, width = _probe_of(target, taps)
        alike = width == record.width and len(probe) == len(record.probe)
        if alike and probe_error(probe, record.probe) <= BOUND:
            input_embedding.read_target = _Reader(target, taps, store or StateStore())
            input_embedding.borrow(target)
            return taps
    raise ConfigError(
        f"the draft reads states of the target that it was made for, {record.target} (taps "
        f"{', '.join(map(str, taps))}), and those of {target.name_or_path} are others: give that "
        "target, or make a draft for this one"
    )


@dataclass(frozen=True, slots=True)
class _Reader:
    """Reads a target's taps; held-out texts are read again and again, in the same batches."""

    target: PreTrainedModel
    taps: Sequence[int]
    store: StateStore = field(default_factory=StateStore)

    def __call__(self, ids: Tensor) -> Tensor:
        def read() -> Tensor:
            with torch.inference_mode(False):  # a training may read the same text
                return read_taps(self.target, self.taps, ids)

        key = ("taps", tuple(self.taps), ids.shape, ids.cpu().numpy().tobytes())
        return self.store.read(key, read).to(ids.device)

    def __deepcopy__(self, _: object) -> _Reader:
        return self  # a copy of a draft has the same target


def _probe_of(target: PreTrainedModel, taps: Sequence[int]) -> tuple[list[float], int]:
    """Some values of a target's taps, rounded to five digits, and the width of all taps."""
    if target.device.type == "meta":  # of a plan (`recipes.memory`): there are no values
        return [0.0], len(taps) * target.config.get_text_config().hidden_size
    state = read_taps(target, taps, probe_ids(target))[0, -1]
    return probe_values(state[None], VALUES), len(state)
