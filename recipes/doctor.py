"""Examine a draft in a layout of engines: why its acceptance is what it is.

Examined are its tensors, flags, taps, vocabulary map and chat template; then the target continues
some prompts, and the draft is measured along that text as it says it is, with each flag turned and
with its taps one layer off. They differ where a bootstrap over the texts says so. Of any other
draft: vocabulary, template, acceptance.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from distill.engine_layouts import with_layout
from distill.published import Finding, Layout, Published, ids_of, not_computed, stored, tensors_of
from distill.watch import SCORE, Figures, HeldOut, Measurement
from eval.measuring.intervals import Floats, Interval, prompts_needed, resamples
from recipes.config import RESULTS
from specdata.config import PromptSet
from specdata.drafts import is_for_engines
from specdata.drafts.states_network import states_input
from specdata.drafts.taps import BOUND, attach
from specdata.errors import ConfigError, VocabularyMismatchError
from specdata.models import (
    check_shared_vocabulary,
    ends_first,
    load_model,
    load_tokenizer,
    positions,
    prompt_limits,
)
from specdata.prompts.catalogue import EMBEDDED
from specdata.prompts.loading import load_prompts
from specdata.rollouts.backend import Request, TransformersBackend
from specdata.sampling import SamplingConfig
from specdata.sources import config_of
from specdata.storage.files import read_object

BETTER = 0.02
"""By so much of the tokens of a round, and beyond the interval, other flags or taps must be better
to be named."""
LOW, FLAG = 0.2, 0.01
"""Acceptance below which a draft slows decoding down, whatever its cost, or is read wrongly."""
SPREAD, TAIL, LEAST = 0.02, 0.15, 8_000
"""How near to .02 and 3 deviation and kurtosis of a random matrix are; its least size."""


def examine(
    folder: Path,
    target_name: str,
    prompts: str | None,
    count: int,
    max_new_tokens: int,
    sampling: SamplingConfig,
) -> Iterator[Finding]:
    """Findings about a draft's folder, one after the other.

    `prompts` is a file, or a set by name (default: chat-assistant, or instruct), of which at most
    `count` are read.
    """
    name, (config, layout) = str(folder), with_layout(config_of(folder))
    target, tokenizer = load_model(target_name), load_tokenizer(target_name)
    yield from _of_tokenizer(folder, tokenizer)
    texts = written_texts(target, tokenizer, prompts, count, max_new_tokens, sampling)
    if not (is_for_engines(config) or "speculators_model_type" in config):
        draft, kind = load_model(name), "an ordinary draft"
        if states_input(draft) is not None:
            attach(draft, target)
            kind = "on states, for this decoder alone"
        yield Finding("ok", "layout", f"{kind}, {type(draft).__name__}")
        if texts := (yield from _within(draft, target, texts, name)):
            yield _acceptance(HeldOut(target, texts, sampling).measure(draft).overall)
        return
    new = [token for row in texts["completion_ids"] for token in row]
    read = yield from _of_files(folder, config, layout, target, new)
    if read is not None:
        yield from _of_settings(read, layout, texts, sampling, is_measured=_is_measured(folder))


def _of_files(
    folder: Path,
    config: dict[str, Any],
    layout: Layout,
    target: PreTrainedModel,
    new: Sequence[int],
) -> Generator[Finding, None, Published | None]:
    """Keys and tensors, against new tokens of the target; returns what can be measured."""
    name = str(folder)
    try:
        theirs = stored(folder)
        yield from _of_target(config, theirs, target)
        yield from layout.traps(config, theirs, target)
        # As it is measured at first.
        config |= {key: layout.fixed_values[key] for key in layout.required_keys}
        if found := not_computed(config, layout):
            for each in found:
                yield Finding("problem", "config.json", each)
            return None
        tensors = tensors_of(theirs, name, layout)
    except ConfigError as error:
        yield Finding("problem", "tensors", str(error))
        return None
    findings = [*_of_tensors(tensors, layout)]
    yield from findings
    if any(each.kind == "problem" for each in findings):
        return None
    ids, wrong = _ids(tensors, name, target)
    if wrong:
        yield Finding("problem", "vocabulary map", wrong)
    if ids is None:
        return None
    share = sum(map({*ids.tolist()}.__contains__, new)) / len(new)
    head = "" if "lm_head.weight" in tensors else "; no lm_head, so the target's rows of them"
    text = f"{len(ids):,} tokens, {share:.1%} of the target's text{head}"
    yield Finding("ok" if share > 1 - LOW else "warning", "vocabulary", text)
    return Published(config, tensors, ids, target, name)


def _of_target(
    config: Mapping[str, Any], theirs: Mapping[str, Tensor], target: PreTrainedModel
) -> Iterator[Finding]:
    """Signs that the draft is of another target."""
    tensors = {name.removeprefix("model."): each for name, each in theirs.items()}
    expected = target.get_input_embeddings().weight
    embedding = tensors.get("embed_tokens.weight")
    states = tensors.get("fc.weight", expected).shape[-1]
    verifier = (config.get("speculators_config") or {}).get("verifier") or {}
    verifier_name, target_name = verifier.get("name_or_path"), target.name_or_path
    signs = []
    if verifier_name and Path(verifier_name).name != Path(target_name).name:
        signs.append(f"config.json names {verifier_name}")
    if states % (width := target.config.get_text_config().hidden_size):
        signs.append(f"the draft reads {states} numbers of states, and this has {width} in each")
    if embedding is not None and (
        embedding.shape != expected.shape
        or (embedding.float() - expected.cpu()).norm() > BOUND * expected.cpu().norm()
    ):
        signs.append("embed_tokens are not this target's")
    if signs:
        text = f"{target_name} may be the wrong one: {'; '.join(signs)}"
        yield Finding("warning", "target", text)


def _of_settings(
    given: Published, layout: Layout, texts: Dataset, sampling: SamplingConfig, *, is_measured: bool
) -> Iterator[Finding]:
    """Acceptance of the draft as its config.json says, and with other flags and taps."""
    config, target = given.settings, given.target
    about = "config.json"
    try:
        taps, flags = layout.taps_of(config, target)
        about = "tensors"
        draft = layout.build(given, taps, flags)
    except ConfigError as error:
        yield Finding("problem", about, str(error))
        return
    if not (texts := (yield from _within(draft, target, texts, given.name))):
        return
    held = HeldOut(target, texts, sampling)
    if silent := [flag for flag in flags if flag not in config]:
        yield Finding(
            "warning",
            "norm flags",
            f"config.json does not say {', '.join(silent)}: read as false here, and engines differ "
            "(vLLM reads norm_before_residual of speculators' folders as true); say them",
        )
    configured = held.measure(draft)
    others: dict[str, tuple[list[int], dict[str, bool]]] = {
        f"{flag} {not flags[flag]}": (taps, {**flags, flag: not flags[flag]})
        for flag in layout.doubtful_flags
    }
    last = target.config.get_text_config().num_hidden_layers
    for step in (-1, 1):
        moved = [tap + step for tap in taps]
        if moved[0] >= 0 and moved[-1] <= last:
            others[f"taps {moved}"] = (moved, flags)
    measured = {
        what: held.measure(layout.build(given, other, turned))
        for what, (other, turned) in others.items()
    }
    given_flags = ", ".join(name for name, value in flags.items() if value) or "no norm flags"
    settings = f"taps {taps}, {given_flags}"
    if not max(each.overall.acceptance or 0.0 for each in (configured, *measured.values())) >= LOW:
        text = (
            f"{target.name_or_path} may be the wrong one, or the draft untrained: it is accepted "
        )
        text += f"with none of these: {settings}; {'; '.join(measured)}"
        yield Finding("problem", "target", text)
    else:
        ratios = {what: _ratio(each, configured) for what, each in measured.items()}
        doubted = ""
        if doubt := layout.doubtful_taps(config):
            doubted = f"taps {[tap + 1 for tap in taps]}"
            yield _of_doubt(doubt, ratios.get(doubted), taps)
        better = {what: each for what, each in ratios.items() if each.value > 1 + BETTER}
        if not better:
            yield Finding("ok", "settings", f"{settings}: no other is better")
        better.pop(doubted, None)  # said already
        yield from _of_better(better, settings, len(configured.sets), is_measured=is_measured)
    yield _acceptance(configured.overall)


def _of_better(
    better: Mapping[str, Interval], settings: str, texts: int, *, is_measured: bool
) -> Iterator[Finding]:
    """What is said of other settings that give more tokens per target call, and how many."""
    shown = {what: each for what, each in better.items() if each.low > 1}
    for what, each in shown.items():
        text = (
            f"with {what} the draft is accepted more, {each.within(2)} times as many tokens "
            f"per target call at K = 4 on {texts} texts, than as config.json says ({settings})"
        )
        if is_measured:
            text += f"; {RESULTS} has this draft measured as it was released, so nothing is wrong"
            yield Finding("warning", "settings", f"{text} unless config.json was changed since")
        else:
            text += f": write it there, no {RESULTS} here says that it was measured otherwise"
            yield Finding("problem", "settings", text)
    if unsure := [
        f"{what} ({each.within(2)})" for what, each in better.items() if what not in shown
    ]:
        text = f"{settings}: {texts} texts do not tell whether it is accepted more with "
        more = f"give more prompts (--count, at least {prompts_needed(1)} for an interval)"
        yield Finding("warning", "settings", f"{text}{', '.join(unsure)}: {more}")


def _of_doubt(doubt: str, ratio: Interval | None, taps: Sequence[int]) -> Finding:
    """What is said of ids that may be of taps one layer below those meant."""
    if ratio is None:
        return Finding("warning", "taps", f"{doubt}; no layer of this target is behind the last")
    found = (
        f"{doubt}; with those it is accepted {ratio.within(2)} times as many tokens per target call"
    )
    if ratio.low > 1:
        return Finding("problem", "taps", f"{found}: more, so write those into config.json")
    if ratio.high < 1:
        return Finding("ok", "taps", f"{found}: less, so {taps} are right as they are read here")
    return Finding("warning", "taps", f"{found}: not told apart, give more prompts (--count)")


def _ratio(one: Measurement, other: Measurement) -> Interval:
    """Tokens per target call over those of another measurement, each text a set of its own."""

    def sums(of: Measurement) -> Floats:
        texts = of.sets.values()  # a model decides p everywhere
        return np.array([each.positions * (each.expected_tokens[SCORE] or 0.0) for each in texts])

    drawn = resamples(len(other.sets))
    return Interval.of((drawn @ sums(one)) / (drawn @ sums(other)))


def _is_measured(folder: Path) -> bool:
    """True if a folder says that it was measured as it is: a release has its results."""
    try:
        return any(run["draft"] for run in read_object(folder / RESULTS)["runs"])
    except (OSError, ValueError, KeyError, TypeError):
        return False


def _within(
    draft: PreTrainedModel, target: PreTrainedModel, texts: Dataset, name: str
) -> Generator[Finding, None, Dataset | None]:
    """The texts as far as the draft has positions; None if none goes beyond its prompt there.

    Each is a set of its own, so that it is measured by itself, too.
    """
    cut, ended = [], 0
    for number, row in enumerate(texts):
        room = max(0, positions(draft.config) - len(row["prompt_ids"]))
        ended += len(row["completion_ids"]) > room
        if room:
            kept = row["completion_ids"][:room]
            cut.append({**row, "completion_ids": kept, "dataset": str(number)})
    if words := ends_first(draft, target, name):
        beyond = f"; {ended} of these {len(texts)} texts are longer, and are read up to there"
        yield Finding("problem" if ended else "warning", "positions", words + beyond)
    return Dataset.from_list(cut) if cut else None


def _acceptance(figures: Figures) -> Finding:
    accepted, tokens = figures.acceptance or 0.0, figures.expected_tokens[SCORE] or 0.0
    text = (
        f"{accepted:.3f}, the sum of min(p, q) along {figures.positions:,} tokens of the "
        f"target's text; {tokens:.2f} tokens per target call at K = 4"
    )
    if accepted < FLAG:
        text += ", nearly always the wrong target, a flag or taps"
    if not accepted >= LOW:  # NaN, too
        return Finding("problem", "acceptance", f"{text}: too little, see what is above")
    return Finding("ok", "acceptance", text)


def _of_tensors(tensors: Mapping[str, Tensor], layout: Layout) -> Iterator[Finding]:
    """Tensors that hold nothing, or what new ones are filled with."""
    random = []
    for ours, each in tensors.items():
        if not each.is_floating_point():
            continue
        name, wide = layout.theirs(ours), each.float()
        if not wide.isfinite().all() or not wide.any():
            what = "only zeros" if not wide.any() else "NaN or infinity"
            yield Finding("problem", "tensors", f"{name} holds {what}: restore it")
        elif each.dim() == 2 and each.numel() >= LEAST:
            scaled = (wide - wide.mean()) / (deviation := wide.std())
            fourth = float(scaled.pow(4).mean())
            if abs(float(deviation) / 0.02 - 1) < SPREAD and abs(fourth - 3) < TAIL:
                random.append(name)
    if random:
        yield Finding(
            "warning",
            "tensors",
            f"{', '.join(random)} are as random weights are (normal, deviation .02), which loaders "
            "fill in for what they do not find: see that they are what was published",
        )
    else:
        yield Finding("ok", "tensors", f"{len(tensors)}, none as random weights are")


def _ids(
    tensors: Mapping[str, Tensor], name: str, target: PreTrainedModel
) -> tuple[Tensor | None, str]:
    """(N,) the ids of the draft's tokens, and what is wrong with its maps."""
    try:
        return ids_of(tensors, target, name), ""
    except ConfigError as error:
        if (added := tensors.get("d2t")) is None or added.dim() != 1:
            return None, str(error)
        try:
            ids = ids_of({**tensors, "d2t": added - torch.arange(len(added))}, target, name)
        except ConfigError:
            return None, str(error)
    return ids, "d2t holds ids, and must hold what is added to 0, 1, 2, ...: subtract these"


