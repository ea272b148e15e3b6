"""Drives a headless Chromium, shared by tests, over a pipe by https://chromedevtools.github.io/devtools-protocol/."""

import base64
import json
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

PROGRAM = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable"))), None
)
_FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
    "--force-device-scale-factor=1",
    "--remote-debugging-pipe",  # commands come on descriptor 3, and answers go to descriptor 4
)
_ON_3_AND_4 = 'exec "$@" 3<&0 4>&1 </dev/null >/dev/null'
_COMPLAINTS = ("Log.entryAdded", "Runtime.consoleAPICalled", "Runtime.exceptionThrown")

Scheme = Literal["light", "dark"]


class Chromium:
    def __init__(self, profile: Path) -> None:
        assert PROGRAM is not None
        words = [PROGRAM, *_FLAGS, f"--user-data-dir={profile}"]
        self._process = subprocess.Popen(
            ["sh", "-c", _ON_3_AND_4, "sh", *words],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        self._calls = 0
        self._read = b""
        self.events: list[dict[str, Any]] = []

    def call(self, method: str, session: str | None = None, **parameters: Any) -> dict[str, Any]:
        assert self._process.stdin is not None
        self._calls += 1
        asked = {"id": self._calls, "method": method, "params": parameters}
        if session is not None:
            asked["sessionId"] = session
        self._process.stdin.write(json.dumps(asked).encode() + b"\0")
        self._process.stdin.flush()
        while (said := self._message()).get("id") != self._calls:
            self.events.append(said)
        if "error" in said:
            raise RuntimeError(f"{method}: {said['error']}")
        result: dict[str, Any] = said["result"]
        return result

    def wait_for(self, event: str) -> None:
        while not any(said["method"] == event for said in self.events):
            self.events.append(self._message())

    def _message(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        while b"\0" not in self._read:
            more = self._process.stdout.read1()  # type: ignore[attr-defined]
            if not more:
                raise RuntimeError("the browser has ended")
            self._read += more
        message, _, self._read = self._read.partition(b"\0")
        said: dict[str, Any] = json.loads(message)
        return said

    @contextmanager
    def page(self, file: Path, *, width: int = 1200, height: int = 1000, scheme: Scheme = "light") -> "Iterator[Page]":
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        try:
            self.events.clear()
            for domain in ("Page", "Log", "Runtime"):
                self.call(f"{domain}.enable", session)
            Page(self, session).resize(width, height)
            features = [{"name": "prefers-color-scheme", "value": scheme}]
            self.call("Emulation.setEmulatedMedia", session, features=features)
            self.events.clear()
            self.call("Page.navigate", session, url=file.as_uri())
            self.wait_for("Page.loadEventFired")
            yield Page(self, session)
        finally:
            self.call("Target.closeTarget", targetId=target)

    def close(self) -> None:
        with self._process:
            self._process.kill()


class Page:
    def __init__(self, browser: Chromium, session: str) -> None:
        self._browser, self._session = browser, session

    def resize(self, width: int, height: int) -> None:
        window = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self._browser.call("Emulation.setDeviceMetricsOverride", self._session, **window)

    def evaluate(self, expression: str) -> Any:
        """The value of a JavaScript expression or promise; the page's policy does not apply."""
        given = {"expression": expression, "returnByValue": True, "awaitPromise": True}
        answer = self._browser.call("Runtime.evaluate", self._session, **given)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    @property
    def dom(self) -> str:
        html: str = self.evaluate("document.documentElement.outerHTML")
        return html

    @property
    def complaints(self) -> list[dict[str, Any]]:
        self.evaluate("0")  # earlier events have arrived by then
        return [said for said in self._browser.events if said["method"] in _COMPLAINTS]

    def screenshot(self) -> bytes:
        return base64.b64decode(self._browser.call("Page.captureScreenshot", self._session)["data"])
