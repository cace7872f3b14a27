"""Certify a finished evaluation: enumerated, sampled and greedy exactness of each way of decoding.

draftsmith certify runs/toy/eval [--method NAME ...] [--texts 128] [--max-new-tokens 64]

Writes certificate.json into the evaluation's folder; publish puts its sentence on the cards. Exit
status: 0 if every lossless method is exact, 1 if one is not, 2 for unusable input.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from recipes.config import PipelineConfig, build
from recipes.layout import CERTIFICATE, RESULTS
from recipes.run import OUTPUT, portable, prepare_libraries, say, stage_record
from specdata.config import nearest
from specdata.errors import ConfigError
from specdata.storage.files import write_json
from specdata.terminal import accept_any_text, progress, tell, whole_number


def main(arguments: Sequence[str] | None = None, program: str | None = None) -> int:
    """Run the command line; returns the exit status."""
    accept_any_text()
    parser = argparse.ArgumentParser(
        program, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, help="of a finished evaluation, such as runs/toy/eval")
    parser.add_argument(
        "--method",
        action="append",
        metavar="NAME",
        help="only this; by default the first of each form of draft, verifier and stopping rule",
    )
    parser.add_argument(
        "--texts", type=whole_number, default=128, help="sampled texts of each method"
    )
    parser.add_argument("--max-new-tokens", type=whole_number, default=64, help="longest text")
    given = parser.parse_args(arguments)
    try:
        return _run(given)
    except Exception as error:  # noqa: BLE001 - raised again if it is a defect
        return tell(error)


def configuration(folder: Path) -> PipelineConfig:
    """The configuration of an evaluation, its paths where the run lies now."""
    if not (folder / RESULTS).is_file():
        raise ConfigError(f"{folder} must be the folder of a finished evaluation, with {RESULTS}")
    stored = stage_record(folder)["config"]
    text = json.dumps(portable(stored, stored["output"]))
    tree = json.loads(text.replace(f'"{OUTPUT}/', f'"{folder.parent}/'))
    return build({**tree, "output": str(folder.parent)})


def _run(given: argparse.Namespace) -> int:
    if min(given.texts, given.max_new_tokens) < 2:
        raise ConfigError("--texts and --max-new-tokens must be 2 or larger")
    config = configuration(given.folder)
    from eval.analysis.certificate import certify, ways
    from eval.measuring.environment import describe_environment
    from recipes.run_eval import load_evaluation

    methods = ways(config.eval, config.sampling)
    if given.method:
        ours = {each.name: each for each in config.eval.methods if each.decoder == "speculative"}
        for name in given.method:
            if name not in ours:
                raise ConfigError(f"no method {name!r} of ours was measured: {nearest(name, ours)}")
        methods = [ours[name] for name in given.method]
    prepare_libraries()
    models, evaluation, loaded, _, _ = load_evaluation(config)
    fitted = {method.name: method for method in evaluation.methods}
    with progress(len(methods) + 1, "certificate", "method") as bar:
        certificate = certify(
            models,
            [fitted[method.name] for method in methods],
            [prompt.ids for prompt in loaded.prompts],
            config.sampling,
            describe_environment(
                device=str(models.target.device), dtype=config.models.dtype_of("target")
            ),
            texts=given.texts,
            max_new_tokens=min(given.max_new_tokens, evaluation.max_new_tokens),
            seed=config.seed,
            report=bar.update,
        )
    path = given.folder / CERTIFICATE
    write_json(path, certificate.model_dump(mode="json"))
    say(certificate.sentence)
    say(f"written to {path}")
    return 0 if certificate.is_kept else 1


if __name__ == "__main__":
    sys.exit(main())
