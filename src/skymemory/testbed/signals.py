"""Ctrl-C at a moment of our choosing: recorded when it comes, acted on where nothing is half done."""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType
from typing import Any, Self

_STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class SignalGate:
    """While entered, SIGINT, SIGTERM and SIGHUP only set ``closed``; ``check`` raises KeyboardInterrupt then.

    May be entered again while it is entered, so that one gate spans several steps with no gap between them.
    Outside the main thread Python delivers no signals, and the gate is always open.
    """

    def __init__(self) -> None:
        self.closed = False
        self._depth = 0
        self._before: dict[signal.Signals, Any] = {}

    def _close(self, number: int, frame: FrameType | None) -> None:
        self.closed = True

    def __enter__(self) -> Self:
        self._depth += 1
        if self._depth == 1 and threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._close) for number in _STOPPING}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._depth -= 1
        if self._depth == 0:
            for number, handler in self._before.items():
                signal.signal(number, handler)

    def check(self) -> None:
        """Raise KeyboardInterrupt if somebody asked us to stop."""
        if self.closed:
            raise KeyboardInterrupt
