"""Stream of an engine's KV events. No I/O.

1. ``Feed.offer`` takes a message of the subscription or a replay; ``Order`` sorts by number.
2. ``go_on`` applies messages in order, in pieces, so that the event loop is not blocked.
3. After an unfilled gap, a restart or an unreadable message, the index forgets the blocks.

Numbers grow by 1 from 0. The same number with other bytes, or a number from long ago, means a restart.
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

from skymemory.conductor.prefix_index.events import OTHER, AllCleared, BlocksStored, Event, EventBatch, medium_of
from skymemory.conductor.prefix_index.precise import PreciseIndex
from skymemory.errors import InvalidInput
from skymemory.router.engines.wire import BLOCKS, MalformedEvents, Piece, Tally, TooLong, pieces

WARN_EVERY_S = 10.0
UNKNOWN_MEDIA = 8
REMEMBERED = 4096
"""Checksums kept to distinguish duplicates from a restart."""
HELD = 256
END_BYTES = 64 << 10
_log = logging.getLogger("skymemory.router")


class FeedState(enum.Enum):
    """Completeness of the index of an engine's cache."""

    WAITING = "waiting"  # no message yet
    WHOLE = "whole"  # every message since the engine's start was applied
    PARTIAL = "partial"  # the index is correct but incomplete
    LOST = "lost"  # disconnected: the cache may have changed


@dataclass(slots=True)
class Counts:
    """Totals of an engine's messages."""

    batches: int = 0  # applied messages
    stored_blocks: int = 0
    old: int = 0  # duplicates
    gaps: int = 0  # in the numbers of messages
    replayed: int = 0
    losses: int = 0  # unfilled gaps: the blocks were forgotten
    restarts: int = 0
    malformed: int = 0
    too_long: int = 0
    unknown_events: int = 0  # kinds that the router does not know
    unusable_events: int = 0  # stored blocks that cannot be hashed
    refused: int = 0  # messages with blocks of another size than the prompts'


class Feed:
    """Events of a server. ``model`` seeds its blocks' hashes."""

    def __init__(self, server: str, slot: int, model: str, index: PreciseIndex, order: Order | None = None) -> None:
        self.server = server
        self.slot = slot
        self.model = model
        self.connected = False
        self.counts = Counts()
        self.errors: dict[str, str] = {}
        self.order = Order() if order is None else order
        self.wiped = False  # the index was made to forget the server elsewhere: a full replay is needed
        self._state = FeedState.WAITING
        self._index = index
        self._logged: set[str] = set()
        self._unknown_media: set[str] = set()
        self._warned_s = -WARN_EVERY_S
        self._ready = False  # the index expects the same number as `order`
        self._reading: tuple[int, Iterator[Piece]] | None = None  # message that is being applied
        index.follow(slot, model)

    @property
    def state(self) -> FeedState:
        if self.has_applied and not self.connected:
            return FeedState.LOST
        return self._state

    @property
    def has_applied(self) -> bool:
        return bool(self.order.next)

    @property
    def busy(self) -> bool:
        return self._reading is not None or self.order.ready

    # Two numbers must agree before anything is applied: `order.next`, the next number of the publisher, and the index's
    # own. `_ready` is True if they do. Anything that empties the index (restart, loss, refusal) clears it; the index
    # then continues from the next message (`resume_empty`).

    def offer(self, number: int, payload: bytes, until_s: float = math.inf) -> None:
        """Take a message, and apply what is in order until ``until_s`` (`time.perf_counter`)."""
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
        """Handle a restart: the cache is empty, and numbers begin at 0."""
        self.counts.restarts += 1
        self._reading = None
        self._index.follow(self.slot, self.model)
        self._ready = False
        self.order.restart(0)
        self._state = FeedState.WAITING
        _log.info("%s restarted: its blocks are forgotten", self.server)

    def nothing_published(self) -> None:
        if self.order.next is None:
            self.order.restart(0)

    def lost(self) -> None:
        """Give up a gap: forget the blocks, and go on after it."""
        if self.has_applied:
            self._forget_blocks("messages were lost")
        self.order.skip()
        self._state = FeedState.PARTIAL
        self.go_on(0.0)

    def from_the_start(self) -> None:
        self._reading = None
        self.wiped = False
        self._index.follow(self.slot, self.model)
        self._ready = False
        self.order.restart(None)
        self._state = FeedState.WAITING

    def unsure(self) -> None:
        """Forget the blocks, and continue with any message: messages may have been missed without a replay."""
        self._reading = None
        if self.has_applied:
            self._forget_blocks("the connection was lost, and there is no replay of what was missed")
        self.order.restart(None)
        self._state = FeedState.WAITING

    def broken(self, why: str) -> None:
        """Count a malformed message as lost: a replay would repeat it."""
        self.counts.malformed += 1
        self.complain("broken", why)

    def go_on(self, until_s: float = math.inf) -> None:
        """Apply messages in order until ``until_s``, at least a piece."""
        while True:
            if self._reading is None:
                message = self.order.take()
                if message is None:
                    return
                self._reading = (message[0], pieces(message[1]))
            self._read_pieces(*self._reading, until_s)
            if time.perf_counter() >= until_s:
                return

    def _forget_blocks(self, why: str) -> None:
        self.counts.losses += 1
        self._reading = None
        self._index.follow(self.slot, self.model)
        self._ready = False
        now_s = time.monotonic()
        if now_s - self._warned_s >= WARN_EVERY_S:
            self._warned_s = now_s
            _log.warning("events of %s: %s; its blocks are forgotten", self.server, why)

    def _read_pieces(self, number: int, coming: Iterator[Piece], until_s: float) -> None:
        """Apply pieces of message ``number``, as long as time remains."""
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
            # A replay would return the same message.
            self._forget_blocks("a message is too long" if isinstance(error, TooLong) else "a message cannot be read")
            self._state = FeedState.PARTIAL
            return
        if not more:
            counts.batches += 1
            self._reading = None
        if events or not more:
            self._apply_batch(EventBatch(number, events), more)

    def _apply_batch(self, batch: EventBatch, more: bool) -> None:
        """Apply events to the index. ``more``: the message goes on."""
        counts = self.counts
        self._warn_of_unknown_media(batch)
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

    def _warn_of_unknown_media(self, batch: EventBatch) -> None:
        for event in batch.events:
            if isinstance(event, AllCleared) or medium_of(event.medium) != OTHER:
                continue
            name = event.medium[:40]
            if name not in self._unknown_media and len(self._unknown_media) < UNKNOWN_MEDIA:
                self._unknown_media.add(name)
                _log.warning("events of %s: unknown medium %r, treated as the slowest", self.server, name)

    def complain(self, kind: str, why: str) -> None:
        self.errors[kind] = why
        if kind not in self._logged:
            self._logged.add(kind)
            _log.error("events of %s: %s", self.server, why)

    def fine(self, kind: str) -> None:
        self.errors.pop(kind, None)
        self._logged.discard(kind)


