"""Settings for every test: offline, quiet, one thread a process unless a test says otherwise."""

from __future__ import annotations

import os
from collections import Counter

import pytest

os.environ["HF_HUB_OFFLINE"] = "1"
# Tests run side by side; bit-for-bit comparisons need the same number everywhere.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put files with many slow tests first, so that no process waits for another's last file."""
    slow = Counter(item.path for item in items if item.get_closest_marker("slow"))
    items.sort(key=lambda item: -slow[item.path])
