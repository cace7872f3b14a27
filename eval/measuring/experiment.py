"""Measure every method on the same prompts, interleaved, and keep the raw counts.

Methods take turns on each prompt, so a machine that slows down slows them all. Finished prompts
are stored one by one: an interrupted evaluation continues with the next prompt. Where only counts
are wanted, prompts are decoded in batches (`EvalConfig.batch`) and stored group by group. Several
processes share prompts, or groups, out among themselves (`eval.measuring.environment`).
"""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import accumulate, count
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from eval.decode_config import FOREIGN_DECODERS, Method
from eval.decoder import SpeculativeDecoder
from eval.measuring.assisted import assisted_generate
from eval.measuring.environment import Environment, measured_on, sign
from eval.measuring.intervals import LEAST_COVERAGE, coverage
from eval.measuring.lengths import finds_lengths, next_round
from eval.measuring.methods import EvalConfig
from eval.measuring.records import PromptRecord, RecordStore, Text, record_prompt
from eval.measuring.results import Results, Setup, build_results
from eval.measuring.scores import Scorer
from eval.measuring.served import ServedEngine
from eval.rounds import Generation
from eval.runtime.engines import Engine, engine_on
from eval.runtime.graphs import engine_used
from eval.verifiers import VERIFIERS
from heads import BaseHead
from specdata.config import ServerConfig
from specdata.drafts.depths import most_tokens
from specdata.interruption import stop_if_asked
from specdata.models import positions
from specdata.prompts.prompt import Prompt
from specdata.sampling import SamplingConfig, generator_for, seed_for
from specdata.server.client import ServerClient
from specdata.storage.files import PROGRESS, locked, share_out, write_json
from specdata.storage.resume import Settings, read_record
from specdata.texts import pair_columns
from specdata.threads import threads_of, using_threads

BATCHES = 4
"""Batches in a group, which is decoded and stored as a whole; rows are refilled within a group."""
WARMUP_TOKENS = 16
"""Tokens that each method decodes before anything is timed, at most."""
DECODING = "decoding"
LENGTHS_FILE = "lengths.json"
"""The methods that each round of dev asked for, the last one none."""


@dataclass(frozen=True, slots=True)
class Artefacts:
    """The evaluated models, loaded, and how the report calls them.

    Args:
        names: what the report calls "target", "draft" and "head".
        own_head: the target's, for methods that draft with it.
    """

    target: PreTrainedModel
    draft: PreTrainedModel
    head: BaseHead | None
    names: Mapping[str, str | None]
    own_head: PreTrainedModel | None = None

    def draft_of(self, method: Method) -> PreTrainedModel:
        """The model that drafts."""
        if not method.mtp:
            return self.draft
        assert self.own_head is not None  # read where a method asks for it
        return self.own_head


