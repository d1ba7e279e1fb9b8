"""A writer's word that it is still at it, for values that take long to write.

A value that is half there looks like one that has lost the other half: to a reader that has no index, and to satellites
that ask each other whether their blocks are whole. Those that have their chunks already, or have had none yet, cannot
know that more will come, for a write has no longest time. So the writer tells all satellites of such a value each half
second (RETAIN with WRITING, unacknowledged): one packet for each satellite, whatever the number of values.

A writer that could not say so for too long (its process was stopped, or its computer slept) cannot know what became of
what it had stored: then the write has failed, though all may have been acknowledged.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

from skymemory.constellation.torus import SatelliteId
from skymemory.protocol.latecomers import WRITING_S
from skymemory.protocol.messages import MAX_KEYS_PER_PACKET
from skymemory.protocol.retention import Retain, pack_retain
from skymemory.protocol.transfer import WriteTransfer

_EVERY_S = 0.5
_LONGEST_SILENCE_S = WRITING_S - 1.0
"""Between two words: the later may take a second longer on its way, and still comes in time."""


class StillWriting:
    """The writes of one ground host that are under way. ``places``: the satellites that a write concerns, at a time;
    ``send``: a body of RETAIN, to a satellite, at a time.
    """

    def __init__(
        self, places: Callable[[WriteTransfer, float], Iterable[SatelliteId]],
        send: Callable[[SatelliteId, bytes, float], None],
    ) -> None:  # fmt: skip
        self._places = places
        self._send = send
        self._writes: dict[int, tuple[WriteTransfer, float]] = {}
        """By the number of the operation, and when satellites heard of it last."""
        self.next_s = math.inf
        """When ``handle_timer`` is to be called; infinite while nothing is being written."""

    def began(self, number: int, transfer: WriteTransfer, now_s: float) -> None:
        """The first chunks of a write leave; once is enough."""
        if number not in self._writes:
            self._writes[number] = transfer, now_s
            self.next_s = min(self.next_s, now_s + _EVERY_S)

    def ended(self, number: int, now_s: float) -> bool:
        """Whether satellites may have taken it for ended before."""
        _, said_s = self._writes.pop(number, (None, now_s))
        if not self._writes:
            self.next_s = math.inf
        return now_s - said_s > _LONGEST_SILENCE_S

    def handle_timer(self, now_s: float) -> list[int]:
        """Say so of all writes; but of those that it is too late for, return the numbers: they have failed."""
        late = [number for number, (_, said_s) in self._writes.items() if now_s - said_s > _LONGEST_SILENCE_S]
        keys: dict[SatelliteId, dict[bytes, None]] = {}
        for number, (transfer, _) in self._writes.items():
            if number not in late:
                self._writes[number] = transfer, now_s
                for satellite in self._places(transfer, now_s):
                    keys.setdefault(satellite, {})[transfer.info.key] = None
        for satellite, its in keys.items():
            names = list(its)
            for at in range(0, len(names), MAX_KEYS_PER_PACKET):
                body = pack_retain(Retain.WRITING, 0.0, names[at : at + MAX_KEYS_PER_PACKET])
                self._send(satellite, body, now_s)
        self.next_s = now_s + _EVERY_S if self._writes else math.inf
        return late
