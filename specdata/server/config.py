"""Where a server is, and how it is asked: importable without torch or transformers."""

from __future__ import annotations

import re
from urllib.parse import urlsplit

from pydantic import Field, field_validator

from specdata.config import Config, Few


class ServerConfig(Config):
    """Where the server is, and how it is asked."""

    url: str = Field(
        default="http://localhost:8000",
        description="address of the server, such as http://localhost:8000, without a password",
    )
    model: str | None = Field(
        default=None, description="name it is served under (default: models.target)"
    )
    concurrency: Few = Field(default=64, ge=1, description="requests under way at once")
    key_variable: str | None = Field(
        default=None,
        description="environment variable that holds the server's API key (or all that its "
        "Authorization header must say, such as `Basic ...`)",
    )

    @field_validator("url")
    @classmethod
    def _is_public(cls, url: str) -> str:
        """Refuse an address that may hold a secret, without repeating it: run.json stores it."""
        if re.search(r"[@?#\s]", url):
            raise ValueError(
                "must be an address alone, such as http://localhost:8000: it is stored and shown, "
                "so it must hold no name, password or query (no @, ?, # or space). Put the key "
                "into an environment variable and name that in key_variable, beside url"
            )
        parts = urlsplit(url)  # ValueError for an IPv6 address or a port that is none
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.port == 0:
            raise ValueError(f"must begin with http:// or https:// and a host (got {url!r})")
        return url
