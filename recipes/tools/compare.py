"""Greedy texts of speculative decoding beside transformers' `generate`: identical, tied, or a bug?

draftsmith compare --target TARGET --draft DRAFT --method "{length: 8, verifier: block}"

Exit status: 0 if all texts are identical or differ by numerical ties, 1 if there is a bug.
`eval.analysis.ties` says how a tie is told from a bug.
"""

from __future__ import annotations

import argparse

import yaml
from rich.console import Console

from eval.decode_config import DecodeConfig
from eval.runtime.engines import ENGINES
from recipes.config import load_yaml
from specdata.errors import ConfigError
from specdata.prompts.config import PromptSet
from specdata.terminal import whole_number

METHODS = (
    "{length: 4}",
    "{length: 8, verifier: block}",
    "{verifier: traversal, drafter: tree, widths: [4, 2, 2]}",
    "{verifier: rrs, drafter: paths, paths: 2, length: 4}",
)


def add_options(parser: argparse.ArgumentParser) -> None:
    """The command line."""
    add = parser.add_argument
    add("--target", required=True, help="folder or Hub id")
    add("--draft", required=True, help="folder or Hub id")
    add("--head", help="acceptance head, for methods with stop: head or cost")
    add("--method", action="append", help=f"YAML of a method; default: {'; '.join(METHODS)}")
    add("--prompts", default="instruct", help="a JSONL, JSON or parquet file, or a set by name")
    add("--count", type=whole_number, default=8, help="how many prompts (default: 8)")
    add("--dtype", default="float32", help="of both models (default: float32)")
    add("--max-new-tokens", type=whole_number, default=64, help="of each text (default: 64)")
    add("--engine", choices=ENGINES, default="eager", help="of forwards (default: eager)")


def read_method(text: str) -> DecodeConfig:
    """A greedy decoding configuration from a YAML mapping. Raises ConfigError."""
    try:
        settings = load_yaml(text)
        if not isinstance(settings, dict) or "temperature" in settings:
            raise ConfigError(f"must be a mapping such as {METHODS[0]}; decoding is greedy")
        return DecodeConfig(**{str(name): each for name, each in settings.items()}, temperature=0.0)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ConfigError(f"method {text[:80]!r}: {error}") from error


def main(given: argparse.Namespace) -> int:
    """Print how each method's texts differ; returns the exit status."""
    configs = {text: read_method(text) for text in given.method or METHODS}
    if given.max_new_tokens < 1:
        raise ConfigError(f"--max-new-tokens must be 1 or larger, got {given.max_new_tokens}")
    import torch

    from eval.analysis.ties import greedy_differences
    from eval.decoder import SpeculativeDecoder
    from eval.runtime.transformers_models import check_trees
    from heads import BaseHead
    from specdata.models import check_shared_vocabulary, load_model, load_tokenizer, longest_prompt
    from specdata.prompts.loading import load_prompts

    tokenizer = load_tokenizer(given.target)
    check_shared_vocabulary(tokenizer, load_tokenizer(given.draft))
    room = min(longest_prompt(name, given.max_new_tokens) for name in (given.target, given.draft))
    sets = [PromptSet(given.prompts, count=given.count)]
    prompts = load_prompts(sets, tokenizer, seed=0, max_tokens=room).prompts
    target, draft = (load_model(name, dtype=given.dtype) for name in (given.target, given.draft))
    head = None
    if given.head:
        try:
            head = BaseHead.from_pretrained(given.head)
        except (ValueError, OSError) as error:
            raise ConfigError(f"cannot load the head {given.head!r}: {error}") from error
    console, bugs = Console(highlight=False, soft_wrap=True), 0
    if not given.method:
        try:
            check_trees(target, by_mask=False)
        except ConfigError as error:
            console.print(f"without trees and paths: {error}", markup=False)
            configs = {text: each for text, each in configs.items() if each.drafter == "chain"}
    for text, config in configs.items():
        asked = head if config.stop.reads_head else None
        decoder = SpeculativeDecoder.from_config(target, draft, config, asked, engine=given.engine)

        def decode(prompt: torch.Tensor, decoder: SpeculativeDecoder = decoder) -> torch.Tensor:
            out = decoder.generate(
                prompt, max_new_tokens=given.max_new_tokens, generator=torch.Generator()
            )
            return out.tokens

        differences = greedy_differences(
            target,
            [torch.tensor(prompt.ids) for prompt in prompts],
            decode,
            max_new_tokens=given.max_new_tokens,
        )
        wrong = sum(each.verdict == "bug" for each in differences.values())
        same, ties = len(prompts) - len(differences), len(differences) - wrong
        counts = f"{same} of {len(prompts)} texts identical, {ties} tied, {wrong} wrong"
        console.print(f"{text}: {counts}", markup=False, style="red" if wrong else "")
        for number, difference in differences.items():
            console.print(f"  prompt {number}: {difference}", markup=False)
        bugs += wrong
    return int(bugs > 0)
