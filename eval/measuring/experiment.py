"""Measure every method on the same prompts, interleaved, and keep the raw counts.

Methods take turns on each prompt, so a machine that slows down slows them all. Finished prompts
are stored one by one: an interrupted evaluation continues with the next prompt. Where only counts
are wanted, prompts are decoded in batches (`EvalConfig.batch`) and stored group by group.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
from transformers import PreTrainedModel

from eval.decoder import Generation, SpeculativeDecoder
from eval.measuring.assisted import assisted_generate
from eval.measuring.environment import Environment
from eval.measuring.methods import (
    EvalConfig,
    MethodConfig,
    asks_head,
    decode_config,
    deepest,
    drafts_of,
    parameters,
)
from eval.measuring.records import PromptRecord, record_prompt
from eval.measuring.results import Method, Results, build_results
from eval.measuring.store import RecordStore
from eval.verifiers import VERIFIERS
from heads import AcceptanceHead
from specdata.probability import SamplingConfig
from specdata.prompts.loading import Prompt
from specdata.seeds import generator_for, seed_for

Report = Callable[[int], object]
BATCHES = 4
"""Batches in a group, which is decoded and stored as a whole; rows are refilled within a group."""


@dataclass(frozen=True, slots=True)
class Artefacts:
    """What is evaluated: loaded models and how the report calls them.

    Args:
        target: the target.
        draft: the run's draft.
        head: the acceptance head, if any.
        names: what the report calls "target", "draft" and "head".
        path_drafts: the further drafts that `MethodConfig.path_drafts` names.
    """

    target: PreTrainedModel
    draft: PreTrainedModel
    head: AcceptanceHead | None
    names: Mapping[str, str | None]
    path_drafts: Mapping[str, PreTrainedModel] = field(default_factory=dict)


def run_experiment(
    models: Artefacts,
    prompts: Sequence[Prompt],
    folder: Path,
    config: EvalConfig,
    *,
    sampling: SamplingConfig,
    seed: int,
    environment: Environment,
    report: Report,
) -> Results:
    """Decode every prompt with every method.

    Args:
        models: what is measured.
        prompts: of all data sets.
        folder: raw records go to `folder/prompts/`, one file a prompt.
        config: methods and sizes.
        sampling: the distribution of both models.
        seed: each prompt's draws depend on it and on the prompt, not on the method.
        environment: where this runs, for the results.
        report: called with the number of generations done.

    Returns:
        The results, ready to be written.
    """
    store = RecordStore(folder / "prompts", config, sampling, seed, environment)
    stored = [prompt for prompt in prompts if store.has(prompt)]
    for prompt in stored:
        store.get(prompt)  # refuses other settings before anything is measured
    if len(stored) < len(prompts):
        measure = _count if config.batch > 1 else _time
        measure(models, prompts, store, config, sampling, seed, report)
    else:
        report(len(prompts) * len(config.methods))
    measured: dict[tuple[str, str], list[PromptRecord]] = {}
    for prompt in prompts:
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


def _time(
    models: Artefacts,
    prompts: Sequence[Prompt],
    store: RecordStore,
    config: EvalConfig,
    sampling: SamplingConfig,
    seed: int,
    report: Report,
) -> None:
    """Decode the prompts that are not stored one by one, with every method in turn."""
    runners = {
        method.name: _runner(models, method, config, sampling, seed) for method in config.methods
    }
    for run in runners.values():
        run(prompts[0], config.warmup_tokens)
    names = list(runners)
    for turn, prompt in enumerate(prompts):
        if store.has(prompt):
            report(len(names))
            continue
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


def _count(
    models: Artefacts,
    prompts: Sequence[Prompt],
    store: RecordStore,
    config: EvalConfig,
    sampling: SamplingConfig,
    seed: int,
    report: Report,
) -> None:
    """Decode the prompts in batches: the same texts and counts, but no times.

    Groups do not depend on what is stored: a batch rounds differently with other neighbours, and an
    interrupted evaluation shall end as it would have.
    """
    decoders = {
        method.name: _decoder(models, method, config, sampling) for method in config.methods
    }
    size = BATCHES * config.batch
    for group in (prompts[start : start + size] for start in range(0, len(prompts), size)):
        if all(store.has(prompt) for prompt in group):
            report(len(group) * len(decoders))
            continue
        records: list[dict[str, PromptRecord]] = [{} for _ in group]
        for name, decoder in decoders.items():
            outs = decoder.generate_batch(
                [torch.tensor(prompt.ids) for prompt in group],
                max_new_tokens=config.max_new_tokens,
                generators=[generator_for(seed, "eval", prompt.example_id) for prompt in group],
                size=config.batch,
                report=report,
            )
            for prompt, out, record in zip(group, outs, records, strict=True):
                record[name] = record_prompt(
                    prompt.example_id, out.rounds, seconds=None, finish=out.finish
                )
        for prompt, record in zip(group, records, strict=True):
            store.put(prompt, record)


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
    decoder = _decoder(models, method, config, sampling)
    decoder.warm_up()
    return lambda prompt, budget: decoder.generate(
        torch.tensor(prompt.ids),
        max_new_tokens=budget,
        generator=generator_for(seed, "eval", prompt.example_id),
    )


def _decoder(
    models: Artefacts, method: MethodConfig, config: EvalConfig, sampling: SamplingConfig
) -> SpeculativeDecoder:
    drafts = [models.draft, *(models.path_drafts[name] for name in drafts_of(method)[1:])]
    return SpeculativeDecoder.from_config(
        models.target,
        None if method.engine == "plain" else drafts,
        decode_config(method, sampling),
        models.head if asks_head(method) else None,
        engine=config.engine,
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
    known = config.engine == "eager" or method.engine == "transformers"
    engine = {} if known else {"engine": config.engine}
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
        parameters=parameters(method) | engine,
        lossless=not ours or VERIFIERS[method.verifier].lossless,
    )
