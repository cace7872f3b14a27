"""Certify that texts are as of the target alone: of an evaluation, a pair, a server, a function.

draftsmith certify runs/toy/eval [--texts 64]
draftsmith certify --target T --draft D [--method "{length: 8, verifier: block}"] [--prompts FILE]
draftsmith certify --server URL --target T [--draft D] [--temperature 0.7] [--prompts FILE]
draftsmith certify --callable pkg.module:function [--target T --draft D]

Of a finished evaluation each way of decoding is sampled and run greedily. Writes
certificate.json into the evaluation's folder; publish puts its sentence on the cards. Of a pair
greedy texts are compared with transformers' `generate` (`eval.analysis.ties` tells a tie from a
bug). Of a served engine (vLLM 0.10.2 or newer, llama-server, or what answers /v1/completions with
token ids as they do) greedy and sampled texts are judged by the target, in this process;
certificate.json goes to --out; of one that drafts with its target (--draft as --target) all drafted
tokens must be kept. Of a Python function `eval.analysis.callables` makes five checks, on tiny
models unless a pair is named. Exit status: 0 if all that is lossless is exact, 1 if something is
not, 2 for unusable input. Of an evaluation it goes on, killed and run again, after the last method
that it finished.
"""

from __future__ import annotations

import argparse
import importlib
import shutil
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml
from pydantic import ValidationError

from eval.decode_config import DecodeConfig
from eval.runtime.engines import ENGINES
from recipes.config import CERTIFICATE, RESULTS, load_yaml, named
from recipes.run import prepare_libraries, say, stored_config
from specdata.config import PromptSet, ServerConfig
from specdata.errors import ConfigError
from specdata.sampling import SamplingConfig
from specdata.storage.files import write_json
from specdata.terminal import positive_number, progress, whole_number

if TYPE_CHECKING:
    from specdata.prompts.prompt import Prompt
    from specdata.rollouts.backend import Request

CERTIFIED_TOKENS = 64
"""Of a text that is decoded."""
METHODS = (
    "{length: 4}",
    "{length: 8, verifier: block}",
    "{verifier: traversal, drafter: tree, widths: [4, 2, 2]}",
    "{verifier: rrs, drafter: paths, paths: 2, length: 4}",
)
"""What a pair is compared with, where no method is named."""


def add_options(parser: argparse.ArgumentParser) -> None:
    """The command line."""
    add = parser.add_argument
    add("folder", type=Path, nargs="?", help="of a finished evaluation, such as runs/toy/eval")
    add("--texts", type=whole_number, default=64, help="sampled, of each method (default: 64)")
    of_both = parser.add_argument_group("a pair or a served engine").add_argument
    of_both("--target", help="folder or Hub id of the target")
    of_both("--draft", help="of a server: of what it drafts with, to see a smaller bias")
    of_both("--prompts", default="instruct", help="a file, or a set by name (default: instruct)")
    of_both("--count", type=whole_number, default=16, help="prompts (default: 16)")
    of_both("--max-new-tokens", type=whole_number, default=CERTIFIED_TOKENS, help="(default: 64)")
    of_both("--dtype", default="float32", help="of models here (default: float32)")
    of_pair = parser.add_argument_group("a pair").add_argument
    of_pair("--head", help="acceptance head, for methods with stop: head or cost")
    of_pair("--method", action="append", help=f"YAML of a method; default: {'; '.join(METHODS)}")
    of_function = parser.add_argument_group("a Python function").add_argument
    of_function("--callable", metavar="MODULE:FUNCTION", help="generate(...) or step(...)")
    of_function("--seconds", type=positive_number, default=60.0, help="to walk draws (default: 60)")
    of_pair("--engine", choices=ENGINES, default="eager", help="of forwards (default: eager)")
    of_server = parser.add_argument_group("a served engine").add_argument
    of_server("--server", help="its address, instead of a folder")
    of_server("--model", help="name that it serves the target under (default: as --target)")
    of_server("--key-variable", help="environment variable that holds its key")
    of_server("--temperature", type=float, default=1.0, help="(default: 1)")
    of_server("--top-k", type=whole_number, default=0, help="(default: 0, all)")
    of_server("--top-p", type=float, default=1.0, help="(default: 1)")
    of_server("--min-p", type=float, default=0.0, help="(default: 0)")
    of_server("--out", type=Path, default=Path("runs/certificate"), help="(runs/certificate)")


