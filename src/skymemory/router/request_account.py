"""One request in the scheduler's books: entered once, moved where another server takes it, closed once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from skymemory.conductor.request import Decision
from skymemory.conductor.scheduler import Placement, Scheduler
from skymemory.router.deferred import Afterwards


class RequestAccount:
    """Keeps the account right, whatever order things are told in, or left untold.

    Made when the request goes out. Whatever is told twice counts once; ``close`` ends what is still open. With
    ``after`` the entries themselves are made when answers are out, in order: learning a prompt takes as long as picking
    for it.
    """

    __slots__ = ("_after", "_first", "_open", "_placement", "_scheduler", "decision")

    def __init__(
        self, scheduler: Scheduler, placement: Placement, now_s: float, after: Afterwards | None = None
    ) -> None:
        self.decision: Decision = placement.prefill
        self._scheduler = scheduler
        self._placement = placement
        self._after = after
        self._open = True
        self._first = False
        self._do(scheduler.begin, placement, now_s)

    @property
    def waits(self) -> bool:
        """Nothing of the answer has come."""
        return self._open and not self._first

    @property
    def is_open(self) -> bool:
        """It has neither ended nor failed."""
        return self._open

    @property
    def placement(self) -> Placement:
        return self._placement

    def served_by(self, server: str, now_s: float) -> bool:
        """Which server took it. True if it is another than the one that was chosen: that one had it and failed.

        What the other holds of the prompt is not known, so nothing is taken to be matched there.
        """
        decision = self.decision
        if not self.waits or server == decision.server:
            return False
        self._do(self._scheduler.failed, self._placement, now_s, False)
        self.decision = decision.taken_by(server)
        self._placement = Placement(replace(self._placement.case, prefill=self.decision))
        self._do(self._scheduler.begin, self._placement, now_s)
        return True

    def first_byte(self, now_s: float, cached_tokens: int | None = None) -> None:
        if self.waits:
            self._first = True
            self._do(self._scheduler.prefilled, self._placement, now_s, cached_tokens)

    def ended(
        self,
        now_s: float,
        cached_tokens: int | None = None,
        output_tokens: int | None = None,
        met: bool | None = None,
    ) -> None:
        """Its last byte has come, and with it perhaps what the server had cached of the prompt, how long the answer
        is, and whether it came as promised.
        """
        if self.waits:
            self.first_byte(now_s, cached_tokens)
            cached_tokens = None
        if self._open:
            self._open = False
            self._do(self._scheduler.ended, self._placement, now_s, met, cached_tokens, output_tokens)

    def failed(self, now_s: float) -> None:
        """No answer, or one that says nothing of the prompt: an error."""
        if self.waits:
            self._open = False
            self._do(self._scheduler.failed, self._placement, now_s, False)

    def close(self, now_s: float) -> None:
        """Nobody waits for more of it."""
        self.failed(now_s)
        self.ended(now_s)

    def _do(self, entry: Callable[..., object], *said: Any) -> None:
        if self._after is None:
            entry(*said)
        else:
            self._after.do(partial(entry, *said))
