"""Stop when a small network on five numbers of the draft predicts a rejection.

What can be known without a hidden state: the rival that tells what an acceptance head's inputs are
worth beyond numbers that the draft has already computed.
"""

from __future__ import annotations

import base64
import binascii
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Self

import numpy as np
from pydantic import Field, field_validator

from eval.drafting.stopping.rule import (
    ActiveRule,
    AdaptiveRule,
    Features,
    PrefixAcceptanceRule,
    largest,
)

if TYPE_CHECKING:
    from eval.drafting.stopping.recorded import Lengths, Reals, RecordedTokens
    from heads import BaseHead

READS = ("log_q", "log_q_max", "margin", "entropy", "log_mass_above")
"""The network's inputs for a drafted token: names in `heads.inputs.FEATURES`."""
WIDTH = 16
SHAPES = ((WIDTH, len(READS)), (WIDTH,), (WIDTH, WIDTH), (WIDTH,), (1, WIDTH), (1,))
"""Of the weights and biases of the three layers, in the order in which they are written."""
STEPS, BATCH, LEARNING_RATE = 1000, 1024, 1e-2
LEAST_SPREAD = 1e-3
"""Standard deviation of a number that tells tokens apart."""


@dataclass(frozen=True, slots=True)
class Network:
    """Three layers with SiLU between them, from the numbers of a token to acceptance odds.

    Attributes:
        weights: of the shapes in `SHAPES`.
    """

    weights: tuple[Reals, ...]

    def accept(self, numbers: Reals) -> Reals:
        """Acceptance probabilities of tokens, (..., 5) -> (...)."""
        from scipy.special import expit

        first, bias_1, second, bias_2, last, bias_3 = self.weights
        hidden = numbers @ first.T + bias_1
        hidden = hidden * expit(hidden)
        hidden = hidden @ second.T + bias_2
        hidden = hidden * expit(hidden)
        return np.asarray(expit(hidden @ last.T + bias_3)[..., 0])

    def written(self) -> str:
        """The weights as text: base64 of their half-precision values, little endian."""
        flat = np.concatenate([part.ravel() for part in self.weights]).astype("<f2")
        return base64.b64encode(flat.tobytes()).decode("ascii")

    @classmethod
    def read(cls, text: str) -> Self:
        """The network that was written so.

        Raises:
            ValueError: if the text is not that of a network.
        """
        sizes = [int(np.prod(shape)) for shape in SHAPES]
        try:
            flat = np.frombuffer(base64.b64decode(text, validate=True), dtype="<f2")
        except (binascii.Error, ValueError):
            flat = np.zeros(0)
        if len(flat) != sum(sizes) or not np.isfinite(flat).all():
            raise ValueError(
                f"network must be base64 of {sum(sizes)} finite half-precision numbers, as an "
                f"evaluation writes it; got {text[:40]!r}: leave it out to have it fitted"
            )
        parts = np.split(flat.astype(np.float64), np.cumsum(sizes)[:-1])
        return cls(tuple(part.reshape(shape) for part, shape in zip(parts, SHAPES, strict=True)))


class Numbers(AdaptiveRule):
    """End once a network on numbers gives a rejection more probability than `threshold`.

    Stop when 1 - prod_i P_i > threshold, P_i of the token's log q, the draft's largest log q, its
    top-2 margin, its entropy and the log of the mass of more probable tokens. An evaluation fits
    the network on the run's labels in seconds (385 weights; it depends on the labels alone); a
    decoder that is given none takes max q for P, like an unfitted `logit`. A lower threshold stops
    earlier: 1 never stops.
    """

    name: ClassVar[str] = "numbers"
    fitted: ClassVar[tuple[str, ...]] = ("network",)

    threshold: float = Field(
        default=0.7,
        ge=0.0,
        le=1.0,
        description="stop once a rejection has more probability, by the network",
    )
    network: str | None = Field(
        default=None,
        description="the network's weights, as an evaluation writes them; it fits them on the "
        "run's labels unless they are given",
    )

    @field_validator("network")
    @classmethod
    def _check(cls, network: str | None) -> str | None:
        if network is not None:
            Network.read(network)
        return network

    @classmethod
    def fit(cls, tokens: RecordedTokens, accept: Reals) -> dict[str, Any]:
        """The network with the least binary cross-entropy on the labels."""
        numbers = recorded_numbers(tokens)
        if numbers is None:
            raise ValueError("numbers of the drafted tokens are needed and were not recorded")
        return {"network": fit_network(numbers[tokens.inside], accept[tokens.inside]).written()}

    def recorded_lengths(self, tokens: RecordedTokens) -> Lengths | None:
        """Until a rejection is too probable by the network."""
        from eval.drafting.stopping.recorded import until_product_below

        estimates = tokens.q_max
        if self.network is not None:
            numbers = recorded_numbers(tokens)
            if numbers is None:
                return None
            estimates = Network.read(self.network).accept(numbers)
        return until_product_below(tokens, estimates, 1.0 - self.threshold, limit=self.limit)

    def start(self, head: BaseHead | None) -> ActiveRule:
        """Multiply the network's acceptance probabilities of a round's tokens."""
        return _NetworkModel(self)


