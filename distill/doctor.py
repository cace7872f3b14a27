"""Examine a published EAGLE-3 draft: why its acceptance is what it is.

    draftsmith doctor FOLDER --target TARGET [--prompts FILE]

Examined are its tensors, norm flags, taps, vocabulary map and chat template; then the target
continues some prompts, and the draft is measured along that text as it says it is, with each norm
flag turned and with its taps one layer off. Of any other draft: vocabulary, template, acceptance.
Ends with 1 if a problem was found.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from distill.eagle3 import RENAMED, built, config_of, ids_of, settings_of, stored, tensors_of
from specdata.errors import ConfigError, VocabularyMismatchError
from specdata.prompts.config import PromptSet
from specdata.sampling import SamplingConfig
from specdata.terminal import accept_any_text, tell

if TYPE_CHECKING:  # help is shown without torch
    from torch import Tensor
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from distill.watch import HeldOut

BETTER = 0.02
"""By so much of the tokens of a round another setting must be better to be named."""
LOW = 0.2
"""Acceptance below which a draft slows decoding down, whatever its cost."""
SPREAD, TAIL, LEAST = 0.02, 0.15, 8_000
"""How near to .02 and 3 deviation and kurtosis of a matrix never trained are; its least size."""


@dataclass(frozen=True, slots=True)
class Finding:
    """What one examination found."""

    kind: str
    about: str
    text: str


def main(arguments: Sequence[str] | None = None, program: str = "draftsmith doctor") -> int:
    """Examine and print; return 1 if there is a problem."""
    accept_any_text()
    parser = argparse.ArgumentParser(
        prog=program,
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("folder", type=Path, help="the draft")
    add("--target", required=True, help="the model that it drafts for")
    add("--prompts", help="a file, or a set by name (default: chat-assistant, or instruct)")
    add("--count", type=int, default=16, help="most prompts (default: 16)")
    add("--max-new-tokens", type=int, default=64, help="of each text (default: 64)")
    add("--temperature", type=float, default=1.0, help="of target and draft (default: 1)")
    given = parser.parse_args(arguments)
    console, problems = Console(highlight=False, soft_wrap=True), 0
    try:
        for each in examine(given):
            console.print(f"{each.kind:<8} {each.about}: {each.text}", markup=False)
            problems += each.kind == "problem"
    except Exception as error:  # noqa: BLE001 - raised again if it is a defect
        return tell(error)
    return 1 if problems else 0


def examine(given: argparse.Namespace) -> Iterator[Finding]:
    """What is found in a folder, one after the other.

    Raises:
        ConfigError: if there is no draft to examine, the target cannot be loaded, or what is asked
            for is out of range.
    """
    from distill.watch import HeldOut
    from specdata.models import load_model, load_tokenizer
    from specdata.states_draft import states_input

    if min(given.count, given.max_new_tokens) < 1:
        raise ConfigError(
            "--count and --max-new-tokens must be at least 1, got "
            f"{given.count} and {given.max_new_tokens}"
        )
    try:
        sampling = SamplingConfig(given.temperature)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    said, name = config_of(given.folder), str(given.folder)
    target, tokenizer = load_model(given.target), load_tokenizer(given.target)
    yield from _of_tokenizer(given.folder, tokenizer)
    text = _text(given, target, tokenizer)
    held = HeldOut(target, text, sampling)
    is_published = "speculators_model_type" in said or "Eagle3" in str(said.get("architectures"))
    if not is_published:
        draft = load_model(name, target=given.target)
        kind = "on states, for this decoder alone" if states_input(draft) else "an ordinary draft"
        yield Finding("ok", "layout", f"{kind}, {type(draft).__name__}")
        yield _acceptance(held, draft)
        return
    try:
        theirs = stored(given.folder)
        tensors = tensors_of(theirs, name)
    except ConfigError as error:
        yield Finding("problem", "tensors", str(error))
        return
    found = [*_of_tensors(tensors)]
    yield from found
    if any(each.kind == "problem" for each in found):
        return
    ids, wrong = _ids(tensors, theirs.get("t2d"), name, target)
    if wrong:
        yield Finding("problem", "vocabulary map", wrong)
    if ids is None:
        return
    new = [token for row in text["completion_ids"] for token in row]
    share = sum(map({*ids.tolist()}.__contains__, new)) / len(new)
    kind = "ok" if share > 1 - LOW else "warning"
    yield Finding(kind, "vocabulary", f"{len(ids):,} tokens, {share:.1%} of the target's text")

    taps, norms = settings_of(said, target)
    try:
        draft = built(said, taps, norms, tensors, ids, target, name)
    except ConfigError as error:
        yield Finding("problem", "tensors", str(error))
        return
    silent = [each.name for each in fields(norms) if each.name not in said]
    if silent:
        yield Finding(
            "warning",
            "norm flags",
            f"config.json does not say {', '.join(silent)}: read as false here, and engines differ "
            "(vLLM reads norm_before_residual of speculators' folders as true); say them",
        )
    rounds = held.measure(draft).overall.expected_tokens["token_4"]
    others = {
        f"{flag} {not value}": (taps, replace(norms, **{flag: not value}))
        for flag, value in asdict(norms).items()
        if flag in ("norm_before_residual", "norm_output")  # the others have tensors of their own
    }
    last = target.config.get_text_config().num_hidden_layers
    for step in (-1, 1):
        moved = [tap + step for tap in taps]
        if moved[0] >= 0 and moved[-1] <= last:
            others[f"taps {moved}"] = (moved, norms)
    is_better = False
    for what, (their_taps, their_norms) in others.items():
        other = built(said, their_taps, their_norms, tensors, ids, target, name)
        better = held.measure(other).overall.expected_tokens["token_4"]
        if better > rounds * (1 + BETTER):
            is_better = True
            yield Finding(
                "problem",
                "settings",
                f"with {what} the draft is accepted more, {better:.2f} tokens a round of four "
                f"instead of {rounds:.2f}: config.json (taps {taps}, {_said(norms)}) is not how it "
                "was trained",
            )
    if not is_better:
        yield Finding("ok", "settings", f"taps {taps}, {_said(norms)}: no other is better")
    yield _acceptance(held, draft)


def _said(norms: Any) -> str:
    on = [name for name, value in asdict(norms).items() if value]
    return ", ".join(on) or "no norm flags"


def _acceptance(held: HeldOut, draft: PreTrainedModel) -> Finding:
    found = held.measure(draft).overall
    text = (
        f"{found.acceptance:.3f}, the sum of min(p, q) along {found.positions:,} tokens of the "
        f"target's text; {found.expected_tokens['token_4']:.2f} tokens a round of four"
    )
    if not found.acceptance >= LOW:  # NaN, too
        return Finding("problem", "acceptance", f"{text}: too little, see what is above")
    return Finding("ok", "acceptance", text)


def _of_tensors(tensors: Mapping[str, Tensor]) -> Iterator[Finding]:
    """Tensors that hold nothing, or what they were filled with before training."""
    untrained = []
    for ours, each in tensors.items():
        if not each.is_floating_point():
            continue
        name = ours
        for theirs, prefix in RENAMED.items():
            name = name.replace(prefix, theirs, 1) if ours.startswith(prefix) else name
        wide = each.float()
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
    tensors: Mapping[str, Tensor], t2d: Tensor | None, name: str, target: PreTrainedModel
) -> tuple[Tensor | None, str]:
    """(N,) the ids of the draft's tokens, and what is wrong with its maps."""
    import torch

    wrong, rows = "", len(tensors["lm_head.weight"])
    try:
        ids = ids_of(tensors, target, name)
    except ConfigError as error:
        if len(tensors.get("d2t", ())) != rows:
            return None, str(error)
        try:
            ids = ids_of({**tensors, "d2t": tensors["d2t"] - torch.arange(rows)}, target, name)
        except ConfigError:
            return None, str(error)
        wrong = "d2t holds ids, and must hold what is added to 0, 1, 2, ...: subtract these"
    if t2d is not None and not torch.equal(t2d.nonzero().squeeze(-1), ids):
        wrong = wrong or "t2d marks other tokens than d2t names: one of them is of another draft"
    return ids, wrong


