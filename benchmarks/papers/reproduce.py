"""A paper's experiments on a pair of one's own; its protocol is data, a YAML file in this room.

Stages that the protocol needs are run if they are not made. Every measurement is kept in
OUTPUT/papers/PAPER, so that the same run goes on after a kill.
"""

from __future__ import annotations

import json
import shlex
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from benchmarks.papers.measurements import MEASURES, ModelPair, evaluated
from benchmarks.papers.tables import page
from eval.measuring.environment import describe_environment
from eval.reporting.rendering import escape_markdown
from recipes.config import PipelineConfig, parse
from recipes.pipeline import TRAINING
from recipes.recipe import check_stages, check_whole_run
from recipes.run import prepare_libraries, run_stage, say
from specdata.config import nearest
from specdata.errors import ConfigError
from specdata.models import device
from specdata.storage.files import locked, write_json, write_text
from specdata.storage.resume import Settings, read_record
from specdata.threads import using_threads

FOLDER = Path(__file__).parent
PAPERS = sorted(path.stem for path in FOLDER.glob("*.yaml"))
RESULTS, PAGE, SETTINGS, RECORDS = "results.json", "README.md", "settings.json", "records.json"


def protocol_of(paper: str, *, quick: bool) -> dict[str, Any]:
    """A paper's protocol; with `quick`, its measurements are the smaller ones."""
    if paper not in PAPERS:
        raise ConfigError(f"unknown paper {paper!r}: {nearest(paper, PAPERS)}")
    protocol: dict[str, Any] = yaml.safe_load((FOLDER / f"{paper}.yaml").read_text("utf-8"))
    for name, values in protocol.pop("quick").items():
        protocol["measurements"][name] |= values if quick else {}
    return protocol


def make_stages(config: PipelineConfig, specs: Mapping[str, Mapping[str, Any]]) -> None:
    """Run the stages whose artefacts these measurements read, as far as they are not made."""
    if not any(MEASURES[spec["kind"]][1] for spec in specs.values()):
        return
    stages = [stage(config) for stage in TRAINING]
    names = [stage.name for stage in stages]
    last = names.index("draft" if config.draft else "pair")  # a draft may be given as it is
    asked = [stage for stage in stages[: last + 1] if stage.is_configured]
    if asked and not check_stages(asked):
        check_whole_run(config)
    for stage in asked:
        run_stage(stage)


def measure(pair: ModelPair, name: str, spec: Mapping[str, Any]) -> dict[str, Any]:
    """A measurement's `records` and `environment`, stored already or made now."""
    folder = pair.folder / name
    kind, needs_pair = MEASURES[spec["kind"]]
    identity = pair.identity() if needs_pair else {}
    settings = Settings({**identity, "spec": dict(spec)}, f"remove {folder} to measure again")
    folder.mkdir(parents=True, exist_ok=True)
    with locked(folder / ".lock"):
        if (made_with := folder / SETTINGS).is_file():
            settings.check(read_record(made_with, (), settings.remedy), folder)
            if (folder / RECORDS).is_file():
                say(f"{name}: already measured, {folder}", style="green")
                return read_record(folder / RECORDS, ("environment", "records"), settings.remedy)
        say(f"{name}: measuring", style="bold")
        write_json(made_with, settings.values)
        prepare_libraries()
        begun = time.perf_counter()
        with using_threads(pair.config.eval.threads):
            where = describe_environment(device=str(device()), dtype=pair.config.models.dtype)
            made_of = [{"measurement": name, **record} for record in kind(pair, spec, folder)]
            records = json.loads(json.dumps(_rounded(made_of)))
        took = time.perf_counter() - begun
        at = where.model_dump(exclude={"batch_size", "devices"})  # one's own of each measurement
        made = {"seconds": took, "environment": at, "records": records}
        write_json(folder / RECORDS, made)
        say(f"{name}: measured in {took:.0f} s", style="green")
    return made


def _measured_at(environment: Mapping[str, Any]) -> str:
    """Date, commit and hardware of a measurement."""
    hardware, commit = environment["hardware"], environment["git_commit"] or "unknown"
    changed = ", files changed since" if environment["git_dirty"] else ""
    chip = hardware["gpu"] or f"{hardware['cpu']}, threads: {hardware['threads']}"
    return f"{environment['date'][:10]} at commit {commit[:7]}{changed}, {chip}"


def _rounded(value: Any) -> Any:
    """JSON values with eight significant digits: more than a page shows, which rounds but once."""
    if isinstance(value, Mapping):
        return {key: _rounded(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_rounded(item) for item in value]
    return float(f"{value:.8g}") if isinstance(value, float) else value


def reproduce(
    paper: str,
    options: Sequence[str],
    *,
    quick: bool = False,
    prompts: int | None = None,
    out: Path | None = None,
) -> Path:
    """Run a paper's protocol and write its page and JSON; returns the page's path.

    `options` are of the pair's configuration, as a recipe takes them; `prompts` of each set,
    instead of the configuration's `count`. `quick` measures less: minutes.
    """
    protocol = protocol_of(paper, quick=quick)
    if prompts is not None and prompts < 1:
        raise ConfigError(f"--prompts must be at least 1, got {prompts}")
    command = parse(options, paper)
    config, specs = command.config, protocol["measurements"]
    home = Path(config.output) / "papers" / (paper + ("-quick" if quick else ""))
    out = out or home
    pair = ModelPair(config, command.given, home / "measured", prompts)
    for spec in specs.values():  # what cannot be measured is refused before anything is made
        if spec["kind"] == "evaluation":
            evaluated(pair, spec)
    make_stages(config, specs)
    made = {name: measure(pair, name, spec) for name, spec in specs.items()}
    measured = {name: each["records"] for name, each in made.items()}
    where = {name: each["environment"] for name, each in made.items()}
    identity = pair.identity()
    models = [
        f"{escape_markdown(each['name'])} ({each['digest']})" for each in identity["pair"].values()
    ]
    asked = f"{paper}{' --quick' * quick}{f' --prompts {prompts}' if prompts else ''}"
    of = (
        f"`make papers PAPER={shlex.quote(asked)}`: {' with '.join(models)}. Measured on "
        f"{'; '.join(dict.fromkeys(map(_measured_at, where.values())))}. Brackets hold 95 % "
        "intervals over prompts; ± is the deviation over seeds; what the paper prints is marked "
        "*paper*. Names are followed by digests of contents; `results.json` has all counts."
    )
    stored = {"paper": paper, "quick": quick, **identity, "environments": where}
    lines = [  # one record a line: a third of the size
        f"{json.dumps(name)}: [\n" + ",\n".join(map(json.dumps, records)) + "\n]"
        for name, records in measured.items()
    ]
    records_by_name = ",\n".join(lines)
    write_text(
        out / RESULTS, f'{json.dumps(stored)[:-1]},\n"measured": {{\n{records_by_name}\n}}}}\n'
    )
    write_text(out / PAGE, page(protocol, measured, of))
    return out / PAGE
