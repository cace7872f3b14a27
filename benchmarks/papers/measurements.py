"""Measurements of a paper's protocol on a pair: a function each, which gives records.

A record is a flat mapping: keys (set, method, verifier, k, ...) and figures, each a number or an
interval. Evaluations decode as run-eval does; acceptance of several candidates is computed from p
and q at positions of the text that the target alone writes, so that rules differ by what they do
and not by luck.
"""

from __future__ import annotations

import itertools
import json
import math
import statistics
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from pydantic import TypeAdapter
from torch import Tensor
from transformers import PreTrainedModel

from benchmarks.papers.examples import FORMULAS, RULES
from benchmarks.papers.replay import (
    GRIDS,
    Counts,
    Times,
    expected_counts,
    oracle_counts,
    recorded_lengths,
    saving,
)
from benchmarks.papers.tables import Record
from benchmarks.papers.traces import Traces, acceptance_traces
from eval.decode_config import DecodeConfig
from eval.decoder import SpeculativeDecoder
from eval.drafting.stopping import STOPPING_RULES
from eval.measuring.environment import describe_environment
from eval.measuring.experiment import Artefacts, Experiment
from eval.measuring.intervals import Interval, resamples
from eval.measuring.methods import PLAIN, EvalConfig
from eval.measuring.pooled import ALL_SETS, pool
from eval.measuring.results import Results, build_results, columns
from eval.measuring.scores import Scorer, can_score
from eval.runtime.engines import engine_on
from heads import BaseHead
from heads.config import HeadConfig
from heads.loss import binary_kl
from heads.train import train_head
from recipes.config import PipelineConfig, build
from recipes.make_rollouts import Rollouts
from recipes.models import load_draft_in_use
from recipes.run import portable, prepare_libraries, run_stage, say
from recipes.run_eval import Eval
from recipes.train_head import Labels
from specdata.errors import ConfigError
from specdata.models import load_model, load_tokenizer, prompt_limits
from specdata.prompts.loading import load_prompts
from specdata.prompts.prompt import Prompt
from specdata.sampling import SamplingConfig, generator_for
from specdata.storage.columns import arrow_table
from specdata.storage.dataset import load_stored
from specdata.storage.files import fingerprint
from specdata.terminal import progress
from specdata.texts import pair_columns
from specdata.threads import using_threads

UNDECODED = ("over", "label")
"""Keys of a protocol's method that no decoder reads: what it is compared with, more record keys."""
COUNTED = ("prompts", "tokens", "rounds", "n_draft", "n_discarded", "draft_forwards")
"""Raw counts that a record keeps."""
REPLAYED = ("tokens", "n_target", "n_draft", "n_discarded")
"""The same of a replay, in expectation."""


@dataclass(frozen=True)
class ModelPair:
    """The pair that a protocol is run on; its models are loaded when a measurement asks.

    Attributes:
        prompts: of each set; None as the protocol or else the configuration says.
    """

    config: PipelineConfig
    given: Mapping[str, Any]
    folder: Path
    prompts: int | None = None

    @cached_property
    def target(self) -> PreTrainedModel:
        """The target, loaded."""
        prepare_libraries()
        models = self.config.models
        return load_model(models.target, load=models.loading("target"))

    @cached_property
    def draft(self) -> PreTrainedModel:
        """The draft in use, loaded."""
        prepare_libraries()
        return load_draft_in_use(self.config)

    def identity(self) -> dict[str, Any]:
        """Collect what decides every measurement, paths in the run's output relative to it."""
        names = {"target": self.config.models.target, "draft": self.config.draft_in_use}
        values = {
            "pair": {
                role: {"name": name, "digest": fingerprint(name)} for role, name in names.items()
            },
            "sampling": asdict(self.config.sampling),
            "seed": self.config.seed,
            "dtype": self.config.models.dtype,
            **self.config.template_setting,
            "prompts": self.prompts,
            "sets": [asdict(each) for each in self.config.eval.sets],
            "max_new_tokens": self.config.eval.max_new_tokens,
        }
        return dict(portable(json.loads(json.dumps(values)), self.config.output))

    def load_prompts(self, evaluation: EvalConfig) -> Sequence[Prompt]:
        """The prompts of an evaluation that leave both models room to answer."""
        names = [self.config.models.target, self.config.draft_in_use]
        room = [prompt_limits(name, evaluation.max_new_tokens) for name in names]
        limits = {key: min(each[key] for each in room) for key in room[0]}
        tokenizer = load_tokenizer(names[0])
        loaded = load_prompts(
            evaluation.sets,
            tokenizer,
            seed=self.config.seed,
            template_variables=self.config.chat_template_kwargs,
            **limits,
        )
        return loaded.prompts