@dataclass(frozen=True, slots=True)
class Experiment:
    """Methods that are measured on the same prompts, by this process and others.

    Args:
        folder: raw records go into it, one file a prompt.
        seed: each prompt's draws depend on it and on the prompt, not on the method.
        scorer: scores each text; None if no scores are asked for.
        dev: what was measured on dev, if that was asked for lengths (`with_lengths`).
        records: name of the folder of raw records.
    """

    models: Artefacts
    prompts: Sequence[Prompt]
    folder: Path
    config: EvalConfig
    sampling: SamplingConfig
    seed: int
    environment: Environment
    scorer: Scorer | None = None
    dev: Experiment | None = None
    records: str = "prompts"

    def with_lengths(
        self, measure: Callable[[Experiment], object], say: Callable[[str], object]
    ) -> Experiment:
        """Measure dev until no fixed length is missing beside the best; what is left to measure.

        After the first round those methods take turns again that may still be the best
        (`next_round`), and the results of dev are those of the last round, so that all its times
        compare. `LENGTHS_FILE` keeps the rounds: a resume, and every other process, goes on with
        the same. `measure` is called with the experiment of each.
        """
        dev = [each for each in self.prompts if each.split == "dev"]
        path = self.folder / LENGTHS_FILE
        enough = coverage(tuple(Counter(each.dataset for each in dev).values())) >= LEAST_COVERAGE
        if not finds_lengths(self.config) or not enough:
            return self
        part, methods = replace(self, prompts=dev), list(self.config.methods)
        for number in count(1):
            measure(part)
            with locked(self.folder / PROGRESS / "lengths.lock"):
                rounds = _rounds_in(path)
                if len(rounds) < number:  # no other process was faster
                    rounds.append(next_round(part.results(), methods))
                    stored = [[each.model_dump(mode="json") for each in made] for made in rounds]
                    write_json(path, {"rounds": stored})
            if not (asked := rounds[number - 1]):
                break
            known = {each.name for each in methods}
            methods += (new := [each for each in asked if each.name not in known])
            names = ", ".join(each.name for each in new)
            say(f"  lengths next to the best are measured, too: {names}")
            part = replace(part, config=self._with(asked), records=f"{self.records}-{number}")
        rest = [each for each in self.prompts if each.split != "dev"]
        return replace(self, prompts=rest, config=self._with(methods), dev=part)

    def _with(self, methods: Sequence[Method]) -> EvalConfig:
        return self.config.model_copy(update={"methods": methods})

    def measure(self, report: Callable[[int], object]) -> None:
        """Have every prompt decoded with every method and stored.

        `report` is called with the number of generations that are done since the last call.
        Processes that call this on the same experiment, but for the device, share the work; each
        returns when all prompts are stored.
        """
        prompts, methods, store = self.prompts, len(self.config.methods), self._store()
        stored = [prompt for prompt in prompts if store.has(prompt)]
        for prompt in stored:
            store.get(prompt)  # refuses other settings before anything is measured
        if len(stored) == len(prompts):
            report(len(prompts) * methods)
            return
        with using_threads(self.config.threads), ExitStack() as closing:
            share = _Share(self, store, report, closing)
            share_out(range(len(share.groups)), share.attempt)

    def results(self) -> Results:
        """The results of stored prompts, ready to be written."""
        measured: dict[tuple[str, str], list[PromptRecord]] = {}
        rows = []
        for part in (self.dev, self) if self.dev else (self,):
            store, splits = part._store(), {each.dataset: each.split for each in part.prompts}
            for prompt in part.prompts:
                for name, record in store.get(prompt).items():
                    measured.setdefault((prompt.dataset, name), []).append(record)
            rows += [
                (self._setup(method, dataset, split), measured[dataset, method.name])
                for dataset, split in splits.items()
                for method in part.config.methods
            ]
        return build_results(self._where(), rows)

    def texts(self) -> list[tuple[Prompt, dict[str, Text]]]:
        """Of each prompt set the first prompt, with what each method wrote after it."""
        return [(prompt, self._store().texts(prompt)) for prompt in self.shown()]

    def shown(self) -> list[Prompt]:
        """The prompts of which texts are kept: the first of each set."""
        return [*{prompt.dataset: prompt for prompt in reversed(self.prompts)}.values()][::-1]

    def _where(self) -> Environment:
        """The environment, with the devices of all processes and the threads that decode."""
        environment = self.environment
        threads = self.config.threads or threads_of(DECODING, self.models.target.device).count
        hardware = {**environment.hardware, "threads": threads}
        devices = measured_on(self.folder) or [environment.device]
        return environment.model_copy(update={"devices": devices, "hardware": hardware})

    @property
    def engine(self) -> Engine:
        """The engine that forwards of ours run with on this device."""
        return engine_on(self.config.engine, self.environment.device)

    def _store(self) -> RecordStore:
        """The stored prompts, with where they were decoded: all else the run's record decides."""
        config, environment = self.config, self.environment
        values: dict[str, Any] = {
            "engine": self.engine,
            "device": environment.device.partition(":")[0],  # each process has a GPU of its own
        }
        # Times of two machines, or of two versions of the code, must not end up in one table.
        # Counts have none, so they go on in another number of processes, which gives each other
        # threads.
        if config.batch == 1:
            decides = ("hardware", "software", "git_commit")
            values |= {name: getattr(environment, name) for name in decides}
        remedy = f"choose another folder with --eval.folder NAME, or remove {self.folder}"
        names = [method.name for method in config.methods]
        return RecordStore(self.folder / self.records, names, Settings(values, remedy))

    def decoder(self, method: Method) -> SpeculativeDecoder:
        """The decoder of a method of ours."""
        return SpeculativeDecoder.from_config(
            self.models.target,
            self.models.draft_of(method) if method.uses_draft else None,
            method.decoding(self.sampling),
            self.models.head if method.stop.reads_head else None,
            engine=self.config.engine,
        )

    def served(self, method: Method, closing: ExitStack, requests: int = 1) -> ServedEngine:
        """An engine that serves the target, which is made sure of, for so many requests at once."""
        target, name = self.models.target, method.served_model or str(self.models.names["target"])
        where = ServerConfig(url=method.url, model=name, concurrency=requests)
        client = ServerClient(where, f"method {method.name!r}")
        closing.callback(client.close)
        client.check(name)
        tokens = self.config.max_new_tokens
        engine = ServedEngine.of(client, name, target, self.sampling, tokens, self.seed)
        engine.probe(target, self.prompts[0].ids)
        return engine

    def record(self, method: Method, prompt: Prompt, out: Generation) -> PromptRecord:
        """The stored record of a generation; a verifier's bias is measured now, untimed."""
        record = record_prompt(
            # Prompts of one conversation hold one another: they are resampled together.
            prompt.example_id if prompt.row is None else f"row {prompt.row}",
            out.rounds,
            seconds=out.seconds if self.config.batch == 1 else None,
            finish=out.finish,
            cpu_seconds=out.cpu_seconds,
        )
        if method.uses_draft:
            limit = positions(self.models.draft_of(method).config)
            ends = accumulate((each.emitted for each in out.rounds), initial=len(prompt.ids))
            read = zip(ends, out.rounds, strict=False)
            beyond = sum(length > limit and not each.drafted for length, each in read)
            record = replace(record, beyond=beyond)
        if self.scorer:
            record = replace(record, scores=self.scorer.scores(prompt, out.tokens.tolist()))
        if method.lossless or not method.is_chain:
            return record
        variation = measure_bias(
            self.models.target,
            self.models.draft_of(method),
            partial(VERIFIERS[method.verifier].bias_at, **method.verifier_args),
            self.sampling,
            prompt.ids,
            out,
        )
        return replace(record, variation=variation, variation_tokens=record.tokens)

    def _setup(self, method: Method, dataset: str, split: str) -> Setup:
        """The settings that results record of a method on a dataset."""
        names, most = self.models.names, most_tokens(self.models.draft_of(method))
        return Setup(
            dataset=dataset,
            split=split,
            method=method,
            target=str(names["target"]),
            draft=names["target" if method.mtp else "draft"] if method.uses_draft else None,
            head=names["head"] if method.stop.reads_head else None,
            longest_draft=most if method.uses_draft and most < sys.maxsize else None,
            sampling={
                **asdict(self.sampling),
                "max_new_tokens": self.config.max_new_tokens,
                "seed": self.seed,
            },
            engine=engine_used(self.models.target, self.engine)
            if method.decoder not in FOREIGN_DECODERS
            else "eager",
        )


