"""Examine a draft in a layout of engines, or a target's own head: why it is accepted or not.

    draftsmith doctor FOLDER --target TARGET [--prompts FILE]
    draftsmith doctor TARGET [--prompts FILE]

Examined are its tensors, flags, taps, vocabulary map and chat template; then the target continues
some prompts, and the draft is measured along that text as it says it is, with each flag turned and
with its taps one layer off, with an interval over the texts. Of any other draft: vocabulary,
template, acceptance. Of a target alone, the head that it brings along (MTP) is measured in each way
in which engines feed it. Ends with 1 if a problem was found.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from recipes.config import named
from recipes.run import prepare_libraries, say
from specdata.config import PromptSet
from specdata.errors import ConfigError
from specdata.sampling import SamplingConfig


def add_options(parser: argparse.ArgumentParser) -> None:
    """The command line."""
    add = parser.add_argument
    add("folder", help="the draft, or a target with a head")
    add("--target", help="the model that it drafts for")
    add("--prompts", help="a file, or a set by name (default: chat-assistant, or instruct)")
    add("--count", type=int, default=16, help="most prompts (default: 16)")
    add("--max-new-tokens", type=int, default=64, help="of each text (default: 64)")
    add("--temperature", type=float, default=1.0, help="of target and draft (default: 1)")


def main(args: argparse.Namespace) -> int:
    """Examine and print; return 1 if there is a problem."""
    if min(args.count, args.max_new_tokens) < 1:
        raise ConfigError(
            "--count and --max-new-tokens must be at least 1, got "
            f"{args.count} and {args.max_new_tokens}"
        )
    sampling = SamplingConfig(args.temperature)
    from recipes.doctor import examine  # here: it needs torch
    from recipes.doctor_mtp import examine_head
    from specdata.prompts.loading import check_sets
    from specdata.target_heads import find_head

    if args.prompts:
        with named("--prompts"):
            check_sets([PromptSet(args.prompts, count=1)], 0)
    prepare_libraries()
    texts = (args.prompts, args.count, args.max_new_tokens, sampling)
    if args.target:
        findings = examine(Path(args.folder), args.target, *texts)
    elif "://" in args.folder:
        raise ConfigError(
            f"a head is read from its target's files, and {args.folder} is a server: give the "
            "folder that it serves"
        )
    else:
        try:
            head = find_head(args.folder)
        except ConfigError as error:
            raise ConfigError(f"{error}; if {args.folder} is a draft, give its --target") from error
        findings = examine_head(head, *texts)
    problems = 0
    for each in findings:
        say(f"{each.kind:<8} {each.about}: {each.text}")
        problems += each.kind == "problem"
    return 1 if problems else 0
