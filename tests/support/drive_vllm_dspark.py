"""What vLLM's classes for DSpark make of a folder, on a CPU: run by vLLM's Python.

    python tests/support/drive_vllm_dspark.py FOLDER TARGET INPUTS OUTPUTS

INPUTS are tensors: `taps` (n, F) of the target along a context, and `ids` (K,) of a block behind
it, whose tokens count as drawn. OUTPUTS are `logits` (K, N), `ids` (N,) of their tokens, and, if
there is a head, `chances` (K,). The engine's runner of such drafts needs a GPU: so attention, whose
keys and values that runner keeps, is written out here, and all else is vLLM's.
"""

import sys

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from vllm.config import set_current_vllm_config
from vllm.distributed import ensure_model_parallel_initialized, init_distributed_environment
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.model_loader import get_model


class Attention(nn.Module):
    """Attention to a context, whose keys and values it is given beforehand, and both ways."""

    kv_cache = None

    def __init__(self, theirs: nn.Module) -> None:
        super().__init__()
        self.heads, self.groups, self.size = theirs.num_heads, theirs.num_kv_heads, theirs.head_size
        self.impl = self  # that of a layer and that of its kernels

    def do_kv_cache_update(self, _layer: object, k: Tensor, v: Tensor, *_: object) -> None:
        """Keep (n, groups, size) keys and values of the context."""
        self.context = k.clone(), v.clone()

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """(K, heads size), and (K, groups size) twice -> (K, heads size)."""
        keys, values = (
            torch.cat([kept, new.view(-1, self.groups, self.size)])
            .repeat_interleave(self.heads // self.groups, dim=1)
            .transpose(0, 1)
            for kept, new in zip(self.context, (k, v), strict=True)
        )
        queries = q.view(-1, self.heads, self.size).transpose(0, 1)
        seen = nn.functional.scaled_dot_product_attention(queries, keys, values)
        return seen.transpose(0, 1).flatten(1)


@torch.inference_mode()
def main(folder: str, target: str, inputs: str, outputs: str) -> None:
    torch.accelerator.empty_cache = lambda: None  # there is none
    given = load_file(inputs)
    size, count = len(given["ids"]), len(given["taps"])
    options = {"model": target, "dtype": "float32", "enforce_eager": True, "max_model_len": 256}
    config = EngineArgs(**options).create_engine_config()
    speculative = {"method": "dspark", "model": folder, "num_speculative_tokens": size}
    config.speculative_config = EngineArgs(
        **options, speculative_config=speculative
    ).create_speculative_config(config.model_config, config.parallel_config)
    with set_current_vllm_config(config):
        init_distributed_environment(1, 0, "tcp://127.0.0.1:0", 0, "gloo")
        ensure_model_parallel_initialized(1, 1)
        drafting = config.speculative_config.draft_model_config
        model = get_model(vllm_config=config, model_config=drafting)
        theirs = load_file(f"{target}/model.safetensors")
        embedding = theirs["model.embed_tokens.weight"]
        model.model.embed_tokens.weight[: len(embedding)] = embedding
        if drafting.hf_config.draft_vocab_size == drafting.hf_config.vocab_size:
            model.lm_head.weight[: len(embedding)] = theirs.get("lm_head.weight", embedding)
            model.lm_head.quant_method.process_weights_after_loading(model.lm_head)
        for number, layer in enumerate(model.model.layers):
            layer.self_attn.attn = Attention(layer.self_attn.attn)
            model.model._attn_layers[number] = layer.self_attn.attn
        positions = torch.arange(count + size)
        context = model.combine_hidden_states(given["taps"])
        model.model.precompute_and_store_context_kv(context, positions[:count], positions[:count])
        block = given["ids"].clone()
        block[1:] = model.model.mask_token_id
        states = model.model(block, positions[count:])
        before = model.markov_embed(given["ids"])
        found = {"logits": model.compute_draft_logits(states) + model.markov_bias(before)}
        if model.model.confidence_head is not None:
            found["chances"] = model.compute_confidence(states, before)
        found["ids"] = model.map_draft_to_target(torch.arange(found["logits"].shape[1]))
    save_file({name: each.contiguous() for name, each in found.items()}, outputs)


if __name__ == "__main__":
    main(*sys.argv[1:])
