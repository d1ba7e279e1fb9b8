"""Response times, and the silence from which a server is suspected: the shorter, the more requests wait."""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

KEPT = 64
UNREAD = 16_384
SHARE = 0.9
"""Quantile that is the usual wait."""
QUIET = 3.0
"""Expected waits, divided by the unanswered requests, after which a server is quiet; at least one."""
LEAST_QUIET_S = 0.05
UNKNOWN_S = 5.0
SILENT = 5.0
"""Expected waits after which a request counts as unanswered."""
LEAST_SILENT_S, LEAST_WHOLE_SILENT_S = 2.0, 120.0
"""Minimum of that time; the second for unstreamed answers without metrics, which show no progress."""
STALLED, LEAST_STALLED_S = 10.0, 1.0
"""Usual gaps after which a stream stalls. A server is quiet if half of its streams stall."""
LOST, LEAST_LOST_S = 100.0, 10.0
"""Usual gaps after which a stream counts as unanswered."""
UNKNOWN_GAP_S = 0.2
LONGEST = 1.5
"""Factor of the longest wait, also required: unstreamed answers take from a second to minutes."""
FORGOTTEN = 0.9999
"""Decay of the longest wait per answer."""


WHOLE, FIRST_TOKEN, NO_PROMPT, DECODED = KINDS = range(4)
"""First bytes, comparable only within a kind: of an unstreamed answer, after a prefill, without a prompt, after another
server's prefill.
"""


class SentRequest(NamedTuple):
    """Request whose answer has not begun; ``kind``: one of ``KINDS``."""

    sent_s: float
    estimate_s: float  # time to first token; 0: unknown
    kind: int


class UsualWait:
    """Recent waits: ``seconds`` is their quantile ``SHARE`` (None: no wait yet), ``longest_s`` a decaying maximum."""

    __slots__ = ("_longest_s", "_seconds", "_unread", "_waits", "add")

    def __init__(self) -> None:
        self._unread: deque[float] = deque(maxlen=UNREAD)
        self.add = self._unread.append
        self._waits: deque[float] = deque(maxlen=KEPT)
        self._seconds: float | None = None
        self._longest_s = 0.0

    @property
    def seconds(self) -> float | None:
        self._read_new_waits()
        return self._seconds

    @property
    def longest_s(self) -> float:
        self._read_new_waits()
        return self._longest_s

    def _read_new_waits(self) -> None:
        if self._unread:
            for wait_s in self._unread:
                self._longest_s = max(wait_s, FORGOTTEN * self._longest_s)
            self._waits.extend(self._unread)
            self._unread.clear()
            ordered = sorted(self._waits)
            self._seconds = ordered[min(len(ordered) - 1, int(SHARE * len(ordered)))]


def expected_s(sent: SentRequest, usual_s: float | None) -> float:
    return max(sent.estimate_s, UNKNOWN_S if usual_s is None else usual_s)


def quiet_after_s(expected: float, unanswered: int) -> float:
    return max(LEAST_QUIET_S, expected * max(1.0, QUIET / unanswered))


def silent_after_s(expected: float, longest_s: float, least_s: float = LEAST_SILENT_S) -> float:
    return max(least_s, SILENT * expected, LONGEST * longest_s)


def stalled_after_s(usual_gap_s: float | None) -> float:
    return max(LEAST_STALLED_S, STALLED * (UNKNOWN_GAP_S if usual_gap_s is None else usual_gap_s))


def lost_after_s(usual_gap_s: float | None) -> float:
    return max(LEAST_LOST_S, LOST * (UNKNOWN_GAP_S if usual_gap_s is None else usual_gap_s))
