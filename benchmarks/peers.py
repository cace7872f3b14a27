"""Steps of training and rollouts, ours beside peers': tokens a processor second, and memory.

    pip install --no-deps speculators==0.9.0 loguru hs-connectors openai distro jiter sniffio
    python benchmarks/peers.py [--repeats 5] [--works REGEX] [--out FILE]

Each work runs in a process of its own on one thread, ours and the peer's in turns. It makes five
optimizer steps with models of random weights, of which the first is not timed. speculators' draft
is given what a target says of the texts, and ours has kept it. TRL's GKD asks the target in each
pass, and ours in the first alone. Ratios are of two processes that followed one another: their
median, least and largest.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

from eval.measuring.environment import describe_environment
from specdata.products import by_onednn
from specdata.storage.files import write_json

STEPS = 5


def main() -> None:
    """Measure, print, and write one JSON file."""
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("--repeats", type=int, default=5)
    options.add_argument("--works", default="", help="only works whose name matches")
    options.add_argument("--out", type=Path, default=Path("runs/bench/peers.json"))
    options.add_argument("--work", nargs=2, help=argparse.SUPPRESS)
    given = options.parse_args()
    if given.work:
        name, which = given.work
        with by_onednn() if which == "0" else nullcontext():  # as every stage does
            print(json.dumps(spent(WORKS[name][int(which)]())))
        return
    where = describe_environment(device="cpu", dtype="float32").model_dump()
    rows = []
    for name in [each for each in WORKS if re.search(given.works, each)]:
        turns = [(measured(name, 0), measured(name, 1)) for _ in range(given.repeats)]
        row: dict[str, Any] = {"work": name, "turns": turns}
        for key in ("tokens_per_second", "megabytes"):
            ratios = [ours[key] / peer[key] for ours, peer in turns]
            found = {
                "ours": statistics.median(ours[key] for ours, _ in turns),
                "peer": statistics.median(peer[key] for _, peer in turns),
                "ratio": statistics.median(ratios),
                "low": min(ratios),
                "high": max(ratios),
            }
            row[key] = found
            print(name, key, {each: round(value, 2) for each, value in found.items()})
        rows.append(row)
        write_json(given.out, {"schema_version": 1, "rows": rows, "environment": where})
    print(f"written: {given.out}")


def measured(name: str, which: int) -> dict[str, float]:
    """What a work takes in a process of its own: 0 is ours, 1 the peer's."""
    command = [sys.executable, "-W", "ignore", str(Path(__file__).absolute())]
    path = f"{Path.cwd()}:{os.environ.get('PYTHONPATH', '')}"
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            [*command, "--work", name, str(which)],
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path},
            cwd=folder,
            stdout=subprocess.PIPE,
            check=True,
        )
    return dict(json.loads(done.stdout.splitlines()[-1]))


def spent(step: Callable[[int], int]) -> dict[str, float]:
    """Tokens a CPU second of all steps but the first, and megabytes by which all grew."""
    held = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    step(0)
    begun = time.process_time()
    tokens = sum(map(step, range(1, STEPS)))
    seconds = time.process_time() - begun
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return {"tokens_per_second": tokens / seconds, "megabytes": (most - held) / 1024}


SMOL, TOY, TOY_DRAFT = (49_152, 576, 1536, 9, 3), (2048, 256, 672, 4, 4), (2048, 128, 336, 4, 4)


