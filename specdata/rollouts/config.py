"""Configuration of the rollouts stage: importable without torch or transformers."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from specdata.errors import ConfigError, at_least_one
from specdata.prompts.config import PromptSet
from specdata.sampling import SamplingConfig

BACKENDS = ("transformers", "vllm")


@dataclass(frozen=True, slots=True)
class VllmConfig:
    """Where the server is, and how it is asked."""

    url: str = field(default="http://localhost:8000", metadata={"help": "address of the server"})
    model: str | None = field(
        default=None, metadata={"help": "name it is served under (default: models.target)"}
    )
    concurrency: int = field(default=64, metadata={"help": "requests under way at once"})
    timeout: float = field(default=600.0, metadata={"help": "seconds that one request may take"})
    retries: int = field(
        default=6, metadata={"help": "tries of a request, 1, 2, 4 ... seconds apart"}
    )
    key_variable: str | None = field(
        default=None, metadata={"help": "environment variable that holds the server's API key"}
    )

    def __post_init__(self) -> None:
        at_least_one(self, "rollouts.vllm", "concurrency", "retries")
        if not self.url.startswith(("http://", "https://")) or self.timeout <= 0:
            raise ConfigError(
                "rollouts.vllm needs a url such as http://localhost:8000 and a timeout above 0, "
                f"got {self.url!r} and {self.timeout}"
            )


@dataclass(frozen=True, slots=True)
class RolloutConfig:
    """Which prompts are completed, how far, and by what."""

    sets: list[PromptSet] = field(metadata={"help": "prompt sets to complete"})
    max_new_tokens: int = field(default=128, metadata={"help": "longest completion, in tokens"})
    samples: int = field(default=1, metadata={"help": "completions of each prompt"})
    shard_size: int = field(
        default=64, metadata={"help": "prompts of one shard, which is made or lost as a whole"}
    )
    batch_size: int = field(default=64, metadata={"help": "completions decoded together"})
    backend: str = field(
        default="transformers",
        metadata={"help": "transformers (in this process) or vllm (a server in its own)"},
    )
    vllm: VllmConfig = field(
        default_factory=VllmConfig, metadata={"help": "the server of backend vllm"}
    )

    def __post_init__(self) -> None:
        at_least_one(self, "rollouts", "max_new_tokens", "samples", "shard_size", "batch_size")
        if self.backend not in BACKENDS:
            raise ConfigError(
                f"rollouts.backend must be one of {', '.join(BACKENDS)}, got {self.backend!r}"
            )

    def decisive(self) -> dict[str, Any]:
        """What the rows depend on; the address of a server, say, may change on resume."""
        settings = asdict(self)
        del settings["vllm"]
        if self.backend == "vllm":
            del settings["batch_size"]
        return settings


def check_samples(config: RolloutConfig, sampling: SamplingConfig) -> None:
    """Raise ConfigError for several samples of a distribution that always gives the same one."""
    if config.samples > 1 and sampling.temperature == 0:
        raise ConfigError(
            f"rollouts.samples is {config.samples}, but at temperature 0 every sample of a prompt "
            "is the same: set samples to 1, or a temperature above 0"
        )
