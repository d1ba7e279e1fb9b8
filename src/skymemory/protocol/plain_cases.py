"""The two cases that nearly every packet of a satellite is, taken without a look at each part of it.

A GET by this satellite's own beam of chunks that all are here, and a run of sound SETs or MIGRATEs of one request.
Whatever is not exactly that is left alone, for the machine to look at in its own way.
"""

from __future__ import annotations

from collections.abc import MutableMapping, Sequence, Set

from skymemory import native
from skymemory.constellation.torus import SatelliteId
from skymemory.protocol.chunk_service import ChunkService
from skymemory.protocol.departures import Departures
from skymemory.protocol.forwarding import LinkEnd, Router, header_start
from skymemory.protocol.gate import SatelliteGate
from skymemory.protocol.share import Share
from skymemory.protocol.space_packet import COMMAND_BYTES
from skymemory.protocol.wire import COMMAND_PREFIX_BYTES, GROUND_SHELL, Address, Op

PlainRequests = tuple[bytes, MutableMapping[bytes, Share], Set[bytes], int, native.AnswerTerms, native.Guard | None]
"""What ``native.serve`` is told of a satellite: the addresses its requests bear, its chunks, the placement tags whose
chunks it may store, the bytes it has room for, the terms of its answers, and where it asks for MACs who checks them.
"""

_CARRIERS = (Op.SET, Op.MIGRATE)
_OP_AT = COMMAND_BYTES + 1
_DESTINATION = slice(COMMAND_BYTES + 4, COMMAND_BYTES + 8)
_ADDRESSES = slice(COMMAND_BYTES + 4, COMMAND_BYTES + 12)
_GROUND = slice(COMMAND_BYTES + 12, COMMAND_BYTES + 16)


class PlainCases:
    """Each says whether it took the packets; if not, nothing has been done."""

    def __init__(
        self, address: Address, chunks: ChunkService, departures: Departures, router: Router,
        gate: SatelliteGate | None = None,
    ) -> None:  # fmt: skip
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
