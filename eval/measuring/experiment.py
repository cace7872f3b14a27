"""Measure every method on the same prompts, interleaved, and keep the raw counts.

Methods take turns on each prompt, so a machine that slows down slows them all. Finished prompts
are stored one by one: an interrupted evaluation continues with the next prompt. Where only counts
are wanted, prompts are decoded in batches (`EvalConfig.batch`) and stored group by group.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from transformers import PreTrainedModel

from eval.decoder import Generation, SpeculativeDecoder
from eval.measuring.assisted import assisted_generate
from eval.measuring.bias import measure_bias
from eval.measuring.environment import Environment
from eval.measuring.methods import EvalConfig, MethodConfig, rewritten
from eval.measuring.records import PromptRecord, RecordStore, record_prompt
from eval.measuring.results import Method, Results, build_results
from eval.verifiers import VERIFIERS
from heads import AcceptanceHead
from specdata.prompts.loading import Prompt
from specdata.sampling import SamplingConfig
from specdata.seeds import generator_for, seed_for
from specdata.storage.resume import Settings, as_settings, defaults_of

Progress = Callable[[int], object]
"""Called with the number of generations that are done since the last call."""
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
    report: Progress,
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
    names = [method.name for method in config.methods]
    settings = _settings(folder, config, sampling, seed, environment)
    store = RecordStore(folder / "prompts", names, settings)
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
    report: Progress,
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
        outs = {}
        for name in order:
            outs[name] = runners[name](prompt, config.max_new_tokens)
            report(1)
        records = {
            method.name: _record(models, method, sampling, prompt, outs[method.name], timed=True)
            for method in config.methods
        }
        store.put(prompt, records)


def _count(
    models: Artefacts,
    prompts: Sequence[Prompt],
    store: RecordStore,
    config: EvalConfig,
    sampling: SamplingConfig,
    seed: int,
    report: Progress,
) -> None:
    """Decode the prompts in batches: the same tokens and counts, but no times.

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
        for method in config.methods:
            outs = decoders[method.name].generate_batch(
                [torch.tensor(prompt.ids) for prompt in group],
                max_new_tokens=config.max_new_tokens,
                generators=[generator_for(seed, "eval", prompt.example_id) for prompt in group],
                size=config.batch,
                report=report,
            )
            for prompt, out, record in zip(group, outs, records, strict=True):
                record[method.name] = _record(models, method, sampling, prompt, out, timed=False)
        for prompt, record in zip(group, records, strict=True):
            store.put(prompt, record)


def _record(
    models: Artefacts,
    method: MethodConfig,
    sampling: SamplingConfig,
    prompt: Prompt,
    out: Generation,
    *,
    timed: bool,
) -> PromptRecord:
    """What is stored of a generation; the bias of a biased verifier is measured now, untimed."""
    record = record_prompt(
        prompt.example_id,
        out.rounds,
        seconds=out.seconds if timed else None,
        finish=out.finish,
    )
    if _lossless(method) or method.drafter != "chain":
        return record
    variation, tokens = measure_bias(
        models.target,
        models.draft,
        method.decoding(sampling).make_verifier(),
        sampling,
        torch.tensor(prompt.ids),
        out,
    )
    return replace(record, variation=variation, variation_tokens=tokens)


def _lossless(method: MethodConfig) -> bool:
    """Whether the output distribution is proved to be the target's."""
    return method.decoder != "speculative" or VERIFIERS[method.verifier].lossless


def _settings(
    folder: Path,
    config: EvalConfig,
    sampling: SamplingConfig,
    seed: int,
    environment: Environment,
) -> Settings:
    """What decides the records of a prompt."""
    return Settings(
        {
            "methods": {method.name: as_settings(method) for method in config.methods},
            "max_new_tokens": config.max_new_tokens,
            "engine": config.engine,
            "batch": config.batch,
            "sampling": as_settings(sampling),
            "seed": seed,
            # Times of two machines must not end up in one table.
            "hardware": environment.hardware,
            "device": environment.device,
            "dtype": environment.dtype,
        },
        defaults_of(EvalConfig) | defaults_of(SamplingConfig, "sampling"),
        f"choose another folder with --eval.folder NAME, or remove {folder}",
        rewritten,
    )


def _runner(
    models: Artefacts,
    method: MethodConfig,
    config: EvalConfig,
    sampling: SamplingConfig,
    seed: int,
) -> Callable[[Prompt, int], Generation]:
    if method.decoder == "assisted":
        return lambda prompt, budget: assisted_generate(
            models.target,
            models.draft,
            torch.tensor(prompt.ids),
            length=method.stop.longest,
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
    drafts = [models.draft, *(models.path_drafts[name] for name in method.drafts[1:])]
    return SpeculativeDecoder.from_config(
        models.target,
        None if method.decoder == "plain" else drafts,
        method.decoding(sampling),
        models.head if method.stop.reads_head else None,
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
    drafts = method.decoder != "plain"
    known = config.engine == "eager" or method.decoder == "assisted"
    engine = {} if known else {"engine": config.engine}
    drafter = {"plain": None, "speculative": method.drafter, "assisted": "transformers"}
    return Method(
        method=method.name,
        dataset=dataset,
        target=str(models.names["target"]),
        draft=models.names["draft"] if drafts else None,
        head=models.names["head"] if method.stop.reads_head else None,
        drafter=drafter[method.decoder],
        verifier=method.verifier if method.decoder == "speculative" else None,
        stop=method.stop.name if drafts else None,
        length=method.deepest if drafts else None,
        threshold=method.stop.reported().get("threshold"),
        sampling={**as_settings(sampling), "max_new_tokens": config.max_new_tokens, "seed": seed},
        parameters=method.reported() | engine,
        lossless=_lossless(method),
    )
