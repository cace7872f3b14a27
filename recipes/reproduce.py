"""A paper's experiments on a pair of one's own: its protocol is data, in recipes/papers/.

draftsmith reproduce block --config my-pair.yaml

Stages that the protocol needs are run if they are not made. Every measurement is kept in
OUTPUT/papers/PAPER, so that the same command goes on after a kill; page, JSON and figures are
written there, or to --out. Options of the configuration can be given, too (--models.draft FOLDER).
"""

from __future__ import annotations

import argparse
import itertools
import json
import signal
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml
from pydantic import TypeAdapter

from eval.measuring.intervals import Interval
from eval.measuring.methods import PLAIN, EvalConfig, check_machine, check_methods
from eval.reporting.papers import Record, page, pivot, selected, write_figure
from eval.reporting.rendering import escape_markdown
from recipes.candidates import acceptance, tree_search
from recipes.checks import check_hub, check_weights
from recipes.config import TOY, PipelineConfig, build, parse
from recipes.layout import draft_in_use
from recipes.layout import folder as stage_folder
from recipes.run import all_stages, portable, prepare_libraries, run_stage, say
from recipes.run_eval import Eval
from specdata.config import nearest
from specdata.errors import ConfigError
from specdata.interruption import Interrupted, stopping_on_signals
from specdata.sampling import SamplingConfig
from specdata.storage.files import fingerprint, locked, write_json, write_text
from specdata.storage.resume import Settings, read_record
from specdata.terminal import accept_any_text, progress, tell, whole_number

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from eval.measuring.results import Results

FOLDER = Path(__file__).parent / "papers"
PAPERS = sorted(path.stem for path in FOLDER.glob("*.yaml"))
OURS = ("over", "label")
"""Keys of a protocol's method that no decoder reads: what it is compared with, more record keys."""
RESULTS, PAGE, SETTINGS, RECORDS = "results.json", "README.md", "settings.json", "records.json"


@dataclass(frozen=True)
class Pair:
    """The pair that a protocol is run on; its models are loaded when a measurement asks.

    Attributes:
        config: the run's.
        given: its values before defaults.
        measured: records of the measurements before this one, by name.
        folder: of all measurements.
        prompts: of each set; None as the configuration says.
    """

    config: PipelineConfig
    given: Mapping[str, Any]
    measured: dict[str, list[Record]]
    folder: Path
    prompts: int | None = None

    @cached_property
    def target(self) -> PreTrainedModel:
        """The target, loaded."""
        return self._load(self.config.models.target, "target")

    @cached_property
    def draft(self) -> PreTrainedModel:
        """The draft in use, loaded."""
        return self._load(draft_in_use(self.config), "draft")

    def _load(self, name: str, role: Any) -> PreTrainedModel:
        from specdata.models import load_model

        prepare_libraries()
        return load_model(name, load=self.config.models.loading(role))

    def identity(self) -> dict[str, Any]:
        """What decides every measurement, paths in the run's output relative to it."""
        names = {"target": self.config.models.target, "draft": draft_in_use(self.config)}
        values: dict[str, Any] = {
            "pair": {role: [name, fingerprint(name)] for role, name in names.items()},
            "sampling": asdict(self.config.sampling),
            "seed": self.config.seed,
            "dtype": self.config.models.dtype,
        }
        values["prompts"] = self.prompts
        values["sets"] = [asdict(wanted) for wanted in self.config.eval.sets]
        return dict(portable(json.loads(json.dumps(values)), self.config.output))


# --- measurements: (pair, its specification, its folder) -> records ---


