"""The head for trees: what the target will draw, of the draft's most probable tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from heads.inputs import DecisionPoint, HeadInputs, token_embeddings
from heads.model import BaseHead
from specdata.probability import SamplingConfig

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Reals = NDArray[np.float32]
EPSILON = 1e-6
LARGEST = 80.0
"""Of which float32 has the exponential."""
LEAST_LOG_Q = -16.0
"""Log-probabilities below are read as this one; a token never proposed has -inf."""
SCALE = 4.0
"""What log-probabilities are divided by: about their standard deviation."""


class CandidatesHead(BaseHead):
    """Predict the target's probability of each of the draft's m most probable tokens at once.

    One of them at most is drawn, so the probabilities are a softmax over the m and the rest of the
    vocabulary, and sum to less than 1. A candidate's score is its log-probability under the draft,
    times a learned factor, and what one hidden layer adds to it: that reads the sum of three maps,
    of the draft's state before the token with all m log-probabilities, of the candidate's input
    embedding, and of its rank. The first is asked once a position and the second is a row of a
    table, so a level of a tree is one question of a few operations (`Ranker`). Deeper networks were
    not better.

    Candidates are ranked, and their log-probabilities taken, by the draft's unwarped distribution;
    labels are the target's under the sampler. So the head also learns what a low temperature or a
    small nucleus makes of a near miss.

    Args:
        hidden_size: H, the width of the draft's hidden state.
        candidates: m, as many as its labels hold.
        embedding_size: E, the width of the draft's input embedding; 0 means H.
        width: W of the hidden layer.
        draft: name or path of the draft whose hidden states the head reads.
        sampling: temperature, top_k and top_p under which its labels were made.
        probe: values of that draft's hidden states; see `heads.probe`.

    Raises:
        ValueError: if a size is out of range.
    """

    kind: ClassVar[str] = "candidates"
    required = ("hidden_size", "candidates")
    reads = ("hidden_before", "embedding", "log_q")
    decision_points = (DecisionPoint.DRAWN,)
    rejection_weight = 1.0
    reads_sampling = SamplingConfig()
    depth = 1

    def __init__(
        self,
        *,
        hidden_size: int,
        candidates: int,
        embedding_size: int = 0,
        width: int = 128,
        draft: str | None = None,
        sampling: dict[str, Any] | None = None,
        probe: Sequence[float] | None = None,
    ) -> None:
        if min(hidden_size, candidates, width) < 1 or embedding_size < 0:
            raise ValueError(
                "a head needs hidden_size, candidates and width of 1 or more and embedding_size of "
                f"0 or more, got {hidden_size}, {candidates}, {width} and {embedding_size}"
            )
        super().__init__()
        self.hidden_size = hidden_size
        self.embedding_size = embedding_size or hidden_size
        self.candidates = candidates
        self.width = width
        self.draft = draft
        self.sampling = sampling
        self.probe = probe
        self.state_norm = nn.RMSNorm(hidden_size, eps=EPSILON)
        self.state = nn.Linear(hidden_size, width)
        self.numbers = nn.Linear(candidates, width, bias=False)
        self.token_norm = nn.RMSNorm(self.embedding_size, eps=EPSILON)
        self.token = nn.Linear(self.embedding_size, width, bias=False)
        self.rank = nn.Parameter(torch.zeros(candidates, width))
        self.output = nn.Linear(width, 1)
        self.factor = nn.Parameter(torch.ones(()))
        nn.init.zeros_(self.output.weight)  # begins as the draft's own ranking

    def forward(self, hidden_before: Tensor, embedding: Tensor, log_q: Tensor) -> Tensor:
        """Return logits whose sigmoid is the target's probability of each candidate.

        Args:
            hidden_before: (..., 1 or m, H) the draft's last hidden state before the token.
            embedding: (..., m, E) its input embeddings of the candidates.
            log_q: (..., m) their log-probabilities under the draft, falling.

        Returns:
            (..., m) logits.

        Raises:
            ValueError: for another number of candidates, or vectors of another width.
        """
        sizes = hidden_before.shape[-1], embedding.shape[-1], log_q.shape[-1]
        own = self.hidden_size, self.embedding_size, self.candidates
        if sizes != own:
            raise ValueError(
                f"this head reads states and embeddings of width {own[0]} and {own[1]}, of "
                f"{own[2]} candidates; got {sizes[0]} and {sizes[1]}, of {sizes[2]}; it was "
                f"trained for the draft {self.draft or '(not recorded)'}"
            )
        dtype = self.factor.dtype
        # Autocast would quietly run the layers in half precision.
        with torch.autocast(log_q.device.type, enabled=False):
            log_q = log_q.to(dtype).clamp(min=LEAST_LOG_Q)
            state = self.state(self.state_norm(hidden_before[..., 0, :].to(dtype)))
            here = (state + self.numbers(log_q / SCALE)).unsqueeze(-2)
            x = nn.functional.silu(here + self.of_tokens(embedding) + self.rank)
            scores = self.output(x).squeeze(-1) + self.factor * log_q
            # log p - log(1 - p) of a softmax over the candidates and the rest, whose score is 0.
            others = scores.unsqueeze(-2).expand(*scores.shape, self.candidates)
            own_score = torch.eye(self.candidates, dtype=torch.bool, device=scores.device)
            others = others.masked_fill(own_score, float("-inf"))
            logits: Tensor = scores - nn.functional.pad(others, (0, 1)).logsumexp(dim=-1)
        return logits

    def of_tokens(self, embedding: Tensor) -> Tensor:
        """(..., W) what the hidden layer reads of tokens with these input embeddings, (..., E)."""
        x: Tensor = self.token(self.token_norm(embedding.to(self.token.weight.dtype)))
        return x

    def logits(self, inputs: HeadInputs) -> Tensor:
        """Return the logits of candidates; see `BaseHead.logits`. The last dimension is theirs."""
        logits: Tensor = self(*(inputs[name] for name in self.reads))
        return logits


class Ranker:
    """Asks a head about the children of a tree's level, all at once, in numpy.

    A level of five nodes is thousands of multiplications, for which torch's calls take twice as
    long as the arithmetic. `tests/test_candidates_head.py` holds it equal to `forward`.

    Args:
        head: the head; its weights are copied, and the norm's folded into what follows.
        embeddings: (V, E) the draft's input embeddings of the target's tokens, of which the head's
            part is computed once: V x W numbers.
    """

    @torch.no_grad()
    def __init__(self, head: CandidatesHead, embeddings: Tensor) -> None:
        self.candidates = head.candidates
        self._table = _array(head.of_tokens(embeddings))
        self._state = _array((head.state.weight * head.state_norm.weight).T)
        self._numbers = _array(head.numbers.weight.T / SCALE)
        self._rank = _array(head.rank + head.state.bias)
        self._output, self._bias = _array(head.output.weight[0]), float(head.output.bias)
        self._factor = float(head.factor)

    @classmethod
    def of(cls, head: CandidatesHead, draft: PreTrainedModel, vocabulary: int) -> Ranker:
        """For a draft, and the V tokens of its target."""
        ids = torch.arange(vocabulary, device=draft.device)
        return cls(head.to(draft.device), token_embeddings(draft, ids))

    def __call__(self, states: Tensor, q: Tensor, ids: Tensor) -> Reals:
        """(n, m) the target's probabilities, as the head predicts them.

        Args:
            states: (n, H) the draft's state at each of n nodes.
            q: (n, m) the draft's probabilities of its m most probable tokens there, falling.
            ids: (n, m) these tokens.
        """
        state, chances = _array(states), _array(q)
        with np.errstate(divide="ignore"):
            log_q = np.maximum(np.log(chances), LEAST_LOG_Q)
        norm = np.sqrt(np.einsum("nh,nh->n", state, state) / state.shape[1] + EPSILON)
        here = (state @ self._state) / norm[:, None] + log_q @ self._numbers
        x = self._table[ids.cpu().numpy()]
        x += here[:, None]
        x += self._rank
        x /= 1.0 + np.exp(np.minimum(-x, LARGEST))  # SiLU
        scores = x @ self._output + (self._factor * log_q + self._bias)
        scores = np.exp(np.minimum(scores, LARGEST))
        found: Reals = scores / (1.0 + scores.sum(axis=1, keepdims=True))
        return found


def _array(values: Tensor) -> Reals:
    return np.ascontiguousarray(values.detach().float().cpu().numpy())
