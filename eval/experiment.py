"""Measure every method on the same prompts, interleaved, and keep the raw counts.

Methods take turns on each prompt, so a machine that slows down slows them all. Finished prompts
are stored one by one: an interrupted evaluation continues with the next prompt.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from transformers import PreTrainedModel

from eval.assisted import assisted_generate
from eval.decode_config import DecodeConfig, Shape, Siblings, Stop
from eval.decoder import Generation, SpeculativeDecoder
from eval.environment import Environment
from eval.metrics import PromptRecord, record_prompt
from eval.results import PLAIN, Method, Results, build_results
from eval.verifiers import VERIFIERS
from heads import AcceptanceHead
from specdata.errors import ConfigError, at_least_one
from specdata.probability import SamplingConfig
from specdata.prompts import Prompt, PromptSet
from specdata.seeds import generator_for, seed_for
from specdata.shards import write_json
from specdata.tables import differences

Engine = Literal["plain", "draft", "transformers"]


@dataclass(frozen=True, slots=True)
class MethodConfig:
    """One row of the report."""

    name: str = field(metadata={"help": "unique name shown in the report"})
    engine: Engine = field(
        default="draft",
        metadata={"help": "plain (target alone), draft, or transformers (its assisted generation)"},
    )
    verifier: str = field(default="token", metadata={"help": "acceptance rule"})
    verifier_args: dict[str, Any] = field(
        default_factory=dict, metadata={"help": "parameters of the acceptance rule"}
    )
    drafter: Shape = field(default="chain", metadata={"help": "chain, paths or tree"})
    length: int = field(default=4, metadata={"help": "drafted tokens a round with stop: fixed"})
    paths: int = field(default=1, metadata={"help": "number of paths"})
    widths: tuple[int, ...] = field(default=(), metadata={"help": "k-configuration of a tree"})
    siblings: Siblings = field(
        default="auto", metadata={"help": "iid, distinct, greedy, or auto: as the verifier needs"}
    )
    path_temperatures: tuple[float, ...] = field(
        default=(), metadata={"help": "the draft's temperature on each path"}
    )
    stop: Stop = field(default="fixed", metadata={"help": "stopping rule"})
    threshold: float = field(default=0.7, metadata={"help": "of the stopping rule"})
    limit: int = field(default=20, metadata={"help": "most drafted tokens with other stop rules"})


@dataclass(frozen=True, slots=True)
class EvalConfig:
    """What is measured."""

    sets: list[PromptSet] = field(metadata={"help": "prompt sets, each a block of the report"})
    methods: list[MethodConfig] = field(metadata={"help": "ways of decoding, plain among them"})
    max_new_tokens: int = field(default=128, metadata={"help": "longest continuation, in tokens"})
    threads: int = field(
        default=0, metadata={"help": "threads of torch while measuring; 0 leaves its default"}
    )
    warmup_tokens: int = field(
        default=16, metadata={"help": "tokens that each method decodes before anything is timed"}
    )

    def __post_init__(self) -> None:
        at_least_one(self, "eval", "max_new_tokens", "warmup_tokens")
        names = [method.name for method in self.methods]
        plain = [method.name for method in self.methods if method.engine == "plain"]
        if len(set(names)) < len(names) or plain != [PLAIN]:
            raise ConfigError(
                f"method names must be unique and exactly one, {PLAIN!r}, must have engine plain; "
                f"got {', '.join(names)}"
            )


@dataclass(frozen=True, slots=True)
class Artefacts:
    """What is evaluated: loaded models and how the report calls them."""

    target: PreTrainedModel
    draft: PreTrainedModel
    head: AcceptanceHead | None
    names: Mapping[str, str | None]


def decode_config(method: MethodConfig, sampling: SamplingConfig) -> DecodeConfig:
    """The decoder's configuration of a method. Raises ConfigError if it cannot work."""
    return DecodeConfig(
        verifier=method.verifier,
        verifier_args=method.verifier_args,
        drafter=method.drafter,
        length=method.length,
        paths=method.paths,
        widths=method.widths,
        siblings=method.siblings,
        path_temperatures=method.path_temperatures,
        stop=method.stop,
        threshold=method.threshold,
        limit=method.limit,
        **asdict(sampling),
    )


def check_methods(config: EvalConfig, sampling: SamplingConfig, *, head: bool) -> None:
    """Find impossible methods before any model is loaded.

    Raises:
        ConfigError: naming the method.
    """
    for method in config.methods:
        try:
            decode_config(method, sampling)
        except (ValueError, TypeError) as error:
            raise ConfigError(f"method {method.name!r}: {error}") from error
        if method.stop == "head" and not head:
            raise ConfigError(f"method {method.name!r} stops by a head, but none was trained")


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
    store = _Store(folder / "prompts", config, sampling, seed)
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
        models.target, draft, decode_config(method, sampling), models.head
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
    drafts, fixed = method.engine != "plain", method.stop == "fixed"
    ours = method.engine == "draft"
    return Method(
        method=method.name,
        dataset=dataset,
        target=str(models.names["target"]),
        draft=models.names["draft"] if drafts else None,
        head=models.names["head"] if method.stop == "head" else None,
        drafter={"plain": None, "draft": method.drafter, "transformers": "transformers"}[
            method.engine
        ],
        verifier=method.verifier if drafts else None,
        stop=method.stop if drafts else None,
        length=(method.length if fixed else method.limit) if drafts else None,
        threshold=None if fixed or not drafts else method.threshold,
        sampling={**asdict(sampling), "max_new_tokens": config.max_new_tokens, "seed": seed},
        parameters=_parameters(method),
        lossless=not ours or VERIFIERS[method.verifier].lossless,
    )


def _parameters(method: MethodConfig) -> dict[str, Any]:
    """The settings of a method that have no column of their own."""
    named: dict[str, Any] = dict(method.verifier_args)
    if method.drafter == "paths":
        named["paths"] = method.paths
        named |= (
            {"path_temperatures": list(method.path_temperatures)}
            if (method.path_temperatures)
            else {}
        )
    if method.drafter == "tree":
        named["widths"] = list(method.widths)
        named["siblings"] = decode_config(method, SamplingConfig()).how
    return named


class _Store:
    """Raw records of finished prompts, one JSON file a prompt, with what they were made with."""

    def __init__(
        self, folder: Path, config: EvalConfig, sampling: SamplingConfig, seed: int
    ) -> None:
        self._folder = folder
        settings = {"methods": config.methods, "max_new_tokens": config.max_new_tokens}
        plain = {
            **settings,
            "methods": {method.name: asdict(method) for method in config.methods},
            "sampling": asdict(sampling),
            "seed": seed,
        }
        self._settings = json.loads(json.dumps(plain))

    def _path(self, prompt: Prompt) -> Path:
        return self._folder / f"{prompt.dataset}-{prompt.example_id}.json"

    def has(self, prompt: Prompt) -> bool:
        return self._path(prompt).exists()

    def put(self, prompt: Prompt, records: Mapping[str, PromptRecord]) -> None:
        rows = {name: asdict(record) for name, record in records.items()}
        write_json(self._path(prompt), {"settings": self._settings, "records": rows})

    def get(self, prompt: Prompt) -> dict[str, PromptRecord]:
        stored = json.loads(self._path(prompt).read_text(encoding="utf-8"))
        if changed := differences(stored["settings"], self._settings):
            raise ConfigError(
                f"{self._folder} holds measurements made with other settings; choose another "
                "output folder or remove it. Stored -> asked:\n  " + "\n  ".join(changed)
            )
        return {name: PromptRecord(**record) for name, record in stored["records"].items()}