def evaluation(pair: Pair, spec: Mapping[str, Any], folder: Path) -> list[Record]:
    """Methods decoded over the pair's prompts, prompt by prompt as run-eval does.

    A record a set and method, and one for all sets; with several seeds the generations are pooled
    and each rate has its deviation over seeds. Where it is timed, also a record of the fitted times
    of each set (`fit`).
    """
    import torch

    from eval.measuring.environment import describe_environment
    from eval.measuring.experiment import Artefacts, Experiment
    from eval.measuring.results import Method, build_results
    from eval.runtime.engines import engine_on
    from heads import BaseHead
    from specdata.models import load_tokenizer, longest_prompt
    from specdata.prompts.loading import load_prompts

    config, sampling, methods = evaluated(pair, spec)
    names = [pair.config.models.target, draft_in_use(pair.config)]
    room = min(longest_prompt(name, config.max_new_tokens) for name in names)
    prompts = load_prompts(
        config.sets, load_tokenizer(names[0]), seed=pair.config.seed, max_tokens=room
    ).prompts
    head = None
    if "head" in spec:
        head = BaseHead.from_pretrained(str(pair.folder / spec["head"]))
    models = Artefacts(
        pair.target, pair.draft, head, {"target": names[0], "draft": names[1], "head": None}
    )
    found: list[Results] = []
    before = torch.get_num_threads()
    torch.set_num_threads(config.threads or before)
    try:
        where = describe_environment(
            device=str(pair.target.device), dtype=pair.config.models.dtype, batch_size=config.batch
        )
        for seed in spec.get("seeds", [pair.config.seed]):
            one = folder / f"seed-{seed}"
            experiment = Experiment(models, prompts, one, config, sampling, seed, where)
            total = len(prompts) * len(config.methods)
            with progress(total, f"{folder.name}, seed {seed}", "generation") as bar:
                experiment.measure(bar.update)
            results = experiment.results()
            assert results is not None
            found.append(results)
    finally:
        torch.set_num_threads(before)
    used = engine_on(config.engine, where.device)
    say(f"  {len(prompts)} prompts, {len(config.methods)} methods, forwards {used}")
    pooled = build_results(
        where,
        [
            (
                Method(**{name: getattr(run, name) for name in Method.model_fields}),
                [record for each in found for record in each.runs[index].generations],
            )
            for index, run in enumerate(found[0].runs)
        ],
    )
    keys = {method["name"]: method for method in methods} | {PLAIN: {}}
    shared = {"measurement": folder.name, **asdict(sampling)}
    return [shared | record for record in _records(pooled, found, keys)]


def evaluated(
    pair: Pair, spec: Mapping[str, Any]
) -> tuple[EvalConfig, SamplingConfig, list[dict[str, Any]]]:
    """What an evaluation measures: its configuration, its sampling, and the expanded methods.

    Raises:
        ConfigError: if the pair's configuration cannot be measured so.
    """
    given, methods = pair.given["eval"], expanded(spec["methods"])
    section = {"batch": 16, "engine": "eager", "threads": given.get("threads", 0)}
    if spec.get("timed"):
        section = {key: given[key] for key in ("engine", "threads") if key in given}
    if "max_new_tokens" in given or "max_new_tokens" in spec:
        both = [each["max_new_tokens"] for each in (given, spec) if "max_new_tokens" in each]
        section["max_new_tokens"] = min(both)
    sets = []
    for wanted in pair.config.eval.sets:
        count = wanted.count or sys.maxsize
        few = pair.prompts or min(count, spec.get("prompts", count))
        sets.append(asdict(wanted) | {"count": 0 if few == sys.maxsize else few})
    listed = [{key: method[key] for key in method if key not in OURS} for method in methods]
    plain = {"name": PLAIN, "decoder": "plain"}
    whole = {**pair.given, "eval": {**section, "sets": sets, "methods": [plain, *listed]}}
    config = build(whole)
    values = asdict(pair.config.sampling) | spec.get("sampling", {})
    sampling = TypeAdapter(SamplingConfig).validate_python(values)
    check_machine(config.eval)
    check_methods(config.eval, sampling, head="head" in spec)
    Eval(config.model_copy(update={"sampling": sampling})).check()
    return config.eval, sampling, methods


