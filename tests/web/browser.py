"""Debian's chromium without a window, driven by the DevTools protocol: as much of it as the tests need."""

from __future__ import annotations

import itertools
import json
import subprocess
import time
import urllib.request
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from websockets.sync.client import ClientConnection, connect

_OPTIONS = [
    "--headless=new",
    "--remote-debugging-port=0",
    "--no-first-run",
    "--no-sandbox",  # it will not run as root otherwise; it opens pages of the tests only
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-extensions",
    "--disable-background-networking",
    "--no-proxy-server",
]


class Browser:
    def __init__(self, program: str, profile: Path) -> None:
        self._program = program
        self._profile = profile

    def __enter__(self) -> Self:
        self._profile.mkdir()
        with (self._profile / "log").open("wb") as log:
            self._process = subprocess.Popen(
                [self._program, *_OPTIONS, f"--user-data-dir={self._profile}", "about:blank"], stdout=log, stderr=log
            )
        try:
            self._port = self._wait_for_port()
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end()

    def open(self, url: str) -> Page:
        request = urllib.request.Request(f"http://127.0.0.1:{self._port}/json/new?about:blank", method="PUT")
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with opener.open(request, timeout=30) as answer:
            address = json.load(answer)["webSocketDebuggerUrl"]
        page = Page(connect(address, proxy=None, max_size=None, open_timeout=30))
        page.go(url)
        return page

    def _wait_for_port(self) -> int:
        file = self._profile / "DevToolsActivePort"
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            if file.exists() and (lines := file.read_text().split()):
                return int(lines[0])
            if self._process.poll() is not None:
                break
            time.sleep(0.05)
        raise AssertionError(f"chromium did not start:\n{(self._profile / 'log').read_text(errors='replace')[-2000:]}")

    def _end(self) -> None:
        self._process.terminate()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


class Page:
    def __init__(self, socket: ClientConnection) -> None:
        self._socket = socket
        self._ids = itertools.count(1)

    def go(self, url: str) -> None:
        answer = self._call("Page.navigate", url=url)
        assert "errorText" not in answer, answer

    def evaluate(self, expression: str) -> Any:
        """The value of an expression of JavaScript, a promise awaited."""
        answer = self._call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in answer:
            raise AssertionError(f"{expression}: {answer['exceptionDetails']}")
        return answer["result"].get("value")

    @property
    def text(self) -> str:
        return str(self.evaluate("document.body ? document.body.innerText : ''"))

    def wait_for(self, text: str, within_s: float = 60) -> None:
        """Until this is on the page, however often it loads anew."""
        deadline = time.monotonic() + within_s
        seen = ""
        while time.monotonic() < deadline:
            seen = self.text
            if text in seen:
                return
            time.sleep(0.1)
        raise AssertionError(f"{text!r} did not appear; the page has: {seen!r}")

    def _call(self, method: str, **params: Any) -> dict[str, Any]:
        number = next(self._ids)
        self._socket.send(json.dumps({"id": number, "method": method, "params": params}))
        while True:
            message = json.loads(self._socket.recv(60))
            if message.get("id") == number:
                assert "error" not in message or "context" in str(message["error"]), message
                return dict(message.get("result", {"result": {}}))