def main(args: argparse.Namespace) -> int:
    """Run the command line; returns the exit status."""
    folder, texts = args.folder, args.texts
    if texts < 2:
        raise ConfigError(f"--texts must be 2 or larger, got {texts}")
    if args.server:
        with ExitStack() as closing:
            return _certify_server(args, closing)
    if args.max_new_tokens < 1:
        raise ConfigError(f"--max-new-tokens must be 1 or larger, got {args.max_new_tokens}")
    if args.callable:
        return _certify_callable(args)
    if folder is None and args.target and args.draft:
        return _compare_greedy(args)
    if folder is None:
        raise ConfigError(
            "give the folder of a finished evaluation, or --target and --draft, or --server and "
            "--target, or --callable"
        )
    if not (folder / RESULTS).is_file():
        raise ConfigError(f"{folder} must be the folder of a finished evaluation, with {RESULTS}")
    config = stored_config(folder)
    from eval.analysis.certificate import certify, left_out, sentence, ways
    from eval.measuring.environment import describe_environment
    from eval.measuring.results import read_results
    from recipes.experiment import load_experiment
    from specdata.threads import using_threads

    if not ways(config.eval, config.sampling):
        raise ConfigError(f"{folder} has no drafting method of ours: there is nothing to certify")
    prepare_libraries()
    experiment, *_ = load_experiment(config)
    listed = {each.name: each for each in experiment.config.methods}
    measured = {run.name: run.method for run in read_results(folder / RESULTS).runs}
    methods = [*(listed | measured | listed).values()]  # dev may have added lengths
    # Graphs pay for many texts only.
    evaluation = experiment.config.model_copy(update={"engine": "eager", "methods": methods})
    experiment = replace(experiment, folder=folder, config=evaluation)
    parts = folder / f".certificate-{texts}"
    number = len(ways(evaluation, config.sampling))
    with using_threads(evaluation.threads), progress(number, "certificate", "method") as bar:
        where = describe_environment(
            device=experiment.environment.device, dtype=experiment.environment.dtype
        )
        certified = certify(
            experiment,
            parts,
            texts=texts,
            max_new_tokens=min(CERTIFIED_TOKENS, evaluation.max_new_tokens),
            report=bar.update,
        )
    others = left_out(evaluation, config.sampling)
    answer = sentence(certified, others)
    values = {
        "sentence": answer,
        "target": experiment.models.names["target"],
        "draft": experiment.models.names["draft"],
        "sampling": asdict(config.sampling),
        "environment": where.model_dump(mode="json"),
        "methods": [each.model_dump(mode="json") for each in certified],
        "left_out": others,
    }
    write_json(folder / CERTIFICATE, values)
    shutil.rmtree(parts)
    for each in certified:
        for difference in each.differences:
            say(f"  greedy, {each.method}, {difference}")
    say(f"{answer}\nwritten to {folder / CERTIFICATE}")
    return int(any(each.lossless and not each.is_exact for each in certified))


def read_method(text: str) -> DecodeConfig:
    """A greedy decoding configuration from a YAML mapping. Raises ConfigError."""
    try:
        settings = load_yaml(text)
        if not isinstance(settings, dict) or "temperature" in settings:
            raise ConfigError(f"must be a mapping such as {METHODS[0]}; decoding is greedy")
        return DecodeConfig(**{str(name): each for name, each in settings.items()}, temperature=0.0)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ConfigError(f"method {text[:80]!r}: {error}") from error


def _certify_callable(args: argparse.Namespace) -> int:
    """Print what the checks of a function find; returns the exit status."""
    module, _, name = args.callable.partition(":")
    sys.path.insert(0, str(Path.cwd()))
    try:
        function = getattr(importlib.import_module(module), name)
        if not callable(function):
            raise TypeError(f"{name} is {function!r}")
    except Exception as error:  # whatever a user's module raises
        raise ConfigError(
            "--callable must be MODULE:FUNCTION that Python can import here: "
            f"{type(error).__name__}: {error}"
        ) from error
    from eval.analysis.callables import CheckSettings, certify_callable

    settings = CheckSettings(texts=args.texts, seconds=args.seconds)
    if args.target:
        args.draft = args.draft or args.target  # loaded once more
        target, draft, prompts = _load(args)
        ids = [each.ids for each in prompts]
        settings = replace(settings, pair=(target, draft), prompts=ids, new=args.max_new_tokens)
    findings = certify_callable(function, args.callable, settings, lambda each: say(str(each)))
    return int(any(each.holds is False for each in findings))