def _of_tokenizer(folder: Path, target: PreTrainedTokenizerBase) -> Iterator[Finding]:
    """The tokenizer beside the draft against the target's."""
    if not (folder / "tokenizer_config.json").is_file():
        yield Finding("ok", "tokenizer", "none here: engines take the target's")
        return
    of_draft = load_tokenizer(str(folder))
    try:
        check_shared_vocabulary(target, of_draft)
    except VocabularyMismatchError as error:
        yield Finding("problem", "tokenizer", str(error))
    if of_draft.chat_template != target.chat_template:
        yield Finding(
            "warning",
            "chat template",
            "another than the target's, with which engines render prompts",
        )
    else:
        yield Finding("ok", "chat template", "the target's")


def written_texts(
    target: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: str | None,
    count: int,
    max_new_tokens: int,
    sampling: SamplingConfig,
) -> Dataset:
    """At most `count` prompts of a set and the target's text after them, as rollouts."""
    prompts = prompts or ("chat-assistant" if tokenizer.chat_template else "instruct")
    sets = [PromptSet(prompts, count=count if prompts in EMBEDDED else 0)]
    limits = prompt_limits(target.name_or_path, max_new_tokens)
    chosen = load_prompts(sets, tokenizer, seed=0, **limits).prompts[:count]
    backend = TransformersBackend(target, sampling, max_new_tokens, count, seed=0)
    written = backend.complete([Request(each.ids, (each.example_id,)) for each in chosen])
    return Dataset.from_list(
        [
            {"prompt_ids": prompt.ids, "completion_ids": each.ids}
            for prompt, each in zip(chosen, written, strict=True)
        ]
    )
