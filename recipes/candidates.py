"""Measurements along the target's own text, for `draftsmith reproduce`.

The target alone continues the pair's prompts at the measurement's sampling. Acceptance of several
candidates is exact at positions of these texts, given p and q there, so that rules differ by what
they do and not by luck; k search expects rounds along them without decoding (`draftsmith trees`).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from eval.measuring.intervals import Interval, resamples
from eval.measuring.pooled import ALL_SETS
from eval.reporting.papers import Record
from specdata.sampling import SamplingConfig
from specdata.storage.files import write_json
from specdata.terminal import progress

if TYPE_CHECKING:
    from torch import Tensor

    from recipes.reproduce import Pair

OWN = ("name", "rule", "k")
"""Keys of a rule that are not parameters of its function."""


def acceptance(pair: Pair, spec: Mapping[str, Any], folder: Path) -> list[Record]:
    """Acceptance by rule, and shares of effective alphabets, at positions of the target's texts.

    Finished prompt sets are kept in the folder. A record a prompt set and rule, and one of all
    sets, positions weighing alike; intervals are bootstraps over prompts.

    Args:
        pair: the models, and the configuration of prompts.
        spec: `rules`, as methods are listed: `rule` names a function of
            `eval.analysis.acceptance.RULES` and `k` the candidates, other keys are its parameters;
            `rule: alphabet` with `top_p` counts the tokens that truncation leaves. `positions` a
            text, `sampling` of the target, and `draft_temperature` where the draft has another.
        folder: of the measurement.
    """
    from eval.analysis.acceptance import values_along

    sampling = sampling_of(pair, spec)
    drafts = replace(sampling, temperature=spec.get("draft_temperature", sampling.temperature))
    columns = list(_columns(spec))
    sums: dict[str, list[list[float]]] = {}
    for name, rows in texts(pair, spec):
        path = folder / f"{name}.json"
        if not path.is_file():
            with progress(len(rows), f"{folder.name}, {name}", "text") as bar:
                found = []
                for row in rows:
                    values = values_along(
                        row,
                        [function for _, function in columns],
                        target=pair.target,
                        draft=pair.draft,
                        sampling=sampling,
                        draft_sampling=drafts,
                        positions=spec["positions"],
                    )
                    found.append([len(values), *values.sum(axis=0).tolist()])
                    bar.update(1)
            write_json(path, found)
        sums[name] = json.loads(path.read_text(encoding="utf-8"))
    several = {ALL_SETS: [row for rows in sums.values() for row in rows]} if len(sums) > 1 else {}
    shared = {"measurement": folder.name, **asdict(sampling)}
    shared["draft_temperature"] = drafts.temperature
    records = []
    for name, found in (sums | several).items():
        total = resamples(len(found)) @ np.array(found)
        every = (keys for group, _ in columns for keys in group)
        for index, keys in enumerate(every, start=1):
            field = "share" if "tokens left" in keys else "acceptance"
            figure = asdict(Interval.of(total[:, index] / total[:, 0]))
            records.append({**shared, "set": name, **keys, field: figure})
    return records


def tree_search(pair: Pair, spec: Mapping[str, Any], folder: Path) -> list[Record]:
    """Search for a k-configuration (MCSD, section 4.2) along the target's texts of all sets.

    A record for each number of paths and criterion: the k-configuration within it that is expected
    to emit most, and the one that is expected to be fastest.

    Args:
        pair: the models, and the configuration of prompts.
        spec: `budgets`, each a most number of paths; `ratio` of the draft's forward to the
            target's; `siblings` ("iid" or "distinct"); `sampling`.
        folder: of the measurement.
    """
    import datasets

    from eval.analysis.trees import acceptance_along, search

    rows = [row for _, each in texts(pair, spec) for row in each]
    along = acceptance_along(
        datasets.Dataset.from_list(rows),
        target=pair.target,
        draft=pair.draft,
        sampling=sampling_of(pair, spec),
        siblings=spec["siblings"],
        most=max(spec["budgets"]),
        seed=pair.config.seed,
    )
    found = search(along, max(spec["budgets"]), spec["ratio"])
    records = []
    for budget in spec["budgets"]:
        within = [each for each in found if each.paths <= budget]
        for by, best in (
            ("fastest", max(within, key=lambda each: each.speedup)),
            ("most tokens", max(within, key=lambda each: each.tokens.value)),
        ):
            record = {"paths": budget, "by": by, "widths": best.name, "nodes": best.nodes}
            record |= {"block_efficiency": asdict(best.tokens), "speedup": best.speedup}
            records.append({"measurement": folder.name, "set": ALL_SETS, **record})
    return records


def sampling_of(pair: Pair, spec: Mapping[str, Any]) -> SamplingConfig:
    """The pair's sampling with the measurement's over it."""
    return SamplingConfig(**asdict(pair.config.sampling) | spec.get("sampling", {}))


def texts(pair: Pair, spec: Mapping[str, Any]) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """Of each prompt set its name and the target's texts, those with a token at least."""
    from eval.analysis.acceptance import target_texts
    from recipes.reproduce import evaluated
    from specdata.models import load_tokenizer, longest_prompt
    from specdata.prompts.loading import load_prompts

    config, sampling, _ = evaluated(pair, {**spec, "methods": []})
    name = pair.config.models.target
    prompts = load_prompts(
        config.sets,
        load_tokenizer(name),
        seed=pair.config.seed,
        max_tokens=longest_prompt(name, config.max_new_tokens),
    ).prompts
    for chosen in dict.fromkeys(prompt.dataset for prompt in prompts):
        rows = target_texts(
            pair.target,
            [prompt for prompt in prompts if prompt.dataset == chosen],
            sampling,
            max_new_tokens=config.max_new_tokens,
            seed=pair.config.seed,
        )
        yield chosen, [row for row in rows if row["completion_ids"]]


def _columns(
    spec: Mapping[str, Any],
) -> Iterator[tuple[list[Record], Callable[[Tensor, Tensor], float | list[float]]]]:
    """The keys of some figures, and the function of p and q whose means they are."""
    from eval.analysis.acceptance import BUCKETS, RULES, effective_alphabet
    from recipes.reproduce import expanded

    for rule in expanded(spec["rules"]):
        if rule["rule"] == "alphabet":
            keys = [{**rule, "tokens left": name} for name in BUCKETS]
            yield keys, partial(effective_alphabet, top_p=rule["top_p"])
        else:
            own = {key: value for key, value in rule.items() if key not in OWN}
            yield [rule], partial(RULES[rule["rule"]], k=rule["k"], **own)
