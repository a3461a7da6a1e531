"""A page in a headless Chromium, driven by its DevTools protocol over two pipes."""

import itertools
import json
import os
import select
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome")
TIMEOUT_S = 60.0
_BETWEEN_PIPES = """
import fcntl, os, sys
pipes = [fcntl.fcntl(int(word), fcntl.F_DUPFD, 10) for word in sys.argv[1:3]]
os.dup2(pipes[0], 3)
os.dup2(pipes[1], 4)
os.execv(sys.argv[3], sys.argv[3:])
"""
"""Program that becomes Chromium, which reads from descriptor 3 and writes to 4."""


def find_chromium() -> str | None:
    """Command of Chromium, None where none is installed."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class Page:
    """One page, with what it asked of the network and what it complained of."""

    def __init__(self, read_fd: int, write_fd: int) -> None:
        self._read_fd, self._write_fd = read_fd, write_fd
        self._numbers, self._received, self._session = itertools.count(1), b"", ""
        self.requests: list[str] = []
        """Addresses, also of the page itself, without data that is in the page."""
        self.errors: list[str] = []
        """Errors of the console, and exceptions that nobody caught."""
        target = self._call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self._call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self._call(f"{domain}.enable")

    def open(self, path: Path, width: int, *, dark: bool = False) -> None:
        """Show a file in a window of so many CSS pixels, a phone's below 600, and wait until it is drawn."""
        self.requests.clear()
        self.errors.clear()
        phone = width < 600
        self._call(
            "Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=phone
        )
        self._call("Emulation.setTouchEmulationEnabled", enabled=phone)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self._call("Emulation.setEmulatedMedia", features=[scheme])
        self._call("Page.navigate", url=path.resolve().as_uri())
        end = time.monotonic() + TIMEOUT_S
        while not self.value("document.documentElement?.dataset.drawn"):
            assert time.monotonic() < end, f"{path} is not drawn: {self.errors}"
            time.sleep(0.05)

    def value(self, expression: str) -> Any:
        """The value of a JavaScript expression, or of its promise."""
        found = self._call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def _call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Send a command and take events until its answer is there."""
        number = next(self._numbers)
        message: dict[str, Any] = {"id": number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        data = json.dumps(message).encode() + b"\0"
        while data:
            data = data[os.write(self._write_fd, data) :]
        while True:
            answer = self._next_message()
            if answer.get("id") == number:
                assert "error" not in answer, answer["error"]
                return answer["result"]
            self._note(answer.get("method", ""), answer.get("params", {}))

    def _next_message(self) -> dict[str, Any]:
        while b"\0" not in self._received:
            ready, _, _ = select.select([self._read_fd], [], [], TIMEOUT_S)
            assert ready, "Chromium does not answer"
            part = os.read(self._read_fd, 1 << 20)
            assert part, "Chromium has ended"
            self._received += part
        whole, _, self._received = self._received.partition(b"\0")
        return json.loads(whole)

    def _note(self, event: str, words: dict[str, Any]) -> None:
        if event == "Network.requestWillBeSent":
            url = words["request"]["url"]
            self.requests += [] if url.startswith(("data:", "blob:")) else [url]
        elif event == "Runtime.exceptionThrown":
            self.errors.append(str(words["exceptionDetails"]))
        elif event == "Runtime.consoleAPICalled" and words["type"] in ("error", "assert"):
            self.errors.append(str(words["args"]))
        elif event == "Log.entryAdded" and words["entry"]["level"] == "error":
            self.errors.append(str(words["entry"]))


@contextmanager
def page_in_chromium(command: str, profile: Path) -> Iterator[Page]:
    """A page of a new Chromium, whose settings are in ``profile``; it ends with the block."""
    from_us, to_browser = os.pipe()
    from_browser, to_us = os.pipe()
    switches = ("headless", "no-sandbox", "disable-gpu", "disable-dev-shm-usage", "no-first-run")
    words = [command, *(f"--{switch}" for switch in switches), f"--user-data-dir={profile}"]
    words += ["--remote-debugging-pipe", "about:blank"]
    process = subprocess.Popen(
        [sys.executable, "-c", _BETWEEN_PIPES, str(from_us), str(to_us), *words],
        pass_fds=(from_us, to_us),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    os.close(from_us)
    os.close(to_us)
    try:
        yield Page(from_browser, to_browser)
    finally:
        process.terminate()
        process.wait(20)
        os.close(to_browser)
        os.close(from_browser)
