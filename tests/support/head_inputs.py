"""What several files of tests use of `test_head_inputs`."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Drawn:
    """A drafted token, as stopping rules see it."""

    token: int
    distribution: Tensor
    state: Tensor | None
    embeddings: Tensor | None = None

    def embed(self, ids: Tensor) -> Tensor | None:
        return None if self.embeddings is None else self.embeddings[ids]


HIDDEN, EMBEDDING, IDS = 12, 8, 20


def drafted_tokens(
    seed: int,
    count: int = 4,
    dtype: torch.dtype = torch.float32,
    sizes: tuple[int, int, int] = (IDS, HIDDEN, EMBEDDING),
) -> list[Drawn]:
    """Tokens of a draft; some of their distributions have ties and zeros."""
    ids, hidden, embedding = sizes
    generator = torch.Generator().manual_seed(seed)
    embeddings = torch.randn(ids, embedding, generator=torch.Generator().manual_seed(0))
    drawn = []
    for _ in range(count):
        logits = torch.randn(ids, generator=generator).mul(2).round(decimals=seed % 2)
        if seed % 3 == 0:
            logits[logits < logits.topk(1 + seed % 4).values[-1]] = -torch.inf
        q = logits.to(torch.promote_types(dtype, torch.float32)).softmax(-1)
        token = int(torch.multinomial(q, 1, generator=generator))
        state = torch.randn(hidden, generator=generator).to(dtype)
        drawn.append(Drawn(token, q, state, embeddings.to(dtype)))
    return drawn
