"""Certify a finished evaluation: enumerated, sampled and greedy exactness of each way of decoding.

draftsmith certify runs/toy/eval [--texts 64]

Writes certificate.json into the evaluation's folder; publish puts its sentence on the cards. Exit
status: 0 if every lossless method is exact, 1 if one is not, 2 for unusable input. Killed and run
again, it goes on after the last method that it finished.
"""

from __future__ import annotations

import argparse
import json
import shutil
from dataclasses import asdict, replace
from pathlib import Path

from recipes.config import build
from recipes.layout import CERTIFICATE, OUTPUT, RESULTS, portable
from recipes.run import prepare_libraries, say, stage_record
from specdata.errors import ConfigError
from specdata.storage.files import write_json
from specdata.terminal import progress, whole_number

MOST_TOKENS = 64
"""Of a text that is decoded."""


def add_options(parser: argparse.ArgumentParser) -> None:
    """The command line."""
    parser.add_argument("folder", type=Path, help="of a finished evaluation, such as runs/toy/eval")
    parser.add_argument(
        "--texts", type=whole_number, default=64, help="sampled texts of each method (default: 64)"
    )


def main(given: argparse.Namespace) -> int:
    """Run the command line; returns the exit status."""
    folder, texts = given.folder, given.texts
    if texts < 2:
        raise ConfigError(f"--texts must be 2 or larger, got {texts}")
    if not (folder / RESULTS).is_file():
        raise ConfigError(f"{folder} must be the folder of a finished evaluation, with {RESULTS}")
    stored = stage_record(folder)["config"]
    # Its paths where the run lies now.
    text = json.dumps(portable(stored, stored["output"]))
    tree = json.loads(text.replace(f'"{OUTPUT}/', f'"{folder.parent}/'))
    config = build({**tree, "output": str(folder.parent)})
    from eval.analysis.certificate import certify, sentence, ways
    from eval.measuring.environment import describe_environment, using_threads
    from recipes.run_eval import load_experiment

    prepare_libraries()
    experiment, *_ = load_experiment(config)
    # Graphs pay for many texts only.
    evaluation = experiment.config.model_copy(update={"engine": "eager"})
    experiment = replace(experiment, folder=folder, config=evaluation)
    parts = folder / f".certificate-{texts}"
    number = 1 + len(ways(evaluation, config.sampling))
    with using_threads(evaluation.threads), progress(number, "certificate", "method") as bar:
        where = describe_environment(
            device=experiment.environment.device, dtype=experiment.environment.dtype
        )
        certified = certify(
            experiment,
            parts,
            texts=texts,
            max_new_tokens=min(MOST_TOKENS, evaluation.max_new_tokens),
            report=bar.update,
        )
    answer = sentence(certified)
    values = {
        "sentence": answer,
        "target": experiment.models.names["target"],
        "draft": experiment.models.names["draft"],
        "sampling": asdict(config.sampling),
        "environment": where.model_dump(mode="json"),
        "methods": [each.model_dump(mode="json") for each in certified],
    }
    write_json(folder / CERTIFICATE, values)
    shutil.rmtree(parts)
    for each in certified:
        for difference in each.differences:
            say(f"  greedy, {each.method}, {difference}")
    say(f"{answer}\nwritten to {folder / CERTIFICATE}")
    return int(any(each.lossless and not each.is_exact for each in certified))
