"""What several files of tests use of `test_distill`."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(scope="module")
def pair(trained_pair: Path) -> Path:
    return trained_pair
