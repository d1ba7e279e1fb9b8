"""Which link a packet leaves by, and what a forwarder changes in it: the hop limit and the hop count, nothing else."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from itertools import islice

from skymemory.constellation.torus import Axis, RoutingMode, SatelliteId, Torus
from skymemory.protocol.link_state import LinkState
from skymemory.protocol.segments import SegmentBatch
from skymemory.protocol.space_packet import COMMAND_BYTES, TELEMETRY_BYTES
from skymemory.protocol.wire import GROUND_SHELL, HOP_LIMIT_OFFSET, SKY_BYTES, Address, Status

LinkEnd = Hashable
"""``SatelliteId`` of a neighbour, or the transport's token for a ground host."""

_KNOWN_GROUND_HOSTS = 4096
_COMMAND_BIT = 0x10
_GROUND_OFFSET = 12


def header_start(view: memoryview) -> int:
    """Where the SKY header begins, by the packet's first byte."""
    return COMMAND_BYTES if len(view) and view[0] & _COMMAND_BIT else TELEMETRY_BYTES


def same_journey(view: memoryview, segment_bytes: int) -> bool:
    """Whether all segments are whole and have one operation, status and destination, so that one look serves all."""
    if len(view) <= segment_bytes:
        return True
    start = header_start(view)
    if 0 < len(view) % segment_bytes < start + SKY_BYTES or segment_bytes < start + SKY_BYTES:
        return False
    kind, journey = view[0], bytes(view[start : start + 8])
    return all(
        view[at] == kind and view[at + start : at + start + 8] == journey
        for at in range(segment_bytes, len(view), segment_bytes)
    )


class Router:
    """Routing at one satellite: greedy, and round the links that are known to be down.

    A ground host is reached by the link its last packet came in on.
    """

    def __init__(self, here: SatelliteId, torus: Torus, mode: RoutingMode, links: LinkState | None = None) -> None:
        self._links = links or LinkState(torus)
        self._here = here
        self._torus = torus
        self._mode = mode
        self._grounds: OrderedDict[int, LinkEnd] = OrderedDict()

    def remember(self, ground: int, link: LinkEnd) -> None:
        self._grounds[ground] = link
        self._grounds.move_to_end(ground)
        if len(self._grounds) > _KNOWN_GROUND_HOSTS:
            self._grounds.popitem(last=False)

    def heard_last(self, most: int) -> list[int]:
        """The ground hosts whose packets came in last, ``most`` of them."""
        return list(islice(reversed(self._grounds), most))

    def exit_for(self, destination: Address, packet: bytes | bytearray | memoryview) -> LinkEnd | None:
        """The link on which our own telemetry or command leaves; None if nothing leads there."""
        there = SatelliteId(destination.plane, destination.slot)
        if there == self._here:
            return self._beam(destination, packet)
        if there not in self._torus:
            return None
        return self._onward(there)

    def forward(
        self, view: memoryview, segment_bytes: int, destination: Address, source: LinkEnd
    ) -> tuple[SegmentBatch, LinkEnd] | Status:
        """A copy of packets in transit with their hops counted, and their next link; or why they go no further."""
        there = SatelliteId(destination.plane, destination.slot)
        if there == self._here:
            beam = self._beam(destination, view)
            return Status.NO_ROUTE if beam is None else (SegmentBatch(bytearray(view), segment_bytes), beam)
        came: Axis | None = None
        if isinstance(source, SatelliteId):
            came = "slot" if source.plane == self._here.plane else "plane"
        onward = self._onward(there, came) if there in self._torus else None
        if onward is None:
            return Status.NO_ROUTE
        packets = bytearray(view)
        first_limit = header_start(view) + HOP_LIMIT_OFFSET
        for at in range(first_limit, len(packets), segment_bytes):
            if packets[at] == 0:
                return Status.HOP_LIMIT
            packets[at] -= 1
            packets[at + 1] = (packets[at + 1] + 1) & 0xFF
        return SegmentBatch(packets, segment_bytes), onward

    def _onward(self, there: SatelliteId, came: Axis | None = None) -> SatelliteId | None:
        """The neighbour on the way to another satellite; None where no way is left."""
        greedy = self._torus.next_hop(self._here, there, self._mode, came)
        return greedy if self._links.clear else self._links.onward(self._here, there, greedy)

    def _beam(self, destination: Address, packet: bytes | bytearray | memoryview) -> LinkEnd | None:
        if destination.shell != GROUND_SHELL:
            return None
        at = header_start(memoryview(packet)) + _GROUND_OFFSET
        return self._grounds.get(int.from_bytes(packet[at : at + 4], "big"))
