"""Sweeps over acceptance heads: the published one, and what matters to ours.

    python -m eval.analysis.sweep LABELS --draft DRAFT --out runs/sweep

paper     SpecDec++'s sweep (arXiv:2405.19715, Table 3): depth x weight of rejections, all heads
          trained on one forward of the draft, then thresholds
features  our head, and our head without each thing that it reads
data      our head on fewer rollouts, and on those of one prompt set

A head that is finished is kept: after a kill, the same command goes on. Heads and rivals are
compared by replay (`eval.analysis.replay`), the setting of each chosen on dev rows and judged on
test rows. --draft-seconds is the time of one more drafted token, as in replay.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from eval.analysis.expectation import Traces, expected_counts
from eval.analysis.replay import (
    ALL_SETS,
    COST_RULE,
    THRESHOLDS,
    RuleResult,
    best_settings,
    check_draft,
    cost_rule_counts,
    fit_rules,
    replay_rules,
    result_rows,
    rows_of_split,
)
from eval.drafting.stopping.cost import Cost
from eval.drafting.stopping.head import Head
from eval.measuring.intervals import Interval
from heads.config import HeadConfig
from specdata.errors import ConfigError, ManifestError
from specdata.storage.files import atomic_write, write_json
from specdata.terminal import accept_any_text, progress

if TYPE_CHECKING:  # help is shown without torch, so what works imports where it works
    import datasets
    from transformers import PreTrainedModel

    from heads.train import HeadResult
    from specdata.sampling import SamplingConfig

SWEEPS = ("paper", "features", "data")
PAPER_THRESHOLDS = (0.1, 0.3, 0.5, 0.7, 0.9)
OURS = "ours"
NUMBERS = ("log_q", "log_q_max", "margin", "entropy", "log_mass_above")


@dataclass(frozen=True, slots=True)
class Swept:
    """One head of a sweep.

    Attributes:
        sweep: a name in `SWEEPS`.
        name: of the head, unique in its sweep.
        config: how it is trained.
        rows: most training rollouts of a prompt set.
        sets: prompt sets that it is trained on; none means all.
        shares: name of the head that it is, if another sweep has the same one.
    """

    sweep: str
    name: str
    config: HeadConfig
    rows: int
    sets: tuple[str, ...] = ()
    shares: str = ""

    @property
    def group(self) -> str:
        """Folder, relative to the sweep's output, of the heads that see the same rows."""
        return f"{self.config.kind}-{self.rows}" + "".join(f"-{name}" for name in self.sets)

    @property
    def folder(self) -> str:
        """Where it lies, relative to the sweep's output."""
        return f"{self.group}/{(self.shares or self.name).replace(' ', '-')}"


def paper_heads(
    depths: Sequence[int], weights: Sequence[float], rows: int, epochs: int | None
) -> list[Swept]:
    """SpecDec++'s heads: every depth with every weight of rejections."""
    return [
        Swept(
            "paper",
            f"w={weight:g} D={depth}",
            HeadConfig.model_validate(
                {"depth": depth, "rejection_weight": weight, "epochs": epochs}
            ),
            rows,
        )
        for weight in weights
        for depth in depths
    ]


def feature_heads(rows: int, epochs: int | None, draws: int) -> list[Swept]:
    """Our head, and without each thing that it reads or knows."""
    base = {"kind": "immediate", "epochs": epochs, "draws": draws}
    whole = HeadConfig.model_validate(base)

    def head(name: str, **changes: object) -> Swept:
        return Swept("features", name, HeadConfig.model_validate({**base, **changes}), rows)

    numbers = [name for name in whole.features if name in NUMBERS]
    without = [
        head(f"without {name}", features=[other for other in whole.features if other != name])
        for name in whole.features
    ]
    return [
        Swept("features", OURS, whole, rows),
        *without,
        head("numbers alone", features=numbers),
        head("one stage", moments=["before", "drawn"]),
        head("with position", features=[*whole.features, "position"]),
        head("with since_rejection", features=[*whole.features, "since_rejection"]),
    ]


def data_heads(
    sizes: Sequence[int], rows: int, sets: Sequence[str], epochs: int | None, draws: int
) -> list[Swept]:
    """Our head on fewer rollouts of every prompt set, and on those of the first set alone."""
    config = HeadConfig.model_validate({"kind": "immediate", "epochs": epochs, "draws": draws})
    return [
        *(
            Swept("data", f"{size} rollouts a set", config, size, shares=OURS)
            for size in sorted({*sizes})
        ),
        *(
            Swept("data", f"{sets[0]} alone", config, rows, (name,), shares=OURS)
            for name in sets[:1]
            if len(sets) > 1
        ),
    ]


