"""A headless Chromium that the tests share, driven over a pipe by the DevTools protocol.

https://chromedevtools.github.io/devtools-protocol/ describes the commands and the events.
"""

import base64
import json
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

PROGRAM = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable"))),
    None,
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
    """A browser process with a fresh profile."""

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
        """The events that the browser has reported of the open page, in their order."""

    def call(self, method: str, session: str | None = None, **parameters: Any) -> dict[str, Any]:
        """Send a command and wait for its result; raises RuntimeError with what the browser says is wrong."""
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
        """Wait until the browser has reported such an event of the open page."""
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
        """A page, loaded in a window of that size in CSS pixels."""
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        try:
            self.events.clear()
            for domain in ("Page", "Log", "Runtime"):
                self.call(f"{domain}.enable", session)
            window = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
            self.call("Emulation.setDeviceMetricsOverride", session, **window)
            features = [{"name": "prefers-color-scheme", "value": scheme}]
            self.call("Emulation.setEmulatedMedia", session, features=features)
            self.events.clear()
            self.call("Page.navigate", session, url=file.as_uri())
            self.wait_for("Page.loadEventFired")
            yield Page(self, session)
        finally:
            self.call("Target.closeTarget", targetId=target)

    def close(self) -> None:
        """End the process."""
        with self._process:
            self._process.kill()


class Page:
    """A page that is open."""

    def __init__(self, browser: Chromium, session: str) -> None:
        self._browser, self._session = browser, session

    def evaluate(self, expression: str) -> Any:
        """The value of a JavaScript expression, of a promise when it is kept; the page's policy does not bind it."""
        given = {"expression": expression, "returnByValue": True, "awaitPromise": True}
        answer = self._browser.call("Runtime.evaluate", self._session, **given)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    @property
    def dom(self) -> str:
        """The document as the browser has it."""
        html: str = self.evaluate("document.documentElement.outerHTML")
        return html

    @property
    def complaints(self) -> list[dict[str, Any]]:
        """What stands in its console."""
        self.evaluate("0")  # what was told before has come by then
        return [said for said in self._browser.events if said["method"] in _COMPLAINTS]

    def screenshot(self) -> bytes:
        """The window's content, as PNG."""
        return base64.b64decode(self._browser.call("Page.captureScreenshot", self._session)["data"])
