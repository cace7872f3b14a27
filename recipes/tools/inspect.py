"""Look at a dataset of rollouts or labels.

draftsmith inspect FOLDER [--samples 3]

Counts, lengths, finish reasons, acceptance, sample texts. Reads only; downloads nothing.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Mapping
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
from specdata.storage.dataset import read_manifest, verify
from specdata.storage.files import MANIFEST
from specdata.terminal import visible, whole_number

if TYPE_CHECKING:  # help is shown without them
    from transformers import PreTrainedTokenizerBase

ROWS_AT_ONCE = 256

Groups = dict[str, list[dict[str, Any]]]
"""Set and split -> of each row its turn, lengths in tokens, finish, and acceptance (`overlap`)
summed over its positions; None in rollouts."""


def summarise(folder: Path, samples: int = 0) -> tuple[Groups, list[dict[str, Any]]]:
    """Read a dataset, finished or not, a part of one shard at a time.

    Args:
        folder: a dataset of rollouts or labels.
        samples: how many whole rows to keep.

    Returns:
        What its rows hold, and some whole rows, spread evenly over the dataset.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    from specdata.storage.schema import ROLLOUTS

    manifest = read_manifest(folder)
    paths = sorted(folder.glob("shard-*.parquet"))
    if manifest["finished"]:
        for record in manifest["shards"]:
            verify(folder, record)
        paths = [folder / record["file"] for record in manifest["shards"]]
    files = []
    for path in paths:
        try:
            files.append(pq.ParquetFile(path))
        except (pa.ArrowInvalid, OSError) as error:
            raise ManifestError(f"shard {path} is not readable parquet ({error})") from error
        if missing := {*ROLLOUTS.names} - {*files[-1].schema_arrow.names}:
            raise ManifestError(
                f"shard {path} has no column {sorted(missing)[0]!r}: it holds neither rollouts nor "
                "labels of this program"
            )
    total = sum(file.metadata.num_rows for file in files)
    samples = min(samples, total)
    sampled = {int((index + 0.5) * total / samples) for index in range(samples)}
    rows = (
        row
        for file in files
        for batch in file.iter_batches(
            batch_size=ROWS_AT_ONCE,
            columns=[n for n in (*ROLLOUTS.names, "overlap") if n in file.schema_arrow.names],
        )
        for row in batch.to_pylist()
    )
    groups: Groups = {}
    shown = []
    for number, row in enumerate(rows):
        counted = {"turn": row["turn"], "finish": row["finish"], "overlap": None}
        counted |= {name: len(row[f"{name}_ids"]) for name in ("prompt", "completion")}
        if "overlap" in row:
            counted["overlap"] = sum(row["overlap"])
        groups.setdefault(f"{row['dataset']}/{row['split']}", []).append(counted)
        if number in sampled:
            shown.append(row)
    return groups, shown


def add_options(parser: argparse.ArgumentParser) -> None:
    """The command line."""
    parser.add_argument("folder", type=Path, help="output/rollouts or output/labels of a run")
    parser.add_argument("--samples", type=whole_number, default=3, help="rows whose text is shown")


def main(given: argparse.Namespace) -> int:
    """Show one dataset. Returns the exit status: 0, or 2 for a folder that cannot be shown."""
    folder: Path = given.folder
    try:
        # A log file has no width, and a narrower one would cut the tables.
        console = Console(highlight=False, width=max(100, Console().width))
        show(folder, *summarise(folder, given.samples), console)
    except (ManifestError, OSError) as error:
        hint = ""
        if isinstance(error, ManifestError) and not (folder / MANIFEST).exists():
            below = sorted(str(path.parent) for path in folder.glob(f"*/{MANIFEST}"))
            if not folder.is_dir():
                hint = f" ({folder} is not a folder)"
            elif below:
                hint = f"; datasets are in {', '.join(below)}"
        raise ManifestError(f"{error}{hint}") from error
    return 0


def show(folder: Path, groups: Groups, samples: list[dict[str, Any]], console: Console) -> None:
    """Print the settings, the table of sets and the samples of a dataset."""
    manifest = read_manifest(folder)
    settings, rows = manifest["settings"], [row for group in groups.values() for row in group]
    has_labels = any(row["overlap"] is not None for row in rows)
    console.print(
        f"[bold]{'labels' if has_labels else 'rollouts'}[/] in {escape(str(folder))}: "
        f"{len(rows)} rows, {sum(row['completion'] for row in rows)} tokens",
        soft_wrap=True,
    )
    if not manifest["finished"]:
        console.print("[bold yellow]warning: unfinished; this is what there is so far[/]")
    for name in ("target", "draft", "sampling"):
        if value := settings.get(name):
            if isinstance(value, Mapping):
                value = ", ".join(f"{key} {item}" for key, item in value.items())
            console.print(f"  {name}: {escape(str(value))}", soft_wrap=True)
    for line in dropped(settings.get("prompts") or []):
        console.print(f"  {escape(line)}", soft_wrap=True)
    if not rows:
        console.print("no rows")
        return
    table = Table(title="sets (lengths: 5 %, median, 95 %)", title_justify="left")
    for name in ("set/split", "rows", "turns", "prompt", "completion", "finish"):
        table.add_column(name, justify="left" if name in ("set/split", "finish") else "right")
    if has_labels:
        table.add_column("mean sum of min(p, q)", justify="right")
    for name, group in sorted(groups.items()):
        table.add_row(*_cells(name, group, has_labels=has_labels))
    console.print(table)
    tokenizer, why = _tokenizer(settings) if samples else (None, "")
    if why:
        console.print(f"[yellow]token ids instead of texts: {escape(why)}[/]", soft_wrap=True)
    for row in samples:
        place = f"{row['dataset']}/{row['split']}, turn {row['turn']}, ended by {row['finish']}"
        console.print(f"\n[bold]sample[/] of {escape(place)}")
        for name, style in (("prompt_ids", "dim"), ("completion_ids", "")):
            ids = row[name]
            text = " ".join(map(str, ids)) if tokenizer is None else str(tokenizer.decode(ids))
            # Texts may hold anything: no markup, no control characters.
            console.print(Text(visible(text), style=style))


def _cells(name: str, group: list[dict[str, Any]], *, has_labels: bool) -> list[str]:
    """The line of a set and split."""
    reasons = Counter(row["finish"] for row in group).most_common()
    finish = ", ".join(f"{reason} {count / len(group):.0%}" for reason, count in reasons)
    lengths = []
    for part in ("prompt", "completion"):
        tokens = [row[part] for row in group]
        quantiles = np.quantile(tokens, [0.05, 0.5, 0.95], method="inverted_cdf")
        lengths.append(" ".join(f"{value:.0f}" for value in quantiles))
    turns = 1 + max(row["turn"] for row in group)
    cells = [escape(name), str(len(group)), str(turns), *lengths, escape(finish)]
    if has_labels:
        positions = max(1, sum(row["completion"] for row in group))
        cells.append(f"{sum(row['overlap'] for row in group) / positions:.3f}")
    return cells


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
