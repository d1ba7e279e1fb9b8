"""Packets in transit: runs of one journey, their hops, and those that a satellite passes on without its machine.

A *journey* is what one route serves: packets of one kind, operation, status, destination, sender and ground host.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Final

from skymemory.native.twin.segments import COMMAND_BYTES, SKY_BYTES, TELEMETRY_BYTES, segments, verify_segments
from skymemory.native.twin.sockets import check_endpoint, send_batch

if TYPE_CHECKING:
    from typing_extensions import Buffer

Link = Any
"""The other end of a link: (plane, slot) of a satellite, or the endpoint of a ground host."""
Transit = tuple[Mapping[int, Link], Mapping[int, Link], Mapping[Link, tuple[str, int]]]
"""The routes that are known: next hops by destination (plane · 4096 + slot) and the link that packets came by (0: from
the ground, ``BY_SLOT_LINK``, ``BY_PLANE_LINK``); the beams of ground hosts; the endpoints of satellites. One without is
sent nothing: the caller hands over what goes there.
"""
Slot = tuple[int, int, int]
"""A run in the scratch buffer: offset, bytes, bytes of each packet (the last maybe shorter)."""
Passed = tuple[Link, int, Link, int, list[Slot]]
"""Of the runs of one way: the link that they came by, their ground host, the link they leave by, their packets; what is
still to be sent.
"""
BY_SLOT_LINK, BY_PLANE_LINK = 1 << 24, 2 << 24

_JOURNEY_BYTES: Final = 16
_HOP_LIMIT_AT: Final = 20
GROUND_SHELL: Final = 0xFF


def sky_start(data: memoryview) -> int:
    return COMMAND_BYTES if data[0] & 0x10 else TELEMETRY_BYTES


def _has_headers(packets: list[memoryview]) -> bool:
    """Whether there are packets, and all have whole SKY headers."""
    return bool(packets) and all(len(packet) >= sky_start(packets[0]) + SKY_BYTES for packet in packets)


def same_journey(data: Buffer, segment_bytes: int) -> bool:
    """Whether all segments are whole and of one journey. True of one packet alone, whatever it is."""
    packets = segments(data, segment_bytes)
    if len(packets) <= 1:
        return True
    if not _has_headers(packets):
        return False
    first, sky = packets[0], sky_start(packets[0])
    journey = slice(sky, sky + _JOURNEY_BYTES)
    return all(packet[0] == first[0] and packet[journey] == first[journey] for packet in packets)


def count_hops(data: Buffer, segment_bytes: int) -> bytearray | None:
    """A copy of packets of one journey with one hop more counted in each; None if any may cross no further link."""
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
    """The link towards a satellite, and where it leads; None where no route is known."""
    routes, _, endpoints = transit
    link = routes.get(there & 0xFFFFFF | came)
    return link, endpoints.get(link) if link is not None else None


def socket_of(link: Link | None) -> tuple[str, int] | None:
    """Where a ground host's socket is; None where its name is not that of one."""
    if link is None:
        return None
    try:
        check_endpoint(str(link[0]), 0)
    except ValueError:
        return None
    return str(link[0]), link[1]


def pass_on(
    fd: int,
    data: memoryview,
    segment_bytes: int,
    addresses: bytes,
    endpoint: tuple[str, int] | None,
    source: Link | None,
    transit: Transit,
    admits: Callable[[], bool] | None,
) -> tuple[tuple[Link, int, Link], int, bool] | None:
    """Send a run on, its hops counted in place, if it needs no decision of the machine; None, without effect, if it
    does.

    It has one journey, to another satellite or to a ground host of ours, by a route that is known; no packet is at its
    hop limit. From the ground (``source`` None) it is commands, all sound, which ``admits`` (of a satellite that
    requires MACs) admits. Returns its way, the packets sent, and whether the network refused it: then it is lost.
    """
    packets = segments(data, segment_bytes)
    if not _has_headers(packets) or not same_journey(data, segment_bytes):
        return None
    header = packets[0][sky_start(packets[0]) :]
    there, here = int.from_bytes(header[4:8], "big"), int.from_bytes(addresses[:4], "big")
    ground = int.from_bytes(header[12:16], "big")
    if there == here:
        return None
    counted: bytearray | None = bytearray(data)
    if there & 0xFFFFFF == here & 0xFFFFFF:  # a beam is no link between satellites: no hop
        link = transit[1].get(ground) if there >> 24 == GROUND_SHELL else None
        to = socket_of(link)
    else:
        came = 0 if source is None else BY_SLOT_LINK if source[0] == here >> 12 & 0xFFF else BY_PLANE_LINK
        link, to = next_hop(transit, there, came)
        counted = count_hops(data, segment_bytes)
    if link is None or counted is None:
        return None
    if source is None:
        if not packets[0][0] & 0x10 or any(verify_segments(data, segment_bytes)):
            return None
        if admits is not None and not (header[8:12] == addresses[4:8] and admits()):
            return None
    data[:] = counted
    sent, refused = 0, False
    try:
        sent = send_batch(fd, *to, data, segment_bytes, None) if to is not None else 0
    except OSError:
        sent, refused = len(packets), True
    came_by = source if source is not None else endpoint
    assert came_by is not None
    return (came_by, ground, link), sent, refused
