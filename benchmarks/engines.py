"""vLLM, llama.cpp or OpenVINO on this CPU with drafts of several kinds, beside our decoder.

    python benchmarks/engines.py VLLM --config CONFIG --serve 'NAME={"method": ...}' ... [OPTIONS]
    python benchmarks/engines.py LLAMA_SERVER --gguf TARGET --config CONFIG --serve 'NAME={}' ...
    python benchmarks/engines.py OPENVINO --openvino TARGET --config CONFIG --serve 'NAME={}' ...

VLLM is a Python with vLLM in it (`make test-engines` makes one), LLAMA_SERVER a llama-server,
OPENVINO a Python with OpenVINO GenAI. Each --serve is a server with that --speculative-config, or
with such options of llama-server ({"spec-type": "draft-dspark", ...}) or of `in_openvino serve`
({"draft": FOLDER, "length": 2}), all beside one that has no draft. They answer the evaluation
of CONFIG in turns, a prompt at a time: OPTIONS are those of run_eval, and with the same
--eval.folder it goes on where it ended.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx2

from eval.measuring.methods import SERVED
from recipes import in_openvino
from recipes.config import parse
from recipes.run_eval import RECIPE

WAIT = 600
"""Seconds that a server may take to start."""
FIRST_PORT = 8400
CONVERTER = "convert_hf_to_gguf.py"
CONVERT = f"""
import runpy, sys
from types import SimpleNamespace
tree, *arguments = sys.argv[1:]
sys.path[:0] = [tree, f"{{tree}}/gguf-py"]
from conversion.base import TextModel
TextModel.get_vocab_base_pre = lambda *_: "gpt-2"  # ids come and go, so any will do
# It is imported before another kind of tokenizer is looked for, and need not be installed.
sys.modules["sentencepiece"] = SimpleNamespace(SentencePieceProcessor=None)
sys.argv = ["convert", *arguments]
runpy.run_path(f"{{tree}}/{CONVERTER}", run_name="__main__")
"""
OFFLINE = {"HF_HUB_OFFLINE": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1"}


@contextmanager
def started(command: list[str], log: Path, *, at: int = 0) -> Iterator[str]:
    """The address of a server on the loopback, once it answers; `{port}` is its port, or any."""
    with socket.socket() as free:
        free.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            free.bind(("127.0.0.1", at))
        except OSError as error:
            raise RuntimeError(f"port {at} is taken: stop the server of a killed run") from error
        port = str(free.getsockname()[1])
    with log.open("ab") as out:
        process = subprocess.Popen(
            [each.replace("{port}", port) for each in command],
            env={**os.environ, **OFFLINE, "OMP_NUM_THREADS": "2"},
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    url, limit = f"http://127.0.0.1:{port}", time.monotonic() + WAIT
    try:
        while not _answers(url):
            if process.poll() is not None or time.monotonic() > limit:
                raise RuntimeError(f"{command[0]} did not start:\n{log.read_text()[-4000:]}")
            time.sleep(0.5)
        yield url
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
        process.wait(60)


def _answers(url: str) -> bool:
    try:
        return httpx2.get(f"{url}/health").status_code == httpx2.codes.OK
    except httpx2.HTTPError:
        return False


def vllm(
    python: str,
    target: str,
    log: Path,
    speculative: dict[str, Any] | None = None,
    *,
    dtype: str = "float32",
    at: int = 0,
) -> Any:
    """A context of a vLLM server of a target, by the name "target"; its address."""
    command = [python, "-m", "vllm.entrypoints.openai.api_server", "--model", target]
    command += ["--served-model-name", "target", "--host", "127.0.0.1", "--port", "{port}"]
    command += ["--dtype", dtype, "--enforce-eager", "--generation-config", "vllm"]
    command += ["--max-num-seqs", "16", "--max-logprobs", "17"]
    if speculative:
        command += ["--speculative-config", json.dumps(speculative)]
        command += ["--per-request-spec-decode-metrics", "detailed"]
    return started(command, log, at=at)


def tree_of(server: str) -> Path:
    """The source tree of llama.cpp that a llama-server was built in."""
    for folder in Path(server).absolute().parents:
        if (folder / CONVERTER).exists():
            return folder
    raise SystemExit(f"{server} must lie in the tree that it was built in: no {CONVERTER} above it")


def to_gguf(server: str, model: str, target: str, out: Path, kind: str) -> None:
    """Convert a target or its draft with the converter of the tree that llama-server is from."""
    command = [sys.executable, "-c", CONVERT, str(tree_of(server)), model, "--outtype", kind]
    command += ["--outfile", str(out), "--target-model-dir", target]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


def llama(server: str, gguf: str, log: Path, options: Mapping[str, Any], *, at: int = 0) -> Any:
    """A context of a llama-server of a target, by the name "target"; its address."""
    command = [server, "--model", gguf, "--alias", "target", "--port", "{port}", "--metrics"]
    command += ["--log-verbosity", "4"]  # says how long it drafted
    for name, value in {"parallel": 1, "threads": 2, "ctx-size": 1024, **options}.items():
        command += [f"--{name}", str(value)]
    return started(command, log, at=at)


def openvino(
    python: str, target: str, log: Path, options: Mapping[str, Any], *, at: int = 0
) -> Any:
    """A context of a server of a converted target, by the name "target"; its address."""
    command = [python, in_openvino.__file__, "serve", target, "--port", "{port}"]
    command += [f"--{name}={value}" for name, value in options.items()]
    return started(command, log, at=at)


def main() -> int:
    """Start the servers, evaluate, stop them."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0], allow_abbrev=False)
    parser.add_argument("engine", help="a Python with vLLM or OpenVINO, or a llama-server")
    parser.add_argument("--gguf", help="the target as llama-server loads it")
    parser.add_argument("--openvino", help="the target as OpenVINO GenAI loads it")
    parser.add_argument("--serve", action="append", default=[], help="NAME=SETTINGS")
    given, options = parser.parse_known_args()
    config = parse(options, "", ("eval",), None).config
    logs = Path(config.output) / "engines" / (config.eval.folder or "eval")
    logs.mkdir(parents=True, exist_ok=True)
    served = (each.partition("={")[::2] for each in given.serve)
    servers = {name: json.loads("{" + rest) for name, rest in ((SERVED, "}"), *served)}
    with ExitStack() as running:
        for number, (name, settings) in enumerate(servers.items()):
            log, at = logs / f"{name}.log", FIRST_PORT + number  # the same when it is run again
            if given.gguf:
                server = llama(given.engine, given.gguf, log, settings, at=at)
            elif given.openvino:
                server = openvino(given.engine, given.openvino, log, settings, at=at)
            else:
                target, dtype = config.models.target, config.models.dtype
                server = vllm(given.engine, target, log, settings, dtype=dtype, at=at)
            method = {"name": name, "decoder": "server", "served_model": "target"}
            method["url"] = running.enter_context(server)
            options += ["--method", json.dumps(method)]
        return RECIPE.run(options)


if __name__ == "__main__":
    raise SystemExit(main())
