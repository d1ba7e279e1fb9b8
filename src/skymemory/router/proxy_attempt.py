"""One request at one server, and what is known of a request when all attempts are over."""

from __future__ import annotations

import time
from dataclasses import dataclass

from skymemory.conductor.picker import Picker
from skymemory.conductor.request import Decision
from skymemory.router.proxy_usage import Usage


class Unanswered(Exception):
    """An attempt that failed before its first byte. ``again``: another server may be tried."""

    def __init__(self, why: str, again: bool = True, status: int = 502) -> None:
        super().__init__(why)
        self.again = again
        self.status = status


class Attempt:
    """One request at one server, in the picker's account: whatever happens, it is closed once."""

    __slots__ = ("_open", "_picker", "cached_tokens", "decision", "first_byte")

    def __init__(self, picker: Picker, decision: Decision) -> None:
        self.decision = decision
        self.first_byte = False
        self.cached_tokens: int | None = None
        self._picker = picker
        self._open = True
        picker.routed(decision, time.monotonic())

    def succeeded(self) -> None:
        self.first_byte = True
        self._picker.succeeded(self.decision, time.monotonic())

    def close(self) -> None:
        if not self._open:
            return
        self._open = False
        if self.first_byte:
            self._picker.ended(self.decision, time.monotonic(), self.cached_tokens)
        else:
            self._picker.failed(self.decision, time.monotonic())


@dataclass(slots=True, eq=False)
class Told:
    """What is known of a request when it has ended, for metrics and the log."""

    began_s: float
    outcome: str = ""
    status: int = 0
    decision: Decision | None = None
    ttft_s: float | None = None
    usage: Usage | None = None
    retries: int = 0
    why: str = ""
    bytes_out: int = 0
