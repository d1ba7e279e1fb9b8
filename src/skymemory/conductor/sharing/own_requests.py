"""This router's requests as other replicas learn of them: a numbered log of changes, and the present state."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass

from skymemory.conductor.change_log import ChangeLog
from skymemory.conductor.request import Decision
from skymemory.conductor.sharing.messages import MAX_COUNT, MAX_NAME, Booking, ChangeMessage, Ended, FirstByte, Measured

MAX_CHANGES = 8192
"""Changes kept; a replica that falls further behind gets a snapshot."""
MAX_OPEN = 8192
"""Unanswered requests that others learn of; further ones are not booked."""
MAX_BLOCKS = 512
"""Leading blocks of a prompt that others learn of while it is computed."""
BOOKING_S = 900.0
"""Longest time for which a booking counts."""
KEPT_MEASURED = 8
"""Measured prefills per server in a snapshot."""
MAX_MEASURED_SERVERS = 4096
_SNAPSHOT_BYTES = 2 << 20
_SNAPSHOT_BLOCK_BYTES = 1 << 20
_BOOKING_BYTES = 128
_MEASURED_BYTES = 48
_MOST_S = 1e6


@dataclass(slots=True, eq=False)
class _Sent:
    number: int
    decision: Decision | None  # kept while open, so that its id is not reused
    server: str
    sent_s: float
    work_s: float
    ttft_s: float
    prompt_tokens: int
    backlog_tokens: int
    output_tokens: int
    streams: bool
    computes: bool
    blocks: bytes

    def booking(self, now_s: float, *, is_new: bool = False, has_blocks: bool = True) -> Booking:
        age_s = min(max(0.0, now_s - self.sent_s), _MOST_S)
        computes = self.computes or is_new
        return Booking(
            self.number,
            self.server,
            age_s,
            max(0.0, BOOKING_S - age_s),
            self.work_s,
            self.ttft_s,
            self.prompt_tokens,
            self.backlog_tokens,
            self.output_tokens,
            self.streams,
            computes,
            self.blocks if computes and has_blocks else b"",
        )


_Logged = _Sent | tuple[type[FirstByte] | type[Ended], int, float] | Measured


class OwnRequests:
    """Observer of pickers (``Picker.watch``). ``log.end`` is the number of the next change."""

    def __init__(self) -> None:
        self.log: ChangeLog[_Logged] = ChangeLog(MAX_CHANGES)
        self._open: dict[int, _Sent] = {}
        self._measured: dict[str, deque[Measured]] = {}
        self._numbers = 0

    def __len__(self) -> int:
        return len(self._open)

    def routed(self, decision: Decision, now_s: float) -> None:
        if len(self._open) >= MAX_OPEN or id(decision) in self._open or len(decision.server) > MAX_NAME:
            return
        request, compute_s, ttft_s = decision.request, decision.estimated_compute_s, decision.estimated_ttft_s
        prompt = request.prompt
        self._numbers += 1
        sent = _Sent(
            self._numbers,
            decision,
            decision.server,
            now_s,
            _bounded(compute_s),
            _bounded(ttft_s),
            prompt.tokens,
            max(0, prompt.tokens - decision.matched_tokens),
            min(max(0, request.output_tokens or 0), MAX_COUNT),  # the client's
            request.streams,
            True,
            prompt.blocks[:MAX_BLOCKS].tobytes(),
        )
        self._open[id(decision)] = sent
        self.log.append(sent)

    def first_byte(self, decision: Decision, now_s: float) -> None:
        sent = self._open.get(id(decision))
        if sent is not None and sent.computes:
            sent.computes, sent.blocks = False, b""
            self.log.append((FirstByte, sent.number, now_s))

    def ended(self, decision: Decision, now_s: float) -> None:
        sent = self._open.pop(id(decision), None)
        if sent is not None:
            sent.decision, sent.blocks = None, b""  # the log would keep the prompt alive
            self.log.append((Ended, sent.number, now_s))

    def forget(self, server: str) -> None:
        """Drop the measured speed of a server that left."""
        self._measured.pop(server, None)

    def measured(self, server: str, tokens: float, cached: float, seconds: float) -> None:
        if not 0 <= seconds < _MOST_S or len(server) > MAX_NAME:
            return
        point = Measured(server, max(0.0, tokens), max(0.0, cached), seconds)
        if server not in self._measured and len(self._measured) >= MAX_MEASURED_SERVERS:
            del self._measured[next(iter(self._measured))]
        self._measured.setdefault(server, deque(maxlen=KEPT_MEASURED)).append(point)
        self.log.append(point)

    def changes(self, first: int, most: int, now_s: float) -> tuple[ChangeMessage, ...] | None:
        """Return up to ``most`` changes from number ``first`` on; None if the log no longer has them."""
        logged = self.log.since(first, most)
        return None if logged is None else tuple(_as_message(change, now_s) for change in logged)

    def snapshot(self, now_s: float) -> tuple[tuple[Booking, ...], tuple[Measured, ...]]:
        """Return unanswered requests and measured prefills, within a message's size."""
        # The latest requests first: should not all fit, the oldest are the next to end.
        bookings: list[Booking] = []
        left_bytes, left_block_bytes = _SNAPSHOT_BYTES, _SNAPSHOT_BLOCK_BYTES
        for sent in reversed(self._open.values()):
            left_bytes -= _BOOKING_BYTES + 4 * len(sent.server)
            if left_bytes < 0:
                break
            left_block_bytes -= len(sent.blocks)
            bookings.append(sent.booking(now_s, has_blocks=left_block_bytes >= 0))
        measured: list[Measured] = []
        for server, points in self._measured.items():
            left_bytes -= len(points) * (_MEASURED_BYTES + 4 * len(server))
            if left_bytes < 0:
                break
            measured += points
        return tuple(reversed(bookings)), tuple(measured)


def _bounded(seconds: float | None) -> float:
    return min(max(0.0, seconds), _MOST_S) if seconds is not None and math.isfinite(seconds) else 0.0


def _as_message(change: _Logged, now_s: float) -> ChangeMessage:
    if isinstance(change, _Sent):
        return change.booking(now_s, is_new=True)
    if isinstance(change, Measured):
        return change
    kind, number, at_s = change
    return kind(number, min(max(0.0, now_s - at_s), _MOST_S))
