"""Times of the parts of a round."""

from __future__ import annotations

import time

import torch


class Stopwatch:
    """Seconds between laps.

    Args:
        device: where forwards run; work that was asked of a GPU is waited for, so that its time
            counts in the lap in which it was asked for.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._last = self._now()

    def _now(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter()

    def lap(self) -> float:
        """Seconds since the last lap, or since the start."""
        now = self._now()
        seconds, self._last = now - self._last, now
        return seconds
