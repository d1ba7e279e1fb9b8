"""One engine's events on their way into the index: what is in order is applied, what was lost is not glossed over.

Without sockets: ``kv_events`` brings messages and says what became of the connection.
"""

from __future__ import annotations

import enum
import logging
import math
import time
import zlib
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

from skymemory.conductor.prefix_index.events import OTHER, AllCleared, Batch, BlocksStored, Event, medium_of
from skymemory.errors import InvalidInput
from skymemory.router.engines.pieces import BLOCKS, Piece, pieces
from skymemory.router.engines.wire import MalformedEvents, Tally, TooLong

WARN_EVERY_S = 10.0
"""An engine whose every message is lost or broken does not fill the log; losses are counted all the same."""
UNKNOWN_MEDIA = 8
"""Names of media that are not known, of one engine, that are told in the log."""
_log = logging.getLogger("skymemory.router")


class Index(Protocol):
    """What takes events: ``conductor.prefix_index.precise.PreciseIndex``. It is given them in order, without gaps."""

    def follow(self, slot: int, model: str) -> object:
        """An engine that holds nothing and counts from 0."""
        ...

    def resume_empty(self, slot: int, sequence: int) -> object:
        """Nothing is known of what it holds, and ``sequence`` comes next."""
        ...

    def apply(self, slot: int, batch: Batch, replayed: bool = False, more: bool = False) -> object:
        """``more``: the batch goes on, in another call.

        Raises ``InvalidInput``: events that cannot be followed (``trouble`` says why), or a forgotten slot.
        """
        ...

    def trouble(self, slot: int) -> str: ...

    def forget(self, slot: int) -> object: ...


class FeedState(enum.Enum):
    WAITING = "waiting"
    """Nothing heard yet: not connected, or nothing published since."""
    WHOLE = "whole"
    """Every message since the engine began was applied."""
    PARTIAL = "partial"
    """What is believed is true; the engine may hold more, from before what was heard."""
    LOST = "lost"
    """The connection is gone. What is believed is as of then."""


@dataclass(slots=True)
class Counts:
    """What a feed met, in messages where nothing else is said."""

    batches: int = 0
    stored_blocks: int = 0
    old: int = 0
    """That came twice."""
    gaps: int = 0
    """Times that something was missing."""
    replayed: int = 0
    losses: int = 0
    """Gaps that nobody could fill: the engine's blocks were forgotten."""
    restarts: int = 0
    malformed: int = 0
    too_long: int = 0
    """That were not read since they are longer than is allowed; what they said is lost."""
    unknown_events: int = 0
    unusable_events: int = 0
    refused: int = 0
    """That the index cannot follow, because blocks have another size than those that prompts are cut into."""


