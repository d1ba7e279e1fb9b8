"""How long answers take to begin, and when a server that says nothing counts as silent.

What was sent and not answered is load that grows: the more requests wait at a server that gives no sign of life, the
sooner it is left alone, whatever a strategy's estimates say.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

KEPT = 64
"""Waits that are kept."""
UNREAD = 16_384
"""And before they are read."""
SHARE = 0.9
"""The usual wait is what this share of answers stays within."""
QUIET = 3.0
"""One request that waits for so many usual waits, or three for one each, make a server quiet."""
LEAST_QUIET_S = 0.05
UNKNOWN_S = 5.0
"""Assumed as the usual wait until the first answer."""
SILENT = 5.0
"""After so many usual waits without a sign of life a request counts as unanswered, a failure of its server."""
LEAST_SILENT_S, LEAST_WHOLE_SILENT_S = 2.0, 120.0
"""The second for whole answers of servers without metrics, which show no work before the end."""
STALLED, LEAST_STALLED_S = 10.0, 1.0
"""After so many usual gaps between its pieces a stream stalls. A server of which half of the streams do is quiet."""
LOST, LEAST_LOST_S = 100.0, 10.0
"""After so many a stream counts as unanswered."""
UNKNOWN_GAP_S = 0.2
LONGEST = 1.5
"""Or, if that is later, after so many times the longest wait: whole answers of one fleet take from one second to
minutes, and a long one is no sign of a fault.
"""
FORGOTTEN = 0.9999
"""What an answer leaves of the longest wait before it."""


WHOLE, FIRST_TOKEN, NO_PROMPT, DECODED = KINDS = range(4)
"""What a first byte marks, so that waits are compared with their like: the end of an answer that is not streamed; the
end of a prefill; the answer to a request without a prompt; the first token of a server that did not prefill.
"""


class Sent(NamedTuple):
    """A request that a server has not answered."""

    sent_s: float
    estimate_s: float
    """Of the time to its first token, by the strategy; 0: none."""
    kind: int
    """One of ``KINDS``."""


class UsualWait:
    """Time from sending to the first byte, of recent answers of all servers."""

    __slots__ = ("_longest_s", "_new", "_seconds", "_waits", "add")

    def __init__(self) -> None:
        self._new: deque[float] = deque(maxlen=UNREAD)
        """Added since it was last read, which is a few times a second; every request adds one."""
        self.add = self._new.append
        self._waits: deque[float] = deque(maxlen=KEPT)
        self._seconds: float | None = None
        self._longest_s = 0.0

    @property
    def seconds(self) -> float | None:
        """What ``SHARE`` of them stay within; None before the first answer."""
        self._read()
        return self._seconds

    @property
    def longest_s(self) -> float:
        self._read()
        return self._longest_s

    def _read(self) -> None:
        if self._new:
            for wait_s in self._new:
                self._longest_s = max(wait_s, FORGOTTEN * self._longest_s)
            self._waits.extend(self._new)
            self._new.clear()
            ordered = sorted(self._waits)
            self._seconds = ordered[min(len(ordered) - 1, int(SHARE * len(ordered)))]


def expected_s(sent: Sent, usual_s: float | None) -> float:
    """The wait for an answer's first byte: by its estimate, or the usual one, whichever is longer."""
    return max(sent.estimate_s, UNKNOWN_S if usual_s is None else usual_s)


def quiet_after_s(expected: float, unanswered: int) -> float:
    """Seconds without a sign of life after which a server with this many unanswered requests gets no more."""
    return max(LEAST_QUIET_S, expected * max(1.0, QUIET / unanswered))


def silent_after_s(expected: float, longest_s: float, least_s: float = LEAST_SILENT_S) -> float:
    """Seconds without a sign of life after which a request counts as unanswered."""
    return max(least_s, SILENT * expected, LONGEST * longest_s)


def stalled_after_s(usual_gap_s: float | None) -> float:
    return max(LEAST_STALLED_S, STALLED * (UNKNOWN_GAP_S if usual_gap_s is None else usual_gap_s))


def lost_after_s(usual_gap_s: float | None) -> float:
    return max(LEAST_LOST_S, LOST * (UNKNOWN_GAP_S if usual_gap_s is None else usual_gap_s))