class _Share:
    """The work of one process: groups of prompts, decoded and stored as wholes."""

    def __init__(
        self,
        experiment: Experiment,
        store: RecordStore,
        report: Callable[[int], object],
        closing: ExitStack,
    ) -> None:
        prompts, config = experiment.prompts, experiment.config
        self.experiment, self.store, self.report = experiment, store, report
        self.methods = config.methods
        # Groups do not depend on what is stored, nor on the number of processes: a batch rounds
        # differently with other neighbours, and an evaluation must end as it would have in one
        # process that was not interrupted.
        size = BATCHES * config.batch if config.batch > 1 else 1
        self.groups = [prompts[start : start + size] for start in range(0, len(prompts), size)]
        # Of what is timed: warmed up now, and kept from prompt to prompt.
        self.decoders: dict[str, SpeculativeDecoder] = {}
        self.servers: dict[str, ServedEngine] = {}
        # One number for all methods, or what threads gain would be a method's.
        self.threads = threads_of(DECODING, experiment.models.target.device)
        if config.batch == 1:
            self.threads.begin(is_unit=False)
            for method in self.methods:
                if method.decoder == "server":
                    self.servers[method.name] = experiment.served(method, closing)
                elif method.decoder not in FOREIGN_DECODERS:
                    self.decoders[method.name] = experiment.decoder(method)
                    self.decoders[method.name].warm_up()
            self.warm_up(self.methods)
            self.threads.end()
            raced = [method for method in self.methods if method.name in self.decoders][:2]
            while raced and not self.threads.is_settled:  # forwards of one token, and of a draft
                self.threads.begin()
                self.warm_up(raced)
                self.threads.end()

    def warm_up(self, methods: Sequence[Method]) -> None:
        """Decode a few tokens with each of these methods."""
        tokens = min(WARMUP_TOKENS, self.experiment.config.max_new_tokens)
        for method in methods:
            self.generate(method, self.experiment.prompts[0], tokens)

    def attempt(self, index: int) -> bool:
        """Measure a group, unless it is stored; False if another process is at it."""
        progress = self.experiment.folder / PROGRESS
        if self.is_stored(index):
            return True
        with locked(progress / f"prompts-{index:05d}.lock", wait=False) as taken:
            if not taken:
                return False
            if not self.is_stored(index):  # by another process, since the last look
                sign(self.experiment.folder, self.experiment.environment.device)
                self.decode(index)
            return True

    def is_stored(self, index: int) -> bool:
        """True if every prompt of a group is stored, which is then reported."""
        if not all(self.store.has(prompt) for prompt in self.groups[index]):
            return False
        self.report(len(self.groups[index]) * len(self.methods))
        return True

    def decode(self, index: int) -> None:
        """Decode a group with every method, and store it."""
        group, timed = self.groups[index], self.experiment.config.batch == 1
        # Another method goes first each time, so none profits from its place.
        first = index % len(self.methods) if timed else 0
        generations: dict[str, list[Generation]] = {}
        self.threads.begin()
        for method in [*self.methods[first:], *self.methods[:first]]:
            stop_if_asked()
            if timed:
                limit = self.experiment.config.max_new_tokens
                outs = [self.generate(method, prompt, limit) for prompt in group]
                self.report(1)
            else:
                outs = self.generate_batch(method, group)
            generations[method.name] = outs
        self.threads.end()
        for number, prompt in enumerate(group):
            records = {
                method.name: self.experiment.record(
                    method, prompt, generations[method.name][number]
                )
                for method in self.methods
            }
            texts = {}
            if any(prompt is each for each in self.experiment.shown()):
                texts = {name: Text.of(outs[number]) for name, outs in generations.items()}
            self.store.put(prompt, records, texts)

    def generate(self, method: Method, prompt: Prompt, max_new_tokens: int) -> Generation:
        """Continue one prompt, timed; on a CPU also by this thread's clock (`verdict.busy`)."""
        experiment, ids = self.experiment, torch.tensor(prompt.ids)
        if method.decoder == "server":
            server = self.servers[method.name]
            return server.generate(prompt.ids, prompt.example_id, max_new_tokens)
        begun = time.thread_time()
        if method.decoder in FOREIGN_DECODERS:
            out = assisted_generate(
                experiment.models.target,
                experiment.models.draft if method.uses_draft else None,
                ids,
                length=method.stop.longest,
                lookup=method.lookup,
                threshold=method.stop.reported().get("threshold", 0.0),
                sampling=experiment.sampling,
                max_new_tokens=max_new_tokens,
                seed=seed_for(experiment.seed, "eval", prompt.example_id),
            )
        else:
            out = self.decoders[method.name].generate(
                ids,
                max_new_tokens=max_new_tokens,
                generator=generator_for(experiment.seed, "eval", prompt.example_id),
            )
        if experiment.environment.device != "cpu":
            return out
        return replace(out, cpu_seconds=time.thread_time() - begun)

    def generate_batch(self, method: Method, group: Sequence[Prompt]) -> list[Generation]:
        """Continue prompts together: the same tokens and counts, but no times.

        Each group has a decoder of its own: stopping rules may learn from what was decoded before,
        which depends on interruptions and on other processes.
        """
        experiment, config = self.experiment, self.experiment.config
        return experiment.decoder(method).generate_batch(
            [torch.tensor(prompt.ids) for prompt in group],
            max_new_tokens=config.max_new_tokens,
            generators=[generator_for(experiment.seed, "eval", each.example_id) for each in group],
            size=config.batch,
            report=self.report,
        )


