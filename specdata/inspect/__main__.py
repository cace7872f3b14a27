"""Look at a dataset of rollouts or labels: python -m specdata.inspect FOLDER.

Counts, lengths, finish reasons, acceptance, sample texts. Reads only; downloads nothing.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from specdata.errors import ManifestError
from specdata.prompts.loading import dropped
from specdata.sources import hub_source
from specdata.storage.manifest import MANIFEST, read_manifest, verify
from specdata.terminal import accept_any_text

if TYPE_CHECKING:  # help is shown without them
    import pyarrow.parquet as pq
    from transformers import PreTrainedTokenizerBase

BINS = 20
BAR = 30
STRETCHES = 16  # rows that acceptance by position is shown in
ROWS_AT_ONCE = 256


@dataclass(slots=True)
class Group:
    """Rows of one set and split: lengths in tokens, acceptance summed over all positions."""

    prompts: list[int] = field(default_factory=list)
    completions: list[int] = field(default_factory=list)
    finish: Counter[str] = field(default_factory=Counter)
    turns: int = 0
    overlap: float = 0.0


@dataclass(slots=True)
class Summary:
    """A stored dataset in numbers; of labels also the acceptance, sum_x min(p(x), q(x)).

    Attributes:
        folder: where it is.
        manifest: its manifest.
        groups: "set/split" -> its rows.
        samples: some whole rows, spread evenly over the dataset.
        histogram: (BINS,) positions by acceptance.
        sums: (longest,) acceptance summed over rows, by position in the completion.
        counts: (longest,) rows that reach the position; empty for rollouts.
    """

    folder: Path
    manifest: Mapping[str, Any]
    groups: dict[str, Group] = field(default_factory=dict)
    samples: list[dict[str, Any]] = field(default_factory=list)
    histogram: Any = field(default_factory=lambda: np.zeros(BINS))
    sums: Any = field(default_factory=lambda: np.zeros(0))
    counts: Any = field(default_factory=lambda: np.zeros(0))

    @property
    def has_labels(self) -> bool:
        """Whether rows have an acceptance."""
        return len(self.counts) > 0

    @property
    def rows(self) -> int:
        """Rows that were read."""
        return sum(len(group.completions) for group in self.groups.values())

    def add(self, row: Mapping[str, Any]) -> None:
        """Count a row."""
        group = self.groups.setdefault(f"{row['dataset']}/{row['split']}", Group())
        group.prompts.append(len(row["prompt_ids"]))
        group.completions.append(len(row["completion_ids"]))
        group.finish[row["finish"]] += 1
        group.turns = max(group.turns, row["turn"] + 1)
        if "overlap" in row:
            values = np.array(row["overlap"])
            group.overlap += values.sum()
            self.histogram += np.histogram(values, bins=BINS, range=(0.0, 1.0))[0]
            longer = (0, max(0, len(values) - len(self.sums)))
            self.sums, self.counts = np.pad(self.sums, longer), np.pad(self.counts, longer)
            self.sums[: len(values)] += values
            self.counts[: len(values)] += 1


def summarise(folder: Path, samples: int = 0) -> Summary:
    """Read a dataset, finished or not, a part of one shard at a time, and add it up.

    Args:
        folder: a dataset of rollouts or labels.
        samples: how many whole rows to keep.

    Raises:
        ManifestError: if there is no dataset, or a shard is damaged or not of this program.
    """
    summary = Summary(folder, manifest := read_manifest(folder))
    paths = sorted(folder.glob("shard-*.parquet"))
    if manifest["finished"]:
        for record in manifest["shards"]:
            verify(folder, record)
        paths = [folder / record["file"] for record in manifest["shards"]]
    files = [_open(path) for path in paths]
    rows = sum(file.metadata.num_rows for file in files)
    wanted = {int((index + 0.5) * rows / samples) for index in range(samples)}
    number = 0
    for file in files:
        names = [name for name in file.schema_arrow.names if name in _columns()]
        for batch in file.iter_batches(batch_size=ROWS_AT_ONCE, columns=names):
            for row in batch.to_pylist():
                summary.add(row)
                if number in wanted:
                    summary.samples.append(row)
                number += 1
    return summary


def _columns() -> list[str]:
    from specdata.storage.schema import ROLLOUTS

    return [*ROLLOUTS.names, "overlap"]


def _open(path: Path) -> pq.ParquetFile:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        file = pq.ParquetFile(path)
    except (pa.ArrowInvalid, OSError) as error:
        raise ManifestError(f"shard {path} is not readable parquet ({error})") from error
    if missing := {*_columns()} - {*file.schema_arrow.names, "overlap"}:
        raise ManifestError(
            f"shard {path} has no column {sorted(missing)[0]!r}: it holds neither rollouts nor "
            "labels of this program"
        )
    return file


def main(
    arguments: Sequence[str] | None = None, program: str = "python -m specdata.inspect"
) -> int:
    """Show one dataset. Returns the exit status: 0, or 2 for a folder that cannot be shown."""
    parser = argparse.ArgumentParser(prog=program, description=__doc__)
    parser.add_argument("folder", type=Path, help="output/rollouts or output/labels of a run")
    parser.add_argument("--samples", type=int, default=3, help="rows whose text is shown")
    accept_any_text()
    options = parser.parse_args(arguments)
    if options.samples < 0:
        parser.error(f"--samples must be 0 or larger, got {options.samples}")
    try:
        summary = summarise(options.folder, options.samples)
        # A log file has no width, and a narrower one would cut the tables.
        show(summary, Console(highlight=False, width=max(100, Console().width)))
    except (ManifestError, OSError) as error:
        hint = _datasets_below(options.folder) if isinstance(error, ManifestError) else ""
        Console(stderr=True, soft_wrap=True).print(f"error: {error}{hint}", markup=False)
        return 2
    return 0


def show(summary: Summary, console: Console) -> None:
    """Print the summary of a dataset."""
    _heading(summary, console)
    if not summary.rows:
        console.print("no rows")
        return
    console.print(_groups(summary))
    if summary.has_labels:
        console.print(_histogram(summary))
        console.print(_by_position(summary))
    _samples(summary, console)


def _datasets_below(folder: Path) -> str:
    """Where datasets are, if not in the folder itself."""
    if (folder / MANIFEST).exists():
        return ""
    if not folder.is_dir():
        return f" ({folder} is not a folder)"
    below = sorted(str(path.parent) for path in folder.glob(f"*/{MANIFEST}"))
    return f"; datasets are in {', '.join(below)}" if below else ""


def _heading(summary: Summary, console: Console) -> None:
    settings = summary.manifest["settings"]
    kind = "labels" if summary.has_labels else "rollouts"
    tokens = sum(sum(group.completions) for group in summary.groups.values())
    console.print(
        f"[bold]{kind}[/] in {escape(str(summary.folder))}: {summary.rows} rows, {tokens} tokens",
        soft_wrap=True,
    )
    if not summary.manifest["finished"]:
        console.print("[bold yellow]warning: unfinished; this is what there is so far[/]")
    for name in ("target", "draft", "sampling"):
        if value := settings.get(name):
            console.print(f"  {name}: {escape(_line(value))}", soft_wrap=True)
    for line in dropped(settings.get("prompts") or []):
        console.print(f"  {escape(line)}", soft_wrap=True)


def _line(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {item}" for key, item in value.items())
    return str(value)


def _groups(summary: Summary) -> Table:
    """A line a set and split."""
    table = Table(title="sets (lengths: 5 %, median, 95 %)", title_justify="left")
    for name in ("set/split", "rows", "turns", "prompt", "completion", "finish"):
        table.add_column(name, justify="left" if name in ("set/split", "finish") else "right")
    if summary.has_labels:
        table.add_column("acceptance", justify="right")
    for name, group in sorted(summary.groups.items()):
        rows = len(group.completions)
        finish = ", ".join(
            f"{reason} {count / rows:.0%}" for reason, count in group.finish.most_common()
        )
        lengths = [
            " ".join(
                f"{value:.0f}"
                for value in np.quantile(each, [0.05, 0.5, 0.95], method="inverted_cdf")
            )
            for each in (group.prompts, group.completions)
        ]
        row = [escape(name), str(rows), str(group.turns), *lengths, escape(finish)]
        if summary.has_labels:
            row.append(f"{group.overlap / max(1, sum(group.completions)):.3f}")
        table.add_row(*row)
    return table


def _histogram(summary: Summary) -> Table:
    mean = summary.sums.sum() / max(1.0, summary.counts.sum())
    table = Table(title=f"sum of min(p, q): mean {mean:.3f}", title_justify="left", box=None)
    table.add_column("from", justify="right")
    table.add_column("share", justify="right")
    table.add_column("")
    shares = summary.histogram / max(1.0, summary.histogram.sum())
    for index, share in enumerate(shares):
        bar = "█" * round(BAR * share / max(shares.max(), 1e-9))
        table.add_row(f"{index / BINS:.2f}", f"{share:.1%}", Text(bar, style="cyan"))
    return table


def _by_position(summary: Summary) -> Table:
    """Means over stretches of positions, 0 being the first token of a completion."""
    table = Table(title="mean acceptance by position", title_justify="left", box=None)
    for name in ("positions", "rows", "mean", ""):
        table.add_column(name, justify="right" if name else "left")
    longest = len(summary.sums)
    step = -(-longest // STRETCHES)
    for start in range(0, longest, step):
        here = slice(start, min(start + step, longest))
        mean = summary.sums[here].sum() / max(1.0, summary.counts[here].sum())
        span = f"{start}" if step == 1 else f"{start} to {here.stop - 1}"
        bar = Text("█" * round(BAR * mean), style="cyan")
        table.add_row(span, str(int(summary.counts[start])), f"{mean:.3f}", bar)
    return table


def _samples(summary: Summary, console: Console) -> None:
    if not summary.samples:
        return
    tokenizer, why = _tokenizer(summary.manifest["settings"])
    if tokenizer is None:
        console.print(f"[yellow]token ids instead of texts: {escape(why)}[/]", soft_wrap=True)
    for row in summary.samples:
        place = f"{row['dataset']}/{row['split']}, turn {row['turn']}, ended by {row['finish']}"
        console.print(f"\n[bold]sample[/] of {escape(place)}")
        for name, style in (("prompt_ids", "dim"), ("completion_ids", "")):
            ids = row[name]
            text = " ".join(map(str, ids)) if tokenizer is None else str(tokenizer.decode(ids))
            # Texts may hold anything: no markup, no control characters.
            console.print(Text("".join(_shown(letter) for letter in text), style=style))


def _shown(letter: str) -> str:
    return letter if letter.isprintable() or letter == "\n" else f"\\x{ord(letter):02x}"


def _tokenizer(settings: Mapping[str, Any]) -> tuple[PreTrainedTokenizerBase | None, str]:
    """The target's tokenizer if it is on this machine and still the same, else why not."""
    target = settings.get("target")
    name = target.get("name") if isinstance(target, Mapping) else target
    if not isinstance(name, str):
        return None, "the manifest names no target"
    import transformers

    from specdata.models import vocabulary_fingerprint

    transformers.logging.set_verbosity_error()
    source, revision = hub_source(name)
    try:
        tokenizer: PreTrainedTokenizerBase = transformers.AutoTokenizer.from_pretrained(
            source, revision=revision, local_files_only=True, trust_remote_code=False
        )
    except (OSError, ValueError, KeyError):
        return None, f"the tokenizer of {name} is not on this machine"
    if settings.get("tokenizer") not in (None, vocabulary_fingerprint(tokenizer)):
        return None, f"the tokenizer of {name} is not the one these rows were made with"
    return tokenizer, ""


if __name__ == "__main__":
    sys.exit(main())
