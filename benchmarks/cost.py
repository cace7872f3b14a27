"""What a run would cost on one accelerator, from arithmetic: hours, memory and disk of each stage.

Nothing is measured here. A forward of N parameters takes 2 N operations a token, training three
times that; decoding one token for a batch reads every weight once. Each takes the longer of its
operations and its reading, at a stated share (`--efficiency`) of what the accelerator can do.
Attention, sampling and what is between the matrix products are not counted: they are why the share
is well below 1.

    python benchmarks/cost.py --config recipes/configs/vicuna-7b-68m.yaml
    python benchmarks/cost.py --config my-pair.yaml --target 70e9 --draft 1.1e9 --device H200
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict, dataclass
from pathlib import Path

from recipes.config import PipelineConfig, parse
from recipes.layout import GENERATION, REPORT, ROLLOUT_TOKEN, label_bytes

REPOSITORY = Path(__file__).resolve().parent.parent
HALF, CHECKPOINT = 2, 12  # bytes a parameter: bfloat16; float32 weights and Adam's two moments


@dataclass(frozen=True, slots=True)
class Device:
    """An accelerator as its data sheet has it.

    Attributes:
        peak: dense bfloat16 operations a second.
        bandwidth: bytes of its memory read a second.
        memory: bytes of its memory.
    """

    peak: float
    bandwidth: float
    memory: float


# A100 SXM 80 GB, H100 SXM 80 GB, H200 SXM 141 GB, B200 180 GB: NVIDIA's data sheets.
DEVICES = {
    "A100": Device(312e12, 2.04e12, 80e9),
    "H100": Device(989e12, 3.35e12, 80e9),
    "H200": Device(989e12, 4.8e12, 141e9),
    "B200": Device(2250e12, 8.0e12, 180e9),
}


@dataclass(frozen=True, slots=True)
class Stage:
    """What one stage takes.

    Attributes:
        hours: on one accelerator.
        disk: most bytes that it holds at a time, checkpoints included.
    """

    hours: float
    disk: float


def costs(
    config: PipelineConfig, target: float, draft: float, device: Device, share: float, prompt: int
) -> dict[str, Stage]:
    """The cost of each stage of a run.

    Args:
        config: the run.
        target: parameters of the target.
        draft: parameters of the draft.
        device: the accelerator.
        share: how much of the accelerator's peak and bandwidth is reached, in (0, 1].
        prompt: tokens of a prompt.

    Returns:
        The stages by name.

    Raises:
        SystemExit: if a prompt set has no count.
    """
    if not all(wanted.count for wanted in (*config.rollouts.sets, *config.eval.sets)):
        raise SystemExit("error: every set must have a count: without one its size is not known")

    def hours(operations: float, read: float = 0.0) -> float:
        return max(operations / device.peak, read / device.bandwidth) / share / 3600

    rows = config.rollouts.samples * sum(wanted.count for wanted in config.rollouts.sets)
    trained = config.rollouts.samples * sum(
        wanted.count for wanted in config.rollouts.sets if wanted.split == "train"
    )
    new = config.rollouts.max_new_tokens
    steps = rows * new / config.rollouts.batch_size
    decoding = hours(2 * target * rows * new, steps * HALF * target)
    stages = {
        "rollouts": Stage(decoding + hours(2 * target * rows * prompt), ROLLOUT_TOKEN * rows * new)
    }
    if config.draft:
        tokens = config.draft.epochs * trained * (prompt + new)
        # Two checkpoints, and a third while it is written; the model comes when they go.
        stages["draft"] = Stage(hours((2 * target + 6 * draft) * tokens), 3 * CHECKPOINT * draft)
    if config.head:
        stored = new * config.rollouts.samples
        stored *= sum(
            wanted.count * label_bytes(config, wanted.split) for wanted in config.rollouts.sets
        )
        forward = 2 * (target + draft) * rows * (prompt + new)
        stages["labels"] = Stage(hours(forward), stored)
        # A head that reads the state after a drafted token has the draft read that token as well.
        head = config.head
        drafted = head.draws if head.kind == "immediate" and "consumed" in head.moments else 0
        read = head.passes(trained) * trained * (prompt + new * (1 + drafted))
        stages["head"] = Stage(hours(2 * draft * read), 0)
    prompts = sum(wanted.count for wanted in config.eval.sets)
    generations = prompts * len(config.eval.methods)
    one = hours(
        2 * target, HALF * target
    )  # a token of the target alone: no method is assumed faster
    stages["eval"] = Stage(
        generations * config.eval.max_new_tokens * one, generations * GENERATION + REPORT
    )
    return stages


def main() -> None:
    """Print the table, or JSON."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument(
        "--config", default=str(REPOSITORY / "recipes/configs/vicuna-7b-68m.yaml"), help="the run"
    )
    parser.add_argument("--target", type=float, default=7e9, help="parameters of the target")
    parser.add_argument("--draft", type=float, default=68e6, help="parameters of the draft")
    parser.add_argument("--device", choices=list(DEVICES), default="A100")
    parser.add_argument("--efficiency", type=float, default=0.3, help="share of its peak reached")
    parser.add_argument("--prompt-tokens", type=int, default=128, help="tokens of a prompt")
    parser.add_argument("--out", type=Path, default=Path("runs/bench/cost.json"))
    options = parser.parse_args()
    config = parse(["--config", options.config]).config
    device = DEVICES[options.device]
    stages = costs(
        config, options.target, options.draft, device, options.efficiency, options.prompt_tokens
    )
    weights = HALF * options.target
    fits = "fits" if weights < 0.9 * device.memory else "does NOT fit"
    print(
        f"{options.target / 1e9:g}B target, {options.draft / 1e9:g}B draft, one {options.device} "
        f"at {options.efficiency:.0%} of its peak; {weights / 1e9:.0f} GB of weights: {fits}"
    )
    for name, stage in stages.items():
        print(f"  {name:<9}{stage.hours:8.1f} h {stage.disk / 1e9:8.2f} GB")
    total = sum(stage.hours for stage in stages.values())
    print(f"  {'in all':<9}{total:8.1f} h {sum(s.disk for s in stages.values()) / 1e9:8.2f} GB")
    given = {key: str(value) for key, value in vars(options).items()}
    figures = {"options": given, "stages": {name: asdict(s) for name, s in stages.items()}}
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(figures, indent=2) + "\n", "utf-8")


if __name__ == "__main__":
    main()
