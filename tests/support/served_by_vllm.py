"""What several files of tests use of `test_vllm`."""

import json
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
import torch

from specdata.config import ServerConfig
from specdata.probability import SamplingConfig
from specdata.rollouts.vllm import VllmBackend
from specdata.server.client import ServerClient
from tests.support.tiny import END, tiny_llama

VOCABULARY = 40


Edit = Callable[[dict[str, Any]], dict[str, Any]]


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests are sent again at once, and once, and no server rests."""
    monkeypatch.setattr("specdata.server.client.FIRST_PAUSE", 0.0)
    monkeypatch.setattr("specdata.server.client.TRIES", 2)
    monkeypatch.setattr("eval.measuring.served.SETTLED", 0.02)


class Server(ThreadingHTTPServer):
    """Speaks what vLLM's server does: /v1/models and /v1/completions with token ids.

    It answers `troubles` (statuses) first; `edit` changes a completion's answer.
    """

    daemon_threads = True

    def __init__(
        self,
        edit: Edit = dict,
        troubles: tuple[int, ...] = (),
        model: Any = None,
        handler: type[BaseHTTPRequestHandler] | None = None,
    ) -> None:
        super().__init__(("127.0.0.1", 0), handler or Handler)
        self.model = model or tiny_llama(4, vocab=VOCABULARY)
        self.edit = edit
        self.troubles = list(troubles)
        self.bodies: list[dict[str, Any]] = []
        self.headers: list[str | None] = []
        self.lock = threading.Lock()
        self.echo = False  # whether a trouble repeats the request's key
        self.raw: bytes | None = None  # the answer, instead of JSON
        self.tokenizer_end = END  # where it ends, too, unless told not to

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Server

    def do_GET(self) -> None:
        entry = {"id": "served", "object": "model", "root": "/models/x", "max_model_len": 128}
        is_list = self.path == "/v1/models"
        self.answer(200 if is_list else 404, {"object": "list", "data": [entry]})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with self.server.lock:
            trouble = self.server.troubles.pop(0) if self.server.troubles else 0
            self.server.bodies.append(body)
            self.server.headers.append(self.headers["Authorization"])
        if trouble or self.path != "/v1/completions":
            key = f"; you sent {self.headers['Authorization']}" if self.server.echo else ""
            self.answer(trouble or 404, {"error": {"message": f"not now{key}"}})
            return
        with self.server.lock:  # PyTorch's threads and ours do not like each other
            ends = set() if body.get("ignore_eos") else {self.server.tokenizer_end}
            answer = complete(self.server.model, body, ends)
        self.answer(200, self.server.edit(answer))

    def answer(self, status: int, value: dict[str, Any]) -> None:
        data = json.dumps(value).encode() if self.server.raw is None else self.server.raw
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: Any) -> None:
        pass


def complete(model: Any, body: dict[str, Any], ends: Iterable[int] = ()) -> dict[str, Any]:
    """Sample with transformers' own `generate`, from the request's own seed."""
    torch.manual_seed(body["seed"])
    ids = torch.tensor([body["prompt"]])
    distribution: dict[str, Any] = {"do_sample": False}
    if body["temperature"] > 0:
        distribution = {
            "do_sample": True,
            **{k: body[k] for k in ("temperature", "top_k", "top_p", "min_p")},
        }
    out = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=body["max_tokens"],
        eos_token_id=sorted({*body["stop_token_ids"], *ends}),
        **distribution,
    )[0, ids.shape[1] :].tolist()
    finish = "stop" if out[-1] in {*body["stop_token_ids"], *ends} else "length"
    choice: dict[str, Any] = {"index": 0, "text": "", "finish_reason": finish, "stop_reason": None}
    if body.get("return_token_ids"):
        choice |= {"token_ids": out, "prompt_token_ids": body["prompt"]}
    return {"id": "cmpl-1", "object": "text_completion", "model": "served", "choices": [choice]}


@contextmanager
def serving(edit: Edit = dict, troubles: tuple[int, ...] = (), **more: Any) -> Iterator[Server]:
    server = Server(edit, troubles, **more)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@contextmanager
def client(
    server: Server, *, sampling: SamplingConfig | None = None, **changes: Any
) -> Iterator[VllmBackend]:
    config = ServerConfig(**{"url": server.url, "concurrency": 4, **changes})
    backend = VllmBackend(
        client=ServerClient(config, "rollouts.vllm"),
        model="served",
        sampling=sampling or SamplingConfig(),
        max_new_tokens=20,
        ends=frozenset([END]),
        vocabulary=VOCABULARY,
        seed=3,
    )
    try:
        yield backend
    finally:
        backend.client.close()
