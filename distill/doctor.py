"""Examine a published EAGLE-3 or DSpark draft: why its acceptance is what it is.

Examined are its tensors, flags, taps, vocabulary map and chat template; then the target continues
some prompts, and the draft is measured along that text as it says it is, with each flag turned and
with its taps one layer off. Of any other draft: vocabulary, template, acceptance.
"""

from __future__ import annotations

from collections.abc import Collection, Generator, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from distill.engine_layouts import (
    DSPARK,
    Layout,
    built,
    config_of,
    ids_of,
    layout_of,
    not_computed,
    settings_of,
    stored,
    tensors_of,
)
from distill.watch import Figures, HeldOut
from specdata.config import PromptSet
from specdata.draft_models.states_draft import Norms, states_input
from specdata.draft_models.taps import attach
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

BETTER, FAR_BETTER = 0.02, 0.25
"""By so much of the tokens of a round another setting must be better to be named. Where a token
depends on the one before it alone, slots are nearly as good in another's place: by much more."""
LOW, FLAG = 0.2, 0.01
"""Acceptance below which a draft slows decoding down, whatever its cost, or is read wrongly."""
TURNED = ("norm_before_residual", "norm_output", "sample_from_anchor")
"""Flags that are turned; the others have tensors of their own."""
HANDED_OUT = (
    *("llama", "mistral", "qwen3", "qwen3_moe", "qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"),
    *("gemma3n_text", "gemma4_text", "gpt_oss", "lfm2", "nemotron_h", "minimax", "minimax_m2"),
)
"""`model_type` of targets inside of which llama.cpp b11434 lets drafts look."""
SPREAD, TAIL, LEAST = 0.02, 0.15, 8_000
"""How near to .02 and 3 deviation and kurtosis of a matrix never trained are; its least size."""


@dataclass(frozen=True, slots=True)
class Finding:
    """What one examination found."""

    kind: str
    about: str
    text: str


def examine(
    folder: Path,
    target_name: str,
    *,
    prompts: str | None,
    count: int,
    max_new_tokens: int,
    sampling: SamplingConfig,
) -> Iterator[Finding]:
    """What is found in a draft's folder, one after the other.

    `prompts` is a file, or a set by name (default: chat-assistant, or instruct), of which at most
    `count` are read.
    """
    config, name = config_of(folder), str(folder)
    target, tokenizer = load_model(target_name), load_tokenizer(target_name)
    yield from _of_tokenizer(folder, tokenizer)
    prompts = prompts or ("chat-assistant" if tokenizer.chat_template else "instruct")
    texts = written_texts(target, tokenizer, prompts, count, max_new_tokens, sampling)
    layout = layout_of(config)
    is_published = layout is DSPARK or "speculators_model_type" in config
    is_published |= "Eagle3" in str(config.get("architectures"))
    if not is_published:
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
        yield from _of_settings(config, *read, target, name, texts, sampling)


def _of_files(
    folder: Path,
    config: dict[str, Any],
    layout: Layout,
    target: PreTrainedModel,
    new: Sequence[int],
) -> Generator[Finding, None, tuple[dict[str, Tensor], Tensor] | None]:
    """Keys and tensors, against new tokens of the target; returns what can be measured."""
    name = str(folder)
    try:
        theirs = stored(folder)
        if layout is DSPARK:
            yield from _of_engines(config, theirs, target)
            config["sample_from_anchor"] = True  # as it is measured at first
        if found := not_computed(config):
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
    kind = "ok" if share > 1 - LOW else "warning"
    head = "" if "lm_head.weight" in tensors else "; no lm_head, so the target's rows of them"
    share_said = f"{len(ids):,} tokens, {share:.1%} of the target's text"
    yield Finding(kind, "vocabulary", f"{share_said}{head}")
    return tensors, ids


