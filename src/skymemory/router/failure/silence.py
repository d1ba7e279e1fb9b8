"""How long answers take to begin, and when a server that says nothing counts as silent.

What was sent and not answered is load that grows: the more requests wait at a server that gives no sign of life, the
sooner it is left alone, whatever a strategy's estimates say.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

KEPT, EVERY = 64, 8
"""Waits that are kept, and how many new ones make the usual wait be computed again."""
SHARE = 0.9
"""The usual wait is what this share of answers stays within."""
QUIET = 3.0
"""One request that waits for so many usual waits, or three for one each, make a server quiet."""
LEAST_QUIET_S = 0.05
UNKNOWN_S = 5.0
"""Assumed as the usual wait until the first answer."""
SILENT = 5.0
"""After so many usual waits without a sign of life a request counts as unanswered, a failure of its server."""
LEAST_SILENT_S = 2.0


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

    __slots__ = ("_new", "_waits", "seconds")

    def __init__(self) -> None:
        self.seconds: float | None = None
        """None before the first answer."""
        self._waits: deque[float] = deque(maxlen=KEPT)
        self._new = 0

    def add(self, wait_s: float) -> None:
        self._waits.append(wait_s)
        self._new += 1
        if self._new >= EVERY or len(self._waits) < EVERY:
            self._new = 0
            ordered = sorted(self._waits)
            self.seconds = ordered[min(len(ordered) - 1, int(SHARE * len(ordered)))]


def expected_s(sent: Sent, usual_s: float | None) -> float:
    """The wait for an answer's first byte: by its estimate, or the usual one, whichever is longer."""
    return max(sent.estimate_s, UNKNOWN_S if usual_s is None else usual_s)


def quiet_after_s(expected: float, unanswered: int) -> float:
    """Seconds without a sign of life after which a server with this many unanswered requests gets no more."""
    return max(LEAST_QUIET_S, expected * max(1.0, QUIET / unanswered))


def silent_after_s(expected: float) -> float:
    """Seconds without a sign of life after which a request counts as unanswered."""
    return max(LEAST_SILENT_S, SILENT * expected)
