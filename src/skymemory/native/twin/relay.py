"""Packets in transit. A *journey*: equal kind, operation, status, destination, sender and ground host."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Final

from skymemory.native.twin.segments import COMMAND_BYTES, SKY_BYTES, TELEMETRY_BYTES, segments, verify_segments
from skymemory.native.twin.sockets import check_endpoint, send_batch

if TYPE_CHECKING:
    from typing_extensions import Buffer

Link = Any
"""Other end of a link: (plane, slot) of a satellite, or endpoint of a ground host."""
Transit = tuple[Mapping[int, Link], Mapping[int, Link], Mapping[Link, tuple[str, int]]]
"""Known routes: next hops by destination (plane · 4096 + slot) and incoming link (0: the ground, ``BY_SLOT_LINK``,
``BY_PLANE_LINK``); beams of ground hosts; endpoints of satellites (without an endpoint the caller hands packets over).
"""
Slot = tuple[int, int, int]
"""Run in the scratch buffer: offset, bytes, bytes of each packet."""
Way = tuple[tuple[str, int] | None, Link | None]
"""Endpoint and link by which a run came."""
Passed = tuple[Link, int, Link, int, list[Slot]]
"""Forwarded runs: incoming link, ground host, outgoing link, packets; runs still to be sent."""
BY_SLOT_LINK, BY_PLANE_LINK = 1 << 24, 2 << 24

_JOURNEY_BYTES: Final = 16
_HOP_LIMIT_AT: Final = 20
GROUND_SHELL: Final = 0xFF


def sky_start(data: memoryview) -> int:
    return COMMAND_BYTES if data[0] & 0x10 else TELEMETRY_BYTES


def _has_headers(packets: list[memoryview]) -> bool:
    return bool(packets) and all(len(packet) >= sky_start(packets[0]) + SKY_BYTES for packet in packets)


def same_journey(data: Buffer, segment_bytes: int) -> bool:
    """Return True if all segments are whole and of the same journey, or for a single packet."""
    packets = segments(data, segment_bytes)
    if len(packets) <= 1:
        return True
    if not _has_headers(packets):
        return False
    first, sky = packets[0], sky_start(packets[0])
    journey = slice(sky, sky + _JOURNEY_BYTES)
    return all(packet[0] == first[0] and packet[journey] == first[journey] for packet in packets)


def count_hops(data: Buffer, segment_bytes: int) -> bytearray | None:
    """Copy packets of the same journey, counting a hop in each; None if any is at its hop limit."""
    packets = segments(data, segment_bytes)
    if not _has_headers(packets):
        raise ValueError(f"{memoryview(data).nbytes} bytes in packets of {segment_bytes}: not all have whole headers")
    copy = bytearray(data)
    for at in range(sky_start(packets[0]) + _HOP_LIMIT_AT, len(copy), segment_bytes):
        if copy[at] == 0:
            return None
        copy[at] -= 1
        copy[at + 1] = (copy[at + 1] + 1) & 0xFF
    return copy


def next_hop(transit: Transit, there: int, came: int = 0) -> tuple[Link | None, tuple[str, int] | None]:
    routes, _, endpoints = transit
    link = routes.get(there & 0xFFFFFF | came)
    return link, endpoints.get(link) if link is not None else None


def socket_of(link: Link | None) -> tuple[str, int] | None:
    """Return the endpoint of a ground host's link; None if the link is no address."""
    if link is None:
        return None
    try:
        check_endpoint(str(link[0]), 0)
    except ValueError:
        return None
    return str(link[0]), link[1]


def pass_on(
    fd: int,
    run: tuple[memoryview, int],
    addresses: bytes,
    way: Way,
    transit: Transit,
    admits: Callable[[], bool] | None,
) -> tuple[tuple[Link, int, Link], int, bool] | None:
    """Forward a run, counting its hops in place; None, without effect, if only the state machine can.

    The run needs the same journey, a known route, and hops left; from the ground (``source`` None) valid commands that
    ``admits`` admits. Return its way, the packets sent, and True if the network refused it: then it is lost.
    """
    (data, segment_bytes), (endpoint, source) = run, way
    packets = segments(data, segment_bytes)
    if not _has_headers(packets) or not same_journey(data, segment_bytes):
        return None
    header = packets[0][sky_start(packets[0]) :]
    destination, own_address = int.from_bytes(header[4:8], "big"), int.from_bytes(addresses[:4], "big")
    ground = int.from_bytes(header[12:16], "big")
    if destination == own_address:
        return None
    packets_copy: bytearray | None = bytearray(data)
    if destination & 0xFFFFFF == own_address & 0xFFFFFF:  # a beam is no link between satellites: it counts no hop
        link = transit[1].get(ground) if destination >> 24 == GROUND_SHELL else None
        to = socket_of(link)
    else:
        arrival_link = (
            0 if source is None else BY_SLOT_LINK if source[0] == own_address >> 12 & 0xFFF else BY_PLANE_LINK
        )
        link, to = next_hop(transit, destination, arrival_link)
        packets_copy = count_hops(data, segment_bytes)
    if link is None or packets_copy is None:
        return None
    if source is None:
        if not packets[0][0] & 0x10 or any(verify_segments(data, segment_bytes)):
            return None
        if admits is not None and not (header[8:12] == addresses[4:8] and admits()):
            return None
    data[:] = packets_copy
    sent, refused = 0, False
    try:
        sent = send_batch(fd, *to, data, segment_bytes, None) if to is not None else 0
    except OSError:
        sent, refused = len(packets), True
    incoming = source if source is not None else endpoint
    assert incoming is not None
    return (incoming, ground, link), sent, refused