def _rounds_in(path: Path) -> list[list[Method]]:
    """What each round of dev asked for, as `LENGTHS_FILE` keeps it."""
    if not path.is_file():
        return []
    stored = read_record(path, ("rounds",), f"remove {path.parent} and measure again")["rounds"]
    return [[Method.model_validate(each) for each in made] for made in stored]


def measure_bias(
    target: PreTrainedModel,
    draft: PreTrainedModel,
    bias_at: Callable[[Tensor, Tensor], float],
    sampling: SamplingConfig,
    prompt_ids: Sequence[int],
    out: Generation,
) -> float:
    """Total variation at the positions of one generation of chains, summed over its tokens.

    `bias_at` is that of the verifier that decoded it, of p and q (V,) at a drafted position. Over a
    sequence these distances add up at most. The finished sequence is scored once more by both
    models, untimed.
    """

    def variations(p: Tensor, q: Tensor, *_: object) -> dict[str, Tensor]:
        values = [bias_at(p_row, q_row) for p_row, q_row in zip(p, q, strict=True)]
        return {"variation": torch.tensor(values, dtype=torch.float64)}

    # The token after a whole accepted chain stood at no drafted position: it is the target's own.
    drafted = [place < each.drafted for each in out.rounds for place in range(each.emitted)]
    if True not in drafted:
        return 0.0
    # Up to the last drafted token: the draft may have no positions beyond.
    drafted = drafted[: len(drafted) - drafted[::-1].index(True)]
    text = {"prompt_ids": prompt_ids, "completion_ids": out.tokens[: len(drafted)].tolist()}
    (columns,) = pair_columns((target, draft), [text], sampling, variations)
    return float(columns["variation"] @ torch.tensor(drafted).double())
