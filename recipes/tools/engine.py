"""Measure a served engine on a run's prompts: does its draft pay where it is served?

    draftsmith engine URL --alone URL2 --config CONFIG [--name "vLLM K=4"] [--model SERVED_NAME]

URL is a server of models.target that drafts, URL2 one that does not (vLLM 0.10.2 or newer,
llama-server, or what answers /v1/completions with token ids as they do). Both are asked for the
same prompts as the run's evaluation, one at a time and in turns, beside plain decoding here and
whatever --method adds. It is an evaluation as any other, kept in OUTPUT/eval-server: results.json,
report.html, and resumed. What vLLM counts in /metrics gives acceptance by position. With one server
at a time: measure it without its draft as --name "server alone" in another --eval.folder, and give
that folder, OUTPUT/FOLDER, as --alone.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import yaml

from eval.measuring.methods import SERVED
from eval.measuring.pooled import PooledRow, medians
from eval.measuring.results import read_results
from recipes.config import RESULTS, parse
from recipes.run import say
from recipes.run_eval import RECIPE
from specdata.config import ServerConfig
from specdata.errors import ConfigError
from specdata.server.client import ServerClient


def add_options(parser: argparse.ArgumentParser) -> None:
    """The command line; further options are those of the configuration."""
    parser.usage = (
        "%(prog)s URL [--alone URL_OR_FOLDER] [--name NAME] [--model MODEL] [--config FILE] "
        "[--KEY VALUE ...]"
    )
    add = parser.add_argument
    add("url", metavar="URL", help="of the engine that drafts")
    add("--alone", help=f"of one that does not, or the folder of an evaluation with {SERVED!r}")
    add("--name", default="server", help="of its row (default: server)")
    add("--model", default="", help="their name of the target (default: models.target)")


def main(args: argparse.Namespace) -> int:
    """Measure, and print the answer; returns the exit status."""
    further = args.further
    if not any(each.split("=")[0] == "--eval.folder" for each in further):
        further = [*further, "--eval.folder", "eval-server"]
    servers = {args.name: args.url}
    if not args.url.startswith("http"):
        raise ConfigError(f"give a URL (http://...) first, then the options; got {args.url!r}")
    alone = None
    if args.alone and args.alone.startswith("http"):
        servers = {SERVED: args.alone, **servers}
    elif args.alone and not (Path(args.alone) / RESULTS).is_file():
        raise ConfigError(
            f"--alone must be a URL (http://...) or the folder of an evaluation, got {args.alone}"
        )
    elif args.alone and (alone := _rows(Path(args.alone)).get(SERVED)) is None:
        raise ConfigError(f"{args.alone} must be an evaluation with a method named {SERVED!r}")
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
    rows = _rows(folder)
    row, alone = rows[args.name], alone or rows.get(SERVED)
    speed = row.rate("tokens_per_second")
    assert speed is not None
    answer = f"{args.name}: {speed.within(1, ' tokens/s')}"
    if alone is not None and alone is not row:
        if _asked(alone) != _asked(row):
            raise ConfigError(f"{args.alone} must be of the same prompts, sampling and budget")
        ratio = row.over(alone, "tokens_per_second")
        answer += f", {ratio.within(2, 'x')} the server alone"
    if drafted := sum(run.n_draft for run in row.runs):
        accepted = drafted - sum(run.n_discarded for run in row.runs)
        answer += f"; it accepted {accepted:,} of {drafted:,} drafted tokens"
    say(f"{answer}\nkept in  {folder}")
    return 0


def _rows(folder: Path) -> dict[str, PooledRow]:
    return {row.name: row for row in medians(read_results(folder / RESULTS))}


def _asked(row: PooledRow) -> list[tuple[Any, ...]]:
    return [
        (run.dataset, run.sampling, *(each.prompt_id for each in run.generations))
        for run in row.runs
    ]