@dataclass(frozen=True, slots=True)
class Material:
    """What every head of a sweep is trained and judged with.

    Attributes:
        draft: the frozen draft.
        sampling: how its tokens are drawn.
        train: labelled rows, all that any head is trained on.
        dev: held-out rows, on which settings are chosen.
        test: rows that are judged on.
        seed: of the heads.
    """

    draft: PreTrainedModel
    sampling: SamplingConfig
    train: datasets.Dataset
    dev: datasets.Dataset
    test: datasets.Dataset
    seed: int

    def training_rows(self, swept: Swept) -> datasets.Dataset:
        """The rows that a head is trained on."""
        taken: dict[str, int] = {}
        chosen = []
        for index, name in enumerate(self.train["dataset"]):
            if (not swept.sets or name in swept.sets) and taken.get(name, 0) < swept.rows:
                taken[name] = taken.get(name, 0) + 1
                chosen.append(index)
        return self.train.select(chosen)


def train_all(heads: Sequence[Swept], material: Material, out: Path) -> dict[str, HeadResult]:
    """Train the heads that are not finished yet, those of the same rows together.

    Returns:
        Folder of a head, relative to `out` -> what its training measured.
    """
    from heads.together import train_heads

    groups: dict[str, list[Swept]] = {}
    for swept in heads:
        groups.setdefault(swept.group, []).append(swept)
    results: dict[str, HeadResult] = {}
    for name, group in groups.items():
        trained = train_heads(
            draft=material.draft,
            train=material.training_rows(group[0]),
            dev=material.dev,
            out=out / name,
            configs={swept.folder.partition("/")[2]: swept.config for swept in group},
            seed=material.seed,
            sampling=material.sampling,
        )
        results |= {f"{name}/{own}": result for own, result in trained.items()}
    return results


def head_results(
    name: str,
    traces: Traces,
    thresholds: Sequence[float],
    fitted: Mapping[str, Any],
    *,
    draft_seconds: float,
    target_seconds: float,
) -> list[RuleResult]:
    """A recorded head at every threshold, and under the cost rule."""
    results = []
    for h in thresholds:
        lengths = Head(threshold=h).recorded_lengths(traces.tokens)
        assert lengths is not None
        results.append(RuleResult(name, f"h={h:g}", expected_counts(traces, lengths)))
    times = {"draft_seconds": draft_seconds, "target_seconds": target_seconds}
    counts = cost_rule_counts(Cost().with_fit(fitted), traces, **times)
    assert counts is not None
    return [*results, RuleResult(name, COST_RULE, counts)]


def judge(
    heads: Sequence[Swept],
    material: Material,
    out: Path,
    *,
    draft_seconds: float,
    target_seconds: float,
) -> dict[str, dict[str, list[dict[str, Any]]]]:
    """Replay all heads and rivals on dev and test rows.

    Returns:
        Prompt set, all together first -> "rows" of every setting on test rows, and the "shown" one
        of each rule, chosen on dev rows.
    """
    from eval.analysis.traces import acceptance_traces, record_heads
    from heads import BaseHead

    times = {"draft_seconds": draft_seconds, "target_seconds": target_seconds}
    known = {"draft": material.draft, "sampling": material.sampling}
    rows = {"dev": material.dev, "test": material.test}
    loaded = [BaseHead.from_pretrained(out / swept.folder) for swept in heads]
    traces = {name: acceptance_traces(part, **known) for name, part in rows.items()}
    recorded = {name: record_heads(part, loaded, **known) for name, part in rows.items()}
    fitted = fit_rules(traces["dev"])
    sets = dict.fromkeys(material.test["dataset"])
    judged = {}
    names = [ALL_SETS, *(sets if len(sets) > 1 else ())]
    with progress(2 * len(names) * (1 + len(heads)), "replay", "rule") as bar:
        for name in names:
            found: dict[str, list[dict[str, Any]]] = {}
            for split, part in rows.items():
                chosen = np.array([name in (ALL_SETS, own) for own in part["dataset"]])
                own = traces[split].select(chosen)
                results = replay_rules(
                    own, fitted, draft_seconds=draft_seconds, target_seconds=target_seconds
                )
                bar.update()
                for swept, outputs in zip(heads, recorded[split], strict=True):
                    tokens = replace(own.tokens, head=outputs.select(chosen))
                    h = PAPER_THRESHOLDS if swept.sweep == "paper" else THRESHOLDS
                    results += head_results(
                        _label(swept), replace(own, tokens=tokens), h, fitted, **times
                    )
                    bar.update()
                prompts = np.array(part["example_id"])[chosen].tolist()
                found[split] = result_rows(results, **times, prompts=prompts)
            judged[name] = {
                "rows": found["test"],
                "shown": best_settings(found["test"], found["dev"]),
            }
    return judged


