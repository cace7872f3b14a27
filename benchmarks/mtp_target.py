"""Train a small target that brings a head along (MTP), for engines and for trainings of the head.

    python benchmarks/mtp_target.py runs/toy --out FOLDER [--steps 400] [--width 128]

A `glm4_moe` of two layers and its head learn the rollouts of a finished `make demo` on one thread;
the head learns one token ahead, as published ones do. FOLDER loads in transformers and in vLLM. It
prints the share of held-out tokens of which the head foretells the target's likeliest. The last
norms of both are as uneven as those of served models: with weights near 1, nobody could tell a
state before a norm from one behind it.
"""

from __future__ import annotations

import argparse
import copy
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from transformers import Glm4MoeConfig, Glm4MoeForCausalLM

from specdata.models import load_tokenizer
from specdata.saving import copy_tokenizer
from specdata.storage.dataset import load_stored, of_split
from specdata.storage.files import atomic_folder, read_object, write_json

LAYERS, LONGEST, BATCH, RATE = 2, 96, 24, 2e-3


def untrained(tokenizer: Any, width: int) -> Any:
    """A target with one layer more than it runs, which holds the head under its published names."""
    sizes = {"hidden_size": width, "intermediate_size": 2 * width, "head_dim": width // 4}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "n_routed_experts": 4}
    sizes |= {"num_experts_per_tok": 2, "moe_intermediate_size": width // 2}
    config = Glm4MoeConfig(
        vocab_size=len(tokenizer),
        num_hidden_layers=LAYERS + 1,
        max_position_embeddings=1024,
        eos_token_id=tokenizer.eos_token_id,
        use_qk_norm=True,
        **sizes,
    )
    model: Any = Glm4MoeForCausalLM(config)
    config.num_hidden_layers = LAYERS
    head = model.model.layers[LAYERS]
    head.enorm, head.hnorm, norm = (copy.deepcopy(model.model.norm) for _ in range(3))
    head.eh_proj = nn.Linear(2 * width, width, bias=False)
    head.shared_head = nn.ModuleDict({"norm": norm})
    for each in (model.model.norm, norm):
        nn.init.uniform_(each.weight, 0.1, 1.9)
    for layer in model.model.layers[config.first_k_dense_replace :]:
        nn.init.normal_(layer.mlp.gate.weight, std=0.3)  # .02 chooses experts at random for long
    return model


def logits_of(model: Any, ids: Tensor) -> tuple[Tensor, Tensor]:
    """Of texts (B, T): the target's logits (B, T, V), and its head's from its states, (B, T-1, V).

    The head is fed as vLLM feeds it: states after the final norm, an embedding of 0 at position 0.
    """
    head, body = model.model.layers[LAYERS], model.model
    states = body(input_ids=ids, use_cache=False).last_hidden_state
    tokens = F.pad(body.embed_tokens(ids[:, 2:]), (0, 0, 1, 0))
    x = head.eh_proj(torch.cat([head.enorm(tokens), head.hnorm(states[:, :-1])], dim=-1))
    rotary = body.rotary_emb(x, torch.arange(x.shape[1])[None])
    x = head(x, position_embeddings=rotary, attention_mask=None)
    return model.lm_head(states), model.lm_head(head.shared_head["norm"](x))


def main() -> None:
    """Train, write the target, and say how well its head foretells it."""
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("run", type=Path, help="a finished run of the demo")
    options.add_argument("--out", type=Path, required=True)
    options.add_argument("--steps", type=int, default=400)
    options.add_argument("--width", type=int, default=128)
    given = options.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    source, rollouts = str(given.run / "pair/target"), given.run / "rollouts"
    train, dev = (
        [torch.tensor((row["prompt_ids"] + row["completion_ids"])[:LONGEST]) for row in rows]
        for rows in (of_split(load_stored(rollouts), split, rollouts) for split in ("train", "dev"))
    )
    model, begun = untrained(load_tokenizer(source), given.width), time.process_time()
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, betas=(0.9, 0.95))
    rates = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, RATE, total_steps=given.steps + 1, pct_start=0.1, cycle_momentum=False
    )
    for _ in range(given.steps):
        chosen = [train[index] for index in torch.randint(len(train), (BATCH,))]
        ids = nn.utils.rnn.pad_sequence(chosen, batch_first=True, padding_value=-100)
        logits, drafted = logits_of(model, ids.clamp_min(0))
        loss = F.cross_entropy(logits[:, :-1].transpose(1, 2), ids[:, 1:])
        loss += 0.5 * F.cross_entropy(drafted[:, :-1].transpose(1, 2), ids[:, 2:])
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        rates.step()
    seconds, right, count = time.process_time() - begun, 0, 0
    with torch.inference_mode():
        for text in dev[::4]:
            logits, drafted = (each[0].argmax(-1) for each in logits_of(model, text[None]))
            right, count = right + int((drafted == logits[1:]).sum()), count + len(drafted)
    print(f"the head foretells {right / count:.3f} of {count} held-out tokens of the target, after")
    print(f"{given.steps} steps in {seconds:.0f} processor seconds")
    head = model.model.layers[LAYERS]
    head.shared_head["head"] = copy.deepcopy(model.lm_head)  # published files repeat both
    head.embed_tokens = copy.deepcopy(model.model.embed_tokens)
    with atomic_folder(given.out) as folder:
        model.save_pretrained(folder)
        settings = read_object(folder / "config.json")
        write_json(folder / "config.json", settings | {"num_nextn_predict_layers": 1})
        copy_tokenizer(source, folder)
    print(f"written: {given.out}")


if __name__ == "__main__":
    main()