def _of_settings(
    config: dict[str, Any],
    tensors: Mapping[str, Tensor],
    ids: Tensor,
    target: PreTrainedModel,
    name: str,
    texts: Dataset,
    sampling: SamplingConfig,
) -> Iterator[Finding]:
    """How the draft is accepted as it says it is, and with other flags and taps."""
    try:
        taps, form = settings_of(config, target)
    except ConfigError as error:
        yield Finding("problem", "config.json", str(error))
        return
    flags = asdict(form) if isinstance(form, Norms) else {"sample_from_anchor": True}

    def read(taps: Sequence[int], flags: Mapping[str, bool]) -> PreTrainedModel:
        said = Norms(**flags) if isinstance(form, Norms) else form
        draft: Any = built(config, taps, said, tensors, ids, target, name)
        if not flags.get("sample_from_anchor", True):
            draft.model.norm = _FilledIn(draft.model.norm)
        made: PreTrainedModel = draft
        return made

    try:
        draft = read(taps, flags)
    except ConfigError as error:
        yield Finding("problem", "tensors", str(error))
        return
    if not (texts := (yield from _within(draft, target, texts, name))):
        return
    held = HeldOut(target, texts, sampling)
    if silent := [flag for flag in flags if flag not in config]:
        yield Finding(
            "warning",
            "norm flags",
            f"config.json does not say {', '.join(silent)}: read as false here, and engines differ "
            "(vLLM reads norm_before_residual of speculators' folders as true); say them",
        )
    figures = held.measure(draft).overall
    rounds = figures.expected_tokens["token_4"]
    others = {
        f"{flag} {not value}": (taps, {**flags, flag: not value})
        for flag, value in flags.items()
        if flag in TURNED
    }
    last = target.config.get_text_config().num_hidden_layers
    for step in (-1, 1):
        moved = [tap + step for tap in taps]
        if moved[0] >= 0 and moved[-1] <= last:
            others[f"taps {moved}"] = (moved, flags)
    is_better = False
    for what, other in others.items():
        better = held.measure(read(*other)).overall.expected_tokens["token_4"]
        least = FAR_BETTER if what.startswith("sample_from_anchor") else BETTER
        if better > rounds * (1 + least):
            is_better = True
            yield Finding(
                "problem",
                "settings",
                f"with {what} the draft is accepted more, {better:.2f} tokens a round of four "
                f"instead of {rounds:.2f}: config.json (taps {taps}, {_flags(flags)}) is not how "
                "it was trained",
            )
    if not is_better:
        yield Finding("ok", "settings", f"taps {taps}, {_flags(flags)}: no other is better")
    yield _acceptance(figures)


def _within(
    draft: PreTrainedModel, target: PreTrainedModel, texts: Dataset, name: str
) -> Generator[Finding, None, Dataset | None]:
    """The texts as far as the draft has positions; None if none goes beyond its prompt there."""
    cut, ended = [], 0
    for row in texts:
        room = max(0, positions(draft.config) - len(row["prompt_ids"]))
        ended += len(row["completion_ids"]) > room
        if room:
            cut.append({**row, "completion_ids": row["completion_ids"][:room]})
    if words := ends_first(draft, target, name):
        beyond = f"; {ended} of these {len(texts)} texts are longer, and are read up to there"
        yield Finding("problem" if ended else "warning", "positions", words + beyond)
    return Dataset.from_list(cut) if cut else None


def _flags(flags: Mapping[str, bool]) -> str:
    return ", ".join(name for name, value in flags.items() if value) or "no norm flags"


class _FilledIn(nn.Module):
    """The last norm of a draft whose anchor proposes nothing, and each mask the token in its place.

    So what slot i would say here is the state of slot i + 1.
    """

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm, self.width = norm, norm.width

    def forward(self, states: Tensor) -> Tensor:
        """(B, n, 2 H + r) -> (B, n, H + r)."""
        read: Tensor = self.norm(states)
        return torch.cat([read[..., : self.width].roll(-1, dims=-2), read[..., self.width :]], -1)