# --- measurements: (pair, its specification, its folder) -> records ---


def evaluation(pair: ModelPair, spec: Mapping[str, Any], folder: Path) -> list[Record]:
    """Methods decoded over the pair's prompts, prompt by prompt as run-eval does.

    A record a set and method, and one for all sets; with several seeds the generations are pooled
    and each rate has its deviation over seeds. `scores` are those of prompts that have a reference,
    where their packages are installed.
    """
    config, sampling, methods = evaluated(pair, spec)
    prompts = pair.load_prompts(config)
    head = BaseHead.from_pretrained(pair.folder / spec["head"]) if "head" in spec else None
    names = {"target": pair.config.models.target, "draft": pair.config.draft_in_use, "head": None}
    models = Artefacts(pair.target, pair.draft, head, names)
    scorer = None
    if config.scores and any(prompt.reference for prompt in prompts):
        scorer = Scorer(config.scores, prompts, load_tokenizer(pair.config.models.target))
    by_seed: list[Results] = []
    with using_threads(config.threads):
        where = describe_environment(
            device=str(pair.target.device), dtype=pair.config.models.dtype, batch_size=config.batch
        )
        for seed in spec.get("seeds", [pair.config.seed]):
            one = folder / f"seed-{seed}"
            experiment = Experiment(models, prompts, one, config, sampling, seed, where, scorer)
            total = len(prompts) * len(config.methods)
            with progress(total, f"{folder.name}, seed {seed}", "generation") as bar:
                experiment.measure(bar.update)
            by_seed.append(experiment.results())
    used = engine_on(config.engine, where.device)
    say(f"  {len(prompts)} prompts, {len(config.methods)} methods, forwards {used}")
    generations = [
        (run, [record for each in by_seed for record in each.runs[index].generations])
        for index, run in enumerate(by_seed[0].runs)
    ]
    pooled = build_results(where, generations)
    keys = {PLAIN: {}, **{method["name"]: method for method in methods}}
    return [asdict(sampling) | record for record in _records(pooled, by_seed, keys)]


def evaluated(
    pair: ModelPair, spec: Mapping[str, Any]
) -> tuple[EvalConfig, SamplingConfig, list[dict[str, Any]]]:
    """Find an evaluation's configuration, its sampling, and the expanded methods."""
    given, methods = pair.given["eval"], expanded(spec["methods"])
    section = {"batch": 16, "engine": "eager", "threads": given.get("threads", 0)}
    if spec.get("timed"):
        section = {key: given[key] for key in ("engine", "threads") if key in given}
    section["scores"] = [name for name in spec.get("scores", []) if can_score(name)]
    if most := [each["max_new_tokens"] for each in (given, spec) if "max_new_tokens" in each]:
        section["max_new_tokens"] = min(most)
    counts = [count for count in (pair.prompts, spec.get("prompts")) if count]
    sets = [
        asdict(prompts) | {"count": min(counts, default=prompts.count)}
        for prompts in pair.config.eval.sets
    ]
    listed = [{key: method[key] for key in method if key not in UNDECODED} for method in methods]
    plain = {"name": PLAIN, "decoder": "plain"}
    whole = {**pair.given, "eval": {**section, "sets": sets, "methods": [plain, *listed]}}
    if "head" in spec:  # the protocol's own, whatever the configuration trains
        whole |= {"labels": {}, "head": {}}
    config = build(whole)
    sampling = sampling_of(pair, spec)
    Eval(config.model_copy(update={"sampling": sampling})).check()
    return config.eval, sampling, methods


