"""What a satellite does with requests for its chunks: SET, MIGRATE, GET, HAS, EVICT, LIST, FORGET."""

from __future__ import annotations

import math
from collections.abc import Callable, MutableMapping
from dataclasses import dataclass, field

from skymemory.errors import InvalidInput, MalformedPacket
from skymemory.metrics import Counters
from skymemory.protocol import messages
from skymemory.protocol.chunk_store import ChunkStore, PutOutcome
from skymemory.protocol.dead import drop, unpack_forget
from skymemory.protocol.departures import Departures
from skymemory.protocol.latecomers import Latecomers
from skymemory.protocol.messages import KEY_BYTES, Packet
from skymemory.protocol.segments import SegmentBatch
from skymemory.protocol.selection import Selection
from skymemory.protocol.share import Chunk, Share
from skymemory.protocol.space_packet import COMMAND_BYTES
from skymemory.protocol.wire import (
    CHUNK_REF_BYTES,
    FLAG_SETTLED,
    SKY_BYTES,
    ChunkRef,
    Op,
    SkyHeader,
    Status,
)

OnStored = Callable[[bytes, list[int], bytes, SkyHeader, float], None]
"""Told of chunks stored: key, indices, the packed reference of one of them (all have the same placement tag), the
header that brought them, and the time.
"""

OpenedRun = tuple[list[int], list[Chunk], int]
"""Indices, chunks, and what they count in memory."""

_GROUND = slice(COMMAND_BYTES + 12, COMMAND_BYTES + 16)
_JOURNEY_BYTES = 20
"""Of the SKY header: version, operation, flags, status, addresses, ground host and request id."""


@dataclass(slots=True)
class _Request:
    """Chunks of one key that one request brought: acknowledged together, when the transport asks what to send."""

    header: SkyHeader
    key: bytes
    taken: list[int] = field(default_factory=list)
    refused: list[int] = field(default_factory=list)


