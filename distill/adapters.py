"""Low-rank adapters (LoRA) beside frozen weights, through PEFT; merged for the saved draft.

A trained matrix is W + (alpha / rank) B A with W frozen (Hu et al. 2021, arXiv:2106.09685), and
alpha is twice the rank. The merged draft, which is measured and saved, differs from the trained one
by rounding alone.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from pathlib import Path

import peft
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import PreTrainedModel, Trainer

from distill.config import LoraConfig
from specdata.errors import NotFiniteError
from specdata.models import load_model
from specdata.sampling import seed_for

ADAPTER = ".lora_"
"""In the names of an adapter's weights, and of no others."""


def load_student(name: str, lora: LoraConfig | None, *, seed: int) -> PreTrainedModel:
    """Load the draft that is trained: all of its weights, or adapters in it.

    With adapters it is a `peft.PeftModel` of which they alone are trained. They start as no change,
    from the seed, the same on every process.
    """
    model = load_model(name)
    if lora is None:
        if not all(bool(each.isfinite().all()) for each in model.parameters()):
            raise NotFiniteError(name)  # which a training would take for too high a learning rate
        return model
    return with_adapters(model, lora, seed=seed)


def base_of(model: PreTrainedModel) -> PreTrainedModel:
    """The language model itself: inside of PEFT's wrapper, or as it is.

    Its forwards pass through the adapters. `base_model`, `config` and `get_output_embeddings` have
    their usual meaning there; PEFT's own `base_model` is something else.
    """
    return model.get_base_model() if isinstance(model, peft.PeftModel) else model


def trained_weights(trainer: Trainer) -> dict[str, Tensor]:
    """The weights of a draft that a trainer trains: all, or those of adapters alone.

    All processes must call this together; under ZeRO-3 the main process alone gets them.
    """
    # DeepSpeed gathers what is in parts in the main process, and gives the others nothing.
    stored: dict[str, Tensor] = trainer.accelerator.get_state_dict(trainer.model_wrapped) or {}
    weights = {name.removeprefix("draft."): weight for name, weight in stored.items()}
    if not isinstance(trainer.model.draft, peft.PeftModel):
        return weights
    return {name: weight for name, weight in weights.items() if ADAPTER in name}


def write_weights(weights: Mapping[str, Tensor], path: Path) -> None:
    """Write weights, tied ones apart: they share memory, which the format refuses."""
    apart = {name: value.detach().cpu().clone() for name, value in weights.items()}
    save_file(apart, path)


def set_weights(plain: PreTrainedModel, trained: Mapping[str, Tensor]) -> None:
    """Give a copy of a draft the weights of its training, any number of times."""
    if not isinstance(plain, peft.PeftModel):
        plain.load_state_dict(trained)
        return
    # What is no adapter is as it was.
    plain.load_state_dict({**plain.state_dict(), **trained})


def merged(plain: PreTrainedModel) -> PreTrainedModel:
    """The draft as an ordinary model: adapters are added to its weights, in place."""
    return plain.merge_and_unload() if isinstance(plain, peft.PeftModel) else plain


def with_adapters(model: PreTrainedModel, lora: LoraConfig, *, seed: int) -> peft.PeftModel:
    """Put adapters, which alone are trained, into a model; they begin as no change."""
    lora.check_width(model.config.get_text_config().hidden_size)
    settings = peft.LoraConfig(
        r=lora.rank,
        lora_alpha=2 * lora.rank,
        target_modules="all-linear",  # but the output embedding
        exclude_modules=_without_adapters(model) or None,
        task_type="CAUSAL_LM",
    )
    # PEFT initialises on the CPU, from the global generator.
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        # PEFT asks transformers by a name that it will drop.
        warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is", FutureWarning)
        torch.manual_seed(seed_for(seed, "adapters"))
        return peft.get_peft_model(model, settings)


def _without_adapters(model: nn.Module) -> list[str]:
    """Names of the linear layers whose weights are read, or whose results are, past an adapter.

    Kernels of state-space layers take the matrix of the output; Llama 4's router gives two results.
    """
    names = []
    for name, module in model.named_modules():
        if hasattr(module, "conv1d"):
            names.append(f"{name}.out_proj")
        if isinstance(module, nn.Linear) and ".models." in type(module).__module__:
            names.append(name)
    return names
