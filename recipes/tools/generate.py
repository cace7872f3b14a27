"""Answer one prompt with a run's pair, as it is decoded.

    draftsmith generate CONFIG --prompt TEXT [--method NAME]

The text comes round by round, on a terminal with the accepted tokens in colour. The last line has
tokens per target call, and the speed beside the target alone, which then answers the same prompt.
The target's chat template is applied if it has one, unless the first of eval.sets says chat: false.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eval.decode_config import DecodeConfig, Method
from eval.measuring.methods import check_methods
from eval.measuring.pooled import medians
from eval.measuring.results import read_results
from eval.reporting.verdict import best_of
from recipes.config import RESULTS, PipelineConfig, parse
from recipes.models import (
    check_decodable,
    load_head,
    load_models,
    load_own_head,
    shared_tokenizer,
)
from recipes.run import console, prepare_libraries, say
from specdata.config import nearest
from specdata.errors import ConfigError
from specdata.terminal import visible, whole_number

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from eval.rounds import Generation

WARM_UP_TOKENS = 4


def add_options(parser: argparse.ArgumentParser) -> None:
    """The command line."""
    add = parser.add_argument
    add("config", metavar="CONFIG", help="of a run whose draft is trained, such as my-pair.yaml")
    add("--prompt", required=True, help="the text to answer or, without a template, to continue")
    add("--method", help="a name of eval.methods (default: the fastest measured, or the first)")
    add("--max-new-tokens", type=whole_number, help="most new tokens (default: the evaluation's)")
    add("--seed", type=whole_number, help="of the draws (default: the configuration's)")


def main(args: argparse.Namespace) -> int:
    """Decode and print; returns the exit status."""
    config = parse([args.config], "", ("eval",), None).config
    count = config.eval.max_new_tokens if args.max_new_tokens is None else args.max_new_tokens
    if count < 1:
        raise ConfigError(f"--max-new-tokens must be at least 1, got {count}")
    method = _method(config, args.method)
    evaluation = config.eval.model_copy(update={"methods": [method]})
    config = config.model_copy(update={"eval": evaluation})
    check_methods(evaluation, config.sampling, head=config.head is not None)
    check_decodable(config)
    _check_made(config, method, args.config)

    import torch

    from eval.decoder import SpeculativeDecoder
    from recipes.experiment import fitted_values
    from specdata.models import load_model, prompt_limits
    from specdata.prompts.chat_templates import chat_ids, text_ids
    from specdata.threads import using_threads

    prepare_libraries()
    # 1. The prompt, as the target reads it.
    name = config.models.target
    tokenizer, limits = shared_tokenizer(name), prompt_limits(name, count)
    if tokenizer.chat_template and evaluation.sets[0].chat is not False:
        message = {"role": "user", "content": args.prompt}
        ids = chat_ids(tokenizer, [message], config.chat_template_kwargs)
    else:
        ids = text_ids(tokenizer, [args.prompt], is_chat=False)[0]
    if not 1 <= len(ids) <= limits["max_tokens"]:
        raise ConfigError(
            f"--prompt must have 1 to {limits['max_tokens']} tokens, which leave {name} room for "
            f"{count} more, and has {len(ids)}: shorten it, or lower --max-new-tokens"
        )
    # 2. The pair, decoding by the method, and the target alone.
    load = config.models.loading("target")
    if method.uses_draft and not method.mtp:
        target, draft = load_models(config)
    else:
        target = load_model(name, load=load)
        draft = load_own_head(config, target) if method.mtp else None
    head = load_head(asked) if (asked := config.evaluated_head) else None
    if method.stop.needs_fit:
        rule = method.stop.with_fit(fitted_values(config))
        method = method.model_copy(update={"stop": rule})
    engine, sampling = evaluation.engine, config.sampling
    pair = SpeculativeDecoder.from_config(
        target, draft, method.decoding(sampling), head, engine=engine
    )
    plain = DecodeConfig(**asdict(sampling))
    alone = SpeculativeDecoder.from_config(target, None, plain, engine=engine)
    prompt, seed = torch.tensor(ids), config.seed if args.seed is None else args.seed
    with using_threads(evaluation.threads):
        for decoder in (alone, pair):
            decoder.warm_up()
            most, draws = min(count, WARM_UP_TOKENS), torch.Generator()
            decoder.generate(prompt, max_new_tokens=most, generator=draws)
        stream = _Stream(tokenizer)
        outs = [
            decoder.generate(
                prompt,
                max_new_tokens=count,
                generator=torch.Generator().manual_seed(seed),
                report=report,
            )
            for decoder, report in ((pair, stream.add), (alone, lambda *_: None))
        ]
        stream.end()
    # 3. How fast it was.
    speed, base = map(_speed, outs)
    calls = len(outs[0].tokens) / len(outs[0].rounds)
    say(
        f"{method.name}: {calls:.2f} tokens per target call, {speed:.1f} tokens/s, "
        f"{speed / base:.2f} times the target alone ({base:.1f}) on this prompt, once"
    )
    return 0


def _method(config: PipelineConfig, name: str | None) -> Method:
    """The method of that name; without one the fastest of the evaluation, or the first."""
    results = config.eval_folder / RESULTS
    rows = medians(read_results(results)) if results.is_file() else []
    known = [*(row.method for row in rows), *config.eval.methods]  # dev adds lengths
    ours = {each.name: each for each in known if each.decoder == "speculative"}
    if name is not None and name not in ours:
        raise ConfigError(
            f"--method must name one of eval.methods that drafts: {nearest(name, ours)}"
        )
    if not ours:
        raise ConfigError("eval.methods must have one that drafts, such as {name: K=3, length: 3}")
    best = best_of([row for row in rows if row.name in ours])
    return ours[name or (best.name if best else next(iter(ours)))]


def _check_made(config: PipelineConfig, method: Method, file: str) -> None:
    """Refuse models that this run makes and has not made yet."""
    needed = {"pipeline": config.models.target}
    if method.uses_draft and not method.mtp:
        needed["train-draft"] = config.draft_in_use
    if config.head and (method.stop.reads_head or method.stop.needs_fit):  # on the head's labels
        needed["train-head"] = str(config.head_in_use)
    for recipe, model in needed.items():
        if config.holds(model) and not (Path(model) / "config.json").is_file():
            raise ConfigError(
                f"{model} is not there yet, and method {method.name!r} decodes with it: run "
                f"draftsmith {recipe} {file} first"
            )


def _speed(out: Generation) -> float:
    """Tokens a second, of drafting, forward passes and verification: not of what is printed."""
    seconds = sum(
        each.draft_seconds + each.target_seconds + each.overhead_seconds for each in out.rounds
    )
    return len(out.tokens) / seconds


class _Stream:
    """Prints tokens as they are emitted, the accepted ones in colour."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self._ids: list[int] = []
        self._shown = ""

    def add(self, tokens: Sequence[int], accepted: int) -> None:
        """Print the tokens of a round, of which the first were drafted and accepted."""
        for place, token in enumerate(tokens):
            self._ids.append(token)
            text = self._text()
            if not text.endswith("\ufffd"):  # a character whose last bytes are still to come
                self._print(text, "green" if place < accepted else "")

    def end(self) -> None:
        """Print what is left, and end the line."""
        self._print(self._text() + "\n")

    def _text(self) -> str:
        settings: dict[str, Any] = {"clean_up_tokenization_spaces": False}
        return str(self._tokenizer.decode(self._ids, skip_special_tokens=True, **settings))

    def _print(self, text: str, style: str = "") -> None:
        new, self._shown = text[len(self._shown) :], text
        console.print(visible(new), style=style, end="", markup=False, emoji=False, highlight=False)
