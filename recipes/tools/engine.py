"""Measure a served engine on a run's prompts: does its draft pay where it is served, and how long?

    draftsmith engine URL [URL_OR_FOLDER ...] --alone URL2 --config CONFIG [--name "vLLM K=4"]

URL is a server of models.target that drafts, URL2 one that does not (vLLM 0.10.2 or newer,
llama-server, or what answers /v1/completions with token ids as they do). All are asked for the
same prompts as the run's evaluation, one at a time and in turns, beside plain decoding here and
whatever --method adds. It is an evaluation as any other, kept in OUTPUT/eval-server: results.json,
report.html, and resumed. What vLLM counts in /metrics gives acceptance by position. Then they are
asked for several prompts at once (--concurrency), and the length that was surely faster than the
shorter ones is printed for each number, as vLLM's schedule. With one server at a time: measure it
without its draft as --name "server alone" in another --eval.folder, and give that folder,
OUTPUT/FOLDER, as --alone; those of other lengths likewise, after the URL.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Collection, Iterator, Sequence
from contextlib import ExitStack
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from eval.measuring.intervals import Floats, Interval
from eval.measuring.methods import SERVED
from eval.measuring.pooled import PooledRow, medians
from eval.measuring.results import read_results
from eval.measuring.schedule import best_length, schedule, tokens_per_second
from recipes.config import RESULTS, PipelineConfig, parse
from recipes.experiment import load_experiment
from recipes.run import prepare_libraries, say
from recipes.run_eval import RECIPE
from specdata.config import ServerConfig
from specdata.errors import ConfigError
from specdata.server.client import ServerClient
from specdata.storage.files import write_json
from specdata.storage.resume import read_record
from specdata.terminal import progress, whole_number

SCHEDULE = "num_speculative_tokens_per_batch_size"
TURN = 4
"""Prompts that a server answers in its turn, for each request that is under way."""
ANSWERS = "at-{}-requests.json"
"""Beside an evaluation's results: tokens and seconds by server, set and prompt."""
ByRequests = dict[str, tuple[PooledRow, dict[int, Floats]]]
"""Name of a server -> its row, and its tokens a second at each number of requests."""


def add_options(parser: argparse.ArgumentParser) -> None:
    """The command line; further options are those of the configuration."""
    parser.usage = (
        "%(prog)s URL [URL_OR_FOLDER ...] [--alone URL_OR_FOLDER] [--concurrency N ...] "
        "[--name NAME] [--model MODEL] [--config FILE] [--KEY VALUE ...]"
    )
    add = parser.add_argument
    add("servers", metavar="URL", nargs="+", help="of the engine that drafts, and other lengths")
    add("--alone", help=f"of one that does not, or the folder of an evaluation with {SERVED!r}")
    add("--name", default="server", help="of its row (default: server)")
    add("--model", default="", help="their name of the target (default: models.target)")
    numbers = "requests at once; 1 is always measured (default: 1 4 16)"
    add("--concurrency", type=whole_number, nargs="+", default=[1, 4, 16], help=numbers)


def main(args: argparse.Namespace) -> int:
    """Measure, and print the answer; returns the exit status."""
    further, numbers = args.further, sorted({1, *args.concurrency})
    if not any(each.split("=")[0] == "--eval.folder" for each in further):
        further = [*further, "--eval.folder", "eval-server"]
    urls = [each for each in args.servers if each.startswith("http")]
    if args.servers[0] not in urls or not numbers[0]:
        raise ConfigError(
            "give a URL (http://...) first, then the options, --concurrency from 1 on; got "
            f"{args.servers[0]!r} and {numbers}"
        )
    measured = ByRequests()
    for folder in (each for each in args.servers if each not in urls):
        for name, found in _read(Path(folder), numbers).items():
            measured |= {f"{name} of {folder}": found} if name != SERVED else {}
    names = [args.name, *(f"{args.name} {number}" for number in range(2, len(urls) + 1))]
    servers = dict(zip(names, urls, strict=True))
    if args.alone and args.alone.startswith("http"):
        servers = {SERVED: args.alone, **servers}
    elif args.alone:
        if SERVED not in (read := _read(Path(args.alone), numbers)):
            raise ConfigError(f"{args.alone} must be an evaluation with a method named {SERVED!r}")
        measured[SERVED] = read[SERVED]
    for name, url in servers.items():
        method = {"name": name, "decoder": "server", "url": url, "served_model": args.model}
        further = [*further, "--method", yaml.safe_dump(method, default_flow_style=True, width=999)]
    config = parse(further, "", ("eval",), None).config
    folder = config.eval_folder
    if "--plan" not in further and not folder.exists():  # once begun it is of these servers
        for name, url in servers.items():
            client = ServerClient(ServerConfig(url=url), name)
            client.check(args.model or config.models.target)
            client.close()
    if (status := RECIPE.run(further)) or "--plan" in further:
        return status
    _measure(config, servers, numbers[1:])
    measured |= _read(folder, numbers)
    if any(_asked(row) != _asked(measured[args.name][0]) for row, _ in measured.values()):
        raise ConfigError("--alone and all others must be of the same prompts, sampling and budget")
    say("\n".join([*_answer(measured, numbers), f"kept in  {folder}"]))
    return 0


