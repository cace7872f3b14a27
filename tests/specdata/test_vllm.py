"""The vLLM back end against a real server on the loopback, which samples from a real model."""

import json
import signal
import threading
from pathlib import Path
from typing import Any

import pytest

from recipes.make_rollouts import RECIPE
from specdata.config import PromptSet, RolloutConfig, ServerConfig
from specdata.errors import ConfigError, without_passwords
from specdata.probability import SamplingConfig
from specdata.rollouts.backend import Request, TransformersBackend
from tests.support.served_by_vllm import VOCABULARY, Edit, Handler, client, no_pauses, serving
from tests.support.tiny import END, tiny_llama

__all__ = ["no_pauses"]  # a fixture


def requests(count: int) -> list[Request]:
    return [
        Request([2 + (n * 7 + i) % 30 for i in range(1 + n % 5)], (f"id{n}", 0))
        for n in range(count)
    ]


def test_greedy_completions_are_those_of_the_other_back_end() -> None:
    greedy = SamplingConfig(temperature=0.0)
    here = TransformersBackend(tiny_llama(4, vocab=VOCABULARY), greedy, 20, 8, 3)
    expected = here.complete(requests(9))
    for edit in (dict, as_llama_server):
        with serving(edit) as server, client(server, sampling=greedy) as there:
            assert there.complete(requests(9)) == expected
            # vLLM may know another end token of the tokenizer; llama-server draws none if told so.
            server.bodies.clear()
            there.complete(requests(1))
            assert server.bodies[0]["ignore_eos"] == (edit is dict)


def test_an_end_token_of_the_tokenizer_alone_ends_nothing() -> None:
    with serving() as server, client(server) as backend:
        made = backend.complete(requests(3))
        server.tokenizer_end = next(each.ids[0] for each in made if each.ids[0] != END)
        assert backend.complete(requests(3)) == made


def as_llama_server(answer: dict[str, Any]) -> dict[str, Any]:
    [choice] = answer["choices"]
    verbose = {"tokens": choice.pop("token_ids"), "stop_type": "eos"}
    return {**answer, "choices": [{"text": choice["text"]}], "__verbose": verbose}


def test_every_field_that_decides_the_distribution_is_sent_and_each_request_has_its_own_seed() -> (
    None
):
    distribution = SamplingConfig(temperature=0.7, top_k=5, top_p=0.9, min_p=0.1)
    with serving(as_llama_server) as server, client(server, sampling=distribution) as backend:
        first = backend.complete(requests(6))
        again = backend.complete(requests(6)[::-1])[::-1]
    assert first == again, "a completion does not depend on the other requests"
    sent = server.bodies[0]
    assert (sent["temperature"], sent["top_k"], sent["top_p"]) == (0.7, 5, 0.9)
    assert (sent["min_p"], sent["repetition_penalty"]) == (0.1, 1.0)
    assert (sent["presence_penalty"], sent["frequency_penalty"]) == (0.0, 0.0)
    assert (sent["model"], sent["n"], sent["max_tokens"]) == ("served", 1, 20)
    assert sent["stop_token_ids"] == [END]
    assert sent["return_token_ids"]
    assert sent["samplers"] == ["temperature", "top_k", "top_p", "min_p"]
    assert not sent["add_special_tokens"]
    assert len({body["seed"] for body in server.bodies}) == 6
    assert all(0 <= body["seed"] < 2**63 for body in server.bodies), "vLLM takes 64-bit seeds"
    # vLLM drops by min_p before top_p: what both would leave is another distribution.
    refused = pytest.raises(ConfigError, match="vLLM cuts by min_p before top_p")
    with serving() as server, client(server, sampling=distribution) as backend, refused:
        backend.complete(requests(1))