def expanded(methods: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Methods of a protocol with the product of what `each` lists; {key} in texts is filled in.

    A mapping in a list is several settings that go together. `label` holds further keys of the
    method's records.
    """
    made = []
    for method in methods:
        grid = method.get("each", {})
        rest = {key: value for key, value in method.items() if key not in ("each", "label")}
        for values in itertools.product(*grid.values()):
            chosen: dict[str, Any] = {}
            label = dict(method.get("label", {}))
            for key, value in zip(grid, values, strict=True):
                chosen |= value if isinstance(value, Mapping) else {key: value}
                label |= chosen.pop("label", {})
            words = {key: shape(value) for key, value in (rest | label | chosen).items()}
            filled = {
                key: value.format(**words) if isinstance(value, str) else value
                for key, value in rest.items()
            }
            made.append(filled | chosen | ({"label": label} if label else {}))
    return made


def shape(value: Any) -> Any:
    """A list as a name has it: 4x2x2."""
    return "x".join(f"{item}" for item in value) if isinstance(value, list | tuple) else value


def _records(
    pooled: Results, by_seed: Sequence[Results], methods: Mapping[str, Mapping[str, Any]]
) -> Iterator[Record]:
    """A record for each set and method, then for all sets; times are those of each set."""
    from eval.measuring.pooled import ALL_SETS, pool

    sets = pooled.datasets()
    for name, chosen in [
        *((each, [each]) for each in sets),
        *([(ALL_SETS, sets)] * (len(sets) > 1)),
    ]:
        rows = {row.method: row for row in pool(pooled, chosen)}
        seeds = [{row.method: row for row in pool(each, chosen)} for each in by_seed]
        for method, row in rows.items():
            own = methods[method]
            record: Record = {"set": name, "method": method}
            columns = ("verifier", "drafter", "stop", "length", "threshold", "lossless")
            record |= {key: getattr(row.runs[0], key) for key in columns}
            record |= own.get("verifier_args", {}) | own.get("label", {})
            given = (key for key in own if key not in ("name", "verifier_args", *OURS))
            record |= {key: shape(own[key]) for key in given}
            for rate, values in row.rates.items():
                figure = asdict(Interval.of(values))
                if len(seeds) > 1:
                    each_seed = [each[method].value(rate) or 0.0 for each in seeds]
                    figure["deviation"] = statistics.stdev(each_seed)
                record[rate] = figure
            if "over" in own:
                gain = row.over(rows[own["over"]], "block_efficiency")
                record["over"] = {key: 100 * (x - 1) for key, x in asdict(gain).items()}
            yield record
        if name != ALL_SETS and pooled.timed and (fit := pooled.latency[name]) is not None:
            yield {"set": name, "fit": "in use", **asdict(fit)}


def formula(_pair: Pair, spec: Mapping[str, Any], folder: Path) -> list[Record]:
    """What follows from formulas alone: a function of `eval.analysis.examples`."""
    from eval.analysis.examples import FORMULAS

    own = {key: value for key, value in spec.items() if key not in ("kind", "of")}
    return [{"measurement": folder.name, **record} for record in FORMULAS[spec["of"]](**own)]


def replay(pair: Pair, spec: Mapping[str, Any], folder: Path) -> list[Record]:
    """Stopping rules along held-out rollouts, exact over acceptance, and a grid of heads.

    A record a set, rule and setting (`best`: the fastest of its rule there), and one a set, head
    and threshold of the grid (`grid`). Times are those of the specification, by Eq. 5.1.
    """
    import numpy as np

    from eval.analysis.replay import COST_RULE, bounds, replay_rules, result_rows, rows_of_split
    from eval.analysis.sweep import sweep
    from eval.analysis.traces import acceptance_traces
    from eval.measuring.pooled import ALL_SETS
    from heads import BaseHead
    from specdata.labels.make import sampling_of
    from specdata.storage.dataset import stream_stored

    prepare_libraries()
    labels, draft = stage_folder(pair.config, "labels"), draft_in_use(pair.config)
    own = {key: spec[key] for key in GRID} | {"labels": labels, "draft": draft}
    grid = sweep(argparse.Namespace(**own, out=folder / "heads", seed=pair.config.seed))[:-1]
    records: list[Record] = []
    for head in grid:
        shared = {"grid": True, "depth": head["depth"], "weight": head["weight"], "kl": head["kl"]}
        for name, points in {ALL_SETS: head["points"], **head["sets"]}.items():
            fastest = max(points, key=lambda each: each["speed"])
            for each in points:
                figures = {"threshold": each["h"], "speedup": each["speed"]}
                figures |= {
                    "discard_rate": each["discarded"],
                    "verification_rate": each["verified"],
                }
                best = each is fastest
                records.append({"set": name, **shared, **figures, "best": best})
    rows = rows_of_split(stream_stored(labels), labels, "dev", spec["judged_rows"])
    traces = acceptance_traces(
        rows,
        draft=pair.draft,
        sampling=sampling_of(labels),
        head=BaseHead.from_pretrained(str(pair.folder / spec["head"])),
    )
    times = {key: spec[key] for key in ("draft_seconds", "target_seconds")}
    sets = list(dict.fromkeys(rows["dataset"]))
    for name in [*sets, *([ALL_SETS] * (len(sets) > 1))]:
        chosen = np.array([name in (ALL_SETS, each) for each in rows["dataset"]])
        here, prompts = traces.select(chosen), np.array(rows["example_id"])[chosen].tolist()
        results = bounds(here, **times) + replay_rules(here, {}, **times)
        every = result_rows(results, **times, prompts=prompts)
        found = [
            row for row in every if row["setting"] != COST_RULE
        ]  # which is none of the paper's
        least: dict[str, float] = {}
        for row in found:
            seconds = row["seconds_per_token"]
            least[row["rule"]] = min(seconds, least.get(row["rule"], seconds))
        for row in found:
            seconds, rule = row["seconds_per_token"], row["rule"]
            saved = {key: 100 * x for key, x in row["saving_over_best_length"].items()}
            figures = {"speedup": times["target_seconds"] / seconds, "saved": saved}
            figures |= {key: row[key] for key in ("discard_rate", "verification_rate")}
            record = {"set": name, "rule": rule, "method": row["setting"], **figures}
            if rule in spec["rules"]:
                records.append({**record, "best": seconds == least[rule]})
    return [{"measurement": folder.name, **record} for record in records]


GRID: tuple[str, ...] = ("depths", "weights", "thresholds", "epochs", "rows", "judged_rows")
GRID += ("draft_seconds", "target_seconds")
"""What a replay's specification says of the grid, as `draftsmith sweep` has it."""

Measure = Callable[[Pair, Mapping[str, Any], Path], list[Record]]
KINDS: dict[str, tuple[Measure, str | None]] = {
    "evaluation": (evaluation, "draft"),
    "replay": (replay, "labels"),
    "formula": (formula, None),
    "acceptance": (acceptance, "draft"),
    "tree_search": (tree_search, "draft"),
}
"""Kind of measurement -> what makes its records, and the last stage that it needs."""


# --- the command ---


def protocol_of(paper: str, *, quick: bool) -> dict[str, Any]:
    """A paper's protocol; with `quick`, its measurements are the smaller ones.

    Raises:
        ConfigError: for an unknown paper, naming the nearest.
    """
    if paper not in PAPERS:
        raise ConfigError(f"unknown paper {paper!r}: {nearest(paper, PAPERS)}")
    protocol = yaml.safe_load((FOLDER / f"{paper}.yaml").read_text(encoding="utf-8"))
    less = protocol.pop("quick", {}) if quick else {}
    for name, values in less.items():
        protocol["measurements"][name] |= values
    protocol.pop("quick", None)
    return dict(protocol)


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
    kinds = {spec["kind"] for spec in specs.values()}
    if kinds <= {"evaluation", "formula"} and config.draft is None:  # given as it is
        last = names.index("pair")
    asked = [stage for stage in stages[: last + 1] if stage.is_asked]
    if not all(stage.is_made for stage in asked):
        for stage in asked:
            stage.check()
        check_weights(config)
        check_hub(config)
    for stage in asked:
        run_stage(stage)


def measure(pair: Pair, name: str, spec: Mapping[str, Any]) -> list[Record]:
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
    pair = Pair(config, command.given, {}, home / "measured", given.prompts)
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
        for table in protocol.get("tables", [])
    ]
    out.mkdir(parents=True, exist_ok=True)
    for figure in protocol.get("figures", []):
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
