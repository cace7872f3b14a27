"""The cost of an acceptance head to a draft: microseconds a drafted token, on the decoder's path.

    python benchmarks/head_call.py [--draft FOLDER] [--out FILE]     # by default the demo's draft

Drafts of a fixed length are timed with and without a head that is asked about every token and never
stops: all else is the same, so the difference is the head's, with what is captured for it. Heads
have random weights, which costs the same as trained ones. Methods take turns; the median of the
processor time of many drafts counts, so that what else runs on the machine matters less.
"""

from __future__ import annotations

import argparse
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from embedded import DEMO, make_demo

from eval.drafting.drafters import ChainDrafter
from eval.drafting.stopping import STOPPING_RULES
from eval.runtime.model import CachedModel
from eval.runtime.sequence import drive
from heads import AcceptanceHead, BaseHead, ImmediateHead
from specdata.models import load_model
from specdata.sampling import SamplingConfig
from specdata.storage.files import write_json

LENGTH, PROMPT = 8, 60
DRAFT = str(DEMO / "draft" / "model")


def heads_for(draft: Any) -> dict[str, BaseHead | None]:
    """The heads and rules that are compared, by name."""
    sizes = {
        "hidden_size": int(draft.get_output_embeddings().weight.shape[-1]),
        "embedding_size": int(draft.get_input_embeddings().weight.shape[-1]),
    }
    hidden = sizes["hidden_size"]
    return {
        "no head": None,
        "specdec++, depth 3": AcceptanceHead(hidden_size=hidden, depth=3),
        "immediate, drawn": ImmediateHead(**sizes, decision_points=("drawn",)),
        "immediate, drawn and consumed": ImmediateHead(
            **sizes, decision_points=("drawn", "consumed")
        ),
        "immediate, drawn, width 64, depth 1": ImmediateHead(
            **sizes, decision_points=("drawn",), width=64, depth=1
        ),
    }


def drafting(model: CachedModel, head: BaseHead | None) -> Callable[[], float]:
    """A function that drafts once after the same prompt and returns the seconds that it took."""
    rule = STOPPING_RULES["fixed"](length=LENGTH)
    if head is not None:
        rule = STOPPING_RULES["head"](threshold=1.0, limit=LENGTH)
    generator = torch.Generator().manual_seed(0)
    drafter = ChainDrafter(model.sequence(0, SamplingConfig()), rule.start(head), frozenset())
    committed = torch.randint(2, 256, (PROMPT,), generator=generator).tolist()

    def draft() -> float:
        begun = time.thread_time()
        tree = drive(drafter.propose(committed, LENGTH, generator))
        seconds = time.thread_time() - begun
        assert len(tree) == LENGTH
        drafter.accept([], PROMPT - 1)  # the last one gives the first distribution
        return seconds

    draft()  # reads the prompt
    return draft


@torch.inference_mode()
def measure(draft: Any, engine: str, drafts: int) -> dict[str, float]:
    """Microseconds of a drafted token, by what is asked."""
    compared = {}
    for name, head in heads_for(draft).items():
        model = CachedModel(
            draft,
            draft.config.get_text_config().vocab_size,
            engine=engine,
            capture_hidden=head is not None,
        )
        model.warm_up([(1, 1), (2, 1)])
        compared[name] = drafting(model, None if head is None else head.eval())
    seconds: dict[str, list[float]] = {name: [] for name in compared}
    for _ in range(drafts):
        for name, once in compared.items():
            seconds[name].append(once())
    return {name: 1e6 * statistics.median(values) / LENGTH for name, values in seconds.items()}


def main() -> None:
    """Measure, print and write JSON."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--draft", default=DRAFT, help="folder or Hub id")
    parser.add_argument("--drafts", type=int, default=400, help="drafts a method")
    parser.add_argument("--engines", nargs="+", default=["eager", "captured"])
    parser.add_argument("--out", type=Path, default=Path("runs/bench/head_call.json"))
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.draft == DRAFT and not Path(DRAFT).exists():
        make_demo("make_rollouts", "train_draft")
    draft = load_model(options.draft, dtype="float32").eval()
    results: dict[str, Any] = {
        "about": "microseconds a drafted token; share: of a step of the draft without a head",
        "machine": platform.processor() or platform.machine(),
        "threads": 1,
        "torch": torch.__version__,
        "draft_parameters": draft.num_parameters(),
        "length": LENGTH,
        "engines": {},
    }
    for engine in options.engines:
        times = measure(draft, engine, options.drafts)
        step = times["no head"]
        results["engines"][engine] = {
            name: {"microseconds": round(value, 1), "share": round(value / step - 1.0, 4)}
            for name, value in times.items()
        }
        for name, value in times.items():
            print(f"{engine:9} {name:36} {value:8.1f} us {value / step - 1.0:+7.1%}")
    write_json(options.out, results)


if __name__ == "__main__":
    main()