def _of_engines(
    config: Mapping[str, Any], names: Collection[str], target: PreTrainedModel
) -> Iterator[Finding]:
    """What engines read in DSpark's layout without a word, and otherwise than was meant."""
    anchor = config.get("sample_from_anchor")
    if anchor is None:
        text = "is not said: vLLM's reader of speculators' folders takes false, SGLang true, and "
        yield Finding("problem", "sample_from_anchor", f"{text}llama.cpp either: say it")
    elif anchor is not True:
        text = f"is {anchor}: a draft whose anchor proposes nothing cannot decode here"
        yield Finding("problem", "sample_from_anchor", text)
    has = {part: any(part in name for name in names) for part in ("embed_tokens", "confidence")}
    vocabulary = target.config.get_text_config().vocab_size
    is_reduced = (config.get("draft_vocab_size") or vocabulary) < vocabulary
    if has["embed_tokens"] and not is_reduced:
        text = (
            "is in the folder: llama.cpp would take it as output matrix, which leaves lm_head out"
        )
        yield Finding("warning", "embed_tokens", f"{text}: remove it, engines take the target's")
    if is_reduced and "lm_head.weight" not in names:
        yield Finding("problem", "lm_head", "is missing, and vLLM refuses few tokens without it")
    if (kind := target.config.get_text_config().model_type) not in HANDED_OUT:
        text = f"llama.cpp lets no draft look inside of {kind}: it can be served elsewhere alone"
        yield Finding("warning", "target", text)
    for flag, what in {
        "enable_confidence_head": "drops the head without a word",
        "confidence_head_with_markov": "takes it for one of the state alone, by default",
    }.items():
        if has["confidence"] and config.get(flag) is not True:
            text = f"{flag} must be true, or vLLM {what}"
            yield Finding("warning", "confidence head", text)
    if config.get("enable_confidence_head") and not has["confidence"]:
        text = "enable_confidence_head is true and no tensor is there: vLLM then asks none silently"
        yield Finding("warning", "confidence head", text)


def _acceptance(figures: Figures) -> Finding:
    text = (
        f"{figures.acceptance:.3f}, the sum of min(p, q) along {figures.positions:,} tokens of the "
        f"target's text; {figures.expected_tokens['token_4']:.2f} tokens a round of four"
    )
    if figures.acceptance < FLAG:
        text += ", nearly always a flag or taps"
    if not figures.acceptance >= LOW:  # NaN, too
        return Finding("problem", "acceptance", f"{text}: too little, see what is above")
    return Finding("ok", "acceptance", text)


def _of_tensors(tensors: Mapping[str, Tensor], layout: Layout) -> Iterator[Finding]:
    """Tensors that hold nothing, or what they were filled with before training."""
    untrained = []
    for ours, each in tensors.items():
        if not each.is_floating_point():
            continue
        name, wide = layout.theirs(ours), each.float()
        if not wide.isfinite().all() or not wide.any():
            what = "only zeros" if not wide.any() else "NaN or infinity"
            yield Finding("problem", "tensors", f"{name} holds {what}: it was not trained, or lost")
        elif each.dim() == 2 and each.numel() >= LEAST:
            scaled = (wide - wide.mean()) / (deviation := wide.std())
            fourth = float(scaled.pow(4).mean())
            if abs(float(deviation) / 0.02 - 1) < SPREAD and abs(fourth - 3) < TAIL:
                untrained.append(name)
    if untrained:
        yield Finding(
            "warning",
            "tensors",
            f"{', '.join(untrained)} are as random weights are (normal, deviation .02): never "
            "trained, or filled by a loader that did not find them",
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
            "another than the target's: a draft that was trained on prompts rendered with it "
            "meets others when it is served",
        )
    else:
        yield Finding("ok", "chat template", "the target's")


def written_texts(
    target: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: str,
    count: int,
    max_new_tokens: int,
    sampling: SamplingConfig,
) -> Dataset:
    """At most `count` prompts of a set and the target's text after them, as rollouts."""
    sets = [PromptSet(prompts, count=count if prompts in EMBEDDED else 0)]
    limits = prompt_limits(target.name_or_path, max_new_tokens)
    asked = load_prompts(sets, tokenizer, seed=0, **limits).prompts[:count]
    backend = TransformersBackend(target, sampling, max_new_tokens, count, seed=0)
    written = backend.complete([Request(each.ids, (each.example_id,)) for each in asked])
    return Dataset.from_list(
        [
            {"prompt_ids": prompt.ids, "completion_ids": each.ids}
            for prompt, each in zip(asked, written, strict=True)
        ]
    )
