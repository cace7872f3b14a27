"""Certify that decoded texts are distributed as the target alone: an evaluation's, or a server's.

draftsmith certify runs/toy/eval [--texts 64]
draftsmith certify --server URL --target T [--draft D] [--temperature 0.7] [--prompts FILE]

Of a finished evaluation each way of decoding is enumerated, sampled and run greedily. Writes
certificate.json into the evaluation's folder; publish puts its sentence on the cards. Of a served
engine (vLLM 0.10.2 or newer, llama-server, or what answers /v1/completions with token ids as they
do) greedy and sampled texts are judged by the target, in this process; certificate.json goes to
--out. Exit status: 0 if all that is lossless is exact, 1 if something is not, 2 for unusable input.
Killed and run again, it goes on after the last method or text that it finished; once it has
finished, everything is asked again.
"""

from __future__ import annotations

import argparse
import json
import shutil
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from recipes.config import build
from recipes.layout import CERTIFICATE, OUTPUT, RESULTS, portable
from recipes.run import prepare_libraries, say, stage_record
from specdata.errors import ConfigError
from specdata.prompts.config import PromptSet
from specdata.sampling import SamplingConfig
from specdata.server.config import ServerConfig
from specdata.storage.files import fingerprint, write_json
from specdata.storage.resume import Settings
from specdata.terminal import progress, whole_number

if TYPE_CHECKING:
    from specdata.rollouts.backend import Request

MOST_TOKENS = 64
"""Of a text that is decoded."""


def add_options(parser: argparse.ArgumentParser) -> None:
    """The command line."""
    add = parser.add_argument
    add("folder", type=Path, nargs="?", help="of a finished evaluation, such as runs/toy/eval")
    add("--texts", type=whole_number, default=64, help="sampled, of each method (default: 64)")
    of_server = parser.add_argument_group("a served engine").add_argument
    of_server("--server", help="its address, instead of a folder")
    of_server("--target", help="folder or Hub id of the model that it serves")
    of_server("--draft", help="of what it drafts with: a smaller bias is seen with it")
    of_server("--model", help="name that it serves the target under (default: as --target)")
    of_server("--key-variable", help="environment variable that holds its key")
    of_server("--prompts", default="instruct", help="a file, or a set by name (default: instruct)")
    of_server("--count", type=whole_number, default=16, help="prompts (default: 16)")
    of_server("--max-new-tokens", type=whole_number, default=MOST_TOKENS, help="(default: 64)")
    of_server("--temperature", type=float, default=1.0, help="(default: 1)")
    of_server("--top-k", type=whole_number, default=0, help="(default: 0, all)")
    of_server("--top-p", type=float, default=1.0, help="(default: 1)")
    of_server("--dtype", default="float32", help="of the target here (default: float32)")
    of_server("--out", type=Path, default=Path("runs/certificate"), help="(runs/certificate)")


def main(given: argparse.Namespace) -> int:
    """Run the command line; returns the exit status."""
    folder, texts = given.folder, given.texts
    if texts < 2:
        raise ConfigError(f"--texts must be 2 or larger, got {texts}")
    if given.server:
        with ExitStack() as closing:
            return _certify_server(given, closing)
    if folder is None:
        raise ConfigError("give the folder of a finished evaluation, or --server and --target")
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


def _certify_server(given: argparse.Namespace, closing: ExitStack) -> int:
    """Certify a served engine; returns the exit status."""
    if not given.target or given.folder or min(given.count, given.max_new_tokens) < 1:
        raise ConfigError("--server needs --target, at least one prompt and one token, no folder")
    try:
        sampling = SamplingConfig(given.temperature, given.top_k, given.top_p)
        server = ServerConfig(url=given.server, model=given.model, key_variable=given.key_variable)
    except ValidationError as error:
        raise ConfigError(f"--server {error.errors()[0]['msg']}") from error
    except ValueError as error:
        raise ConfigError(str(error)) from error
    import torch

    from eval.analysis.served import certify_server
    from specdata.models import end_ids, load_model, load_tokenizer, longest_prompt
    from specdata.prompts.loading import load_prompts
    from specdata.rollouts.vllm import VllmBackend
    from specdata.server.client import ServerClient

    prepare_libraries()
    most = longest_prompt(given.target, given.max_new_tokens)
    client, name = ServerClient(server, "--server"), given.model or given.target
    closing.callback(client.close)
    room = client.check(name)
    most = most if room is None else min(most, room - given.max_new_tokens)
    prompts = load_prompts(
        [PromptSet(given.prompts, count=given.count)],
        load_tokenizer(given.target),
        seed=0,
        max_tokens=most,
    ).prompts
    target = load_model(given.target, dtype=given.dtype)
    draft = load_model(given.draft, dtype=given.dtype) if given.draft else None
    parts = given.out / ".answers"
    parts.mkdir(parents=True, exist_ok=True)
    asked: dict[str, Any] = {
        key: str(value) for key, value in vars(given).items() if key != "texts"
    }
    asked |= {"target": fingerprint(given.target), "ids": [prompt.ids for prompt in prompts]}
    settings = Settings(asked, remedy=f"give another --out, or remove {parts}")
    if settings.check_file(parts / "settings.json"):
        say(f"going on with the answers of an interrupted run, {parts}: of the same server?")
    else:
        settings.write(parts / "settings.json")

    def answers(requests: Sequence[Request], sampling: SamplingConfig) -> list[list[int]]:
        backend = VllmBackend(
            client=client,
            model=name,
            sampling=sampling,
            max_new_tokens=given.max_new_tokens,
            ends=frozenset(end_ids(target.generation_config)),
            vocabulary=target.config.get_text_config().vocab_size,
            seed=0,
        )
        stored = {each.key: parts / f"{each.key[0]}-{each.key[1]}.json" for each in requests}

        with progress(len(requests), f"{requests[0].key[0]} texts", "text") as bar:

            def answer(request: Request) -> None:
                if not stored[request.key].exists():
                    write_json(stored[request.key], backend.complete([request])[0].ids)
                bar.update()

            client.each(answer, requests)
        return [json.loads(stored[each.key].read_bytes()) for each in requests]

    found = certify_server(
        answers,
        target,
        draft,
        [torch.tensor(prompt.ids) for prompt in prompts],
        sampling,
        texts=given.texts,
        max_new_tokens=given.max_new_tokens,
        seed=0,
    )
    write_json(given.out / CERTIFICATE, {"sentence": str(found), **found.model_dump(mode="json")})
    shutil.rmtree(parts)  # the server may be another when it is asked again
    for difference in found.differences:
        say(f"  greedy, {difference}")
    say(f"{found}\nwritten to {given.out / CERTIFICATE}")
    return int(not found.is_exact)
