"""Measure every method on the same prompts, interleaved, and keep the raw counts.

Methods take turns on each prompt, so a machine that slows down slows them all. Finished prompts
are stored one by one: an interrupted evaluation continues with the next prompt. Where only counts
are wanted, prompts are decoded in batches (`EvalConfig.batch`) and stored group by group. Several
processes share prompts, or groups, out among themselves (`eval.measuring.sharing`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from eval.decode_config import THEIRS, Method
from eval.decoder import SpeculativeDecoder
from eval.measuring.assisted import assisted_generate
from eval.measuring.bias import measure_bias
from eval.measuring.environment import Environment
from eval.measuring.methods import EvalConfig
from eval.measuring.records import PromptRecord, RecordStore, record_prompt
from eval.measuring.results import Results, Setup, build_results
from eval.measuring.samples import shown_prompts
from eval.measuring.scores import Scorer
from eval.measuring.sharing import share_prompts
from eval.rounds import Generation
from eval.runtime.engines import engine_on
from heads import BaseHead
from specdata.interruption import stop_if_asked
from specdata.prompts.loading import Prompt
from specdata.sampling import SamplingConfig, generator_for, seed_for
from specdata.storage.files import fingerprint
from specdata.storage.resume import Settings

Progress = Callable[[int], object]
"""Called with the number of generations that are done since the last call."""
_Decode = Callable[[int, Sequence[Prompt], RecordStore], None]
"""Decodes the group of a number, and stores its prompts."""
BATCHES = 4
"""Batches in a group, which is decoded and stored as a whole; rows are refilled within a group."""


@dataclass(frozen=True, slots=True)
class Artefacts:
    """The evaluated models, loaded, and how the report calls them.

    Args:
        target: the target.
        draft: the run's draft.
        head: the acceptance head, if any.
        names: what the report calls "target", "draft" and "head".
        path_drafts: the further drafts that `Method.path_drafts` names.
    """

    target: PreTrainedModel
    draft: PreTrainedModel
    head: BaseHead | None
    names: Mapping[str, str | None]
    path_drafts: Mapping[str, PreTrainedModel] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Experiment:
    """Methods that are measured on the same prompts, by this process and others.

    Args:
        models: what is measured.
        prompts: of all data sets.
        folder: raw records go to `folder/prompts/`, one file a prompt.
        config: methods and sizes.
        sampling: the distribution of both models.
        seed: each prompt's draws depend on it and on the prompt, not on the method.
        environment: where this process runs.
        scorer: scores each text; None if no scores are asked for.
    """

    models: Artefacts
    prompts: Sequence[Prompt]
    folder: Path
    config: EvalConfig
    sampling: SamplingConfig
    seed: int
    environment: Environment
    scorer: Scorer | None = None

    def measure(self, report: Progress) -> None:
        """Have every prompt decoded with every method and stored.

        Processes that call this on the same experiment, but for the device, share the work; each
        returns when all prompts are stored.

        Args:
            report: called with the number of generations done.
        """
        prompts, methods, store = self.prompts, len(self.config.methods), self._store()
        stored = [prompt for prompt in prompts if store.has(prompt)]
        for prompt in stored:
            store.get(prompt)  # refuses other settings before anything is measured
        if len(stored) == len(prompts):
            report(len(prompts) * methods)
            return
        # Groups do not depend on what is stored, nor on the number of processes: a batch rounds
        # differently with other neighbours, and an evaluation must end as it would have in one
        # process that was not interrupted.
        batch = self.config.batch
        size = BATCHES * batch if batch > 1 else 1
        groups = [prompts[start : start + size] for start in range(0, len(prompts), size)]
        decode = self.counter(report) if batch > 1 else self.timer(report)
        share_prompts(
            groups,
            store,
            lambda index: decode(index, groups[index], store),
            lambda found: report(found * methods),
            self.folder,
            self.environment.device,
        )

    def results(self) -> Results | None:
        """The results, ready to be written; None if a prompt is not stored.

        Raises:
            ManifestError: if a stored prompt is damaged, or was measured with other settings.
        """
        store = self._store()
        if not all(store.has(prompt) for prompt in self.prompts):
            return None
        measured: dict[tuple[str, str], list[PromptRecord]] = {}
        for prompt in self.prompts:
            for name, record in store.get(prompt).items():
                measured.setdefault((prompt.dataset, name), []).append(record)
        rows = [
            (self._setup(method, dataset), measured[dataset, method.name])
            for dataset in dict.fromkeys(prompt.dataset for prompt in self.prompts)
            for method in self.config.methods
        ]
        return build_results(self.environment, rows)

    def _store(self) -> RecordStore:
        """The stored prompts, with what decides their records."""
        config, environment = self.config, self.environment
        methods: dict[str, Any] = {}
        for method in config.methods:
            # Drafts of paths by what they hold: their folders may move, their files not change.
            drafts = [draft and fingerprint(draft) for draft in method.path_drafts]
            methods[method.name] = method.model_dump(mode="json") | {"path_drafts": drafts}
        values = {
            "methods": methods,
            "max_new_tokens": config.max_new_tokens,
            "engine": engine_on(config.engine, environment.device),
            "batch": config.batch,
            "sampling": asdict(self.sampling),
            "seed": self.seed,
            "device": environment.device.partition(":")[0],  # each process has a GPU of its own
            "dtype": environment.dtype,
        }
        if config.scores or config.reward_model:
            values |= {"scores": config.scores, "reward_model": config.reward_model}
        # Times of two machines must not end up in one table. Counts have none, so they go on in
        # another number of processes, which gives each other threads.
        if config.batch == 1:
            values["hardware"] = environment.hardware
        remedy = f"choose another folder with --eval.folder NAME, or remove {self.folder}"
        settings = Settings(values, remedy)
        return RecordStore(self.folder / "prompts", list(methods), settings)

    def timer(self, report: Progress) -> _Decode:
        """A measurer of prompts one by one, with every method in turn; all are warmed up now."""
        runners = {method.name: self._runner(method) for method in self.config.methods}
        for run in runners.values():
            run(self.prompts[0], self.config.warmup_tokens)
        names, shown = list(runners), shown_prompts(self.prompts)

        def decode(turn: int, group: Sequence[Prompt], store: RecordStore) -> None:
            (prompt,) = group
            # Another method goes first each time, so none profits from its place.
            first = turn % len(names)
            order = names[first:] + names[:first]
            outs = {}
            for name in order:
                stop_if_asked()
                outs[name] = runners[name](prompt, self.config.max_new_tokens)
                report(1)
            records = {
                method.name: self._record(method, prompt, outs[method.name], timed=True)
                for method in self.config.methods
            }
            kept = {
                method.name: outs[method.name].tokens.tolist()
                for method in self.config.methods
                if prompt in shown and method.uses_draft
            }
            store.put(prompt, records, kept)

        return decode

    def counter(self, report: Progress) -> _Decode:
        """A measurer that decodes prompts in batches: the same tokens and counts, but no times.

        Each group has decoders of its own: stopping rules may learn from what was decoded before,
        which depends on interruptions and on other processes.
        """
        shown = shown_prompts(self.prompts)

        def decode(_turn: int, group: Sequence[Prompt], store: RecordStore) -> None:
            records: list[dict[str, PromptRecord]] = [{} for _ in group]
            tokens: list[dict[str, list[int]]] = [{} for _ in group]
            for method in self.config.methods:
                stop_if_asked()
                outs = self.decoder(method).generate_batch(
                    [torch.tensor(prompt.ids) for prompt in group],
                    max_new_tokens=self.config.max_new_tokens,
                    generators=[
                        generator_for(self.seed, "eval", prompt.example_id) for prompt in group
                    ],
                    size=self.config.batch,
                    report=report,
                )
                for prompt, out, record, kept in zip(group, outs, records, tokens, strict=True):
                    record[method.name] = self._record(method, prompt, out, timed=False)
                    if prompt in shown and method.uses_draft:
                        kept[method.name] = out.tokens.tolist()
            for prompt, record, kept in zip(group, records, tokens, strict=True):
                store.put(prompt, record, kept)

        return decode

    def _record(
        self, method: Method, prompt: Prompt, out: Generation, *, timed: bool
    ) -> PromptRecord:
        """The stored record of a generation; a verifier's bias is measured now, untimed."""
        record = record_prompt(
            prompt.example_id,
            out.rounds,
            seconds=out.seconds if timed else None,
            finish=out.finish,
        )
        if self.scorer:
            record = replace(record, scores=self.scorer(prompt, out.tokens.tolist()))
        if method.lossless or method.drafter != "chain":
            return record
        variation, tokens = measure_bias(
            self.models.target,
            self.models.draft,
            method.decoding(self.sampling).make_verifier(),
            self.sampling,
            torch.tensor(prompt.ids),
            out,
        )
        return replace(record, variation=variation, variation_tokens=tokens)

    def _runner(self, method: Method) -> Callable[[Prompt, int], Generation]:
        """A function that continues a prompt by at most some tokens; its graphs are made now."""
        if method.decoder in THEIRS:
            return lambda prompt, budget: assisted_generate(
                self.models.target,
                self.models.draft if method.uses_draft else None,
                torch.tensor(prompt.ids),
                length=method.stop.longest,
                threshold=method.stop.reported().get("threshold", 0.0),
                sampling=self.sampling,
                max_new_tokens=budget,
                seed=seed_for(self.seed, "eval", prompt.example_id),
            )
        decoder = self.decoder(method)
        decoder.warm_up()
        return lambda prompt, budget: decoder.generate(
            torch.tensor(prompt.ids),
            max_new_tokens=budget,
            generator=generator_for(self.seed, "eval", prompt.example_id),
        )

    def decoder(self, method: Method) -> SpeculativeDecoder:
        """What decodes with a method of ours."""
        drafts = [self.models.draft, *(self.models.path_drafts[name] for name in method.drafts[1:])]
        return SpeculativeDecoder.from_config(
            self.models.target,
            drafts if method.uses_draft else None,
            method.decoding(self.sampling),
            self.models.head if method.stop.reads_head else None,
            engine=self.config.engine,
        )

    def _setup(self, method: Method, dataset: str) -> Setup:
        """What results record of a method on a dataset."""
        names, eager = self.models.names, method.decoder in THEIRS
        return Setup(
            dataset=dataset,
            method=method,
            target=str(names["target"]),
            draft=names["draft"] if method.uses_draft else None,
            head=names["head"] if method.stop.reads_head else None,
            sampling={
                **asdict(self.sampling),
                "max_new_tokens": self.config.max_new_tokens,
                "seed": self.seed,
            },
            engine="eager" if eager else engine_on(self.config.engine, self.environment.device),
        )
