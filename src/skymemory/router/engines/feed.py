"""One engine's events on their way into the index: what is in order is applied, what was lost is not glossed over.

Without sockets: ``kv_events`` brings messages and says what became of the connection.
"""

from __future__ import annotations

import enum
import logging
import time
from dataclasses import dataclass
from typing import Protocol

from skymemory.conductor.prefix_index.events import AllCleared, Batch, BlocksStored
from skymemory.conductor.prefix_index.media import OTHER, medium_of
from skymemory.errors import InvalidInput
from skymemory.router.kv_messages import MalformedEvents, decode
from skymemory.router.kv_order import Offer, Order

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

    def begin_anew(self, slot: int, sequence: int) -> object:
        """Nothing is known of what it holds, and ``sequence`` comes next."""
        ...

    def apply(self, slot: int, batch: Batch, replayed: bool = False) -> object:
        """Raises ``InvalidInput``: events that cannot be followed (``trouble`` says why), or a forgotten slot."""
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

    def offer(self, number: int, payload: bytes) -> None:
        """A message, whichever way it came. What is in order now is applied."""
        offer = self.order.offer(number, payload)
        if offer is Offer.RESTARTED:
            self.restarted()
            offer = self.order.offer(number, payload)
        if offer is Offer.OLD:
            self.counts.old += 1
            return
        if self._state is FeedState.WAITING:
            self._state = FeedState.WHOLE if self.order.next == 0 else FeedState.PARTIAL
        self._catch_up()

    def restarted(self) -> None:
        """The engine began anew: it holds nothing of before, and counts from 0."""
        self.counts.restarts += 1
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
        self._catch_up()

    def from_the_start(self) -> None:
        """As on the first day: whatever the engine still has is wanted."""
        self.wiped = False
        self._index.follow(self.slot, self.model)
        self._ready = False
        self.order.restart(None)
        self._state = FeedState.WAITING

    def unsure(self) -> None:
        """Whether what is believed still holds cannot be told: forget it, and take whatever comes."""
        if self.heard:
            self._forget("the connection was lost, and what was missed cannot be asked for")
        self.order.restart(None)
        self._state = FeedState.WAITING

    def broken(self, why: str) -> None:
        """A message that cannot be read. What it said is lost, and its number is not worth asking for again."""
        self.counts.malformed += 1
        self.complain("broken", why)

    def _catch_up(self) -> None:
        while (message := self.order.take()) is not None:
            self._apply(*message)

    def _forget(self, why: str) -> None:
        self.counts.losses += 1
        self._index.follow(self.slot, self.model)
        self._ready = False
        now_s = time.monotonic()
        if now_s - self._warned_s >= WARN_EVERY_S:
            self._warned_s = now_s
            _log.warning("events of %s: %s; what it held is forgotten", self.server, why)

    def _apply(self, number: int, payload: bytes) -> None:
        try:
            decoded = decode(number, payload)
        except MalformedEvents as error:
            self.broken(str(error))
            self._forget("one cannot be read")
            self._state = FeedState.PARTIAL
            return
        counts = self.counts
        counts.batches += 1
        counts.unknown_events += decoded.unknown
        counts.unusable_events += decoded.unusable
        batch = decoded.batch
        counts.stored_blocks += sum(len(event.hashes) for event in batch.events if isinstance(event, BlocksStored))
        self._name_media(batch)
        if not self._ready:
            self._index.begin_anew(self.slot, number)
            self._ready = True
        try:
            self._index.apply(self.slot, batch, replayed=True)
        except InvalidInput as error:
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
