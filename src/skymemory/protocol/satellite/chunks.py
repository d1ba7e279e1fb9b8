"""Handlers of requests for chunks: SET, MIGRATE, GET, HAS, EVICT, FORGET, LIST."""

from __future__ import annotations

import math
from collections.abc import Sequence, Set
from dataclasses import dataclass, field

from skymemory import native
from skymemory.constellation.torus import SatelliteId
from skymemory.errors import InvalidInput, MalformedPacket
from skymemory.placement.locate import Moves
from skymemory.protocol import messages
from skymemory.protocol.auth import SatelliteGate
from skymemory.protocol.messages import KEY_BYTES, Selection
from skymemory.protocol.satellite.memory import Chunk, PutOutcome, set_moves_of, setting_of
from skymemory.protocol.satellite.migration import Migration
from skymemory.protocol.satellite.state import SatelliteState
from skymemory.protocol.wire import (
    CHUNK_REF_BYTES,
    COMMAND_BYTES,
    COMMAND_PREFIX_BYTES,
    FLAG_SETTLED,
    GROUND_SHELL,
    SKY_BYTES,
    Address,
    ChunkRef,
    LinkEnd,
    Op,
    Packet,
    SkyHeader,
    Status,
    header_start,
)

OpenedRun = tuple[list[int], list[Chunk], int]


_CARRIERS = (Op.SET, Op.MIGRATE)
_OP_AT = COMMAND_BYTES + 1
_DESTINATION = slice(COMMAND_BYTES + 4, COMMAND_BYTES + 8)
_ADDRESSES = slice(COMMAND_BYTES + 4, COMMAND_BYTES + 12)
_GROUND = slice(COMMAND_BYTES + 12, COMMAND_BYTES + 16)
_JOURNEY_BYTES = 20


@dataclass(slots=True)
class _PendingAck:
    """Request whose chunks (indices ``taken`` and ``refused``) are acknowledged together."""

    header: SkyHeader
    key: bytes
    taken: list[int] = field(default_factory=list)
    refused: list[int] = field(default_factory=list)


