"""Names of models and data sets on the Hugging Face Hub."""

from __future__ import annotations

from pathlib import Path


def hub_source(name: str) -> tuple[str, str | None]:
    """Split OWNER/NAME@REVISION; anything that exists here is a folder, whatever its name."""
    source, at, revision = name.partition("@")
    return (source, revision) if at and not Path(name).exists() else (name, None)
