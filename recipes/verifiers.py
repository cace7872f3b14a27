"""Which verifier and which draft, and whether speculation pays, for any pair: without a run.

    draftsmith verifiers TARGET DRAFT --prompts FILE [--out FOLDER] [--seconds 240]

The target continues the prompts. Acceptance is measured along its text, every verifier is
enumerated on every kind of draft (`eval.analysis.verifier_table`), and a few prompts are decoded
one at a time for the times from which speeds are predicted.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from eval.runtime.engines import ENGINES
from specdata.errors import ConfigError
from specdata.prompts.catalogue import EMBEDDED
from specdata.prompts.config import PromptSet
from specdata.sampling import SamplingConfig, generator_for
from specdata.storage.files import write_json, write_text
from specdata.terminal import accept_any_text, tell

if TYPE_CHECKING:  # help is shown without torch
    from torch import Tensor
    from transformers import PreTrainedModel

    from eval.analysis.verifier_table import Times
    from eval.measuring.intervals import Interval
    from eval.measuring.results import VerifierRow

TIMED_PROMPTS, TIMED_TOKENS = 2, 32
TIMED: Sequence[dict[str, Any]] = (
    {"length": 2},
    {"length": 8},
    {"verifier": "rrs", "drafter": "tree", "widths": (4, 2, 2)},
)
"""What is decoded for the times: they tell a round, a forward of the draft and a node apart."""


def main(arguments: Sequence[str] | None = None, program: str = "draftsmith verifiers") -> int:
    """Run the command line; returns the exit status."""
    accept_any_text()
    given = _parser(program).parse_args(arguments)
    console = Console(highlight=False, soft_wrap=True)
    try:
        rows, said = _run(given, Console(stderr=True, highlight=False, soft_wrap=True))
    except Exception as error:  # noqa: BLE001 - raised again if it is a defect
        return tell(error)
    from eval.reporting import verifiers

    table = verifiers.markdown(rows)
    console.print(f"{said}\n\n{table}", markup=False)
    if given.out:
        from eval.reporting.charts import write_bars

        write_text(given.out / "verifiers.md", f"{said}\n\n{table}")
        stored = [row.model_dump(mode="json") for row in rows]
        write_json(given.out / "verifiers.json", {"answer": said, "verifiers": stored})
        meaning = "expected tokens a call of the target; line: ceiling"
        write_bars(given.out / "verifiers.png", verifiers.bars(rows), meaning)
        console.print(f"written: {given.out}/verifiers.md, .json, .png", markup=False)
    return 0


def _run(given: argparse.Namespace, log: Console) -> tuple[list[VerifierRow], str]:
    if given.seconds <= 0 or given.max_new_tokens < 2 or given.count < 1:
        raise ConfigError(
            "--seconds must be above 0, --max-new-tokens at least 2 and --count at least 1; got "
            f"{given.seconds:g}, {given.max_new_tokens} and {given.count}"
        )
    try:
        sampling = SamplingConfig(given.temperature, given.top_k, given.top_p)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    import torch

    from eval.analysis.verifier_table import Measured, verifier_table
    from eval.reporting import verifiers
    from specdata.models import (
        check_shared_vocabulary,
        load_model,
        load_tokenizer,
        longest_prompt,
    )
    from specdata.prompts.loading import load_prompts

    begun = time.perf_counter()
    tokenizer = load_tokenizer(given.target)
    check_shared_vocabulary(tokenizer, load_tokenizer(given.draft))
    room = min(longest_prompt(name, given.max_new_tokens) for name in (given.target, given.draft))
    # Of a file all are read first: it may hold fewer.
    sets = [PromptSet(given.prompts, count=given.count if given.prompts in EMBEDDED else 0)]
    loaded = load_prompts(sets, tokenizer, seed=given.seed, max_tokens=room)
    prompts = loaded.prompts[: given.count]
    target, draft = (load_model(name, dtype=given.dtype) for name in (given.target, given.draft))
    ids = [torch.tensor(prompt.ids) for prompt in prompts]
    log.print(f"{len(ids)} prompts: times, then acceptance along the target's text")
    measured = Measured(
        target,
        draft,
        [("prompts", each) for each in ids],
        sampling,
        _times(target, draft, ids, sampling, given),
        seed=given.seed,
        max_new_tokens=given.max_new_tokens,
    )
    accepted = _acceptance(target, draft, ids, sampling, given)
    with tempfile.TemporaryDirectory() as folder:
        rows = verifier_table(
            measured,
            seconds=max(1.0, given.seconds - (time.perf_counter() - begun)),
            folder=Path(folder),
            report=lambda said: log.print(f"  verifiers on {said}", markup=False),
        )
    if not rows:
        raise ConfigError("no kind of draft could be decoded by this pair: see above")
    best = verifiers.best(rows)
    speed, tokens = best.speedup or 0.0, best.expected_tokens
    pays = "so few places cannot tell whether it pays"
    if speed * tokens.low > tokens.value:
        pays = "it pays"
    elif speed * tokens.high < tokens.value:
        pays = "it does not pay: drafting costs more than it saves"
    return rows, (
        f"A drafted token is accepted with probability {accepted.value:.3f} [{accepted.low:.3f}, "
        f"{accepted.high:.3f}]; best is {best.name} on {best.draft_kind}, expected {speed:.2f}x "
        f"over the target alone here: {pays}. {verifiers.answer(rows)}"
    )


def _times(
    target: PreTrainedModel,
    draft: PreTrainedModel,
    prompts: Sequence[Tensor],
    sampling: SamplingConfig,
    given: argparse.Namespace,
) -> Mapping[bool, Times]:
    """Fitted to a few prompts, decoded one at a time."""
    from eval.analysis.verifier_table import Times
    from eval.decoder import DecodeConfig, SpeculativeDecoder
    from eval.measuring.records import record_prompt

    made = []
    for settings in ({}, *TIMED):
        config = DecodeConfig(**{**settings, **asdict(sampling)})
        decoder = SpeculativeDecoder.from_config(
            target, draft if settings else None, config, engine=given.engine
        )
        decoder.warm_up()
        records = []
        for number, prompt in enumerate([prompts[0], *prompts[:TIMED_PROMPTS]]):
            out = decoder.generate(
                prompt,
                max_new_tokens=TIMED_TOKENS if number else 4,
                generator=generator_for(given.seed, "times", number),
            )
            records.append(
                record_prompt(str(number), out.rounds, seconds=out.seconds, finish=out.finish)
            )
        made.append(records[1:])  # the first warms up
    return Times.of(made[0], [*made[1], *made[2]], made[3])


def _acceptance(
    target: PreTrainedModel,
    draft: PreTrainedModel,
    prompts: Sequence[Tensor],
    sampling: SamplingConfig,
    given: argparse.Namespace,
) -> Interval:
    """The mean of sum_x min(p, q) along texts of the target alone."""
    import numpy as np
    import torch

    from eval.decoder import DecodeConfig, SpeculativeDecoder
    from eval.measuring.intervals import Interval, resamples
    from specdata.probability import overlap, probabilities, to_vocabulary

    decoder = SpeculativeDecoder.from_config(target, None, DecodeConfig(**asdict(sampling)))
    texts = decoder.generate_batch(
        prompts,
        max_new_tokens=given.max_new_tokens,
        generators=[generator_for(given.seed, "texts", index) for index in range(len(prompts))],
    )
    vocabulary = target.config.get_text_config().vocab_size
    sums, counts = np.zeros((2, len(prompts)))
    with torch.inference_mode():
        for index, (prompt, out) in enumerate(zip(prompts, texts, strict=True)):
            ids = torch.cat([prompt, out.tokens])[:-1].unsqueeze(0)
            logits = [
                model(input_ids=ids.to(model.device)).logits[0, len(prompt) - 1 :].cpu()
                for model in (target, draft)
            ]
            p, q = (probabilities(to_vocabulary(each, vocabulary), sampling) for each in logits)
            sums[index], counts[index] = float(overlap(p, q).sum()), len(out.tokens)
    weights = resamples(len(prompts))
    return Interval.of((weights @ sums) / (weights @ counts))


def _parser(program: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=program,
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("target", help="folder or Hub id of the target")
    add("draft", help="folder or Hub id of the draft, of the same vocabulary")
    add("--prompts", required=True, help="a JSONL, JSON or parquet file, or a set by name")
    add("--out", type=Path, help="folder for verifiers.md, verifiers.json and verifiers.png")
    add("--seconds", type=float, default=240.0, help="that it may take (default: 240)")
    add("--count", type=int, default=16, help="most prompts (default: 16)")
    add("--max-new-tokens", type=int, default=48, help="of each text (default: 48)")
    add("--temperature", type=float, default=1.0, help="default: 1")
    add("--top-k", type=int, default=0, help="0: all tokens (default)")
    add("--top-p", type=float, default=1.0, help="default: 1")
    add("--dtype", default="float32", help="of both models (default: float32)")
    add(
        "--engine", default="captured", choices=ENGINES, help="of what is timed (default: captured)"
    )
    add("--seed", type=int, default=0, help="of everything drawn (default: 0)")
    return parser


if __name__ == "__main__":
    sys.exit(main())
