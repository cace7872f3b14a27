"""What is known of a draft's training: its steps, and what was measured of it meanwhile.

Kept with the model as `history.json`; trainings write it, the report draws it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from specdata.errors import ManifestError
from specdata.storage.files import write_json

HISTORY = "history.json"


@dataclass(frozen=True, slots=True)
class Figures:
    """Means over completion positions of held-out rollouts.

    Attributes:
        positions: how many.
        acceptance: of sum_x min(p, q), the probability that a drafted token is accepted.
        kl: of KL(p || q) in nats, over the tokens that the draft can propose.
        expected_tokens: of a round that starts there, by verification and tokens drafted, such as
            "token_4" and "block_8" (`specdata.expected_tokens`).
    """

    positions: int
    acceptance: float
    kl: float
    expected_tokens: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class PositionFigures:
    """Mean acceptance of the completions' tokens `first` to `last`, counted from 1."""

    first: int
    last: int
    positions: int
    acceptance: float


@dataclass(frozen=True, slots=True)
class Measurement:
    """A draft on held-out rollouts.

    Attributes:
        step: optimizer steps taken before.
        rollouts: how many were read.
        overall: over all positions.
        sets: the same of each prompt set.
        by_position: acceptance by position in the completion.
    """

    step: int
    rollouts: int
    overall: Figures
    sets: Mapping[str, Figures]
    by_position: tuple[PositionFigures, ...]


@dataclass(frozen=True, slots=True)
class LoggedStep:
    """Means since the entry before, as the Trainer logs them; None where it does not.

    Attributes:
        step: optimizer steps taken.
        loss: the objective.
        grad_norm: norm of the gradient before it is clipped, at this step.
        learning_rate: at this step.
        tokens: that the draft has read so far, prompts included.
        tokens_per_second: read in a second of training, measurements and checkpoints left out.
    """

    step: int
    loss: float
    grad_norm: float | None = None
    learning_rate: float | None = None
    tokens: int | None = None
    tokens_per_second: float | None = None


@dataclass(frozen=True, slots=True)
class History:
    """The whole file.

    Attributes:
        steps: what was logged, in order.
        measurements: on the rollouts that are watched while training, in order.
        before: on all held-out rollouts, before the first step.
        after: the same, of the weights that were kept.
        kept_step: optimizer steps after which the kept weights were reached.
        kept_by: which figure decided, in words; None if the last weights are kept whatever it is.
    """

    steps: tuple[LoggedStep, ...] = ()
    measurements: tuple[Measurement, ...] = ()
    before: Measurement | None = None
    after: Measurement | None = None
    kept_step: int | None = None
    kept_by: str | None = None

    def write(self, folder: Path) -> None:
        """Write it into a model's folder, whole or not at all."""
        write_json(folder / HISTORY, asdict(self))


def read_history(folder: Path) -> History | None:
    """The history in a model's folder; None if it holds none, as of earlier versions.

    Raises:
        ManifestError: if it is damaged.
    """
    path = folder / HISTORY
    if not path.is_file():
        return None
    try:
        return TypeAdapter(History).validate_python(json.loads(path.read_text("utf-8")))
    except (ValueError, ValidationError) as error:
        raise ManifestError(
            f"{path} is damaged ({str(error).splitlines()[0]}): remove it, and the training's "
            "curves are left out of the report"
        ) from error