class ChunkService:
    """Answers requests from a ``ChunkStore``.

    ``settled`` says of a key whether nothing of it is being handed over here, by a count of moves that is up to date.
    ``check_place`` may raise ``InvalidInput`` to refuse a chunk whose placement is impossible; it is asked before.
    """

    def __init__(
        self, store: ChunkStore, departures: Departures, counters: Counters, on_stored: OnStored,
        check_place: Callable[[bytes], object], latecomers: Latecomers,
        settled: Callable[[bytes, float], bool],
    ) -> None:  # fmt: skip
        self._store = store
        self._departures = departures
        self._counters = counters
        self._on_stored = on_stored
        self._check_place = check_place
        self._latecomers = latecomers
        self._settled = settled
        self._unanswered: dict[bytes, _Request] = {}
        self._now_s = -math.inf
        self.on_set: Callable[[bytes], None] | None = None
        """Told of each key that a writer (not a handover) stored chunks of."""
        self.on_served: Callable[[bytes, int], None] | None = None
        """Told of each key that a ground host, by its number, was sent chunks of."""
        self.waited_s = 0.0
        """How long ago the packets that are being taken came: a late host takes some from a queue (``postponed``)."""

    def set_run(self, view: memoryview, start: int, opened: OpenedRun, now_s: float) -> None:
        """SET and MIGRATE, as ``native.open_runs`` took them apart; ``start`` is where the SKY header begins."""
        indices, chunks, size_bytes = opened
        ref = chunks[0][0]
        try:
            request = self._request(view, start, ref)
            self._check_place(ref)
        except (MalformedPacket, InvalidInput):
            self._counters.add("packets_malformed", len(indices))
            return
        migrated = request.header.op is Op.MIGRATE
        self._now_s = now_s
        if migrated and self._latecomers.is_deleted(ref, now_s - self.waited_s):
            return
        outcome = None
        if not (migrated and any(map(self._is_outdated, indices, chunks))):
            outcome = self._store.put_run(request.key, indices, chunks, size_bytes, migrated)
        if outcome is None:
            for index, (its_ref, payload) in zip(indices, chunks, strict=True):
                self._store_chunk(request, index, its_ref, payload, now_s)
            return
        request.taken += indices
        self._count(outcome, request.header.op, len(indices), request.key)
        self._on_stored(request.key, indices, ref, request.header, now_s)

    def set(self, segments: list[memoryview], start: int, now_s: float) -> None:
        """SET and MIGRATE of any keys and requests: whole packets whose checksums have been verified."""
        body_at = start + SKY_BYTES
        payload_at = body_at + CHUNK_REF_BYTES
        for segment in segments:
            ref = bytes(segment[body_at:payload_at])
            try:
                index = ChunkRef.unpack(ref).index
                request = self._request(segment, start, ref)
                self._check_place(ref)
            except (MalformedPacket, InvalidInput):
                self._counters.add("packets_malformed")
                continue
            self._store_chunk(request, index, ref, bytes(segment[payload_at:]), now_s)

    def _request(self, packet: memoryview, start: int, ref: bytes) -> _Request:
        """What the packet belongs to: same operation, addresses, ground host, request id and key."""
        name = bytes(packet[start : start + _JOURNEY_BYTES]) + ref[:KEY_BYTES]
        found = self._unanswered.get(name)
        if found is None:
            found = self._unanswered[name] = _Request(SkyHeader.unpack(packet, start), ref[:KEY_BYTES])
        return found

    def _is_outdated(self, index: int, chunk: Chunk) -> bool:
        """Of a chunk that is handed over: whether what is here in its place was set later."""
        held = self._store.peek((chunk[0][:KEY_BYTES], index))
        return held is not None and self._latecomers.is_outdated(chunk[0], held.ref)

    def _store_chunk(self, request: _Request, index: int, ref: bytes, payload: bytes, now_s: float) -> None:
        migrated = request.header.op is Op.MIGRATE
        self._now_s = now_s
        if migrated and self._latecomers.is_deleted(ref, now_s - self.waited_s):
            return
        if migrated and self._is_outdated(index, (ref, payload)):
            self._store.pass_over(len(payload))
            self._count(PutOutcome(True, 1), Op.MIGRATE, 1, request.key)
            request.taken.append(index)
            return
        outcome = self._store.put((request.key, index), ref, payload, migrated)
        self._count(outcome, request.header.op, 1, request.key)
        if not outcome.stored:
            request.refused.append(index)
            return
        request.taken.append(index)
        self._on_stored(request.key, [index], ref, request.header, now_s)

    def _count(self, outcome: PutOutcome, op: Op, chunks: int, key: bytes) -> None:
        if outcome.evicted:
            self._counters.add("chunks_evicted", outcome.evicted)
        if not outcome.stored:
            self._counters.add("chunks_refused", chunks)
            return
        self._counters.add("chunks_migrated_in" if op is Op.MIGRATE else "chunks_set", chunks)
        if op is Op.SET:
            self._latecomers.set_again(key, self._now_s)
            if self.on_set is not None:
                self.on_set(key)
        if outcome.replaced:
            self._counters.add("chunks_replaced", outcome.replaced)

    def acknowledge(self, now_s: float) -> None:
        """Answer what has been stored or refused since the last time: one ACK a request, mostly."""
        if not self._unanswered:
            return
        for request in self._unanswered.values():
            for indices, status in ((request.taken, Status.OK), (request.refused, Status.FULL)):
                for selection in Selection.cover(request.key, indices):
                    self._departures.reply(request.header, Op.ACK, selection.pack(), now_s, status)
        self._unanswered.clear()

    def answer(self, view: memoryview, now_s: float) -> SegmentBatch | None:
        """DATA for a plain GET, all of which is here; None for anything else, and nothing done."""
        found = self._departures.data_for(view, self._store.shares, now_s)
        if found is None:
            return None
        key, batch = found
        self.served(key, batch.count, int.from_bytes(view[_GROUND], "big"))
        return batch

    @property
    def shares(self) -> MutableMapping[bytes, Share]:
        """All chunks by key; whoever adds to them tells ``taken``."""
        return self._store.shares

    @property
    def room_bytes(self) -> int:
        """What fits in without an eviction."""
        return self._store.limit_bytes - self._store.used_bytes

    def left_to_transport(self, now_s: float) -> None:
        """From now on, until the next call, a transport may store chunks by itself and tell ``taken``."""
        self._now_s = now_s

    def taken(self, key: bytes, chunks: int, replaced: int, replaced_bytes: int, added_bytes: int) -> None:
        """So many chunks were added to the share of this key, and acknowledged."""
        self._store.added(key, chunks - replaced, added_bytes, replaced_bytes)
        self._count(PutOutcome(True, replaced), Op.SET, chunks, key)

    def served(self, key: bytes, chunks: int, ground: int) -> None:
        """So many chunks of this key, which is here, were sent to the ground host that asked for them."""
        if self.on_served is not None:
            self.on_served(key, ground)
        self._store.touch(key)
        self._counters.add("chunks_served", chunks)

    def get(self, packet: Packet, now_s: float) -> None:
        """What we hold of the selection as DATA, what we do not as one MISS."""
        selection = Selection.unpack(packet.body)
        indices = selection.indices()
        chunks, missing = self._store.get_run(selection.key, indices)
        if chunks:
            self._counters.add("chunks_served", len(chunks))
            if self.on_served is not None:
                self.on_served(selection.key, packet.header.ground)
            self._departures.reply_chunks(packet.header, chunks, now_s)
        if missing:
            self._counters.add("chunks_missed", len(missing))
            body = Selection.of(selection.key, missing, selection.stride).pack()
            flags = FLAG_SETTLED if self._settled(selection.key, now_s) else 0
            self._departures.reply(packet.header, Op.MISS, body, now_s, flags=flags)

    def has(self, packet: Packet, now_s: float) -> None:
        found = [self._store.presence(key) for key in messages.unpack_keys(packet.body)]
        self._departures.reply(packet.header, Op.PRESENCE, messages.pack_presences(found), now_s)

    def evict(self, packet: Packet, now_s: float) -> None:
        keys = messages.unpack_keys(packet.body)
        self._latecomers.delete(((key, b"") for key in keys), now_s)
        freed = sum(map(self._store.remove_key, keys))
        self._counters.add("chunks_deleted", freed)
        self._departures.reply(packet.header, Op.EVICTED, messages.pack_count(freed), now_s)

    def forget(self, packet: Packet, now_s: float) -> None:
        """Settings that a client found dead. What was stored since it looked is not, though it be the same bytes."""
        dead, since_s = unpack_forget(packet.body)
        dead = [one for one in dead if not self._latecomers.was_set_since(one[0], now_s - since_s)]
        self._latecomers.delete(dead, now_s)
        freed = drop(self._store, dead, "deleted")
        self._counters.add("chunks_deleted", freed)
        self._departures.reply(packet.header, Op.EVICTED, messages.pack_count(freed), now_s)

    def list(self, packet: Packet, now_s: float) -> None:
        after, limit = messages.unpack_list(packet.body)
        keys = self._store.keys_after(after, limit)
        entries = [(key, presence) for key in keys if (presence := self._store.presence(key)) is not None]
        self._departures.reply(packet.header, Op.LISTED, messages.pack_listed(entries), now_s)
