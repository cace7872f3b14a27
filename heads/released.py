"""Heads in the format that SpecDec++ was released in, read as heads of `kind: specdec++`.

A folder holds the `config.json` and the weights that the official code's `save_pretrained` wrote
(github.com/Kaffaljidhmah2/SpecDec_pp, commit 55531dc; its head for Llama 2 chat is
huggingface.co/hacky/acchead-llama2-chat-7bx70b). It differs from ours in two things:

- the released network is `Sequential(*[block] * num_layers, Linear(H, 2))`: one block object,
  applied several times. Ours has as many blocks, and each gets a copy of its weights.
- it has two logits, of rejection and of acceptance, in this order. The softmax over them gives the
  sigmoid of their difference, which one output row can compute.
"""

from __future__ import annotations

from pathlib import Path
from pickle import UnpicklingError

import torch
from huggingface_hub.constants import CONFIG_NAME, PYTORCH_WEIGHTS_NAME, SAFETENSORS_SINGLE_FILE
from safetensors import SafetensorError, safe_open
from torch import Tensor

from heads.kinds.specdecpp import AcceptanceHead
from specdata.errors import ConfigError
from specdata.storage.resume import read_record


def from_released(
    folder: str | Path, *, rejection_weight: float = 6.0, draft: str | None = None
) -> AcceptanceHead:
    """Read a released head; its raw acceptance probabilities stay what they are.

    The folder has `config.json` (hidden_size, num_layers) and model.safetensors, or else
    pytorch_model.bin, of which only tensors are read. The format does not record the weight of
    rejections in the training loss (6 in that of Llama 2 chat). Only `probability` depends on it,
    the rule with a threshold does not. The name of its draft is to be recorded. The head is in
    float32 and in evaluation mode.
    """
    folder = Path(folder)
    if not (folder / CONFIG_NAME).is_file():
        raise ConfigError(f"{folder} holds no released head: it has no {CONFIG_NAME}")
    settings = read_record(folder / CONFIG_NAME, ("hidden_size",), "download it again")
    size, depth = settings["hidden_size"], settings.get("num_layers", 0)
    if not (isinstance(size, int) and isinstance(depth, int) and size > 0 and depth >= 0):
        raise ConfigError(
            f"{folder / CONFIG_NAME} must give hidden_size >= 1 and num_layers >= 0, it gives "
            f"{size!r} and {depth!r}"
        )
    path, weights = _weights(folder)
    head = AcceptanceHead(
        hidden_size=size, depth=depth, rejection_weight=rejection_weight, draft=draft
    )
    try:
        head.load_state_dict(_translated(weights, depth))
    except (KeyError, IndexError, RuntimeError) as error:
        raise ConfigError(
            f"{path} does not hold the {depth} blocks of width {size} and the two logits that "
            f"{CONFIG_NAME} describes: {error}"
        ) from error
    return head.eval()


def _weights(folder: Path) -> tuple[Path, dict[str, Tensor]]:
    """The file, and its tensors under all of their names."""
    path = folder / SAFETENSORS_SINGLE_FILE
    try:
        if path.is_file():
            with safe_open(path, framework="pt") as stored:
                weights = {name: stored.get_tensor(name) for name in stored.keys()}  # noqa: SIM118
                # Of tensors that share memory safetensors stores one, and the others' names.
                shared = stored.metadata() or {}
            aliases = {name: weights[kept] for name, kept in shared.items() if kept in weights}
            return path, weights | aliases
        path = folder / PYTORCH_WEIGHTS_NAME
        return path, torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError as error:
        raise ConfigError(
            f"{folder} holds no weights: neither {SAFETENSORS_SINGLE_FILE} nor "
            f"{PYTORCH_WEIGHTS_NAME}"
        ) from error
    except (SafetensorError, UnpicklingError, RuntimeError, EOFError) as error:
        raise ConfigError(
            f"{path} cannot be read, download it again: nothing but tensors is loaded ({error})"
        ) from error


def _translated(weights: dict[str, Tensor], depth: int) -> dict[str, Tensor]:
    """The names and values of `AcceptanceHead`'s parameters, float32."""
    parameters = {
        f"blocks.{block}.linear.{kind}": weights[f"model.{block}.linear.{kind}"].float()
        for block in range(depth)
        for kind in ("weight", "bias")
    }
    for kind in ("weight", "bias"):
        rejected, accepted = weights[f"model.{depth}.{kind}"].double().unbind()
        parameters[f"output.{kind}"] = (accepted - rejected).reshape(1, -1).float()
    parameters["output.bias"] = parameters["output.bias"].reshape(1)
    return parameters
