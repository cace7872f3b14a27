"""Compare greedy output of speculative decoding with plain decoding: identical, tied, or a bug?

    draftsmith compare --target ID --draft ID --method "{length: 8, verifier: block}"

Sequences are compared with those of transformers' generate(do_sample=False). Exit status: 0 if all
are identical or differ by numerical ties, 1 if there is a bug, 2 for unusable input. How a tie is
told from a bug: see `eval.analysis.ties`.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, get_args

import yaml
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from eval.decode_config import DecodeConfig
from eval.runtime.engines import Engine
from specdata.errors import ConfigError
from specdata.prompts.config import PromptSet
from specdata.terminal import progress, whole_number

if TYPE_CHECKING:  # help and mistakes are shown without torch: what works imports where it works
    from torch import Tensor
    from transformers import PreTrainedTokenizerBase

    from eval.analysis.ties import Choice, Comparison, Difference

METHODS = (
    "{length: 4}",
    "{length: 8, verifier: block}",
    "{verifier: traversal, drafter: tree, widths: [4, 2, 2]}",
    "{verifier: rrs, drafter: paths, paths: 2, length: 4}",
)
PLAIN = "plain"
SHOWN_TOKENS = 24


def read_method(text: str) -> DecodeConfig:
    """A greedy decoding configuration from a YAML mapping of `DecodeConfig`'s fields.

    Raises:
        ConfigError: if it is no such mapping, or its settings exclude each other.
    """
    try:
        given = yaml.safe_load(text)
        if not isinstance(given, dict):
            raise ConfigError(f"must be a mapping such as {METHODS[0]!r}")
        if "temperature" in given:
            raise ConfigError("no setting of it is 'temperature': greedy decoding is compared")
        return DecodeConfig(**{str(name): value for name, value in given.items()}, temperature=0.0)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ConfigError(f"method {text!r}: {error}") from error


def add_options(parser: argparse.ArgumentParser) -> None:
    """The command line."""
    add = parser.add_argument
    add("--target", required=True, help="folder or Hub id")
    add("--draft", required=True, help="folder or Hub id")
    add("--head", help="acceptance head, for methods with stop: head or cost")
    add("--method", action="append", help=f"YAML of a method; default: {'; '.join(METHODS)}")
    add("--prompts", default="instruct", help="an embedded family or a JSONL file with `prompt`")
    add("--count", type=whole_number, default=8, help="how many prompts")
    add("--dtype", default="float32", help="float32, bfloat16 or float16: of both models")
    add("--max-new-tokens", type=whole_number, default=64, help="longest continuation")
    add("--engine", choices=get_args(Engine), default="eager", help="see eval.runtime.graphs")


def main(given: argparse.Namespace) -> int:
    """Run the command line; returns the exit status."""
    console = Console(highlight=False, soft_wrap=True)
    configs = {text: read_method(text) for text in given.method or METHODS}
    comparisons, tokenizer = _run(given, configs)
    console.print(table(comparisons))
    for comparison in comparisons:
        for difference in comparison.differences:
            console.print(explain(comparison.method, difference, tokenizer))
    return int(any(comparison.count("bug") for comparison in comparisons))


def _run(
    given: argparse.Namespace, configs: dict[str, DecodeConfig]
) -> tuple[list[Comparison], PreTrainedTokenizerBase]:
    if given.max_new_tokens < 1:
        raise ConfigError(f"--max-new-tokens must be 1 or larger, got {given.max_new_tokens}")
    import torch

    from eval.analysis.ties import compare_sequences
    from eval.decoder import SpeculativeDecoder
    from heads import BaseHead
    from specdata.models import (
        check_dtype,
        check_length,
        check_shared_vocabulary,
        load_model,
        load_tokenizer,
    )
    from specdata.prompts.loading import dropped, load_prompts

    check_dtype(given.dtype)
    tokenizer = load_tokenizer(given.target)
    check_shared_vocabulary(tokenizer, load_tokenizer(given.draft))
    target = load_model(given.target, dtype=given.dtype)
    room = target.config.get_text_config().max_position_embeddings - given.max_new_tokens
    if room < 1:
        raise ConfigError(
            f"--max-new-tokens {given.max_new_tokens} leaves no room for a prompt: {given.target} "
            f"has positions for {room + given.max_new_tokens} tokens"
        )
    prompt_set = PromptSet(given.prompts, "test", given.count)
    loaded = load_prompts([prompt_set], tokenizer, seed=0, max_tokens=room)
    for line in dropped(loaded.report):
        Console(stderr=True, soft_wrap=True).print(line, markup=False)
    prompts = [prompt.ids for prompt in loaded.prompts]
    draft = load_model(given.draft, dtype=given.dtype)
    for model in (target, draft):
        check_length(model.config, max(map(len, prompts)) + given.max_new_tokens)
    head = None
    if given.head:
        try:
            head = BaseHead.from_pretrained(given.head)
        except (ValueError, OSError) as error:
            raise ConfigError(f"cannot load the head {given.head!r}: {error}") from error
    asked = {PLAIN: DecodeConfig(temperature=0.0), **configs}
    decoders = {
        name: SpeculativeDecoder.from_config(
            target,
            None if name == PLAIN else draft,
            config,
            head if config.stop.reads_head else None,
            engine=given.engine,
        )
        for name, config in asked.items()
    }

    def decoding(decoder: SpeculativeDecoder) -> Callable[[Tensor], Tensor]:
        return lambda prompt: (
            decoder.generate(
                prompt,
                max_new_tokens=given.max_new_tokens,
                generator=torch.Generator().manual_seed(0),
            ).tokens
        )

    methods = {name: decoding(decoder) for name, decoder in decoders.items()}
    sequences = len(prompts) * (len(methods) + 1)
    with progress(sequences, "comparison", "sequence") as bar:
        comparisons = compare_sequences(
            target,
            [torch.tensor(ids) for ids in prompts],
            methods,
            max_new_tokens=given.max_new_tokens,
            report=bar.update,
        )
    return comparisons, tokenizer


def table(comparisons: Sequence[Comparison]) -> Table:
    """One row a method."""
    rows = Table(title="greedy output against transformers' generate")
    rows.add_column("method")
    for name in ("texts", "identical", "ties", "bugs", "tokens"):
        rows.add_column(name, justify="right")
    for comparison in comparisons:
        ties, bugs = comparison.count("tie"), comparison.count("bug")
        same = comparison.texts - len(comparison.differences)
        row = (comparison.texts, same, ties, bugs, comparison.tokens)
        rows.add_row(escape(comparison.method), *map(str, row), style="red" if bugs else None)
    return rows


def explain(method: str, difference: Difference, tokenizer: PreTrainedTokenizerBase) -> str:
    """A difference, and why it is a tie or a bug, in rich's markup."""

    def described(choice: Choice | None) -> str:
        if choice is None:
            return "nothing (it has ended)"
        token, best = (repr(tokenizer.decode([token])) for token in (choice.token, choice.best))
        return escape(
            f"{choice.token} {token}, logit {choice.logit:.6g}; gap to the largest "
            f"({choice.best} {best}) {choice.gap:.3g}; rounding noise {choice.noise:.3g}"
        )

    head = f"{method}, prompt {difference.prompt}, new token {difference.position}: "
    colour = {"tie": "yellow", "bug": "red"}[difference.verdict]
    context = tokenizer.decode(list(difference.context[-SHOWN_TOKENS:]))
    lines = [
        f"{escape(head)}[{colour}]{difference.verdict.upper()}[/]",
        escape(f"  after  ...{context!r}"),
        f"  plain  {described(difference.expected)}",
        f"  method {described(difference.found)}",
    ]
    worst = difference.worst
    if worst is not None and worst != difference.found:
        lines.append(f"  worst after that, new token {worst.position}: {described(worst)}")
    if not difference.complete:
        lines.append("  it ends neither at the first end token nor at the budget")
    return "\n".join(lines)
