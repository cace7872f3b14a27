"""Look at a dataset of rollouts or labels: python -m specdata.inspect FOLDER [--png FILE].

Counts, lengths, finish reasons, acceptance, sample texts. Reads only; downloads nothing.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from specdata.errors import ManifestError
from specdata.inspect.summary import ACCEPTANCE, BINS, Spread, Summary, quantiles, summarise
from specdata.prompts.loading import dropped
from specdata.sources import hub_source
from specdata.storage.manifest import MANIFEST
from specdata.terminal import accept_any_text

if TYPE_CHECKING:  # help is shown without transformers
    from transformers import PreTrainedTokenizerBase

POINTS = [0.05, 0.5, 0.95]
BAR = 30
STRETCHES = 16  # rows that acceptance by position is shown in


def main(
    arguments: Sequence[str] | None = None, program: str = "python -m specdata.inspect"
) -> int:
    """Show one dataset. Returns the exit status: 0, or 2 for a folder that cannot be shown."""
    parser = argparse.ArgumentParser(prog=program, description=__doc__)
    parser.add_argument("folder", type=Path, help="output/rollouts or output/labels of a run")
    parser.add_argument("--png", type=Path, help="draw the same figures into this file")
    parser.add_argument("--samples", type=int, default=3, help="rows whose text is shown")
    accept_any_text()
    options = parser.parse_args(arguments)
    if options.samples < 0:
        parser.error(f"--samples must be 0 or larger, got {options.samples}")
    try:
        summary = summarise(options.folder, options.samples)
        # A log file has no width, and a narrower one would cut the tables.
        show(summary, Console(highlight=False, width=max(100, Console().width)))
        if options.png:
            from specdata.inspect.plot import draw  # slow to import, and not always needed

            draw(summary, options.png)
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
    for name, spread in summary.acceptance.items():
        console.print(_histogram(ACCEPTANCE[name], spread))
    if summary.acceptance:
        console.print(_by_position(summary.acceptance))
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
    kind = "labels" if summary.acceptance else "rollouts"
    tokens = sum(group.tokens for group in summary.groups.values())
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
    if summary.acceptance:
        table.add_column("acceptance", justify="right")
    for name, group in sorted(summary.groups.items()):
        finish = ", ".join(
            f"{reason} {count / group.rows:.0%}" for reason, count in group.finish.most_common()
        )
        row = [
            escape(name),
            str(group.rows),
            str(max(group.turns) + 1),
            " ".join(map(str, quantiles(group.prompts, POINTS))),
            " ".join(map(str, quantiles(group.completions, POINTS))),
            escape(finish),
        ]
        if summary.acceptance:
            row.append(f"{group.overlap / max(1, group.tokens):.3f}")
        table.add_row(*row)
    return table


def _histogram(title: str, spread: Spread) -> Table:
    table = Table(title=f"{title}: mean {spread.mean:.3f}", title_justify="left", box=None)
    table.add_column("from", justify="right")
    table.add_column("share", justify="right")
    table.add_column("")
    shares = spread.histogram / max(1.0, spread.histogram.sum())
    for index, share in enumerate(shares):
        bar = "█" * round(BAR * share / max(shares.max(), 1e-9))
        table.add_row(f"{index / BINS:.2f}", f"{share:.1%}", Text(bar, style="cyan"))
    return table


def _by_position(spreads: Mapping[str, Spread]) -> Table:
    """Means over stretches of positions, 0 being the first token of a completion."""
    table = Table(title="mean acceptance by position", title_justify="left", box=None)
    for name in ("positions", "rows", *(ACCEPTANCE[column] for column in spreads), ""):
        table.add_column(name, justify="right" if name else "left")
    longest = len(next(iter(spreads.values())).sums)
    step = -(-longest // STRETCHES) if longest else 1
    for start in range(0, longest, step):
        here = slice(start, min(start + step, longest))
        means = [
            float(spread.sums[here].sum() / max(1.0, spread.counts[here].sum()))
            for spread in spreads.values()
        ]
        rows = int(next(iter(spreads.values())).counts[start])
        bar = Text("█" * round(BAR * means[0]), style="cyan")
        span = f"{start}" if step == 1 else f"{start} to {here.stop - 1}"
        table.add_row(span, str(rows), *(f"{mean:.3f}" for mean in means), bar)
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
