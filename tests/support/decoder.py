"""What several files of tests use of `test_decoder`."""

import torch

from heads import AcceptanceHead

PROMPT = [2, 3]


def head(width: int = 16) -> AcceptanceHead:
    torch.manual_seed(5)
    made = AcceptanceHead(hidden_size=width, depth=1).eval()
    # A random head hardly varies; this one stops after one to four tokens.
    torch.nn.init.normal_(made.output.weight, std=2.0)
    return made
