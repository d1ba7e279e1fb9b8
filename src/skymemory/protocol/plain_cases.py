"""The two cases that nearly every packet of a satellite is, taken without a look at each part of it.

A GET by this satellite's own beam of chunks that all are here, and a run of sound SETs or MIGRATEs of one request.
Whatever is not exactly that is left alone, for the machine to look at in its own way.
"""

from __future__ import annotations

from skymemory import native
from skymemory.constellation.torus import SatelliteId
from skymemory.protocol.chunk_service import ChunkService
from skymemory.protocol.departures import Departures
from skymemory.protocol.forwarding import LinkEnd, Router, header_start
from skymemory.protocol.space_packet import COMMAND_BYTES
from skymemory.protocol.wire import COMMAND_PREFIX_BYTES, GROUND_SHELL, Address, Op

_CARRIERS = (Op.SET, Op.MIGRATE)
_OP_AT = COMMAND_BYTES + 1
_DESTINATION = slice(COMMAND_BYTES + 4, COMMAND_BYTES + 8)
_ADDRESSES = slice(COMMAND_BYTES + 4, COMMAND_BYTES + 12)
_GROUND = slice(COMMAND_BYTES + 12, COMMAND_BYTES + 16)


class PlainCases:
    """Both say whether they took the packets; if not, nothing has been done."""

    def __init__(self, address: Address, chunks: ChunkService, departures: Departures, router: Router) -> None:
        self._chunks = chunks
        self._departures = departures
        self._router = router
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

    def store(self, view: memoryview, segment_bytes: int, source: LinkEnd, now_s: float) -> bool:
        """Chunks of one value and request, all sound."""
        if (
            len(view) < COMMAND_PREFIX_BYTES
            or header_start(view) != COMMAND_BYTES
            or view[_OP_AT] not in _CARRIERS
            or view[_DESTINATION] != self._here
        ):
            return False
        opened = native.open_run(view, segment_bytes)
        if opened is None:
            return False
        if not isinstance(source, SatelliteId):
            self._router.remember(int.from_bytes(view[_GROUND], "big"), source)
        self._chunks.set_run(view, COMMAND_BYTES, opened, now_s)
        return True
