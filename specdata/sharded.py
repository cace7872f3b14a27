"""A frozen model in parts, one in each process: FSDP2, as transformers loads it.

Each process reads its own part of every matrix. In a forward the processes gather one layer after
another, so all of them must run it, each on rows of its own: beside its part a process then has up
to four layers (this one and the next, each as it came and as it is used). On a CPU the part is
mapped pages of the model's files. The output matrix stays whole once it has been used: logits are
made of as many states as a process has, a chunk at a time.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.distributed import DistributedConfig

from specdata.errors import ConfigError
from specdata.loading import ONE_DEVICE, Loading, check_shardable
from specdata.models import DTYPES, check_complete, check_dtype, from_hub
from specdata.sources import hub_source


def load_sharded(name: str, load: Loading = ONE_DEVICE) -> Any:
    """Load a frozen causal LM in as many parts as there are processes; all must call this.

    transformers reads of each matrix the slice that is this process's.

    Args:
        name: folder or Hub id, as in `specdata.models.load_model`; neither adapters nor GGUF.
        load: precision and attention; neither devices nor bits.

    Returns:
        The model, in eval mode, of which every process must run every forward.

    Raises:
        ConfigError: if it cannot be had, or not in parts.
    """
    dtype = load.dtype or "float32"
    check_dtype(dtype)
    check_shardable(name, load)
    source, revision = hub_source(name)
    parts = DistributedConfig(fsdp_size=torch.distributed.get_world_size())

    attention = load.attn_implementation

    def read() -> tuple[Any, dict[str, Any]]:
        return AutoModelForCausalLM.from_pretrained(  # type: ignore[no-any-return]
            source,
            dtype=DTYPES[dtype],
            revision=revision,
            trust_remote_code=False,
            output_loading_info=True,
            distributed_config=parts,
            **({"attn_implementation": attention} if attention else {}),
        )

    model, info = from_hub("model", name, read)
    check_complete(name, info)
    _check_parts(model)
    model.eval().requires_grad_(False)
    with torch.no_grad():  # not in inference mode, in which buffers could be used in no other
        model(input_ids=torch.zeros(1, 1, dtype=torch.long, device=model.device), use_cache=False)
    output = model.get_output_embeddings()
    if isinstance(getattr(output, "weight", None), DTensor):
        raise _undivided(model, "keeps its output matrix in parts")
    return model


def is_sharded(model: nn.Module) -> bool:
    """True if a model is in parts, so that all processes must run its forwards."""
    return isinstance(model, FSDPModule)


def _check_parts(model: PreTrainedModel) -> None:
    """Refuse a model that would be gathered as a whole. Raises ConfigError."""
    names = set(model._no_split_modules or ())  # the classes of its layers
    layers = [m for m in model.modules() if type(m).__name__.removeprefix("FSDP") in names]
    if not layers or not all(isinstance(layer, FSDPModule) for layer in layers):
        raise _undivided(model, "has no plan that divides its layers")


def _undivided(model: PreTrainedModel, why: str) -> ConfigError:
    return ConfigError(
        f"draft.shard_teacher: transformers {why} for {model.config.model_type}: leave out "
        "draft.shard_teacher"
    )
