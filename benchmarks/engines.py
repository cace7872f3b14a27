"""vLLM on this CPU with drafts of several kinds, beside our decoder on the same prompts.

    python benchmarks/engines.py VLLM --config CONFIG --serve 'NAME={"method": ...}' ... [OPTIONS]

VLLM is a Python with vLLM in it (`make test-engines` makes one). Each --serve is a server with that
--speculative-config, all beside one that has no draft. They answer the evaluation of CONFIG in
turns, a prompt at a time: OPTIONS are those of run_eval, and with the same --eval.folder it goes on
where it ended.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx2

from eval.measuring.methods import SERVED
from recipes.config import parse
from recipes.run_eval import RECIPE

WAIT = 600
"""Seconds that a server may take to start."""
FIRST_PORT = 8400
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
    with log.open("wb") as out:
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
    command += ["--max-num-seqs", "8", "--max-logprobs", "17"]
    if speculative:
        command += ["--speculative-config", json.dumps(speculative)]
    return started(command, log, at=at)


def main() -> int:
    """Start the servers, evaluate, stop them."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0], allow_abbrev=False)
    parser.add_argument("vllm", help="a Python with vLLM")
    parser.add_argument("--serve", action="append", default=[], help="NAME=SPECULATIVE_CONFIG")
    given, options = parser.parse_known_args()
    config = parse(options, "", ("eval",), None).config
    logs = Path(config.output) / "engines"
    logs.mkdir(parents=True, exist_ok=True)
    served = (each.partition("={")[::2] for each in given.serve)
    servers = {SERVED: "}"} | dict(served)
    with ExitStack() as running:
        for number, (name, settings) in enumerate(servers.items()):
            server = vllm(
                given.vllm,
                config.models.target,
                logs / f"{name}.log",
                json.loads("{" + settings),
                dtype=config.models.dtype,
                at=FIRST_PORT + number,  # the same when it is run again
            )
            method = {"name": name, "decoder": "server", "served_model": "target"}
            method["url"] = running.enter_context(server)
            options += ["--method", json.dumps(method)]
        return RECIPE.run(options)


if __name__ == "__main__":
    raise SystemExit(main())
