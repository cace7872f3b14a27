"""Numbers as people read them."""

from __future__ import annotations


def in_bytes(count: float) -> str:
    """A number of bytes with its unit."""
    for limit, unit in ((10**9, "GB"), (10**6, "MB"), (10**3, "KB")):
        if count >= limit:
            return f"{count / limit:.1f} {unit}"
    return f"{count:.0f} bytes"


def in_seconds(seconds: float) -> str:
    """A time with its unit."""
    for limit, unit in ((86400, "days"), (3600, "h"), (60, "min")):
        if seconds >= 2 * limit:
            return f"{seconds / limit:.1f} {unit}"
    return f"{seconds:.0f} s" if seconds >= 10 else f"{seconds:.1f} s"
