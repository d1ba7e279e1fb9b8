"""One publisher's messages in the order of their numbers, with what is missing noticed. No I/O.

Numbers grow by one per message from 0. A message that was had before has the same number and the same bytes; the same
number with other bytes, or a number from long ago, is another life of the engine: it restarted and counts anew.
"""

from __future__ import annotations

import enum
import zlib
from collections import OrderedDict

REMEMBERED = 4096
"""Messages of which the checksum is kept, to tell what came twice from what another life of the engine sends."""
HELD = 256
"""Messages that wait for one before them; beyond, waiting has no end in sight."""


class Offer(enum.Enum):
    TAKEN = enum.auto()
    """It is next, or waits for what is missing before it: ``take`` says."""
    OLD = enum.auto()
    """It was had before."""
    RESTARTED = enum.auto()
    """The engine began anew, and what it held is gone. ``restart``, then offer it again."""


class Order:
    """``next``: the number that comes next; None before the first message, whatever number that has."""

    def __init__(self, remembered: int = REMEMBERED, held: int = HELD) -> None:
        self.next: int | None = None
        self._remembered = remembered
        self._most_held = held
        self._seen: OrderedDict[int, int] = OrderedDict()
        self._held: dict[int, bytes] = {}

    def offer(self, number: int, payload: bytes) -> Offer:
        checksum = zlib.crc32(payload)
        if number in self._held:
            return Offer.OLD if self._held[number] == payload else Offer.RESTARTED
        if self.next is not None and number < self.next:
            return Offer.OLD if self._seen.get(number) == checksum else Offer.RESTARTED
        if self.next is None:
            self.next = number
        self._held[number] = payload
        return Offer.TAKEN

    def take(self) -> tuple[int, bytes] | None:
        """The next message, if it is here. It counts as had."""
        if self.next is None or self.next not in self._held:
            return None
        number, payload = self.next, self._held.pop(self.next)
        self._seen[number] = zlib.crc32(payload)
        if len(self._seen) > self._remembered:
            self._seen.popitem(last=False)
        self.next = number + 1
        return number, payload

    @property
    def gap(self) -> bool:
        """Something is here, and what comes before it is not."""
        return bool(self._held) and self.next not in self._held

    @property
    def crowded(self) -> bool:
        return len(self._held) >= self._most_held

    def skip(self) -> None:
        """Give up what is missing: the least number that is here comes next."""
        if self._held:
            self.next = min(self._held)

    def had(self, number: int, payload: bytes) -> bool:
        """This very message was had."""
        return self._seen.get(number) == zlib.crc32(payload)

    def restart(self, at: int | None = 0) -> None:
        """Begin anew: ``at`` comes next (None: whatever comes)."""
        self.next = at
        self._seen.clear()
        self._held.clear()
