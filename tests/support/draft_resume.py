"""What several files of tests use of `test_draft_resume`."""

from pathlib import Path
from typing import Any

from distill.config import FinetuneConfig, LoraConfig
from distill.finetune import finetune
from tests.support.random_pair import texts_of
from tests.support.trainings import changed

TUNING = FinetuneConfig(epochs=1.5, max_length=256, batch_size=3, learning_rate=5e-3)


def tuned(pair: Path, out: Path, changes: dict[str, Any]) -> None:
    """Fine-tune the draft of a pair on 48 rollouts: 24 steps."""
    lora = changes.get("lora")
    finetune(
        target=pair / "target",
        draft=pair / "draft",
        rollouts=texts_of(pair, 48, seed=1),
        out=out,
        config=changed(TUNING, **changes.get("finetune", {})),
        lora=None if lora is None else LoraConfig(**lora),
        seed=0,
        save_steps=4,
    )
