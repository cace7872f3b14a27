"""The cost of an acceptance head to a draft: microseconds a drafted token, on the decoder's path.

    python benchmarks/head_call.py [--drafts NAME=FOLDER ...] [--out FILE]   # by default the demo's

In each engine, at temperature 1 and with a nucleus of .9. Heads have random weights, which costs
the same as trained ones.
"""

from __future__ import annotations

import argparse
import platform
import statistics
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from embedded import DEMO, make_demo
from transformers import PreTrainedModel

from eval.drafting.drafters import ChainDrafter
from eval.drafting.stopping import ActiveRule, DraftedToken, StoppingRule
from eval.drafting.stopping.thresholds import Fixed, Head
from eval.runtime.batches import drive
from eval.runtime.engines import Engine
from eval.runtime.model import CachedModel
from eval.runtime.sequence import CachedSequence, sequence_of, warm_up
from heads import AcceptanceHead, BaseHead, ConfidenceHead, ImmediateHead
from specdata.lm_head import width_of_states
from specdata.models import load_model
from specdata.sampling import SamplingConfig
from specdata.storage.files import write_json

DRAFT = str(DEMO / "draft" / "model")
LENGTH, PROMPT = 8, 60


class _Unheeded(ActiveRule):
    """Asks a rule, and drafts on whatever it answers."""

    def __init__(self, asked: ActiveRule) -> None:
        super().__init__(LENGTH, asked.reads)
        self.asked = asked

    def begin(self) -> None:
        self.asked.begin()

    def should_stop(self, drafted: DraftedToken) -> bool:
        self.asked.should_stop(drafted)
        return False


@torch.inference_mode()
def drafting_seconds(
    draft: PreTrainedModel,
    asked: Mapping[str, tuple[StoppingRule, BaseHead | None]],
    sampling: SamplingConfig,
    *,
    engine: Engine = "captured",
    drafts: int = 50,
) -> dict[str, list[float]]:
    """Seconds of a drafted token in each turn, by the rule that is asked about it.

    Drafts of `LENGTH` tokens, whatever the rules say. So all else is the same and a difference is
    the rule's, with what is captured for its head. Rules take turns. On a CPU time is the thread's
    on a processor, so that what else runs on the machine matters less.

    Args:
        draft: the draft.
        asked: name -> a rule and its head.
        sampling: of the draft's tokens.
        engine: of the draft's forwards.
        drafts: of each rule.
    """
    vocabulary = draft.config.get_text_config().vocab_size
    clock = time.thread_time if draft.device.type == "cpu" else time.perf_counter
    compared: dict[str, Callable[[], float]] = {}
    for name, (rule, head) in asked.items():
        model = CachedModel(draft, vocabulary, engine=engine, capture_hidden=head is not None)
        warm_up(model, [(1, 1), (2, 1)])
        generator = torch.Generator().manual_seed(0)
        unheeded = _Unheeded(rule.start(head))
        sequence = sequence_of(model, 0, sampling)
        drafter = ChainDrafter(sequence, unheeded, frozenset())
        committed = torch.randint(0, vocabulary, (PROMPT,), generator=generator).tolist()

        def once(
            sequence: CachedSequence = sequence,
            drafter: ChainDrafter = drafter,
            committed: list[int] = committed,
            generator: torch.Generator = generator,
        ) -> float:
            begun = clock()
            drafted = len(drive(drafter.propose(committed, LENGTH, generator)))
            seconds = clock() - begun
            sequence.crop(PROMPT - 1)  # the last one gives the first distribution
            return seconds / max(1, drafted)

        once()  # reads the prompt
        compared[name] = once
    seconds: dict[str, list[float]] = {name: [] for name in compared}
    for _ in range(drafts):
        for name, drafting in compared.items():
            seconds[name].append(drafting())
    return seconds


def heads_for(draft: Any) -> dict[str, BaseHead | None]:
    """The heads and rules that are compared, by name."""
    sizes = {
        "hidden_size": width_of_states(draft),
        "embedding_size": int(draft.get_input_embeddings().weight.shape[-1]),
    }
    hidden = sizes["hidden_size"]
    return {
        "no head": None,
        "specdec++, depth 3": AcceptanceHead(hidden_size=hidden, depth=3),
        "immediate, drawn": ImmediateHead(**sizes),
        "confidence": ConfidenceHead(hidden_size=hidden),
        "immediate, drawn, width 128, depth 2": ImmediateHead(**sizes, width=128, depth=2),
    }


def main() -> None:
    """Measure, print and write JSON."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--drafts", nargs="+", default=[f"demo={DRAFT}"], metavar="NAME=FOLDER")
    parser.add_argument("--times", type=int, default=400, help="that each method drafts")
    parser.add_argument("--engines", nargs="+", default=["eager", "captured"])
    parser.add_argument("--out", type=Path, default=Path("runs/bench/head_call.json"))
    options = parser.parse_args()
    torch.set_num_threads(1)
    results: dict[str, Any] = {
        "about": "microseconds a drafted token; share: of a step of the draft without a head",
        "machine": platform.processor() or platform.machine(),
        "threads": 1,
        "torch": torch.__version__,
        "drafts": {},
    }
    for named in options.drafts:
        called, _, folder = named.rpartition("=")
        if folder == DRAFT and not Path(DRAFT).exists():
            make_demo()
        draft = load_model(folder, dtype="float32").eval()
        asked: dict[str, tuple[StoppingRule, BaseHead | None]] = {}
        for name, head in heads_for(draft).items():
            rule = Head(threshold=1.0, limit=LENGTH) if head else Fixed(length=LENGTH)
            asked[name] = (rule, head and head.eval())
        made = results["drafts"][called] = {"parameters": draft.num_parameters()}
        for engine in options.engines:
            for sampling, warp in ((SamplingConfig(), ""), (SamplingConfig(top_p=0.9), ", top-p")):
                turns = drafting_seconds(
                    draft, asked, sampling, engine=engine, drafts=options.times
                )
                times = {name: statistics.median(each) for name, each in turns.items()}
                step = times["no head"]
                made[engine + warp] = {
                    name: {"microseconds": round(1e6 * value, 1), "share": value / step - 1.0}
                    for name, value in times.items()
                }
                for name, value in times.items():
                    share = f"{1e6 * value:8.1f} us {value / step - 1.0:+7.1%}"
                    print(f"{called:9}{engine + warp:16} {name:36} {share}", flush=True)
    write_json(options.out, results)


if __name__ == "__main__":
    main()
