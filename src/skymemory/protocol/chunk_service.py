"""What a satellite does with requests for its chunks: SET, MIGRATE, GET, HAS, EVICT, LIST."""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass, field

from skymemory.errors import InvalidInput, MalformedPacket
from skymemory.metrics import Counters
from skymemory.protocol import messages
from skymemory.protocol.chunk_store import ChunkName, ChunkStore
from skymemory.protocol.departures import Departures
from skymemory.protocol.messages import Packet
from skymemory.protocol.selection import Selection
from skymemory.protocol.wire import CHUNK_REF_BYTES, SKY_BYTES, ChunkRef, Op, SkyHeader, Status

OnStored = Callable[[ChunkName, bytes, Op, float], None]
"""Told of every chunk stored: its name, its packed reference, the operation that brought it, and the time."""

_NUMBERS = struct.Struct(">IIIIIIHH")
_NUMBERS_AT = 32
"""Of the packed reference: everything between the key and the strategy."""


@dataclass(slots=True)
class _Run:
    """Chunks of one key that one request brought: acknowledged together."""

    header: SkyHeader
    key: bytes
    taken: list[int] = field(default_factory=list)
    refused: list[int] = field(default_factory=list)


class ChunkService:
    """Answers requests from a ``ChunkStore``.

    ``on_stored`` may raise ``InvalidInput`` to refuse a chunk whose placement is impossible; it is asked before.
    """

    def __init__(
        self, store: ChunkStore, departures: Departures, counters: Counters, on_stored: OnStored,
        check_place: Callable[[bytes], object],
    ) -> None:  # fmt: skip
        self._store = store
        self._departures = departures
        self._counters = counters
        self._on_stored = on_stored
        self._check_place = check_place

    def set(self, segments: list[memoryview], start: int, now_s: float) -> None:
        """SET and MIGRATE: store each chunk, answer once per run of chunks of one request.

        ``segments`` are whole packets whose checksums have been verified, ``start`` is where the SKY header begins.
        """
        runs: dict[int, _Run] = {}
        body_at = start + SKY_BYTES
        payload_at = body_at + CHUNK_REF_BYTES
        for segment in segments:
            ref = bytes(segment[body_at:payload_at])
            request_id = int.from_bytes(segment[start + 16 : start + 20], "big")
            run = runs.get(request_id)
            try:
                if run is None or run.key != ref[:_NUMBERS_AT]:
                    header = SkyHeader.unpack(segment, start)
                    index = ChunkRef.unpack(ref).index
                    if run is not None:
                        self._acknowledge(run, now_s)
                    run = runs[request_id] = _Run(header, ref[:_NUMBERS_AT])
                else:
                    index = _checked_index(ref)
                self._check_place(ref)
            except (MalformedPacket, InvalidInput):
                self._counters.add("packets_malformed")
                continue
            self._store_chunk(run, (run.key, index), ref, bytes(segment[payload_at:]), now_s)
        for run in runs.values():
            self._acknowledge(run, now_s)

    def _store_chunk(self, run: _Run, name: ChunkName, ref: bytes, payload: bytes, now_s: float) -> None:
        outcome = self._store.put(name, ref, payload)
        if outcome.evicted:
            self._counters.add("chunks_evicted", len(outcome.evicted))
        if not outcome.stored:
            self._counters.add("chunks_refused")
            run.refused.append(name[1])
            return
        run.taken.append(name[1])
        self._counters.add("chunks_migrated_in" if run.header.op is Op.MIGRATE else "chunks_set")
        if outcome.replaced:
            self._counters.add("chunks_replaced")
        self._on_stored(name, ref, run.header.op, now_s)

    def _acknowledge(self, run: _Run, now_s: float) -> None:
        for indices, status in ((run.taken, Status.OK), (run.refused, Status.FULL)):
            for selection in Selection.cover(run.key, indices):
                self._departures.reply(run.header, Op.ACK, selection.pack(), now_s, status)

    def get(self, packet: Packet, now_s: float) -> None:
        """What we hold of the selection as DATA, what we do not as one MISS."""
        selection = Selection.unpack(packet.body)
        refs, payloads, missing = [], [], []
        for index in selection.indices():
            chunk = self._store.get((selection.key, index))
            if chunk is None:
                missing.append(index)
            else:
                refs.append(chunk.ref)
                payloads.append(chunk.payload)
        if payloads:
            self._counters.add("chunks_served", len(payloads))
            self._departures.reply_chunks(packet.header, refs, payloads, now_s)
        if missing:
            self._counters.add("chunks_missed", len(missing))
            body = Selection.of(selection.key, missing, selection.stride).pack()
            self._departures.reply(packet.header, Op.MISS, body, now_s)

    def has(self, packet: Packet, now_s: float) -> None:
        found = [self._store.presence(key) for key in messages.unpack_keys(packet.body)]
        self._departures.reply(packet.header, Op.PRESENCE, messages.pack_presences(found), now_s)

    def evict(self, packet: Packet, now_s: float) -> None:
        freed = sum(self._store.remove_key(key) for key in messages.unpack_keys(packet.body))
        self._counters.add("chunks_deleted", freed)
        self._departures.reply(packet.header, Op.EVICTED, messages.pack_count(freed), now_s)

    def list(self, packet: Packet, now_s: float) -> None:
        after, limit = messages.unpack_list(packet.body)
        keys = self._store.keys_after(after, limit)
        entries = [(key, presence) for key in keys if (presence := self._store.presence(key)) is not None]
        self._departures.reply(packet.header, Op.LISTED, messages.pack_listed(entries), now_s)


def _checked_index(ref: bytes) -> int:
    """The 0-based index of a packed reference; what ``ChunkRef.unpack`` refuses is refused, without building one."""
    number, chunks, length, _, value_bytes, _, servers, server = _NUMBERS.unpack_from(ref, _NUMBERS_AT)
    if (
        not 1 <= number <= chunks <= max(1, value_bytes)
        or not servers
        or server != (number - 1) % servers + 1
        or length > value_bytes
    ):
        raise MalformedPacket("chunk reference out of range")
    return int(number) - 1
