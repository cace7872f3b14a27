"""A paper's experiments on a pair of one's own: its protocol is data, in recipes/papers/.

draftsmith reproduce block --config my-pair.yaml

Stages that the protocol needs are run if they are not made. Every measurement is kept in
OUTPUT/papers/PAPER, so that the same command goes on after a kill; page, JSON and figures are
written there, or to --out. Options of the configuration can be given, too (--models.draft FOLDER).
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from eval.reporting.papers import Record, page, pivot, selected, write_figure
from eval.reporting.rendering import escape_markdown
from recipes.checks import check_hub, check_weights
from recipes.config import TOY, PipelineConfig, parse
from recipes.layout import folder as stage_folder
from recipes.measurements import KINDS, ModelPair, evaluated
from recipes.run import all_stages, run_stage, say
from specdata.config import nearest
from specdata.errors import ConfigError
from specdata.interruption import Interrupted, stopping_on_signals
from specdata.storage.files import fingerprint, locked, write_json, write_text
from specdata.storage.resume import Settings, read_record
from specdata.terminal import accept_any_text, tell, whole_number

FOLDER = Path(__file__).parent / "papers"
PAPERS = sorted(path.stem for path in FOLDER.glob("*.yaml"))
RESULTS, PAGE, SETTINGS, RECORDS = "results.json", "README.md", "settings.json", "records.json"


def protocol_of(paper: str, *, quick: bool) -> dict[str, Any]:
    """A paper's protocol; with `quick`, its measurements are the smaller ones.

    Raises:
        ConfigError: for an unknown paper, naming the nearest.
    """
    if paper not in PAPERS:
        raise ConfigError(f"unknown paper {paper!r}: {nearest(paper, PAPERS)}")
    protocol: dict[str, Any] = yaml.safe_load((FOLDER / f"{paper}.yaml").read_text("utf-8"))
    for name, values in protocol.pop("quick").items():
        protocol["measurements"][name] |= values if quick else {}
    return protocol


def make_stages(config: PipelineConfig, specs: Mapping[str, Mapping[str, Any]]) -> None:
    """Run the stages whose artefacts these measurements read, as far as they are not made.

    Raises:
        ConfigError: if the configuration has no section that makes one, or cannot work.
    """
    needed = {KINDS[spec["kind"]][1] for spec in specs.values()} - {None}
    if not needed:
        return
    if "labels" in needed and config.head is None:
        raise ConfigError(
            "this paper's experiments read labels, which are made for a head: add a head section, "
            "such as head: {kind: specdec++}"
        )
    stages = all_stages(config)
    names = [stage.name for stage in stages]
    last = max(names.index(name) for name in needed if name)
    if "labels" not in needed and config.draft is None:  # given as it is
        last = names.index("pair")
    asked = [stage for stage in stages[: last + 1] if stage.is_asked]
    if not all(stage.is_made for stage in asked):
        for stage in asked:
            stage.check()
        check_weights(config)
        check_hub(config)
    for stage in asked:
        run_stage(stage)


def measure(pair: ModelPair, name: str, spec: Mapping[str, Any]) -> list[Record]:
    """The records of a measurement: those that are stored, or made now and stored.

    Raises:
        ManifestError: if its folder was made with other settings.
    """
    folder = pair.folder / name
    kind, stage = KINDS[spec["kind"]]
    identity = pair.identity() if stage else {}
    if stage == "labels":
        identity["labels"] = fingerprint(str(stage_folder(pair.config, "labels")))
    settings = Settings({**identity, "spec": dict(spec)}, f"remove {folder} to measure again")
    folder.mkdir(parents=True, exist_ok=True)
    with locked(folder / ".lock"):
        if settings.check_file(folder / SETTINGS) and (folder / RECORDS).is_file():
            say(f"{name}: already measured, {folder}", style="green")
            return list(read_record(folder / RECORDS, ("records",), settings.remedy)["records"])
        say(f"{name}: measuring", style="bold")
        settings.write(folder / SETTINGS)
        begun = time.perf_counter()
        records = json.loads(json.dumps(_rounded(kind(pair, spec, folder))))
        took = time.perf_counter() - begun
        write_json(folder / RECORDS, {"seconds": took, "records": records})
        say(f"{name}: measured in {took:.0f} s", style="green")
    return list(records)


def _rounded(value: Any) -> Any:
    """JSON values with six significant digits, so that a stored figure is what a page shows."""
    if isinstance(value, Mapping):
        return {key: _rounded(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_rounded(item) for item in value]
    return float(f"{value:.6g}") if isinstance(value, float) else value


def reproduce(given: argparse.Namespace, rest: Sequence[str]) -> Path:
    """Run a paper's protocol and write its page, JSON and figures; returns the page's path."""
    protocol = protocol_of(given.paper, quick=given.quick)
    if given.prompts is not None and given.prompts < 1:
        raise ConfigError(f"--prompts must be at least 1, got {given.prompts}")
    command = parse(["--config", str(given.config), *rest], given.paper)
    config, specs = command.config, protocol["measurements"]
    home = Path(config.output) / "papers" / (given.paper + ("-quick" if given.quick else ""))
    pair = ModelPair(config, command.given, {}, home / "measured", given.prompts)
    for spec in specs.values():  # what cannot be measured is refused before anything is made
        if spec["kind"] == "evaluation":
            evaluated(pair, spec)
    make_stages(config, specs)
    for name, spec in specs.items():
        pair.measured[name] = measure(pair, name, spec)
    out, identity = Path(given.out or home), pair.identity()
    of = (
        f"`draftsmith reproduce {given.paper}{' --quick' * given.quick}"
        f"{f' --prompts {given.prompts}' if given.prompts else ''}`: "
        f"{escape_markdown(identity['pair']['target'][0])} with "
        f"{escape_markdown(identity['pair']['draft'][0])}. Brackets hold 95 % intervals over "
        "prompts; ± is the deviation over seeds; what the paper prints is marked *paper*."
    )
    tables = [
        {"title": table["title"], "rows": pivot(table, selected(table, pair.measured))}
        for table in protocol["tables"]
    ]
    for figure in protocol["figures"]:
        write_figure(out / f"{figure['name']}.svg", figure, pair.measured)
    stored = {"paper": given.paper, "quick": given.quick, **identity, "tables": tables}
    lines = [  # one record a line: a third of the size
        f"{json.dumps(name)}: [\n" + ",\n".join(map(json.dumps, records)) + "\n]"
        for name, records in pair.measured.items()
    ]
    measured = ",\n".join(lines)
    write_text(out / RESULTS, f'{json.dumps(stored)[:-1]},\n"measured": {{\n{measured}\n}}}}\n')
    write_text(out / PAGE, page(protocol, pair.measured, of))
    return out / PAGE


def main(arguments: Sequence[str] | None = None, program: str = "draftsmith reproduce") -> int:
    """Run the command line; returns the exit status, as a recipe's."""
    accept_any_text()
    parser = argparse.ArgumentParser(
        program,
        "%(prog)s PAPER [--config FILE] [--quick] [--prompts N] [--out FOLDER] [--KEY VALUE ...]",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("paper", metavar="PAPER", help=", ".join(PAPERS))
    parser.add_argument("--config", default=TOY, help="the pair's YAML (default: the demo's pair)")
    parser.add_argument("--quick", action="store_true", help="fewer prompts and settings: minutes")
    parser.add_argument(
        "--prompts", type=whole_number, metavar="N", help="of each set, not its `count`"
    )
    parser.add_argument("--out", help="folder of page and figures (default: OUTPUT/papers/PAPER)")
    given, rest = parser.parse_known_args(arguments)
    with stopping_on_signals():
        try:
            written = reproduce(given, rest)
        except Exception as error:  # noqa: BLE001 - raised again if it is a defect
            return tell(error)
        except KeyboardInterrupt as stop:
            print("\ninterrupted: run the same command again to continue", file=sys.stderr)
            return 128 + (stop.number if isinstance(stop, Interrupted) else signal.SIGINT)
    text = written.read_text(encoding="utf-8")
    say("\n".join(line for line in text.splitlines() if not line.startswith("![")))
    say(f"look     {written}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