class ChunkService:
    """Service that stores chunks and answers requests for them.

    Fast paths serve *plain* packets: GETs of stored chunks by the own beam (``answer_get``), and runs of SETs or
    MIGRATEs (``store_runs``).
    """

    def __init__(self, state: SatelliteState, migration: Migration, gate: SatelliteGate | None) -> None:
        self._state = state
        self._store = state.store
        self._history = state.history
        self._locator = state.locator
        self._outbox = state.outbox
        self._router = state.router
        self._counters = state.counters
        self._migration = migration
        self._gate = gate
        self._here = state.address.pack().to_bytes(4, "big")
        beam = Address(state.address.plane, state.address.slot, GROUND_SHELL)
        self._own_address_and_beam = self._here + beam.pack().to_bytes(4, "big")
        self._pending_acks: dict[bytes, _PendingAck] = {}
        self._now_s = -math.inf
        self.waited_s = 0.0

    # --- Fast paths ---

    def answer_get(self, view: memoryview, segment_bytes: int, source: LinkEnd, now_s: float, busy: bool) -> bool:
        """Answer a GET from this satellite's beam if all its chunks are stored. Otherwise, or if ``busy``, return
        False.
        """
        if (
            not len(view) == segment_bytes > COMMAND_PREFIX_BYTES
            or view[_OP_AT] != Op.GET
            or view[_ADDRESSES] != self._own_address_and_beam  # destination and source
            or isinstance(source, SatelliteId)
            or busy
        ):
            return False
        answer = self._outbox.data_for(view, self._store.shares, now_s)
        if answer is None:
            return False
        key, batch = answer
        ground = int.from_bytes(view[_GROUND], "big")
        self._count_read(key, batch.count, ground)
        self._router.remember(ground, source)
        self._outbox.send_by(batch, source)
        return True

    def store_runs(self, runs: list[native.Run], first: int, source: LinkEnd, now_s: float) -> int:
        """Store SETs or MIGRATEs of a request. Return how many runs these were; 0: not plain."""
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
        self.set_run(view, COMMAND_BYTES, opened[:3], now_s)
        return opened[3]

    def plain_requests(self, settled: Set[bytes], now_s: float) -> native.PlainRequests | None:
        """Return what ``native`` needs to serve plain requests until the next call; None if answers need MACs."""
        guard = None
        if self._gate is not None:
            if self._gate.every_packet:
                return None
            guard = self._gate.guard(now_s)
        self._now_s = now_s
        room_bytes = self._store.limit_bytes - self._store.used_bytes
        return self._own_address_and_beam, self._store.shares, settled, room_bytes, self._outbox.terms(now_s), guard

    def count_served(self, served: Sequence[native.Served]) -> int:
        """Account for ``plain_requests``. Return their packets."""
        packets = 0
        for op, key, ground, source, _, chunks, replaced, replaced_bytes, added_bytes, _ in served:
            if not isinstance(source, SatelliteId):
                self._router.remember(ground, source)
            if op == Op.GET:
                self._count_read(key, chunks, ground)
                self._outbox.sent(chunks)
                packets += 1
            else:
                self._outbox.credit.record_sender(ground, self._now_s)
                self._store.added(key, chunks - replaced, added_bytes, replaced_bytes)
                self._count_stored(PutOutcome(True, replaced), Op.SET, chunks, key)
                self._outbox.sent(1)
                packets += chunks
        return packets

    def _count_read(self, key: bytes, chunks: int, ground: int) -> None:
        if self._store.leases:
            self._store.release(key, ground)
        self._store.touch(key)
        self._counters.add("chunks_served", chunks)

    # --- SET and MIGRATE ---

    def set_run(self, view: memoryview, start: int, opened: OpenedRun, now_s: float) -> None:
        indices, chunks, size_bytes = opened
        ref, self._now_s = chunks[0][0], now_s
        try:
            request = self._get_pending_ack(view, start, ref)
            self._locator.home(ref)  # raises for an impossible placement
        except (MalformedPacket, InvalidInput):
            self._counters.add("packets_malformed", len(indices))
            return
        migrated = request.header.op is Op.MIGRATE
        if migrated and self._history.is_deleted(ref, now_s - self.waited_s):
            return
        # All at once; chunk by chunk if a chunk is outdated or the memory must evict selectively.
        outcome = None
        if not (migrated and any(map(self._is_outdated, indices, chunks))):
            outcome = self._store.put_run(request.key, indices, chunks, size_bytes, migrated)
        if outcome is None:
            for index, (chunk_ref, payload) in zip(indices, chunks, strict=True):
                self._store_chunk(request, index, chunk_ref, payload, now_s)
            return
        request.taken += indices
        self._count_stored(outcome, request.header.op, len(indices), request.key)
        self._migration.stored(request.key, indices, ref, request.header, now_s)

    def set(self, segments: list[memoryview], start: int, now_s: float) -> None:
        body_at = start + SKY_BYTES
        payload_at = body_at + CHUNK_REF_BYTES
        self._now_s = now_s
        for segment in segments:
            ref = bytes(segment[body_at:payload_at])
            try:
                index = ChunkRef.unpack(ref).index
                request = self._get_pending_ack(segment, start, ref)
                self._locator.home(ref)
            except (MalformedPacket, InvalidInput):
                self._counters.add("packets_malformed")
                continue
            self._store_chunk(request, index, ref, bytes(segment[payload_at:]), now_s)

    def _get_pending_ack(self, packet: memoryview, start: int, ref: bytes) -> _PendingAck:
        """Return the record that collects the ACK of this packet's request."""
        name = bytes(packet[start : start + _JOURNEY_BYTES]) + ref[:KEY_BYTES]
        request = self._pending_acks.get(name)
        if request is None:
            request = self._pending_acks[name] = _PendingAck(SkyHeader.unpack(packet, start), ref[:KEY_BYTES])
            if request.header.op is Op.SET:
                self._outbox.credit.record_sender(request.header.ground, self._now_s)
        return request

    def _store_chunk(self, request: _PendingAck, index: int, ref: bytes, payload: bytes, now_s: float) -> None:
        """Store a chunk and note it for the ACK. Handed-over chunks that are deleted or outdated are dropped."""
        migrated = request.header.op is Op.MIGRATE
        if migrated and self._history.is_deleted(ref, now_s - self.waited_s):
            return
        if migrated and self._is_outdated(index, (ref, payload)):
            self._store.count_outdated(len(payload))
            self._count_stored(PutOutcome(True, 1), Op.MIGRATE, 1, request.key)
            request.taken.append(index)
            return
        outcome = self._store.put((request.key, index), ref, payload, migrated)
        self._count_stored(outcome, request.header.op, 1, request.key)
        if not outcome.stored:
            request.refused.append(index)
            return
        request.taken.append(index)
        self._migration.stored(request.key, [index], ref, request.header, now_s)

    def _is_outdated(self, index: int, chunk: Chunk) -> bool:
        """Return True if a handed-over chunk was set before the chunk in its place.

        More moves mean later. At equal moves, or if the box goes back and forth, a chunk set here by its writer is
        later.
        """
        ref = chunk[0]
        stored = self._store.peek((ref[:KEY_BYTES], index))
        if stored is None or setting_of(ref) == setting_of(stored.ref):
            return False
        moves, held_moves = set_moves_of(ref), set_moves_of(stored.ref)
        if (moves == held_moves or held_moves == self._locator.moves) and self._was_set_here(stored.ref, held_moves):
            return True
        return sum(held_moves) > sum(moves)

    def _was_set_here(self, ref: bytes, moves: Moves) -> bool:
        tag = ChunkRef.unpack(ref).tag
        placement = self._state.sky.placement(tag.strategy, tag.servers)
        return placement.locate(tag.server, moves, moves, tag.replica) == self._state.here

    def _count_stored(self, outcome: PutOutcome, op: Op, chunks: int, key: bytes) -> None:
        if outcome.evicted:
            self._counters.add("chunks_evicted", outcome.evicted)
        if not outcome.stored:
            self._counters.add("chunks_refused", chunks)
            return
        self._counters.add("chunks_migrated_in" if op is Op.MIGRATE else "chunks_set", chunks)
        if op is Op.SET:
            self._history.written(key, self._now_s)
            if self._store.expiries:  # an expiry belonged to the key's earlier content
                self._store.expiries.pop(key, None)
        if outcome.replaced:
            self._counters.add("chunks_replaced", outcome.replaced)

    def acknowledge(self, now_s: float) -> None:
        if not self._pending_acks:
            return
        for request in self._pending_acks.values():
            for indices, status in ((request.taken, Status.OK), (request.refused, Status.FULL)):
                for body in Selection.pack_cover(request.key, indices):
                    self._outbox.reply(request.header, Op.ACK, body, now_s, status)
        self._pending_acks.clear()

    # --- All other requests ---

    def get(self, packet: Packet, now_s: float) -> None:
        selection = Selection.unpack(packet.body)
        indices = selection.indices()
        chunks, missing = self._store.get_run(selection.key, indices)
        if chunks:
            self._counters.add("chunks_served", len(chunks))
            if self._store.leases:
                self._store.release(selection.key, packet.header.ground)
            self._outbox.reply_chunks(packet.header, chunks, now_s)
        if missing:
            self._counters.add("chunks_missed", len(missing))
            body = Selection.of(selection.key, missing, selection.stride).pack()
            stored_indices = self._store.shares.get(selection.key, ())
            flags = FLAG_SETTLED if self._state.is_settled(selection.key, stored_indices, now_s) else 0
            self._outbox.reply(packet.header, Op.MISS, body, now_s, flags=flags)

    def has(self, packet: Packet, now_s: float) -> None:
        keys = messages.unpack_keys(packet.body)
        # Each examines a whole share: a key that is named 180 times is examined once.
        presences = {key: self._store.presence(key) for key in dict.fromkeys(keys)}
        answer = messages.pack_presences(map(presences.__getitem__, keys))
        self._outbox.reply(packet.header, Op.PRESENCE, answer, now_s)

    def evict(self, packet: Packet, now_s: float) -> None:
        keys = messages.unpack_keys(packet.body)
        self._history.deleted(((key, b"") for key in keys), now_s)
        freed = sum(map(self._store.remove_key, keys))
        self._counters.add("chunks_deleted", freed)
        self._outbox.reply(packet.header, Op.EVICTED, messages.pack_count(freed), now_s)

    def forget(self, packet: Packet, now_s: float) -> None:
        """Delete settings that a client found dead, except keys stored since."""
        dead, since_s = messages.unpack_forget(packet.body)
        dead = [value for value in dead if not self._history.was_written_since(value[0], now_s - since_s)]
        self._history.deleted(dead, now_s)
        freed = self._store.remove_values(dead, "deleted")
        self._counters.add("chunks_deleted", freed)
        self._outbox.reply(packet.header, Op.EVICTED, messages.pack_count(freed), now_s)

    def list(self, packet: Packet, now_s: float) -> None:
        after, limit = messages.unpack_list(packet.body)
        keys = self._store.keys_after(after, limit)
        entries = [(key, presence) for key in keys if (presence := self._store.presence(key)) is not None]
        self._outbox.reply(packet.header, Op.LISTED, messages.pack_listed(entries), now_s)