def expanded(methods: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Methods of a protocol with the product of what `each` lists; {key} in texts is filled in.

    A mapping in a list is several settings that go together. `label` holds further keys of the
    method's records.
    """
    filled = []
    for method in methods:
        grid = method.get("each", {})
        rest = {key: value for key, value in method.items() if key not in ("each", "label")}
        for values in itertools.product(*grid.values()):
            settings: dict[str, Any] = {}
            label = dict(method.get("label", {}))
            for key, value in zip(grid, values, strict=True):
                settings |= value if isinstance(value, Mapping) else {key: value}
                label |= settings.pop("label", {})
            words = {key: shape(value) for key, value in (rest | label | settings).items()}
            texts = {
                key: value.format(**words) for key, value in rest.items() if isinstance(value, str)
            }
            filled.append(rest | texts | settings | ({"label": label} if label else {}))
    return filled


def shape(value: Any) -> Any:
    """A list as a name has it: 4x2x2."""
    return "x".join(f"{item}" for item in value) if isinstance(value, list | tuple) else value


def _records(
    pooled: Results, by_seed: Sequence[Results], methods: Mapping[str, Mapping[str, Any]]
) -> Iterator[Record]:
    """A record for each set and method, then for all sets."""
    sets = pooled.datasets()
    several = {ALL_SETS: sets} if len(sets) > 1 else {}
    for name, pooled_sets in ({each: [each] for each in sets} | several).items():
        rows = {row.name: row for row in pool(pooled, pooled_sets)}
        seeds = [{row.name: row for row in pool(each, pooled_sets)} for each in by_seed]
        for method, row in rows.items():
            given = methods[method]
            record: Record = {"set": name, "method": method}
            of_method = columns(row.method)
            shown = ("verifier", "drafter", "stop", "length", "threshold", "lossless")
            record |= {key: of_method[key] for key in shown}
            record |= given.get("verifier_args", {}) | given.get("label", {})
            named = ("name", "verifier_args", *UNDECODED)
            record |= {key: shape(value) for key, value in given.items() if key not in named}
            if "widths" in given:
                record["paths"] = math.prod(given["widths"])
            for rate, values in row.rates.items():
                figure = Interval.of(values).stored()
                if len(seeds) > 1:
                    each_seed = [each[method].value(rate) or 0.0 for each in seeds]
                    figure["deviation"] = statistics.stdev(each_seed)
                record[rate] = figure
            if pooled.timed:
                record["time"] = Interval.of(1 / row.rates["speedup"]).stored()
            if "over" in given:
                other = rows[given["over"]]
                for key, rate in (("over", "block_efficiency"), ("faster", "tokens_per_second")):
                    if rate in row.rates:
                        gain = 100 * (row.rates[rate] / other.rates[rate] - 1)
                        record[key] = Interval.of(gain).stored()
                if pooled.timed:
                    saved = 1 - other.rates["speedup"] / row.rates["speedup"]
                    record["saved"] = Interval.of(100 * saved).stored()
            scores = row.runs[0].scores if len(row.runs) == 1 else {}
            for score, value in scores.items():
                low, high = row.runs[0].intervals.get(score, (None, None))
                record[score] = {"value": value, "low": low, "high": high}
            record["counts"] = {key: sum(getattr(run, key) for run in row.runs) for key in COUNTED}
            yield record


def formula(_pair: ModelPair, spec: Mapping[str, Any], _folder: Path) -> list[Record]:
    """Compute what follows from formulas alone: a function of `benchmarks.papers.examples`."""
    arguments = {key: value for key, value in spec.items() if key not in ("kind", "of")}
    return FORMULAS[spec["of"]](**arguments)


def _first_rows(labels: Dataset, split: str, most: int) -> Dataset:
    """The first rows of a split, at most so many of each prompt set."""
    splits, sets = arrow_table(labels, "split", "dataset").to_pydict().values()
    taken: Counter[str] = Counter()
    rows = []
    for index, (row_split, dataset) in enumerate(zip(splits, sets, strict=True)):
        if row_split == split and taken[dataset] < most:
            taken[dataset] += 1
            rows.append(index)
    return labels.select(rows)


def replay(pair: ModelPair, spec: Mapping[str, Any], folder: Path) -> list[Record]:
    """Stopping rules along held-out rollouts, exact over acceptance, among them a grid of heads.

    Rollouts and labels are the measurement's own, under its sampling. Heads learn from the first
    training set alone and are judged on all. A record a head, with its KL on rows that it learned
    from and on held-out ones of that set; and one a set, rule and setting, of which `best` is the
    fastest of its rule there. Times are the specification's, by Eq. 5.1.
    """
    made = _labelled(pair, spec, folder / "run")
    labels = made.folder("labels")
    times = Times(spec["draft_seconds"], spec["target_seconds"])
    seconds = partial(Counts.seconds_per_token, times=times)
    of_split = partial(_first_rows, load_stored(labels))
    train, rows = of_split("train", spec["rows"]), of_split("dev", spec["judged_rows"])
    if not len(train) or not len(rows):
        raise ConfigError(f"{labels} must have rows of splits train and dev")
    sets, prompts = np.array(rows["dataset"]), np.array(rows["example_id"])
    in_set = {name: sets == name for name in dict.fromkeys(rows["dataset"])}
    everything = np.full(len(rows), True)
    learned = in_set.get(train[0]["dataset"], everything)
    if len(in_set) > 1:
        in_set[ALL_SETS] = everything
    read = partial(acceptance_traces, draft=pair.draft, sampling=made.sampling)
    traces, of_heads = read(rows), []
    replays: list[tuple[Record, Any]] = [({"rule": "oracle"}, oracle_counts(traces))]
    tried = [("fixed", "length", f"K={each}", each) for each in spec["lengths"]]
    tried += [(n, "threshold", f"{v:g}", v) for n in spec["rules"] for v in GRIDS[n]]
    for name, parameter, label, value in tried:
        rule = STOPPING_RULES[name].model_validate({parameter: value})
        counts = expected_counts(traces, recorded_lengths(rule, traces.tokens))
        replays.append(({"rule": name, "method": label}, counts))
    for weight, depth in itertools.product(spec["weights"], spec["depths"]):
        keys, out = {"weight": weight, "depth": depth}, folder / f"depth-{depth}-weight-{weight:g}"
        train_head(  # one that is finished is kept
            draft=pair.draft,
            train=train,
            dev=rows.select(learned.nonzero()[0]),
            out=out,
            config=HeadConfig(depth=depth, rejection_weight=weight, **spec["training"]),
            seed=pair.config.seed,
            sampling=made.sampling,
        )
        head = BaseHead.from_pretrained(out)
        known = read(train.select(range(min(len(train), spec["judged_rows"]))), head=head)
        traces = read(rows, head=head)
        of_heads.append(keys | {"train_kl": _kl(known), "eval_kl": _kl(traces, learned)})
        for threshold in spec["thresholds"]:
            rule = STOPPING_RULES["head"].model_validate({"threshold": threshold})
            named = {"rule": "head", "method": f"h={threshold:g}", "threshold": threshold, **keys}
            counts = expected_counts(traces, recorded_lengths(rule, traces.tokens))
            replays.append((named, counts))
    records: list[Record] = of_heads
    for name, these in in_set.items():
        best: dict[Any, Counts] = {}
        of_set, of_rows = [], prompts[these].tolist()
        for keys, counts in replays:
            here = Counts(*(getattr(counts, each)[these] for each in REPLAYED))
            of_set.append((keys, here, (keys.get("weight"), keys.get("depth"))))
            for group in (keys["rule"], of_set[-1][-1]):
                best[group] = min(best.get(group, here), here, key=seconds)
        for keys, here, head_of in of_set:
            share = saving(here, best["fixed"], times, of_rows)
            record = {"set": name, **keys, "best": here is best[keys["rule"]]}
            record["best_h"] = here is best[head_of]
            gain = (100 * x / (1 - x) for x in (share.value, share.low, share.high))
            record["gain"] = Interval(*gain).stored()
            records.append(record | _expected(here, of_rows, spec))
    return records


def _labelled(pair: ModelPair, spec: Mapping[str, Any], folder: Path) -> PipelineConfig:
    """The run of a specification's sampling: the first training set and all held-out ones."""
    sets = [asdict(each) for each in pair.config.rollouts.sets]
    trained = [each | {"count": spec["rows"]} for each in sets if each["split"] == "train"][:1]
    held_out = [each | {"count": spec["judged_rows"]} for each in sets if each["split"] == "dev"]
    given = {**pair.given, **dict.fromkeys(("toy", "logits", "draft")), "labels": {}, "head": {}}
    given["models"] = {**given["models"], "draft": pair.config.draft_in_use}
    given["rollouts"] = {**given["rollouts"], "sets": trained + held_out}
    config = build(given | {"output": str(folder), "sampling": asdict(sampling_of(pair, spec))})
    for stage in (Rollouts(config), Labels(config)):
        run_stage(stage)
    return config


def _kl(traces: Traces, rows: Any = slice(None)) -> Record:
    """The binary KL divergence of acceptance from a head's raw output, over some rollouts."""
    assert traces.tokens.head is not None
    logits, accept = map(torch.from_numpy, (traces.tokens.head.logits, traces.accept))
    of_rows = np.where(traces.inside, binary_kl(logits, accept), 0.0).sum(axis=1)[rows]
    drawn = resamples(len(of_rows))
    return Interval.of(drawn @ of_rows / (drawn @ traces.tokens.lengths[rows])).stored()


def _expected(counts: Counts, prompts: Sequence[str], spec: Mapping[str, Any]) -> Record:
    """Rates and speeds of expected counts (R,), with intervals over prompts, and the counts."""
    _, group = np.unique(prompts, return_inverse=True)
    drawn = resamples(int(group.max()) + 1)
    of_rule = {name: getattr(counts, name) for name in REPLAYED}
    of_rule["seconds"] = counts.seconds(Times(spec["draft_seconds"], spec["target_seconds"]))
    sums = {name: drawn @ np.bincount(group, each) for name, each in of_rule.items()}
    speed = sums["tokens"] / sums["seconds"]
    rates = {
        "tokens_per_second": speed,
        "speedup": spec["alone_seconds"] * speed,
        "discard_rate": sums["n_discarded"] / sums["tokens"],
        "verification_rate": sums["n_target"] / sums["tokens"],
    }
    figures: Record = {name: Interval.of(values).stored() for name, values in rates.items()}
    return figures | {"counts": {name: float(sums[name][0]) for name in REPLAYED}}


def acceptance(pair: ModelPair, spec: Mapping[str, Any], folder: Path) -> list[Record]:
    """Acceptance by rule, at positions of the target's texts.

    A record a prompt set and rule, and one of all sets, positions weighing alike; intervals are
    bootstraps over prompts. `rules` are listed as methods are: `rule` names a function of
    `examples.RULES` and `k` the candidates, other keys are its parameters. `positions` a text;
    `draft_temperature` where it is not the target's.
    """
    sampling = sampling_of(pair, spec)
    drafts = replace(sampling, temperature=spec.get("draft_temperature", sampling.temperature))
    rules = expanded(spec["rules"])
    functions = [
        partial(RULES[rule["rule"]], **{key: rule[key] for key in rule.keys() - {"name", "rule"}})
        for rule in rules
    ]

    def values(p: Tensor, q: Tensor, *_: object) -> dict[str, Tensor]:
        pairs = zip(p.cpu(), q.cpu(), strict=True)
        rows = [[rule(*pair) for rule in functions] for pair in pairs]
        return {"values": torch.tensor(rows, dtype=torch.float64)}

    sums: dict[str, list[list[float]]] = {}
    for name, rows in texts(pair, spec):
        lasts = [len(row["completion_ids"]) - 1 for row in rows]
        places = [  # evenly over the text; all, if it has fewer
            torch.linspace(0, last, min(spec["positions"], last + 1)).round().long()
            for last in lasts
        ]
        models, warps = (pair.target, pair.draft), (sampling, drafts)
        with progress(len(rows), f"{folder.name}, {name}", "text") as bar:
            along = pair_columns(models, rows, warps, values, places=places, report=bar.update)
        of_texts = [each["values"] for each in along]
        sums[name] = [[len(each), *each.sum(dim=0).tolist()] for each in of_texts]
    several = {ALL_SETS: [row for rows in sums.values() for row in rows]} if len(sums) > 1 else {}
    shared = {**asdict(sampling), "draft_temperature": drafts.temperature}
    records = []
    for name, of_set in (sums | several).items():
        total = resamples(len(of_set)) @ np.array(of_set)
        for index, rule in enumerate(rules, start=1):
            figure = Interval.of(total[:, index] / total[:, 0]).stored()
            counts = {"positions": int(total[0, 0])}
            records.append({**shared, "set": name, **rule, "acceptance": figure, "counts": counts})
    return records


def sampling_of(pair: ModelPair, spec: Mapping[str, Any]) -> SamplingConfig:
    """The pair's sampling with the measurement's over it."""
    values = asdict(pair.config.sampling) | spec.get("sampling", {})
    return TypeAdapter(SamplingConfig).validate_python(values)


def texts(pair: ModelPair, spec: Mapping[str, Any]) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """Yield each prompt set's name and the target's texts of at least a token."""
    config, sampling, _ = evaluated(pair, {**spec, "methods": []})
    alone = SpeculativeDecoder.from_config(pair.target, None, DecodeConfig(**asdict(sampling)))
    prompts, seed = pair.load_prompts(config), pair.config.seed
    for name in dict.fromkeys(prompt.dataset for prompt in prompts):
        of_set = [prompt for prompt in prompts if prompt.dataset == name]
        generations = alone.generate_batch(
            [torch.tensor(prompt.ids) for prompt in of_set],
            max_new_tokens=config.max_new_tokens,
            generators=[generator_for(seed, "texts", prompt.example_id) for prompt in of_set],
            size=16,
        )
        rows = [
            {"prompt_ids": list(prompt.ids), "completion_ids": out.tokens.tolist()}
            | {"example_id": prompt.example_id, "sample": 0}
            for prompt, out in zip(of_set, generations, strict=True)
        ]
        yield name, [row for row in rows if row["completion_ids"]]


Measure = Callable[[ModelPair, Mapping[str, Any], Path], list[Record]]
MEASURES: dict[str, tuple[Measure, bool]] = {
    "evaluation": (evaluation, True),
    "replay": (replay, True),
    "formula": (formula, False),
    "acceptance": (acceptance, True),
}
"""Kind of measurement -> what makes its records, and whether it is of a pair."""
