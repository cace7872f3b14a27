"""Settings for every test: offline, quiet, one thread a process unless a test says otherwise."""

from __future__ import annotations

import os

os.environ["HF_HUB_OFFLINE"] = "1"
# Tests run side by side; bit-for-bit comparisons need the same number everywhere.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")
