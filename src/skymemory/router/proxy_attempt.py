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

    __slots__ = ("_corrects", "_open", "_placement", "_scheduler", "first_byte", "met", "usage")

    def __init__(self, scheduler: Scheduler, placement: Placement) -> None:
        self.first_byte = False
        self.usage: Usage | None = None
        self.met: bool | None = None
        """Whether it came as was promised, where that is known."""
        self._placement = placement
        self._scheduler = scheduler
        self._open = True
        self._corrects = False
        """Whether the end may say what was cached."""
        scheduler.begin(placement, time.monotonic())

    @property
    def decision(self) -> Decision:
        return self._placement.prefill

    def succeeded(self) -> None:
        """With ``usage``, where that is known already: of an answer that came whole."""
        self.first_byte = True
        self._scheduler.prefilled(self._placement, time.monotonic(), self._cached_tokens)
        self._corrects = self._cached_tokens is None

    @property
    def _cached_tokens(self) -> int | None:
        return None if self.usage is None else self.usage.cached_of(self.decision.request.prompt.tokens)

    def close(self) -> None:
        if not self._open:
            return
        self._open = False
        if self.first_byte:
            cached = self._cached_tokens if self._corrects else None
            output = None if self.usage is None else self.usage.output_tokens
            self._scheduler.ended(self._placement, time.monotonic(), self.met, cached, output)
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