def test_another_model_a_wrong_address_and_a_dead_server_are_told_apart() -> None:
    with serving() as server:
        with client(server) as backend:
            assert backend.client.check("served") == 128
            with pytest.raises(ConfigError, match="serves 'served', not 'my/target'"):
                backend.client.check("my/target")
        with client(server, url=f"{server.url}/v1/") as backend:
            assert backend.client.check("served") == 128
        with (
            client(server, url=f"{server.url}/elsewhere") as backend,
            pytest.raises(ConfigError, match="refuses \\(status 404\\)"),
        ):
            backend.client.check("served")
    with (
        client(server) as backend,
        pytest.raises(ConnectionError, match="did not answer /v1/models in 2 tries"),
    ):
        backend.client.check("served")


def changed(**fields: Any) -> Edit:
    """Each choice with other fields, without those that are None."""

    def edit(answer: dict[str, Any]) -> dict[str, Any]:
        choices = [{**choice, **fields} for choice in answer["choices"]]
        kept = [{k: v for k, v in each.items() if v is not None} for each in choices]
        return {"choices": kept}

    return edit


NO_OBJECTS = (b"", b"[" * 100_000, b"null")


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda answer: {}, "does not speak the API of this server: choices: Field required"),
        (lambda answer: {"choices": []}, "choices: List should have at least 1 item"),
        (changed(token_ids=[1.5] * 20), "choices.0.token_ids.0: Input should be a valid integer"),
        (
            changed(token_ids=[5] * 19 + [VOCABULARY]),
            f"returned token {VOCABULARY}, and the vocabulary",
        ),
        (changed(token_ids=[5] * 20 + [END]), "ended a completion after 21 tokens"),
        (changed(token_ids=[5, END] * 10), "ended a completion after 20 tokens"),
        (
            changed(token_ids=None, prompt_token_ids=None),
            "returned no token ids: it must know return_token_ids",
        ),
        (changed(prompt_token_ids=[]), "read another prompt"),
        (changed(token_ids=[5, 6]), "ended a completion after 2 tokens"),
        *((text, "does not speak the API of this server: the answer") for text in NO_OBJECTS),
    ],
)
def test_an_answer_that_cannot_be_stored_as_ids_is_refused(
    edit: Edit | bytes, message: str
) -> None:
    with serving(dict if isinstance(edit, bytes) else edit) as server, client(server) as backend:
        server.raw = edit if isinstance(edit, bytes) else None
        with pytest.raises(ConfigError, match=message):
            backend.complete(requests(3))


def test_a_passing_trouble_is_tried_again_and_a_refusal_is_not() -> None:
    for status in (408, 425, 429, 500, 502, 503, 504):
        with serving(troubles=(status,)) as server, client(server, concurrency=1) as backend:
            assert len(backend.complete(requests(1))) == 1
            assert len(server.bodies) == 2
    for status in (400, 401, 404, 501):
        with serving(troubles=(status,)) as server, client(server, concurrency=1) as backend:
            with pytest.raises(ConfigError, match=f"status {status}"):
                backend.complete(requests(1))
            assert len(server.bodies) == 1


