"""Which of the launcher's processes this is: torchrun's and accelerate's environment, no group."""

from __future__ import annotations

import os


def process_count() -> int:
    """How many processes the launcher started, on all nodes."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def is_main() -> bool:
    """Whether this is the process that writes run.json and prints."""
    return int(os.environ.get("RANK", "0")) == 0