def _measure(config: PipelineConfig, names: Collection[str], numbers: Sequence[int]) -> None:
    """Ask servers, in turns, for so many of the results' prompts at once, and keep the answers."""
    paths = {number: config.eval_folder / ANSWERS.format(number) for number in numbers}
    numbers = [number for number, path in paths.items() if not path.exists()]
    if not numbers:
        return
    prepare_libraries()
    experiment, *_ = load_experiment(config)
    sets = read_results(config.eval_folder / RESULTS).datasets()
    prompts = [each for each in experiment.prompts if each.dataset in sets]
    with ExitStack() as closing:
        engines = {
            method.name: experiment.served(method, closing, max(numbers))
            for method in experiment.config.methods
            if method.name in names
        }
        for number in numbers:
            found: dict[str, Any] = {name: {each: {} for each in sets} for name in engines}
            turns = max(1, len(prompts) // (TURN * number))
            with progress(turns * len(engines), f"{number} requests at once", "turn") as bar:
                for turn, name in product(range(turns), engines):
                    group = prompts[turn::turns]
                    answers = engines[name].side_by_side(group, number)
                    for prompt, answer in zip(group, answers, strict=True):
                        found[name][prompt.dataset][prompt.example_id] = answer
                    bar.update()
            write_json(paths[number], found)


def _read(folder: Path, numbers: Sequence[int]) -> ByRequests:
    """The servers of an evaluation, as they were measured at each number of requests."""
    if missing := [
        name
        for name in (RESULTS, *map(ANSWERS.format, numbers[1:]))
        if not (folder / name).exists()
    ]:
        raise ConfigError(
            "--alone and other lengths must be URLs (http://...) or folders of evaluations by this "
            f"command, with the same --concurrency; {folder} has no {missing[0]}"
        )
    rows = {row.name: row for row in medians(read_results(folder / RESULTS))}
    rows = {name: row for name, row in rows.items() if row.method.decoder == "server"}
    found = {name: (row, {1: row.rates["tokens_per_second"]}) for name, row in rows.items()}
    for number in numbers[1:]:
        path = folder / ANSWERS.format(number)
        for name, each in read_record(path, [*rows], f"remove {path}, and run again").items():
            found[name][1][number] = tokens_per_second(each, number)
    return found


def _answer(measured: ByRequests, numbers: Sequence[int]) -> Iterator[str]:
    """What is printed: each server at each number of requests, the schedule, and where it pays."""
    best, pays = dict[int, int](), dict[int, int]()
    for number in numbers:
        speeds: dict[int, Floats] = {}
        for name in sorted(measured, key=SERVED.__ne__):
            row, speed_at = measured[name]
            length = max(len(run.acceptance_by_position) for run in row.runs)
            # Of two that draft nothing, that of the one with a draft.
            speeds[length] = speed_at[number]
            answer = f"{name}" + f", {number} requests at once" * (number > 1)
            answer += f": {Interval.of(speed_at[number]).within(1, ' tokens/s')}"
            if SERVED in measured and name != SERVED:
                ratio = Interval.of(speed_at[number] / measured[SERVED][1][number])
                answer += f", {ratio.within(2, 'x')} the server alone"
            if number == 1 and (drafted := sum(run.n_draft for run in row.runs)):
                accepted = drafted - sum(run.n_discarded for run in row.runs)
                answer += f"; it accepted {accepted:,} of {drafted:,} drafted tokens"
            yield answer
        if SERVED in measured and {0} < {*speeds} and not np.isnan(speeds[0][1]):  # can be told
            best[number] = best_length(speeds)
            ratio = Interval.of(speeds[best[number]] / measured[SERVED][1][number])
            pays[number] = int(ratio.low > 1)
    if any(pays.values()):
        settings = {"num_speculative_tokens": max(best.values()), SCHEDULE: schedule(best)}
        yield f"in vLLM's --speculative-config: {json.dumps(settings)}"
    for begin, end, is_paid in schedule(pays):
        if not is_paid:
            yield f"at {begin} to {end} requests nothing is surely faster than the server alone"


def _asked(row: PooledRow) -> list[tuple[Any, ...]]:
    return [
        (run.dataset, run.sampling, *(each.prompt_id for each in run.generations))
        for run in row.runs
    ]