def _load(args: argparse.Namespace, room: int | None = None) -> tuple[Any, Any, list[Prompt]]:
    """The named target, the draft (None if none is named), and prompts.

    `room` is the context of a server in tokens, if it is known.
    """
    from specdata.drafts.states_network import states_input
    from specdata.drafts.taps import attach
    from specdata.models import check_shared_vocabulary, load_model, load_tokenizer, prompt_limits
    from specdata.prompts.loading import load_prompts

    tokenizer = load_tokenizer(args.target)
    limits = prompt_limits(args.target, args.max_new_tokens)
    if room is not None:
        limits["max_tokens"] = min(limits["max_tokens"], room - args.max_new_tokens)
    if args.draft:
        check_shared_vocabulary(tokenizer, load_tokenizer(args.draft))
    with named("--prompts"):
        sets = [PromptSet(args.prompts, count=args.count)]
        prompts = list(load_prompts(sets, tokenizer, seed=0, **limits).prompts)
    target = load_model(args.target, dtype=args.dtype)
    draft = load_model(args.draft, dtype=args.dtype) if args.draft else None
    if draft is not None and states_input(draft) is not None:
        attach(draft, target)
    return target, draft, prompts


def _compare_greedy(args: argparse.Namespace) -> int:
    """Print how each method's texts differ; returns the exit status."""
    configs = {text: read_method(text) for text in args.method or METHODS}
    import torch

    from eval.analysis.certificate import greedily, judge_greedy
    from eval.decoder import SpeculativeDecoder
    from eval.runtime.transformers_models import check_trees
    from recipes.models import load_head
    from specdata.drafts.depths import most_tokens

    target, draft, prompts = _load(args)
    head, bugs = load_head(args.head) if args.head else None, 0
    if not args.method:
        try:
            check_trees(target)
        except ConfigError as error:
            say(f"without trees and paths: {error}")
            configs = {text: each for text, each in configs.items() if not each.branches}
        most = most_tokens(draft)
        if any(each.deepest > most for each in configs.values()):
            say(f"without drafts longer than a block of {most}")
            configs = {text: each for text, each in configs.items() if each.deepest <= most}
    for text, config in configs.items():
        asked = head if config.stop.reads_head else None
        decoder = SpeculativeDecoder.from_config(target, draft, config, asked, engine=args.engine)
        ids = [torch.tensor(prompt.ids) for prompt in prompts]
        tokens = args.max_new_tokens
        found = judge_greedy(target, ids, greedily(decoder, tokens), tokens)
        counts = f"{found.same} of {found.texts} texts identical, {found.ties} tied"
        say(f"{text}: {counts}, {found.bugs} wrong", style="red" if found.bugs else "")
        for difference in found.differences:
            say(f"  {difference}")
        bugs += found.bugs
    return int(bugs > 0)


def _certify_server(args: argparse.Namespace, closing: ExitStack) -> int:
    """Certify a served engine; returns the exit status."""
    if not args.target or args.folder or min(args.count, args.max_new_tokens) < 1:
        raise ConfigError("--server needs --target, at least one prompt and one token, no folder")
    sampling = SamplingConfig(args.temperature, args.top_k, args.top_p, args.min_p)
    try:
        server = ServerConfig(url=args.server, model=args.model, key_variable=args.key_variable)
    except ValidationError as error:
        raise ConfigError(f"--server {error.errors()[0]['msg']}") from error
    import torch

    from eval.analysis.certificate import certify_server
    from eval.measuring.served import ServedEngine
    from specdata.server.client import ServerClient

    prepare_libraries()
    client, name = ServerClient(server, "--server"), args.model or args.target
    closing.callback(client.close)
    target, draft, prompts = _load(args, client.check(name))
    engine = ServedEngine.of(client, name, target, sampling, args.max_new_tokens)

    def answers(requests: Sequence[Request], sampling: SamplingConfig) -> list[list[int]]:
        backend = replace(engine.backend, sampling=sampling)
        texts: dict[tuple[str | int, ...], list[int]] = {}
        with progress(len(requests), f"{requests[0].key[0]} texts", "text") as bar:

            def answer(request: Request) -> None:
                texts[request.key] = backend.complete([request])[0].ids
                bar.update()

            client.each(answer, requests)
        return [texts[each.key] for each in requests]

    before = engine.counts()
    found = certify_server(
        answers,
        target,
        draft,
        [torch.tensor(prompt.ids) for prompt in prompts],
        sampling,
        texts=args.texts,
        max_new_tokens=args.max_new_tokens,
        seed=0,
    )
    sentence = f"{found} Up to {server.concurrency} were asked for at once."
    is_exact = found.is_exact
    if args.draft == args.target:
        drafted, lost, longest = engine.lost_since(before)
        # At the end of a text a server may leave out what it drafted beyond.
        is_exact &= lost <= longest * (len(prompts) + args.texts)
        sentence += f" It counts {drafted:,} tokens drafted by the target itself, {lost:,} lost."
    values = {"sentence": sentence, **found.model_dump(mode="json")}
    write_json(args.out / CERTIFICATE, values)
    for difference in found.differences:
        say(f"  greedy, {difference}")
    say(f"{sentence}\nwritten to {args.out / CERTIFICATE}")
    return int(not is_exact)