def _label(swept: Swept) -> str:
    return f"{swept.sweep}: {swept.name}"


def table(
    heads: Sequence[Swept],
    results: Mapping[str, HeadResult],
    judged: Mapping[str, Mapping[str, Sequence[dict[str, Any]]]],
    target_seconds: float,
) -> list[dict[str, Any]]:
    """Rows in the form of the paper's Table 3, of heads and then of rivals.

    Speeds are multiples of the target's alone. KL is that of the raw output, as in the paper, on
    dev rows; `saved` is the share of time over the best fixed length.

    Args:
        heads: of the sweep.
        results: what their trainings measured, by folder.
        judged: from `judge`.
        target_seconds: t_t.
    """
    of = {_label(swept): swept for swept in heads}
    rows: dict[str, dict[str, Any]] = {}
    for name, parts in judged.items():
        for shown in parts["shown"]:
            key = (
                f"{shown['rule']}, {COST_RULE}" if shown["setting"] == COST_RULE else shown["rule"]
            )
            row = rows.setdefault(key, {"rule": key, "kl": None, "auroc": None, "sets": {}})
            if (swept := of.get(key)) is not None:
                after = results[swept.folder].after
                row |= {"kl": after.kl_raw, "auroc": after.auroc}
            row["sets"][name] = {
                "setting": shown["setting"],
                "speed": target_seconds / shown["seconds_per_token"],
                "saved": shown["saving_over_best_length"],
            }
    order = {label: number for number, label in enumerate(of)}
    kept = [row for key, row in rows.items() if key in of or "paper: " not in key]
    return sorted(kept, key=lambda row: order.get(row["rule"].partition(",")[0], len(order)))


def draw(judged: Mapping[str, Mapping[str, Sequence[dict[str, Any]]]], path: Path) -> None:
    """Verification rate against discard rate, one plot a prompt set: the paper's Figure, as PNG.

    The published heads are one cloud of points; what is fixed, our head, the rivals, the exact
    acceptance and the oracle are curves and points of their own.
    """
    from matplotlib.figure import Figure

    names = [name for name in judged if name != ALL_SETS] or [ALL_SETS]
    figure = Figure(figsize=(6 * len(names), 5.5), layout="constrained")
    for number, name in enumerate(names):
        axes = figure.add_subplot(1, len(names), number + 1)
        rows = [row for row in judged[name]["rows"] if row["setting"] != COST_RULE]
        published = [row for row in rows if row["rule"].startswith("paper: ")]
        if published:
            axes.plot(*_rates(published), "x", color="0.6", label=f"SpecDec++ ({len(published)})")
        families = dict.fromkeys(row["rule"] for row in rows)
        for family in families:
            swept = family.partition(": ")[0] in SWEEPS
            if family == "plain" or (swept and family != f"features: {OURS}"):
                continue
            points = [row for row in rows if row["rule"] == family]
            ours, marker = family == f"features: {OURS}", "*" if family == "oracle" else "."
            drawn = {"linewidth": 2.5, "color": "black"} if ours else {"linewidth": 1.0}
            label = "our head" if ours else family
            axes.plot(*_rates(points), marker=marker, label=label, **drawn)
        axes.set_xlabel("discard rate  (N discarded / N)")
        axes.set_ylabel("verification rate  (N target / N)")
        axes.set_title(name)
        axes.set_xlim(-0.02, 1.5)
    figure.axes[0].legend(fontsize="small")
    figure.suptitle("Sweep of acceptance heads, replayed; lower left is better")
    with atomic_write(path) as temporary:
        figure.savefig(temporary, dpi=130, format="png")


def _rates(rows: Sequence[dict[str, Any]]) -> tuple[list[float], list[float]]:
    return [row["discard_rate"] for row in rows], [row["verification_rate"] for row in rows]


def main(
    arguments: Sequence[str] | None = None, program: str = "python -m eval.analysis.sweep"
) -> int:
    """Run the command line; returns the exit status."""
    accept_any_text()
    given = _parser(program).parse_args(arguments)
    try:
        rows = _run(given)
    except (ConfigError, ManifestError, ValueError, OSError) as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    sets = [name for name in rows[0]["sets"] if name != ALL_SETS] or [ALL_SETS]
    view = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False)
    for column, width in (("rule", 38), ("KL", 5), ("AUROC", 5), *((name, 23) for name in sets)):
        view.add_column(column, no_wrap=True, min_width=width)
    for row in rows:
        judged = [f"{x:.3f}" if x is not None else "" for x in (row["kl"], row["auroc"])]
        cells = [_cell(row["sets"].get(name)) for name in sets]
        view.add_row(row["rule"], *judged, *cells)
    console = Console(highlight=False)
    console.width = max(console.width, 60 + 24 * len(sets))  # wrapped cells could not be read
    console.print(view)
    console.print(
        "speeds are multiples of the target's alone, in brackets the setting, and what is saved "
        f"over the best K; intervals: {given.out / 'sweep.json'}, {given.out / 'sweep.png'}",
        soft_wrap=True,
    )
    return 0


