"""The embedded pair and its prompts, or a stand-in for them, for the other benchmarks."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from specdata.config import PromptSet
from specdata.models import load_model, load_tokenizer
from specdata.probability import SamplingConfig
from specdata.prompts.loading import load_prompts
from specdata.rollouts.backend import Request, TransformersBackend
from specdata.storage.schema import Rollout

PLAIN = SamplingConfig()
CONFIG = "recipes/configs/toy-full.yaml"
DEMO = Path("runs/toy-full")
"""Its output."""
BATCH, NEW_TOKENS, VOCABULARY = 64, 96, 2048


def pair(folder: Path) -> tuple[PreTrainedModel, PreTrainedModel, str]:
    """The embedded pair if it has been trained, else random weights of its shape."""
    if (folder / "target").is_dir() and (folder / "draft").is_dir():
        return load_model(str(folder / "target")), load_model(str(folder / "draft")), str(folder)
    stand_in = "random weights of the same shape: no text ends before its longest length"
    return llama(256, 12, 672, seed=0), llama(128, 1, 336, seed=1), stand_in


def make_demo(*recipes: str) -> None:
    """Run stages of `CONFIG`, in their order; those that are finished take no time."""
    print(f"part of {DEMO} is not there: making it (some minutes)", file=sys.stderr)
    for recipe in recipes:
        command = [sys.executable, f"recipes/{recipe}.py", "--config", CONFIG]
        subprocess.run(command, check=True)


def llama(width: int, layers: int, inner: int, *, seed: int) -> LlamaForCausalLM:
    """A Llama with random weights."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=width,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=width // 64,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        eos_token_id=None,
        pad_token_id=0,
    )
    return LlamaForCausalLM(config).eval()


def requests(folder: Path, count: int) -> list[Request]:
    """Prompts of the embedded instructions, or random ones of their lengths without a pair."""
    if (folder / "target").is_dir():
        wanted = [PromptSet("instruct", split="train", count=count)]
        prompts = load_prompts(wanted, load_tokenizer(str(folder / "target")), seed=0).prompts
        return [Request(prompt.ids, (prompt.example_id, 0)) for prompt in prompts]
    draw = torch.Generator().manual_seed(0)
    return [
        Request(torch.randint(3, VOCABULARY, (18 + n % 8,), generator=draw).tolist(), (f"{n}", 0))
        for n in range(count)
    ]


def rolled_out(target: PreTrainedModel, asked: list[Request]) -> list[Rollout]:
    """Batched completions as rows of a dataset."""
    backend = TransformersBackend(target, PLAIN, NEW_TOKENS, BATCH, seed=0)
    return [
        row(request, completion.ids, completion.finish)
        for request, completion in zip(asked, backend.complete(asked), strict=True)
    ]


def row(request: Request, completion: list[int], finish: str = "length") -> Rollout:
    """One row of a dataset."""
    return Rollout(
        example_id=str(request.key[0]),
        dataset="bench",
        split="train",
        sample=0,
        turn=0,
        prompt_ids=request.ids,
        completion_ids=completion,
        finish=finish,
    )