class _NetworkModel(PrefixAcceptanceRule):
    def __init__(self, rule: Numbers) -> None:
        self.network = None if rule.network is None else Network.read(rule.network)
        reads = largest if self.network is None else Features(READS)
        super().__init__(rule.limit, reads, rule.threshold)

    def accept(self, numbers: tuple[float, ...]) -> float:
        if self.network is None:
            return numbers[0]
        return float(self.network.accept(np.array(numbers)))


def fit_network(numbers: Reals, accept: Reals) -> Network:
    """Fit the network to labels, the same each time.

    AdamW with a warm-up and a cosine, over batches that are drawn with replacement. Seconds on a
    CPU.

    Args:
        numbers: (n, 5), in the order of `READS`; n is at least 1.
        accept: (n,) min(1, p/q) of the tokens.
    """
    import torch
    from torch import nn

    inputs = torch.from_numpy(numbers).float()
    labels = torch.from_numpy(accept).float().clamp(0.0, 1.0)
    mean, spread = inputs.mean(dim=0), inputs.std(dim=0, correction=0)
    # A number that does not vary (greedy drafts: all of them) gets no weight, which half precision
    # would multiply with its mean.
    spread = torch.where(spread < LEAST_SPREAD, torch.inf, spread)
    inputs = (inputs - mean) / spread
    with torch.random.fork_rng(devices=[]), torch.enable_grad():
        torch.manual_seed(0)
        layers = nn.Sequential(
            nn.Linear(len(READS), WIDTH),
            nn.SiLU(),
            nn.Linear(WIDTH, WIDTH),
            nn.SiLU(),
            nn.Linear(WIDTH, 1),
        )
        optimizer = torch.optim.AdamW(layers.parameters(), lr=LEARNING_RATE, weight_decay=1e-3)
        schedule = torch.optim.lr_scheduler.OneCycleLR(
            optimizer, LEARNING_RATE, total_steps=STEPS, pct_start=0.1
        )
        for _ in range(STEPS):
            chosen = torch.randint(len(inputs), (BATCH,))
            odds = layers(inputs[chosen]).squeeze(-1)
            loss = nn.functional.binary_cross_entropy_with_logits(odds, labels[chosen])
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            schedule.step()
    first, bias, *others = (part.detach() for part in layers.parameters())
    # The network reads the numbers as they are: standardising them is part of its first layer.
    first = first / spread
    weights = (first, bias - first @ mean, *others)
    return Network(tuple(part.double().numpy() for part in weights))


def recorded_numbers(tokens: RecordedTokens) -> Reals | None:
    """(R, N, 5), in the order of `READS`; None if some were not recorded."""
    from heads.inputs import LEAST_CHANCE, LEAST_MASS

    if tokens.margin is None or tokens.entropy is None or tokens.log_mass_above is None:
        return None
    log_q, log_q_max = (np.log(q.clip(LEAST_CHANCE)) for q in (tokens.q, tokens.q_max))
    above = np.log(np.exp(tokens.log_mass_above) + LEAST_MASS)  # as heads read it
    columns = (log_q, log_q_max, tokens.margin, tokens.entropy, above)
    return np.stack(columns, axis=-1)
