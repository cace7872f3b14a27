"""Raw records of finished prompts on disk: an interrupted evaluation goes on with the next."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

from eval.measuring.environment import Environment
from eval.measuring.methods import EvalConfig
from eval.measuring.records import PromptRecord
from specdata.errors import ConfigError, ManifestError
from specdata.probability import SamplingConfig
from specdata.prompts.loading import Prompt
from specdata.storage.files import write_json
from specdata.storage.manifest import differences


class RecordStore:
    """Raw records of finished prompts, one JSON file a prompt, with what they were made with."""

    def __init__(
        self,
        folder: Path,
        config: EvalConfig,
        sampling: SamplingConfig,
        seed: int,
        environment: Environment,
    ) -> None:
        self._folder = folder
        settings = {
            "methods": {method.name: asdict(method) for method in config.methods},
            "max_new_tokens": config.max_new_tokens,
            "engine": config.engine,
            "batch": config.batch,
            "sampling": asdict(sampling),
            "seed": seed,
            # Times of two machines must not end up in one table.
            "hardware": environment.hardware,
            "device": environment.device,
            "dtype": environment.dtype,
        }
        self._settings = json.loads(json.dumps(settings))

    def _path(self, prompt: Prompt) -> Path:
        return self._folder / f"{prompt.dataset}-{prompt.example_id}.json"

    def has(self, prompt: Prompt) -> bool:
        """Whether this prompt is done."""
        return self._path(prompt).exists()

    def put(self, prompt: Prompt, records: Mapping[str, PromptRecord]) -> None:
        """Keep the records of a prompt, one a method: all of them or none."""
        rows = {name: asdict(record) for name, record in records.items()}
        write_json(self._path(prompt), {"settings": self._settings, "records": rows})

    def get(self, prompt: Prompt) -> dict[str, PromptRecord]:
        """Method -> record of a prompt that is done.

        Raises:
            ManifestError: if the file is damaged.
            ConfigError: if it was made with other settings, or on another machine.
        """
        path = self._path(prompt)
        try:
            stored = json.loads(path.read_text(encoding="utf-8"))
            records = {
                name: PromptRecord(**stored["records"][name]) for name in self._settings["methods"]
            }
            before = stored["settings"]
        except (ValueError, KeyError, TypeError) as error:
            raise ManifestError(
                f"{path} is damaged ({error!r}): remove it, and run again"
            ) from error
        if changed := differences(before, self._settings):
            raise ConfigError(
                f"{self._folder} holds measurements made with other settings; choose another "
                "output folder or remove it. Stored -> asked:\n  " + "\n  ".join(changed)
            )
        return records
