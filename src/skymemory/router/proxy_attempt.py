"""One request at one server, and what is known of a request when all attempts are over."""

from __future__ import annotations

import time
from dataclasses import dataclass

from skymemory.conductor.request import Decision
from skymemory.conductor.scheduler import Placement, Scheduler
from skymemory.router.proxy_usage import Usage
from skymemory.router.relayed import Relayed


class Unanswered(Exception):
    """An attempt that failed before its first byte. ``again``: another server may be tried."""

    def __init__(self, why: str, again: bool = True, status: int = 502) -> None:
        super().__init__(why)
        self.again = again
        self.status = status


class Attempt:
    """One request at one server, in the scheduler's account: whatever happens, it is closed once."""

    __slots__ = ("_open", "_placement", "_scheduler", "cached_tokens", "first_byte", "met")

    def __init__(self, scheduler: Scheduler, placement: Placement) -> None:
        self.first_byte = False
        self.cached_tokens: int | None = None
        self.met: bool | None = None
        """Whether it came as was promised, where that is known."""
        self._placement = placement
        self._scheduler = scheduler
        self._open = True
        scheduler.begin(placement, time.monotonic())

    @property
    def decision(self) -> Decision:
        return self._placement.prefill

    def succeeded(self) -> None:
        self.first_byte = True
        self._scheduler.prefilled(self._placement, time.monotonic())

    def close(self) -> None:
        if not self._open:
            return
        self._open = False
        if self.first_byte:
            self._scheduler.ended(self._placement, time.monotonic(), self.met, self.cached_tokens)
        else:
            self._scheduler.failed(self._placement, time.monotonic(), prefilled=False)


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
    relayed: Relayed | None = None
    """The answer on its way to the client, once a server has begun one."""
