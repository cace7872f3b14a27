"""A Hub on loopback: the part of its protocol that lists and downloads, and uploads small files."""

import base64
import hashlib
import json
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any, Self
from urllib.parse import unquote

COMMIT = "a" * 40


class Server:
    """Serves root/OWNER/NAME as a data set and a model; one named `gated` is, others are absent.

    `asked` lists the paths of the requests.
    """

    def __init__(self, root: Path) -> None:
        self.asked: list[str] = []
        handler = type(
            "Handler", (_Handler,), {"root": root, "asked": self.asked, "private": set()}
        )
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self) -> Self:
        self._thread = Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class _Handler(BaseHTTPRequestHandler):
    root: Path
    asked: list[str]
    private: set[str]
    protocol_version = "HTTP/1.1"

    def do_HEAD(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        path = unquote(self.path.split("?")[0])
        self.asked.append(path)
        match path.strip("/").split("/"):
            case ["api", "validate-yaml"]:
                self._json({"errors": [], "warnings": []})
            case ["api", "repos", "create"]:
                self._create(json.loads(body))
            case ["api", "models", _, _, "preupload", _]:
                files = [{**file, "uploadMode": "regular"} for file in json.loads(body)["files"]]
                self._json({"files": [{**file, "shouldIgnore": False} for file in files]})
            case ["api", "models", owner, name, "commit", _]:
                self._commit(self.root / owner / name, body)
            case ["api", "datasets" | "models", owner, name, *rest]:
                self._describe(self.root / owner / name, rest)
            case ["datasets", owner, name, "resolve", _, *rest]:
                self._file(self.root / owner / name, "/".join(rest))
            case [owner, name, "resolve", _, *rest]:
                self._file(self.root / owner / name, "/".join(rest))
            case _:
                self._send(404)

    do_GET = do_POST = do_HEAD  # noqa: N815

    def _create(self, order: dict[str, Any]) -> None:
        (self.root / order["organization"] / order["name"]).mkdir(parents=True, exist_ok=True)
        if order["visibility"] == "private":
            self.private.add(f"{order['organization']}/{order['name']}")
        self._json(
            {"url": f"http://{self.headers['Host']}/{order['organization']}/{order['name']}"}
        )

    def _commit(self, repository: Path, body: bytes) -> None:
        for line in body.splitlines():
            order = json.loads(line)
            if order["key"] == "file":
                path = repository / order["value"]["path"]
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(base64.b64decode(order["value"]["content"]))
        url = f"http://{self.headers['Host']}/{'/'.join(repository.parts[-2:])}/commit/{COMMIT}"
        self._json({"commitUrl": url, "commitOid": COMMIT})

    def _describe(self, repository: Path, rest: list[str]) -> None:
        if not repository.is_dir():
            return self._send(404, code="RepoNotFound")
        if rest[:1] == ["tree"]:
            folder = repository / "/".join(rest[2:])
            if not folder.is_dir():
                return self._send(404, code="EntryNotFound")
            paths = folder.rglob("*") if "recursive=true" in self.path else folder.iterdir()
            return self._json([_entry(path, repository) for path in sorted(paths)])
        files = [path for path in repository.rglob("*") if path.is_file()]
        siblings = [{"rfilename": path.relative_to(repository).as_posix()} for path in files]
        identity = "/".join(repository.parts[-2:])
        about = {"id": identity, "sha": COMMIT, "private": identity in self.private}
        return self._json({**about, "siblings": siblings})

    def _file(self, repository: Path, name: str) -> None:
        if repository.name == "gated":
            return self._send(403, code="GatedRepo")
        if not repository.is_dir():
            return self._send(404, code="RepoNotFound")
        if not (repository / name).is_file():
            return self._send(404, code="EntryNotFound")
        return self._send(200, (repository / name).read_bytes())

    def _json(self, value: Any) -> None:
        self._send(200, json.dumps(value).encode())

    def _send(self, status: int, body: bytes = b"", code: str | None = None) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("X-Repo-Commit", COMMIT)
        self.send_header("ETag", f'"{hashlib.sha1(body).hexdigest()}"')
        if code:
            self.send_header("X-Error-Code", code)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


def _entry(path: Path, repository: Path) -> dict[str, Any]:
    name = path.relative_to(repository).as_posix()
    if path.is_dir():
        return {"type": "directory", "oid": COMMIT, "size": 0, "path": name}
    oid = hashlib.sha1(path.read_bytes()).hexdigest()
    return {"type": "file", "oid": oid, "size": path.stat().st_size, "path": name}
