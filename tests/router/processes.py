"""Routers and engines as processes, and none of them left behind."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.settings_file import settings_file

ROOT = Path(__file__).parents[2]
PATIENCE_S = 60.0


class Process:
    """One process of ours; what it says is kept."""

    def __init__(self, *command: str) -> None:
        self.said: list[str] = []
        self._spoke = threading.Condition()
        environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
        self._process = subprocess.Popen(
            [sys.executable, *command],
            cwd=ROOT,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        self.pid = self._process.pid
        self._listener = threading.Thread(target=self._listen, daemon=True)
        self._listener.start()

    def _listen(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            with self._spoke:
                self.said.append(line.rstrip("\n"))
                self._spoke.notify_all()

    def says(self, pattern: str, patience_s: float = PATIENCE_S) -> re.Match[str]:
        """The first line that matches; waits for it."""

        def found() -> re.Match[str] | None:
            return next((match for line in self.said if (match := re.search(pattern, line))), None)

        with self._spoke:
            match = self._spoke.wait_for(found, patience_s)
        assert match, f"never said {pattern!r}, but: {self.said}"
        return match

    def send_signal(self, number: signal.Signals) -> None:
        self._process.send_signal(number)

    def ends(self) -> int:
        status = self._process.wait(PATIENCE_S)
        self._listener.join(PATIENCE_S)
        return status

    def close(self) -> None:
        if self._process.poll() is None:
            os.killpg(self.pid, signal.SIGKILL)
            self._process.wait(PATIENCE_S)
        self._listener.join(PATIENCE_S)
        assert self._process.stdout is not None
        self._process.stdout.close()


@contextmanager
def engine(name: str, port: int = 0) -> Iterator[tuple[Process, int]]:
    """A mock engine as a process, and its port."""
    process = Process("-m", "tests.router.mock_engine", name, str(port))
    try:
        yield process, int(process.says(r"^(\d+)$")[1])
    finally:
        process.close()


@contextmanager
def router(*arguments: str, settings: str = "") -> Iterator[tuple[Process, int]]:
    """Run ``skymemory route``; yield it and its port."""
    with settings_file(settings) as words:
        process = Process("-m", "skymemory", "route", "--listen", "127.0.0.1:0", *words, *arguments)
        try:
            yield process, int(process.says(r"listening on http://127\.0\.0\.1:(\d+)")[1])
        finally:
            process.close()
