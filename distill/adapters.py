"""Low-rank adapters (LoRA) beside frozen weights, through PEFT; merged for the saved draft.

A trained matrix is W + (alpha / rank) B A with W frozen (Hu et al. 2021, arXiv:2106.09685), and
alpha is twice the rank. The merged draft, which is measured and saved, differs from the trained one
by rounding alone.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

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
OF_KERNELS = (".x_proj", ".dt_proj", ".out_proj")
"""Ends of the names of matrices that kernels of state-space layers take."""
PROBE_TOKENS = 8
"""Tokens on which a model is seen to call its layers."""


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


def averaged(
    trained: Mapping[str, Tensor], begun: Mapping[str, Tensor], share: float
) -> dict[str, Tensor]:
    """Weights of which a share is what training began with.

    WiSE-FT (Wortsman et al. 2022, arXiv:2109.01903): the average keeps most of what was learnt, and
    more of what was known before.
    """
    floats = {name: each for name, each in trained.items() if each.is_floating_point()}
    average = {name: each.lerp(begun[name].to(each), share) for name, each in floats.items()}
    return {**trained, **average}


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


@torch.enable_grad()
def _without_adapters(model: PreTrainedModel) -> list[str]:
    """Names of the linear layers of which adapters would get no gradient, or would not be read.

    Kernels of state-space layers take the matrices of the time step and the output. Of the others a
    reading tells: a layer is not called where its parent is (LongCat's router), gives something
    else than a linear map (Llama 4's router gives two results), or decides only what is looked at
    (indexers of sparse attention). An expert that no token chose says nothing.
    """
    results: dict[nn.Module, Any] = {}

    def note(module: nn.Module, inputs: tuple[Any, ...], result: Any) -> None:
        is_linear = isinstance(module, nn.Linear) and isinstance(result, Tensor)
        shape = (*inputs[0].shape[:-1], module.out_features) if is_linear else ()
        results[module] = result if is_linear and result.shape == shape else None

    modules = dict(model.named_modules())
    hooks = [module.register_forward_hook(note) for module in modules.values()]
    ids = torch.arange(PROBE_TOKENS, device=model.device).unsqueeze(0)
    logits = model(input_ids=ids, use_cache=False).logits
    for hook in hooks:
        hook.remove()
    of = [m for m, result in results.items() if result is not None and result.requires_grad]
    found = torch.autograd.grad(logits.sum(), [results[m] for m in of], allow_unused=True)
    learns = {module for module, gradient in zip(of, found, strict=True) if gradient is not None}

    def is_chosen(name: str) -> bool:
        """True if a layer, or what it is in, is one of many that tokens may choose.

        What holds these has been called; what looks at pictures, say, has not.
        """
        while modules[name] not in results:
            name = name.rpartition(".")[0]
            if isinstance(modules[name], nn.ModuleList):
                return modules[name.rpartition(".")[0]] in results
        return False

    names = []
    for name, module in modules.items():
        if isinstance(module, nn.Linear):
            parent = modules[name.rpartition(".")[0]]
            in_kernel = hasattr(parent, "conv1d") and name.endswith(OF_KERNELS)
            if in_kernel or not (module in learns or is_chosen(name)):
                names.append(name)
    return names
