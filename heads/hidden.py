"""Reading a draft's last hidden state: the input of its output embedding, after the final norm."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from specdata.errors import ConfigError
from specdata.models import known_ids

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def hidden_states(draft: PreTrainedModel, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
    """Return the state at each position, after the draft consumed the token there.

    Equal to `output_hidden_states=True`'s last entry, without the logits and the other layers.
    No gradient reaches the draft.

    Args:
        draft: a causal language model.
        input_ids: (B, T).
        attention_mask: (B, T), 1 at tokens, 0 at padding.

    Returns:
        (B, T, H) in the draft's precision.
    """
    # Not inference_mode: the head's backward pass must be allowed to keep this tensor.
    with torch.no_grad():
        output = draft.base_model(
            input_ids=known_ids(input_ids, draft), attention_mask=attention_mask, use_cache=False
        )
    states: Tensor = output.last_hidden_state
    return states


def check_hidden_states(draft: PreTrainedModel, input_ids: Tensor) -> None:
    """Make sure that `hidden_states` reads what the draft's output embedding reads.

    Args:
        draft: a causal language model.
        input_ids: (1, T) any tokens.

    Raises:
        ConfigError: if the draft does something between its last layer and its output embedding.
    """
    embedding = draft.get_output_embeddings()
    if embedding is None:
        raise ConfigError(f"{type(draft).__name__} has no output embedding; pass a causal LM")
    seen: list[Tensor] = []

    def keep(_module: nn.Module, inputs: tuple[Any, ...]) -> None:
        seen.append(inputs[0])

    hook = embedding.register_forward_pre_hook(keep)
    try:
        with torch.no_grad():
            draft(input_ids=input_ids, use_cache=False)
    finally:
        hook.remove()
    states = hidden_states(draft, input_ids, torch.ones_like(input_ids))
    if states.shape != seen[0].shape or not torch.allclose(states, seen[0], rtol=1e-2, atol=1e-3):
        raise ConfigError(
            f"{type(draft).__name__} changes its hidden state before the output embedding, so a "
            "head trained on the last hidden state would not see it in decoding; use another draft"
        )


def weights_fingerprint(model: nn.Module) -> str:
    """Hex digest of a sample of every parameter: changes whenever the model was trained further."""
    digest = hashlib.sha256()
    for name, parameter in model.named_parameters():
        digest.update(name.encode())
        digest.update(parameter.detach().flatten()[:1024].float().cpu().numpy().tobytes())
    return digest.hexdigest()