class Offer(enum.Enum):
    TAKEN = enum.auto()  # it is next, or waits for missing messages
    OLD = enum.auto()  # a duplicate
    RESTARTED = enum.auto()  # call `restart`, then offer it again


class Order:
    """Messages of a publisher in order. ``next`` is the expected number; None: any."""

    def __init__(self, remembered: int = REMEMBERED, most_held: int = HELD) -> None:
        self.next: int | None = None
        self._remembered = remembered
        self._most_held = most_held
        self._seen: OrderedDict[int, int] = OrderedDict()  # checksums of taken messages
        self._held: dict[int, bytes] = {}  # messages that wait for their turn

    def offer(self, number: int, payload: bytes) -> Offer:
        """Keep a message until its turn, unless it is old or shows a restart."""
        # Numbers alone do not show a restart: the engine counts from 0 again, and soon passes the old number. Equal
        # numbers with other bytes do show it.
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
        if self.next is None or self.next not in self._held:
            return None
        number, payload = self.next, self._held.pop(self.next)
        self._seen[number] = _checksum(payload)  # to recognise duplicates and restarts
        if len(self._seen) > self._remembered:
            self._seen.popitem(last=False)
        self.next = number + 1
        return number, payload

    @property
    def gap(self) -> bool:
        return bool(self._held) and self.next not in self._held

    @property
    def ready(self) -> bool:
        return self.next in self._held

    @property
    def crowded(self) -> bool:
        return len(self._held) >= self._most_held

    def skip(self) -> None:
        if self._held:
            self.next = min(self._held)

    def had(self, number: int, payload: bytes) -> bool:
        return self._seen.get(number) == _checksum(payload)

    def restart(self, at: int | None = 0) -> None:
        """Forget all messages; expect ``at`` (None: any)."""
        self.next = at
        self._seen.clear()
        self._held.clear()


def _checksum(payload: bytes) -> int:
    """Return a CRC-32, of a long message only over its ends: a restart changes the timestamp in the first bytes."""
    if len(payload) > 2 * END_BYTES:
        payload = payload[:END_BYTES] + payload[-END_BYTES:] + len(payload).to_bytes(8, "big")
    return zlib.crc32(payload)
