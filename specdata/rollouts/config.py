"""Configuration of the rollouts stage: importable without torch or transformers."""

from __future__ import annotations

from typing import Any, Literal, Self

from pydantic import Field, model_validator

from specdata.config import Config, Count, Few
from specdata.prompts.config import PromptSet
from specdata.server.config import ServerConfig


class RolloutConfig(Config):
    """Which prompts are completed, how far, and by what."""

    sets: list[PromptSet] = Field(description="prompt sets to complete")
    max_new_tokens: Count = Field(default=128, ge=1, description="longest completion, in tokens")
    samples: Few = Field(default=1, ge=1, description="completions of each prompt")
    shard_size: Count = Field(
        default=64, ge=1, description="prompts of one shard, which is made or lost as a whole"
    )
    batch_size: Count = Field(default=64, ge=1, description="completions decoded together")
    store_states: bool = Field(
        default=False,
        description="store the target's last hidden states with the completions (hidden size x "
        "bytes of a number, a token), so that neither distillation nor labels run the target again",
    )
    store_taps: list[int] | None = Field(
        default=None,
        min_length=1,
        description="store these states inside the target at every token, prompts included (2 x "
        "hidden size bytes each), for a draft of init.kind states with the same taps: then no "
        "training runs the target again; 0 enters the first layer",
    )
    backend: Literal["transformers", "vllm"] = Field(
        default="transformers",
        description="transformers (in this process) or vllm (a server in its own)",
    )
    vllm: ServerConfig = Field(default=ServerConfig(), description="the server of backend vllm")

    @model_validator(mode="after")
    def _states_are_known(self) -> Self:
        if self.store_taps is not None and self.store_taps != sorted(set(self.store_taps)):
            raise ValueError(f"store_taps must be in order, each once, got {self.store_taps}")
        if (self.store_states or self.store_taps) and self.backend != "transformers":
            raise ValueError(
                "store_states and store_taps need backend transformers, got "
                f"{self.backend}: a server does not give its hidden states"
            )
        return self

    def stored_settings(self) -> dict[str, Any]:
        """The settings that the rows depend on, as JSON values.

        The server's address and the like are left out, because they may change on resume.
        """
        settings = self.model_dump(mode="json", exclude={"vllm"})
        if self.backend == "vllm":
            del settings["batch_size"]
        return settings
