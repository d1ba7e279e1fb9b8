"""What a satellite does with requests for its chunks: SET, MIGRATE, GET, HAS, EVICT, LIST."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field

from skymemory.errors import InvalidInput, MalformedPacket
from skymemory.metrics import Counters
from skymemory.protocol import messages
from skymemory.protocol.chunk_store import ChunkName, ChunkStore
from skymemory.protocol.departures import Departures
from skymemory.protocol.messages import Packet, Selection
from skymemory.protocol.wire import CHUNK_REF_BYTES, SKY_BYTES, ChunkRef, Op, SkyHeader, Status

OnStored = Callable[[ChunkName, bytes, Op], None]
"""Told of every chunk stored: its name, its packed reference and the operation that brought it."""


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
            key, index = ref[:32], int.from_bytes(ref[32:36], "big") - 1
            run = runs.get(request_id)
            try:
                self._check_place(ref)
                if run is None or run.key != key:
                    ChunkRef.unpack(ref)
                    if run is not None:
                        self._acknowledge(run, now_s)
                    run = runs[request_id] = _Run(SkyHeader.unpack(segment, start), key)
            except (MalformedPacket, InvalidInput):
                self._counters.add("packets_malformed")
                continue
            name = (key, index)
            op = run.header.op
            outcome = self._store.put(name, ref, bytes(segment[payload_at:]))
            (run.taken if outcome.stored else run.refused).append(index)
            self._count(op, outcome.stored, outcome.replaced, len(outcome.evicted))
            if outcome.stored:
                self._on_stored(name, ref, op)
        for run in runs.values():
            self._acknowledge(run, now_s)

    def _count(self, op: Op, stored: bool, replaced: bool, evicted: int) -> None:
        if not stored:
            self._counters.add("chunks_refused")
            return
        self._counters.add("chunks_migrated_in" if op is Op.MIGRATE else "chunks_set")
        if replaced:
            self._counters.add("chunks_replaced")
        if evicted:
            self._counters.add("chunks_evicted", evicted)

    def _acknowledge(self, run: _Run, now_s: float) -> None:
        for indices, status in ((run.taken, Status.OK), (run.refused, Status.FULL)):
            if indices:
                ordered = sorted(set(indices))
                steps = [b - a for a, b in itertools.pairwise(ordered)]
                stride = steps[0] if steps and len(set(steps)) == 1 else 1
                body = Selection.of(run.key, ordered, stride).pack()
                self._departures.reply(run.header, Op.ACK, body, now_s, status)

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
