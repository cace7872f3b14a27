"""Configuration of the logits stage: importable without torch or transformers."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from specdata.config import Config, Count
from specdata.server.config import ServerConfig


class LogitsConfig(Config):
    """The logits that are stored of the target along the rollouts, and what computes them."""

    top_logits: Count = Field(
        default=64, ge=1, description="largest target top logits stored a position (N)"
    )
    shard_size: Count = Field(default=64, ge=1, description="rollouts of one shard")
    backend: Literal["transformers", "vllm"] = Field(
        default="transformers",
        description="transformers (the target in this process), or vllm (a server in its own, "
        "which computes log probabilities of given texts)",
    )
    server: ServerConfig = Field(default=ServerConfig(), description="the server of backend vllm")

    def stored_settings(self) -> dict[str, Any]:
        """The settings that the rows depend on, as JSON values.

        The server's address and the like are left out, because they may change on resume.
        """
        return self.model_dump(mode="json", exclude={"server"})