def llama(layers: int, tokens: int, width: int, inside: int, heads: int, keys: int) -> Any:
    """A model of so many layers of a size; its random weights are as if stored in bfloat16."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes: dict[str, Any] = {"hidden_size": width, "intermediate_size": inside}
    sizes |= {"vocab_size": tokens, "eos_token_id": None}  # texts are of one length
    sizes |= {"num_attention_heads": heads, "num_key_value_heads": keys}
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_hidden_layers=layers)).eval()
    for weight in model.parameters():
        weight.data = weight.data.bfloat16().float()
    return model


def stepped(student: Any, loss: Callable[[], Any], tokens: int) -> Callable[[int], int]:
    """An optimizer step of a peer's loss, AdamW as ours; returns its tokens."""
    import torch

    learnt = [each for each in student.parameters() if each.requires_grad]
    optimizer = torch.optim.AdamW(learnt, lr=1e-4)

    def step(_number: int) -> int:
        loss().backward()
        torch.nn.utils.clip_grad_norm_(learnt, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return tokens

    return step


def speculators(size: int, vocabulary: int = 49_152) -> Callable[[int], int]:
    """`distilling` of EAGLE-3 by speculators; what its target says is given."""
    import torch
    from speculators.config import SpeculatorsConfig, VerifierConfig
    from speculators.losses.utils import resolve_loss_config
    from speculators.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig
    from speculators.proposals.greedy import GreedyTokenProposalConfig
    from transformers import LlamaConfig

    tokens, width, inside, heads, keys = SMOL
    layer = LlamaConfig(
        vocab_size=tokens,
        hidden_size=width,
        intermediate_size=inside,
        num_attention_heads=heads,
        num_key_value_heads=keys,
        num_hidden_layers=1,
        attn_implementation="eager",
    )
    proposal = GreedyTokenProposalConfig(speculative_tokens=3)
    student = Eagle3DraftModel(
        Eagle3SpeculatorConfig(
            transformer_layer_config=layer,
            draft_vocab_size=vocabulary,
            eagle_aux_hidden_state_layer_ids=[1, 2, 3],
            speculators_config=SpeculatorsConfig(
                algorithm="eagle3",
                proposal_methods=[proposal],
                default_proposal_method="greedy",
                verifier=VerifierConfig(name_or_path=None, architectures=[]),
            ),
        )
    )
    with torch.no_grad():
        for weight in student.parameters():
            weight.normal_(0, 0.02) if weight.ndim > 1 else weight.fill_(1)
        if vocabulary < tokens:
            student.t2d[:vocabulary] = True
    draw = torch.Generator().manual_seed(0)
    loss_config = resolve_loss_config("kl_div", "eager")
    texts = torch.arange(2).repeat_interleave(size // 2)[None]
    ids = torch.randint(0, 2000, (1, size), generator=draw)
    ids = ids.remainder(vocabulary)
    taps, last = (torch.randn(1, size, n * width, generator=draw) for n in (3, 1))

    def loss() -> Any:
        _, total, _ = student(
            taps,
            ids,
            texts,
            loss_mask=torch.ones(1, size, dtype=torch.bool),
            verifier_last_hidden_states=last,
            ttt_steps=3,
            loss_config=loss_config,
        )
        return total

    return stepped(student, loss, size)


def gkd(size: int, texts: int = 2, on_policy: bool = False) -> Callable[[int], int]:
    """`distilling` of a plain draft by TRL's GKD: its target reads the texts in each pass."""
    import torch
    from transformers import GenerationConfig
    from trl.experimental.gkd import GKDTrainer

    target, student = llama(8, *TOY), llama(1, *TOY_DRAFT)
    draw = torch.Generator().manual_seed(0)
    given = torch.randint(0, 2000, (texts, size // texts), generator=draw)
    length = size // texts - 8
    sampled = GenerationConfig(
        do_sample=True, temperature=0.7, top_k=0, max_new_tokens=length, pad_token_id=0
    )
    prompts = {"prompts": given[:, :8], "prompt_attention_mask": torch.ones_like(given[:, :8])}

    def loss() -> Any:
        ids = given
        if on_policy:
            with torch.no_grad():
                ids, *_ = GKDTrainer.generate_on_policy_outputs(student, prompts, sampled)
        labels = ids.clone()
        labels[:, :8] = -100
        with torch.no_grad():
            said = target(ids).logits
        return GKDTrainer.generalized_jsd_loss(
            student(ids).logits[:, :-1], said[:, :-1], labels[:, 1:], beta=0.0, temperature=0.7
        )

    return stepped(student, loss, size)


def distilling(
    size: int,
    draft: str,
    vocabulary: int = 49_152,
    kept: bool = True,
    texts: int = 2,
    on_policy: bool = False,
) -> Callable[[int], int]:
    """An optimizer step of texts of so many tokens together, nearly all of them learnt.

    SmolLM2's width and vocabulary for EAGLE-3, of three readings; else the demo's pair's sizes.
    """
    import torch
    from datasets import Dataset

    from distill.config import DistilConfig, InitConfig
    from distill.distillation import draft_trainer
    from distill.initial import new_draft
    from specdata.drafts.draft_vocabulary import reduce_vocabulary
    from specdata.drafts.state_store import StateStore
    from specdata.drafts.taps import attach
    from specdata.processes import keep_freed_memory
    from specdata.sampling import SamplingConfig

    keep_freed_memory()  # as every command does
    store, changes = StateStore(), {"batch_size": texts, "epochs": 9, "report_to": []}
    if draft == "eagle3":
        target = llama(4, *SMOL)
        init = InitConfig.model_validate(
            {"kind": "states", "layout": draft, "layers": 1, "taps": [1, 2, 3]}
        )
        student: Any = new_draft(target, init)
        with torch.no_grad():
            for weight in student.parameters():
                weight.normal_(0, 0.02) if weight.ndim > 1 else weight.fill_(1)
            student.d2t.zero_()
            student.t2d.fill_(True)
        if vocabulary < 49_152:
            reduce_vocabulary(student, range(vocabulary))
        attach(student, target, store)
        changes["readings"] = 3
    else:
        target, student = llama(8, *TOY), llama(1, *TOY_DRAFT)
        changes |= {"objective": "forward_kl", "on_policy": float(on_policy)}
    draw = torch.Generator().manual_seed(0)

    def row(completion: int) -> dict[str, list[int]]:
        ids = torch.randint(0, 2000, (8 + completion,), generator=draw).tolist()
        return {"prompt_ids": ids[:8], "completion_ids": ids[8:]}

    rows = Dataset.from_list([row(size // texts - 8) for _ in range(texts * STEPS)])
    config, sampling = DistilConfig.model_validate(changes), SamplingConfig(0.7)
    trainer: Any = draft_trainer(target, student, rows, Path("work"), config, sampling, 0, store)
    optimizer = trainer.create_optimizer()
    numbered = trainer.train_dataset
    batches = [
        trainer.data_collator([numbered[texts * n + place] for place in range(texts)])
        for n in range(STEPS)
    ]
    if kept:
        for batch in batches:
            trainer.objective.teacher.columns(batch)
            trainer.objective.teacher.taps(student, batch)

    def step(number: int) -> int:
        batch = batches[number]
        if on_policy:
            (batch,) = trainer.texts.into([batch], student, number)
        total, learnt = trainer.objective(batch, number)
        (total / learnt).backward()
        torch.nn.utils.clip_grad_norm_(student.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return size

    return step


def rolling(is_ours: bool) -> Callable[[int], int]:
    """64 completions by a model of SmolLM2's shape, of 33 tokens in the mean and at most 64."""
    import torch
    from transformers import GenerationConfig

    from specdata.rollouts.backend import Request, TransformersBackend
    from specdata.sampling import SamplingConfig

    target = llama(30, *SMOL)
    ends, draw = list(range(1500)), torch.Generator().manual_seed(0)
    target.generation_config = GenerationConfig(eos_token_id=ends, pad_token_id=0)
    prompts = [torch.randint(1500, 2500, (8 + row,), generator=draw) for row in range(64)]
    backend = TransformersBackend(target, SamplingConfig(0.7), 64, 64, seed=0)

    def step(number: int) -> int:
        if is_ours:
            asked = [Request(ids.tolist(), (number, row)) for row, ids in enumerate(prompts)]
            return sum(len(each.ids) for each in backend.complete(asked))
        ids = torch.nn.utils.rnn.pad_sequence(prompts, batch_first=True, padding_side="left")
        asked_by = {"attention_mask": (ids > 0).long(), "max_new_tokens": 64, "do_sample": True}
        texts = target.generate(ids, **asked_by, temperature=0.7, top_k=0)[:, ids.shape[1] :]
        is_end = texts < 1500
        return int((is_end.cumsum(1) - is_end.long() == 0).sum())

    return step


WORKS: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
    "EAGLE-3, 8,192 tokens, speculators": (
        partial(distilling, 512, draft="eagle3", vocabulary=8192),
        partial(speculators, 512, vocabulary=8192),
    ),
    "EAGLE-3, all tokens, speculators": (
        partial(distilling, 512, draft="eagle3"),
        partial(speculators, 512),
    ),
    "forward KL, first pass, GKD": (
        partial(distilling, 1024, draft="plain", kept=False),
        partial(gkd, 1024),
    ),
    "forward KL, later passes, GKD": (partial(distilling, 1024, draft="plain"), partial(gkd, 1024)),
    "forward KL, own texts, GKD": (
        partial(distilling, 1024, draft="plain", kept=False, texts=16, on_policy=True),
        partial(gkd, 1024, texts=16, on_policy=True),
    ),
    "rollouts, 64 a batch, generate": (partial(rolling, True), partial(rolling, False)),
}
"""Name -> ours and the peer's."""


if __name__ == "__main__":
    main()
