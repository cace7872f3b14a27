"""Chromium, driven over a pipe by the DevTools protocol: what a page looks like to people."""

import base64
import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any, Self

NAMES = ("chromium", "chromium-browser", "google-chrome")
CHROMIUM = next(filter(None, map(shutil.which, NAMES)), None)
FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]


class Browser:
    """One page of a Chromium of its own, with its profile, which ends with the `with` block."""

    def __init__(self, folder: Path) -> None:
        assert CHROMIUM is not None
        asked, self._asking = os.pipe()
        self._answering, answer = os.pipe()
        # Chromium reads commands from descriptor 3 and writes answers to descriptor 4.
        shell = f'exec "$0" "$@" 3<&{asked} 4>&{answer}'
        own = ["--remote-debugging-pipe", f"--user-data-dir={folder}/profile"]
        self._process = subprocess.Popen(
            ["bash", "-c", shell, CHROMIUM, *FLAGS, *own],
            pass_fds=(asked, answer),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(asked)
        os.close(answer)
        self._number, self._left, self._session = 0, b"", ""
        target = self._send("Target.createTarget", url="about:blank")["targetId"]
        attached = self._send("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        self._send("Page.enable")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()
        os.close(self._asking)
        os.close(self._answering)

    def open(self, page: Path, *, width: int, media: str = "") -> None:
        """Show a file, in a window so many CSS pixels wide; `media` may be "print"."""
        size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 500}
        self._send("Emulation.setDeviceMetricsOverride", **size)
        self._send("Emulation.setEmulatedMedia", media=media)
        self._send("Page.navigate", url=page.resolve().as_uri())
        self._wait_for("Page.loadEventFired")

    def ask(self, expression: str) -> Any:
        """The value of a JavaScript expression on the page."""
        answer = self._send("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def pdf(self) -> bytes:
        """The page printed on A4."""
        made = self._send("Page.printToPDF", preferCSSPageSize=True, printBackground=False)
        return base64.b64decode(made["data"])

    def _send(self, method: str, **parameters: Any) -> dict[str, Any]:
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._asking, json.dumps(message).encode() + b"\0")
        while (answer := self._read()).get("id") != self._number:
            pass
        assert "error" not in answer, answer["error"]
        return dict(answer["result"])

    def _wait_for(self, event: str) -> None:
        while self._read().get("method") != event:
            pass

    def _read(self) -> dict[str, Any]:
        """The next answer or event."""
        while b"\0" not in self._left:
            more = os.read(self._answering, 1 << 20)
            assert more, "Chromium has ended"
            self._left += more
        message, self._left = self._left.split(b"\0", 1)
        return dict(json.loads(message))