def _cell(found: Mapping[str, Any] | None) -> str:
    if found is None:
        return ""
    saved = Interval(**found["saved"])
    setting = f" ({found['setting'].partition('=')[2] or found['setting']})".replace(" ()", "")
    setting = "" if found["setting"] == COST_RULE else setting
    return f"{found['speed']:.2f}x{setting} {100 * saved.value:+.1f} %"


def _run(given: argparse.Namespace) -> list[dict[str, Any]]:
    from specdata.labels.make import sampling_of
    from specdata.models import load_model
    from specdata.storage.dataset import stream_stored

    if given.draft_seconds <= 0 or given.target_seconds <= 0:
        raise ConfigError("--draft-seconds and --target-seconds must be positive")
    labels = stream_stored(given.labels)
    sizes = [given.rows, *(given.sizes or ())]
    train = rows_of_split(labels, given.labels, "train", max(sizes))
    dev, test = (
        rows_of_split(labels, given.labels, split, given.judged_rows) for split in ("dev", "test")
    )
    check_draft(given.labels, given.draft)
    draft = load_model(given.draft, dtype="float32")
    material = Material(draft, sampling_of(given.labels), train, dev, test, given.seed)
    heads = _heads(given, [*dict.fromkeys(train["dataset"])])
    results = train_all(heads, material, given.out)
    times = {"draft_seconds": given.draft_seconds, "target_seconds": given.target_seconds}
    judged = judge(heads, material, given.out, **times)
    rows = table(heads, results, judged, given.target_seconds)
    stored = {
        "settings": {name: str(value) for name, value in vars(given).items()},
        "heads": {
            _label(swept): {"folder": swept.folder, **_metrics(results[swept.folder])}
            for swept in heads
        },
        "table": rows,
        "sets": {name: parts["rows"] for name, parts in judged.items()},
    }
    write_json(given.out / "sweep.json", json.loads(json.dumps(stored)))
    draw(judged, given.out / "sweep.png")
    return rows


def _metrics(result: HeadResult) -> dict[str, Any]:
    return {
        "train_rows": result.train_rows,
        "steps": result.steps,
        "dev": {moment: asdict(metrics) for moment, metrics in result.by_moment.items()},
    }


def _heads(given: argparse.Namespace, sets: Sequence[str]) -> list[Swept]:
    heads: list[Swept] = []
    if "paper" in given.sweep:
        heads += paper_heads(given.depths, given.weights, given.rows, given.epochs)
    if "features" in given.sweep:
        heads += feature_heads(given.rows, given.epochs, given.draws)
    if "data" in given.sweep:
        sizes = given.sizes or [given.rows // 4, given.rows // 2, given.rows]
        heads += data_heads(sizes, given.rows, sets, given.epochs, given.draws)
    return heads


def _parser(program: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=program,
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("labels", type=Path, help="folder of a dataset of labels, with train, dev and test rows")
    add("--draft", required=True, help="the draft that made them")
    add("--sweep", nargs="+", choices=SWEEPS, default=SWEEPS, help="which (default: all three)")
    add("--out", type=Path, default=Path("runs/sweep"), help="folder of heads and results")
    add("--rows", type=int, default=512, help="training rollouts of a prompt set (default: 512)")
    add("--sizes", type=int, nargs="+", help="the same for data (default: 1/4, 1/2, all of them)")
    add("--depths", type=int, nargs="+", default=[0, 1, 2, 3, 4], help="of paper (default: 0..4)")
    add(
        "--weights",
        type=float,
        nargs="+",
        default=[1.0, 3.0, 6.0, 12.0],
        help="of rejections, of paper (default: 1 3 6 12)",
    )
    add(
        "--epochs",
        type=int,
        default=3,
        help="passes over the rows (default: the paper's 3; ours gain from more)",
    )
    add("--draws", type=int, default=1, help="drafted tokens a position in a pass, of our heads")
    add("--judged-rows", type=int, default=256, help="dev and test rollouts of a set (256)")
    add("--draft-seconds", type=float, default=0.1, help="t_d (default: %(default)s)")
    add("--target-seconds", type=float, default=1.0, help="t_t (default: 1)")
    add("--seed", type=int, default=0, help="of the heads (default: 0)")
    return parser


if __name__ == "__main__":
    sys.exit(main())
