"""Which verifier and which draft, and whether speculation pays, for any pair: without a run.

    draftsmith verifiers TARGET DRAFT --prompts FILE [--out FOLDER] [--seconds 240]

A few prompts are decoded one at a time for the times from which speeds are predicted; then every
verifier is enumerated on every kind of draft (`eval.analysis.verifier_table`).
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from eval.runtime.engines import ENGINES
from recipes.config import named
from recipes.run import prepare_libraries, say
from specdata.config import PromptSet
from specdata.errors import ConfigError
from specdata.prompts.catalogue import EMBEDDED
from specdata.sampling import SamplingConfig
from specdata.storage.files import write_json, write_text
from specdata.terminal import positive_number, whole_number

if TYPE_CHECKING:  # help is shown without torch
    from eval.measuring.results import VerifierRow


def add_options(parser: argparse.ArgumentParser) -> None:
    """The command line."""
    add = parser.add_argument
    add("target", help="folder or Hub id of the target")
    add("draft", help="folder or Hub id of the draft, of the same vocabulary")
    add("--prompts", required=True, help="a JSONL, JSON or parquet file, or a set by name")
    add("--out", type=Path, help="folder for verifiers.md and verifiers.json")
    add("--seconds", type=positive_number, default=240.0, help="that it may take (default: 240)")
    add("--count", type=whole_number, default=16, help="most prompts (default: 16)")
    add("--max-new-tokens", type=whole_number, default=48, help="of each text (default: 48)")
    add("--temperature", type=float, default=1.0, help="default: 1")
    add("--top-k", type=whole_number, default=0, help="0: all tokens (default)")
    add("--top-p", type=float, default=1.0, help="default: 1")
    add("--min-p", type=float, default=0.0, help="default: 0")
    add("--dtype", default="float32", help="of both models (default: float32)")
    add(
        "--engine", default="captured", choices=ENGINES, help="of what is timed (default: captured)"
    )
    add("--seed", type=whole_number, default=0, help="of everything drawn (default: 0)")


def main(args: argparse.Namespace) -> int:
    """Print the table; returns the exit status."""
    rows = _measured(args)
    from eval.reporting.verifiers import verifier_pays, verifier_sentence, verifiers_table

    answer = f"{verifier_sentence(rows)} {verifier_pays(rows)}"
    table = verifiers_table(rows).markdown()
    say(f"{answer}\n\n{table}")
    if args.out:
        write_text(args.out / "verifiers.md", f"{answer}\n\n{table}")
        stored = [row.model_dump(mode="json") for row in rows]
        write_json(args.out / "verifiers.json", {"answer": answer, "verifiers": stored})
        say(f"written: {args.out}/verifiers.md, .json")
    return 0


def _measured(args: argparse.Namespace) -> list[VerifierRow]:
    """The table of the pair."""
    if args.max_new_tokens < 2 or args.count < 1:
        raise ConfigError(
            "--max-new-tokens must be at least 2 and --count at least 1; got "
            f"{args.max_new_tokens} and {args.count}"
        )
    sampling = SamplingConfig(args.temperature, args.top_k, args.top_p, args.min_p)
    import torch

    from eval.analysis.round_times import measure_times
    from eval.analysis.verifier_table import TableInputs, verifier_table
    from specdata.models import (
        check_shared_vocabulary,
        ends_first,
        load_model,
        load_tokenizer,
        prompt_limits,
    )
    from specdata.prompts.loading import dropped, load_prompts

    prepare_libraries()
    begun, log = time.perf_counter(), Console(stderr=True, highlight=False, soft_wrap=True)
    tokenizer = load_tokenizer(args.target)
    check_shared_vocabulary(tokenizer, load_tokenizer(args.draft))
    limits = prompt_limits(args.target, args.max_new_tokens)
    # Of a file all are read first: it may hold fewer.
    sets = [PromptSet(args.prompts, count=args.count if args.prompts in EMBEDDED else 0)]
    with named("--prompts"):
        loaded = load_prompts(sets, tokenizer, seed=args.seed, **limits)
    for line in dropped(loaded.report):
        log.print(line, markup=False)
    ids = [torch.tensor(prompt.ids) for prompt in loaded.prompts[: args.count]]
    target, draft = (load_model(name, dtype=args.dtype) for name in (args.target, args.draft))
    if words := ends_first(draft, target):
        log.print(words, markup=False)
    read = f"{len(ids)} prompts of up to {max(map(len, ids)):,} tokens"
    log.print(f"{read}: times, then every verifier on every kind of draft")
    measured = TableInputs(
        target,
        draft,
        [("prompts", each) for each in ids],
        sampling,
        measure_times(target, draft, ids, sampling, engine=args.engine, seed=args.seed),
        seed=args.seed,
        max_new_tokens=args.max_new_tokens,
    )
    left = args.seconds - (time.perf_counter() - begun)
    if left < 1.0:
        spent = f"--seconds {args.seconds:g} went by with loading, {read} and times"
        log.print(f"{spent}: the table is given one second")
    rows = verifier_table(
        measured,
        seconds=max(1.0, left),
        report=lambda text: log.print(f"  verifiers on {text}", markup=False),
    )
    if not rows:
        raise ConfigError("no kind of draft could be decoded by this pair: see above")
    return rows