class Feed:
    """Events of the server that has ``slot`` and serves ``model``, which prompts' chains of blocks are seeded with."""

    def __init__(self, server: str, slot: int, model: str, index: Index, order: Order | None = None) -> None:
        self.server = server
        self.slot = slot
        self.model = model
        self.connected = False
        self.counts = Counts()
        self.errors: dict[str, str] = {}
        """What is wrong with this feed now, by kind."""
        self.order = Order() if order is None else order
        self.wiped = False
        """Somebody else, who thinks that the server restarted, told the index to forget it: all is wanted again."""
        self._state = FeedState.WAITING
        self._index = index
        self._told: set[str] = set()
        self._unknown_media: set[str] = set()
        self._warned_s = -WARN_EVERY_S
        self._ready = False
        """The index awaits the number that is next here."""
        self._reading: tuple[int, Iterator[Piece]] | None = None
        """A message of which some is applied."""
        index.follow(slot, model)

    @property
    def state(self) -> FeedState:
        if self.heard and not self.connected:
            return FeedState.LOST
        return self._state

    @property
    def heard(self) -> bool:
        """Something was applied of what the engine's present life, as far as is known, has published."""
        return bool(self.order.next)

    @property
    def busy(self) -> bool:
        """Something is in order, and not yet applied."""
        return self._reading is not None or self.order.ready

    def offer(self, number: int, payload: bytes, until_s: float = math.inf) -> None:
        """A message, whichever way it came. What is in order now is applied, as far as that goes until ``until_s``, by
        `time.perf_counter`; the rest by ``go_on``.
        """
        offer = self.order.offer(number, payload)
        if offer is Offer.RESTARTED:
            self.restarted()
            offer = self.order.offer(number, payload)
        if offer is Offer.OLD:
            self.counts.old += 1
            return
        if self._state is FeedState.WAITING:
            self._state = FeedState.WHOLE if self.order.next == 0 else FeedState.PARTIAL
        self.go_on(until_s)

    def restarted(self) -> None:
        """The engine began anew: it holds nothing of before, and counts from 0."""
        self.counts.restarts += 1
        self._reading = None
        self._index.follow(self.slot, self.model)
        self._ready = False
        self.order.restart(0)
        self._state = FeedState.WAITING
        _log.info("%s restarted: what it held is forgotten", self.server)

    def nothing_published(self) -> None:
        """The engine says that it has nothing: its first message is number 0, whichever we hear first."""
        if self.order.next is None:
            self.order.restart(0)

    def lost(self) -> None:
        """What is missing before the messages that wait will not come: forget, and go on with those."""
        if self.heard:
            self._forget("some were lost")
        self.order.skip()
        self._state = FeedState.PARTIAL
        self.go_on(0.0)

    def from_the_start(self) -> None:
        """As on the first day: whatever the engine still has is wanted."""
        self._reading = None
        self.wiped = False
        self._index.follow(self.slot, self.model)
        self._ready = False
        self.order.restart(None)
        self._state = FeedState.WAITING

    def unsure(self) -> None:
        """Whether what is believed still holds cannot be told: forget it, and take whatever comes."""
        self._reading = None
        if self.heard:
            self._forget("the connection was lost, and what was missed cannot be asked for")
        self.order.restart(None)
        self._state = FeedState.WAITING

    def broken(self, why: str) -> None:
        """A message that cannot be read. What it said is lost, and its number is not worth asking for again."""
        self.counts.malformed += 1
        self.complain("broken", why)

    def go_on(self, until_s: float = math.inf) -> None:
        """Apply what is in order. At least some of it, and no more than that after ``until_s``."""
        while True:
            if self._reading is None:
                message = self.order.take()
                if message is None:
                    return
                self._reading = (message[0], pieces(message[1]))
            self._read_on(*self._reading, until_s)
            if time.perf_counter() >= until_s:
                return

    def _forget(self, why: str) -> None:
        self.counts.losses += 1
        self._reading = None
        self._index.follow(self.slot, self.model)
        self._ready = False
        now_s = time.monotonic()
        if now_s - self._warned_s >= WARN_EVERY_S:
            self._warned_s = now_s
            _log.warning("events of %s: %s; what it held is forgotten", self.server, why)

    def _read_on(self, number: int, coming: Iterator[Piece], until_s: float) -> None:
        """A message's next pieces. When there are none left, the next message may come."""
        counts, events, work, more = self.counts, list[Event](), 0, False
        try:
            for piece in coming:
                if isinstance(piece, Tally):
                    counts.unknown_events += piece is Tally.UNKNOWN
                    counts.unusable_events += piece is Tally.UNUSABLE
                elif piece is not None:
                    events.append(piece)
                    work += 0 if isinstance(piece, AllCleared) else len(piece.hashes)
                    counts.stored_blocks += len(piece.hashes) if isinstance(piece, BlocksStored) else 0
                work += 1
                if work >= BLOCKS or (piece is None and time.perf_counter() >= until_s):
                    more = True
                    break
        except MalformedEvents as error:
            self._reading = None
            if isinstance(error, TooLong):
                counts.too_long += 1
                self.complain("too long", str(error))
            else:
                self.broken(str(error))
            # A replay would bring the same message again.
            self._forget("one is too long" if isinstance(error, TooLong) else "one cannot be read")
            self._state = FeedState.PARTIAL
            return
        if not more:
            counts.batches += 1
            self._reading = None
        if events or not more:
            self._apply(Batch(number, events), more)

    def _apply(self, batch: Batch, more: bool) -> None:
        counts = self.counts
        self._name_media(batch)
        if not self._ready:
            self._index.resume_empty(self.slot, batch.sequence)
            self._ready = True
        try:
            self._index.apply(self.slot, batch, replayed=True, more=more)
        except InvalidInput as error:
            self._reading = None
            if self._index.trouble(self.slot):
                counts.refused += 1
                self.complain("blocks", str(error))
            else:
                self.wiped = True
            self._index.follow(self.slot, self.model)
            self._ready = False

    def _name_media(self, batch: Batch) -> None:
        for event in batch.events:
            if isinstance(event, AllCleared) or medium_of(event.medium) != OTHER:
                continue
            name = event.medium[:40]
            if name not in self._unknown_media and len(self._unknown_media) < UNKNOWN_MEDIA:
                self._unknown_media.add(name)
                _log.warning("events of %s: medium %r is not known, and is taken for the slowest", self.server, name)

    def complain(self, kind: str, why: str) -> None:
        self.errors[kind] = why
        if kind not in self._told:
            self._told.add(kind)
            _log.error("events of %s: %s", self.server, why)

    def fine(self, kind: str) -> None:
        """What was complained about is over; if it comes back, it is said again."""
        self.errors.pop(kind, None)
        self._told.discard(kind)


# One publisher's messages in the order of their numbers, with what is missing noticed. No I/O.
#
# Numbers grow by one per message from 0. A message that was had before has the same number and the same bytes; the
# same
# number with other bytes, or a number from long ago, is another life of the engine: it restarted and counts anew.


REMEMBERED = 4096
"""Messages of which the checksum is kept, to tell what came twice from what another life of the engine sends."""
HELD = 256
"""Messages that wait for one before them; beyond, waiting has no end in sight."""

END_BYTES = 64 << 10


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
        checksum = _checksum(payload)
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
        self._seen[number] = _checksum(payload)
        if len(self._seen) > self._remembered:
            self._seen.popitem(last=False)
        self.next = number + 1
        return number, payload

    @property
    def gap(self) -> bool:
        """Something is here, and what comes before it is not."""
        return bool(self._held) and self.next not in self._held

    @property
    def ready(self) -> bool:
        """``take`` has something."""
        return self.next in self._held

    @property
    def crowded(self) -> bool:
        return len(self._held) >= self._most_held

    def skip(self) -> None:
        """Give up what is missing: the least number that is here comes next."""
        if self._held:
            self.next = min(self._held)

    def had(self, number: int, payload: bytes) -> bool:
        """This very message was had."""
        return self._seen.get(number) == _checksum(payload)

    def restart(self, at: int | None = 0) -> None:
        """Begin anew: ``at`` comes next (None: whatever comes)."""
        self.next = at
        self._seen.clear()
        self._held.clear()


def _checksum(payload: bytes) -> int:
    """Of a long message its ends alone, and its length: all of it would keep the event loop for 10 ms, and a message of
    another life has another time in its first bytes.
    """
    if len(payload) > 2 * END_BYTES:
        payload = payload[:END_BYTES] + payload[-END_BYTES:] + len(payload).to_bytes(8, "big")
    return zlib.crc32(payload)