def _of_tokenizer(folder: Path, target: PreTrainedTokenizerBase) -> Iterator[Finding]:
    """The tokenizer beside the draft against the target's."""
    from specdata.models import check_shared_vocabulary, load_tokenizer

    if not (folder / "tokenizer_config.json").is_file():
        yield Finding("ok", "tokenizer", "none here: engines take the target's")
        return
    theirs = load_tokenizer(str(folder))
    try:
        check_shared_vocabulary(target, theirs)
    except VocabularyMismatchError as error:
        yield Finding("problem", "tokenizer", str(error))
    if theirs.chat_template != target.chat_template:
        yield Finding(
            "warning",
            "chat template",
            "another than the target's: a draft that was trained on prompts rendered with it "
            "meets others when it is served",
        )
    else:
        yield Finding("ok", "chat template", "the target's")


def _text(
    given: argparse.Namespace, target: PreTrainedModel, tokenizer: PreTrainedTokenizerBase
) -> Any:
    """Prompts and the target's text after them, as rollouts."""
    from datasets import Dataset

    from specdata.models import longest_prompt
    from specdata.prompts.catalogue import EMBEDDED
    from specdata.prompts.loading import load_prompts
    from specdata.rollouts.backend import Request, TransformersBackend

    name = given.prompts or ("chat-assistant" if tokenizer.chat_template else "instruct")
    sets = [PromptSet(name, count=given.count if name in EMBEDDED else 0)]
    room = longest_prompt(given.target, given.max_new_tokens)
    prompts = load_prompts(sets, tokenizer, seed=0, max_tokens=room).prompts[: given.count]
    sampling = SamplingConfig(given.temperature)
    backend = TransformersBackend(target, sampling, given.max_new_tokens, given.count, seed=0)
    written = backend.complete([Request(each.ids, (each.example_id,)) for each in prompts])
    return Dataset.from_list(
        [
            {"prompt_ids": prompt.ids, "completion_ids": each.ids}
            for prompt, each in zip(prompts, written, strict=True)
        ]
    )


if __name__ == "__main__":
    sys.exit(main())
