"""A browser without a window, driven through its own pipe (the DevTools protocol), which needs no library."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import time
from pathlib import Path
from typing import Any

PATIENCE_S = 60.0


class Browser:
    """Chromium with one page; `with Browser(folder) as page:`."""

    def __init__(self, folder: Path) -> None:
        self._numbers = itertools.count(1)
        self._rest = b""
        self.errors: list[str] = []
        # It reads what it is told from descriptor 3, and answers on 4.
        ours_in, theirs_out = os.pipe()
        theirs_in, self._write = os.pipe()
        self._read = ours_in
        command = [
            *("chromium", "--headless", "--no-sandbox", "--disable-gpu", "--remote-debugging-pipe", "--no-first-run"),
            *("--disable-background-networking", "--disable-component-update", "--disable-sync", "--disable-quic"),
            *(f"--user-data-dir={folder}", "about:blank"),
        ]
        shell = f'exec 3<&{theirs_in} 4>&{theirs_out}; exec "$@"'
        self._process = subprocess.Popen(
            ["bash", "-c", shell, "browser", *command],
            pass_fds=(theirs_in, theirs_out),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        os.close(theirs_in)
        os.close(theirs_out)
        self._session = ""

    def __enter__(self) -> Browser:
        target = self.tell("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.tell("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        self.tell("Runtime.enable")
        self.tell("Log.enable")
        return self

    def __exit__(self, *_: object) -> None:
        self._session = ""
        try:
            self.tell("Browser.close")
        finally:
            os.close(self._write)
            os.close(self._read)
            try:
                self._process.wait(PATIENCE_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()

    def open(self, url: str) -> None:
        self.tell("Page.navigate", url=url)

    def value(self, expression: str) -> Any:
        """Return what an expression of JavaScript gives."""
        answer = self.tell("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def until(self, expression: str) -> Any:
        """Wait until an expression gives something true, and return that."""
        deadline = time.monotonic() + PATIENCE_S
        while not (value := self.value(expression)):
            if time.monotonic() > deadline:
                raise TimeoutError(f"{expression} stays {value!r}")
            time.sleep(0.05)
        return value

    def tell(self, method: str, **parameters: Any) -> dict[str, Any]:
        number = next(self._numbers)
        message = {"id": number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while True:
            heard = self._hear()
            if heard.get("id") == number:
                assert "error" not in heard, heard
                return heard["result"]
            if heard.get("method") == "Runtime.exceptionThrown":
                self.errors.append(json.dumps(heard["params"]))
            if heard.get("method") == "Log.entryAdded" and heard["params"]["entry"]["level"] == "error":
                self.errors.append(json.dumps(heard["params"]))

    def _hear(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            part = os.read(self._read, 1 << 16)
            assert part, "the browser has ended"
            self._rest += part
        line, _, self._rest = self._rest.partition(b"\0")
        return json.loads(line)