@pytest.mark.parametrize("trouble", ["refusal", "Ctrl-C"])
def test_the_first_trouble_ends_all_requests_at_once(
    trouble: str, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    """One stays without an answer, and one would be sent again after a while."""
    monkeypatch.setattr("specdata.server.client.FIRST_PAUSE", 2.0)
    answered, resting = threading.Event(), threading.Event()

    class Silent(Handler):
        def do_POST(self) -> None:  # noqa: N802 - the name that http.server calls
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            self.server.bodies.append(body)
            first = body["prompt"][0]
            if first == 3:
                self.answer(503, {})
                resting.set()
                return
            if first == 4:
                resting.wait()
                if trouble == "Ctrl-C":
                    signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
            if (first, trouble) != (4, "refusal"):
                answered.wait()
            self.answer(400, {})

    kind = ConfigError if trouble == "refusal" else KeyboardInterrupt
    former = signal.signal(signal.SIGINT, signal.default_int_handler)  # shells' jobs ignore it
    request.addfinalizer(lambda: signal.signal(signal.SIGINT, former))
    others = threading.enumerate()  # requests of other tests, too
    with serving(handler=Silent) as server, client(server) as backend:
        with pytest.raises(kind):
            backend.complete([Request([first], ("id", first)) for first in (2, 3, 4)])
        assert not answered.is_set()
        answered.set()
        for each in threading.enumerate():
            if each.name == "request" and each not in others:
                each.join()
        assert [body["prompt"] for body in server.bodies].count([3]) == 1


def test_a_key_is_read_from_the_environment_and_never_stored(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with serving() as server:
        with pytest.raises(ConfigError, match="must be the NAME of an environment") as refused:
            client(server, key_variable="S3cretPW").__enter__()
        assert "S3cretPW" not in str(refused.value), "it may be the key itself"
        for key in ("hunter2\nhunter2", "hunter2\u00e9"):  # which no header can hold
            monkeypatch.setenv("MY_KEY", key)
            with pytest.raises(ConfigError, match="one line of ASCII") as refused:
                client(server, key_variable="MY_KEY").__enter__()
            assert "hunter2" not in str(refused.value)
        monkeypatch.setenv("MY_KEY", "k-1")
        with client(server, key_variable="MY_KEY") as backend:
            backend.complete(requests(1))
        assert server.headers == ["Bearer k-1"]
    config = RolloutConfig(sets=[PromptSet("d")], backend="vllm")
    assert "vllm" not in config.stored_settings()


def test_a_key_that_a_server_repeats_is_not_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_KEY", "Basic bmFtZTpwYXNz")
    for status, error in ((400, ConfigError), (503, ConnectionError)):
        with serving(troubles=(status,) * 2) as server:
            server.echo = True
            with (
                client(server, key_variable="MY_KEY", concurrency=1) as backend,
                pytest.raises(error) as refusal,
            ):
                backend.complete(requests(1))
            assert server.headers[0] == "Basic bmFtZTpwYXNz", "a whole header is sent as it is"
        assert "you sent ***" in str(refusal.value)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("no http://me:hunter2@server:80/v1, sorry", "no http://***@server:80/v1, sorry"),
        ("'http://me:hunt/er@2@server' or ftp://a:b@c", "'http://***@server' or ftp://***@c"),
        (
            "hf://datasets/o/n@main at http://server:80",
            "hf://datasets/o/n@main at http://server:80",
        ),
    ],
)
def test_a_message_shows_no_password_of_an_address(text: str, shown: str) -> None:
    assert without_passwords(text) == shown


@pytest.mark.parametrize(
    "url",
    [
        "http://me:hunt/hunter2@server:8000",
        "http://server/v1?api_key=hunter2",
        "me:hunter2@server",
        ["http://me:hunter2@server"],
    ],
)
def test_a_password_in_the_address_is_refused_before_it_is_stored_or_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], url: Any
) -> None:
    sets = [{"name": "instruct", "split": "train", "count": 2}]
    config = {
        "output": str(tmp_path / "out"),
        "models": {"target": "t", "draft": "d"},
        "rollouts": {"sets": sets, "backend": "vllm", "vllm": {"url": url}},
        "eval": {"sets": sets, "methods": [{"name": "plain", "decoder": "plain"}]},
    }
    (tmp_path / "pair.yaml").write_text(json.dumps(config))
    for more in ([], ["--plan"]):
        assert RECIPE.run(["--config", str(tmp_path / "pair.yaml"), *more]) == 2
        said = capsys.readouterr()
        assert "hunter2" not in said.out + said.err
        assert "rollouts.vllm.url" in said.err
        assert isinstance(url, list) or "name that in key_variable" in said.err
    assert not (tmp_path / "out").exists()
    for address in (url, "http://hunter2#", "http://[::1", "http://h:99999", "http://:80"):
        with pytest.raises(ValueError, match="url") as refusal:
            ServerConfig(url=address)
        assert "hunter2" not in str(refusal.value)
