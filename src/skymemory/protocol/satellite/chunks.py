"""What a satellite does with requests for its chunks: SET, MIGRATE, GET, HAS, EVICT, LIST, FORGET."""

from __future__ import annotations

import math
from collections.abc import Callable, MutableMapping, Sequence, Set
from dataclasses import dataclass, field

from skymemory import native
from skymemory.constellation.torus import SatelliteId
from skymemory.errors import InvalidInput, MalformedPacket
from skymemory.metrics import Counters
from skymemory.protocol import messages
from skymemory.protocol.auth import SatelliteGate
from skymemory.protocol.messages import KEY_BYTES, Packet, Selection
from skymemory.protocol.routing import LinkEnd, Router, header_start
from skymemory.protocol.satellite.memory import Chunk, ChunkStore, PutOutcome, Share
from skymemory.protocol.satellite.outbox import Departures
from skymemory.protocol.satellite.tombstones import Latecomers, drop, unpack_forget
from skymemory.protocol.segments import SegmentBatch
from skymemory.protocol.wire import (
    CHUNK_REF_BYTES,
    COMMAND_BYTES,
    COMMAND_PREFIX_BYTES,
    FLAG_SETTLED,
    GROUND_SHELL,
    SKY_BYTES,
    Address,
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
        self,
        store: ChunkStore,
        departures: Departures,
        counters: Counters,
        on_stored: OnStored,
        check_place: Callable[[bytes], object],
        latecomers: Latecomers,
        settled: Callable[[bytes, float], bool],
    ) -> None:
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


# The two cases that nearly every packet of a satellite is, taken without a look at each part of it.
#
# A GET by this satellite's own beam of chunks that all are here, and a run of sound SETs or MIGRATEs of one request.
# Whatever is not exactly that is left alone, for the machine to look at in its own way.


PlainRequests = tuple[bytes, MutableMapping[bytes, Share], Set[bytes], int, native.AnswerTerms, native.Guard | None]
"""What ``native.serve`` is told of a satellite: the addresses its requests bear, its chunks, the placement tags whose
chunks it may store, the bytes it has room for, the terms of its answers, and where it asks for MACs who checks them.
"""

_CARRIERS = (Op.SET, Op.MIGRATE)
_OP_AT = COMMAND_BYTES + 1
_DESTINATION = slice(COMMAND_BYTES + 4, COMMAND_BYTES + 8)
_ADDRESSES = slice(COMMAND_BYTES + 4, COMMAND_BYTES + 12)


class PlainCases:
    """Each says whether it took the packets; if not, nothing has been done."""

    def __init__(
        self,
        address: Address,
        chunks: ChunkService,
        departures: Departures,
        router: Router,
        gate: SatelliteGate | None = None,
    ) -> None:
        self._chunks = chunks
        self._departures = departures
        self._router = router
        self._gate = gate
        self._here = address.pack().to_bytes(4, "big")
        self._by_our_beam = self._here + Address(address.plane, address.slot, GROUND_SHELL).pack().to_bytes(4, "big")

    def answer(self, view: memoryview, segment_bytes: int, source: LinkEnd, now_s: float, busy: bool) -> bool:
        """A GET that came down no link but up our beam, all of which is here. ``busy``: no more may be queued."""
        if (
            not len(view) == segment_bytes > COMMAND_PREFIX_BYTES
            or view[_OP_AT] != Op.GET
            or view[_ADDRESSES] != self._by_our_beam
            or isinstance(source, SatelliteId)
            or busy
        ):
            return False
        batch = self._chunks.answer(view, now_s)
        if batch is None:
            return False
        self._router.remember(int.from_bytes(view[_GROUND], "big"), source)
        self._departures.pass_on(batch, source)
        return True

    def terms(self, settled: Set[bytes], now_s: float) -> PlainRequests | None:
        """What whoever receives for us needs to serve such requests himself; good until the machine is next called.
        None where answers need MACs.
        """
        chunks, guard = self._chunks, None
        if self._gate is not None:
            if self._gate.every_packet:
                return None
            guard = self._gate.guard(now_s)
        chunks.left_to_transport(now_s)
        return self._by_our_beam, chunks.shares, settled, chunks.room_bytes, self._departures.terms(now_s), guard

    def served(self, served: Sequence[native.Served]) -> int:
        """Requests that were served by our ``terms``; how many packets they came in."""
        packets = 0
        for op, key, ground, endpoint, chunks, replaced, replaced_bytes, added_bytes, _ in served:
            self._router.remember(ground, endpoint)
            if op == Op.GET:
                self._chunks.served(key, chunks, ground)
                self._departures.sent(chunks)
                packets += 1
            else:
                self._chunks.taken(key, chunks, replaced, replaced_bytes, added_bytes)
                self._departures.sent(1)
                packets += chunks
        return packets

    def store(self, runs: list[native.Run], first: int, source: LinkEnd, now_s: float) -> int:
        """Chunks of one value and request, all sound: how many of the runs from ``first`` on these are."""
        view = runs[first][0]
        if (
            len(view) < COMMAND_PREFIX_BYTES
            or header_start(view) != COMMAND_BYTES
            or view[_OP_AT] not in _CARRIERS
            or view[_DESTINATION] != self._here
        ):
            return 0
        opened = native.open_runs(runs, first)
        if opened is None:
            return 0
        if not isinstance(source, SatelliteId):
            self._router.remember(int.from_bytes(view[_GROUND], "big"), source)
        self._chunks.set_run(view, COMMAND_BYTES, opened[:3], now_s)
        return opened[3]
