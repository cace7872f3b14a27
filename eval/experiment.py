"""Measure every method on the same prompts, interleaved, and keep the raw counts.

Methods take turns on each prompt, so a machine that slows down slows them all. Finished prompts
are stored one by one: an interrupted evaluation continues with the next prompt.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from transformers import PreTrainedModel

from eval.assisted import assisted_generate
from eval.decoder import Generation, SpeculativeDecoder
from eval.environment import Environment
from eval.methods import (
    EvalConfig,
    MethodConfig,
    asks_head,
    decode_config,
    deepest,
    parameters,
)
from eval.metrics import PromptRecord, record_prompt
from eval.results import Method, Results, build_results
from eval.verifiers import VERIFIERS
from heads import AcceptanceHead
from specdata.errors import ConfigError, ManifestError
from specdata.manifest import differences
from specdata.probability import SamplingConfig
from specdata.prompts import Prompt
from specdata.seeds import generator_for, seed_for
from specdata.shards import write_json


@dataclass(frozen=True, slots=True)
class Artefacts:
    """What is evaluated: loaded models and how the report calls them."""

    target: PreTrainedModel
    draft: PreTrainedModel
    head: AcceptanceHead | None
    names: Mapping[str, str | None]


def run_experiment(
    models: Artefacts,
    prompts: Sequence[Prompt],
    folder: Path,
    config: EvalConfig,
    *,
    sampling: SamplingConfig,
    seed: int,
    environment: Environment,
    report: Callable[[int], object],
) -> Results:
    """Decode every prompt with every method.

    Args:
        models: what is measured.
        prompts: of all data sets.
        folder: raw records go to `folder/prompts/`, one file a prompt.
        config: methods and sizes.
        sampling: the law of both models.
        seed: each prompt's draws depend on it and on the prompt, not on the method.
        environment: where this runs, for the results.
        report: called with the number of generations done.

    Returns:
        The results, ready to be written.
    """
    runners = {
        method.name: _runner(models, method, config, sampling, seed) for method in config.methods
    }
    store = _Store(folder / "prompts", config, sampling, seed, environment)
    if not all(store.has(prompt) for prompt in prompts):
        for run in runners.values():
            run(prompts[0], config.warmup_tokens)
    measured: dict[tuple[str, str], list[PromptRecord]] = {}
    names = list(runners)
    for turn, prompt in enumerate(prompts):
        if not store.has(prompt):
            # Another method goes first each time, so none profits from its place.
            first = turn % len(names)
            order = names[first:] + names[:first]
            records = {}
            for name in order:
                out = runners[name](prompt, config.max_new_tokens)
                records[name] = record_prompt(
                    prompt.example_id, out.rounds, seconds=out.seconds, finish=out.finish
                )
                report(1)
            store.put(prompt, records)
        else:
            report(len(names))
        for name, record in store.get(prompt).items():
            measured.setdefault((prompt.dataset, name), []).append(record)
    datasets = list(dict.fromkeys(prompt.dataset for prompt in prompts))
    rows = [
        (
            _describe(method, models, dataset, config, sampling, seed),
            measured[dataset, method.name],
        )
        for dataset in datasets
        for method in config.methods
    ]
    return build_results(environment, rows)


def _runner(
    models: Artefacts,
    method: MethodConfig,
    config: EvalConfig,
    sampling: SamplingConfig,
    seed: int,
) -> Callable[[Prompt, int], Generation]:
    if method.engine == "transformers":
        return lambda prompt, budget: assisted_generate(
            models.target,
            models.draft,
            torch.tensor(prompt.ids),
            length=method.length,
            sampling=sampling,
            max_new_tokens=budget,
            seed=seed_for(seed, "eval", prompt.example_id),
        )
    draft = None if method.engine == "plain" else models.draft
    decoder = SpeculativeDecoder.from_config(
        models.target,
        draft,
        decode_config(method, sampling),
        models.head if asks_head(method) else None,
    )
    return lambda prompt, budget: decoder.generate(
        torch.tensor(prompt.ids),
        max_new_tokens=budget,
        generator=generator_for(seed, "eval", prompt.example_id),
    )


def _describe(
    method: MethodConfig,
    models: Artefacts,
    dataset: str,
    config: EvalConfig,
    sampling: SamplingConfig,
    seed: int,
) -> Method:
    drafts, untuned = method.engine != "plain", method.stop in ("fixed", "cost")
    ours = method.engine == "draft"
    return Method(
        method=method.name,
        dataset=dataset,
        target=str(models.names["target"]),
        draft=models.names["draft"] if drafts else None,
        head=models.names["head"] if asks_head(method) else None,
        drafter={"plain": None, "draft": method.drafter, "transformers": "transformers"}[
            method.engine
        ],
        verifier=method.verifier if ours else None,
        stop=method.stop if drafts else None,
        length=deepest(method) if drafts else None,
        threshold=None if untuned or not drafts else method.threshold,
        sampling={**asdict(sampling), "max_new_tokens": config.max_new_tokens, "seed": seed},
        parameters=parameters(method),
        lossless=not ours or VERIFIERS[method.verifier].lossless,
    )


class _Store:
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
        return self._path(prompt).exists()

    def put(self, prompt: Prompt, records: Mapping[str, PromptRecord]) -> None:
        rows = {name: asdict(record) for name, record in records.items()}
        write_json(self._path(prompt), {"settings": self._settings, "records": rows})

    def get(self, prompt: Prompt) -> dict[str, PromptRecord]:
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
