"""Socket that receives and sends whole batches.

A block of 480 datagrams needs larger buffers than the default: 4 MiB are requested, and a smaller grant is reported.
Network errors are only counted.
"""

from __future__ import annotations

import fcntl
import ipaddress
import socket
import struct
import termios
import threading
from collections.abc import Iterable, Mapping

import numpy as np

from skymemory import native
from skymemory.constellation.torus import SatelliteId
from skymemory.native.twin.sockets import SOL_UDP, UDP_GRO
from skymemory.protocol.wire import Buffer, SegmentBatch, Slices
from skymemory.units import format_size

Endpoint = tuple[str, int]
Run = tuple[memoryview, int, Endpoint]
"""Datagrams of a sender; the bytes of each (the last maybe shorter); the sender."""

DEFAULT_BUFFER_BYTES = 4 * 2**20
DEFAULT_SLOTS = 16

_SO_SNDBUFFORCE, _SO_RCVBUFFORCE, _SO_MEMINFO = 32, 33, 55
_MEMINFO = struct.Struct("=9I")
_BOOKKEEPING = 2

PLACE = struct.Struct(">8sdd")
"""Announcement of a client's place: mark, degrees north and east."""
PLACE_MARK = b"SKYPLACE"

_thread = threading.local()


def _scratch(slots: int) -> memoryview:
    """Return this thread's receive buffer, shared by its sockets."""
    view: memoryview | None = getattr(_thread, "view", None)
    if view is None or len(view) < slots * native.SLOT_BYTES:
        view = np.empty(slots * native.SLOT_BYTES, dtype=np.uint8).data
        _thread.view = view
    return view


def udp_socket(ip: str) -> socket.socket:
    """Return a socket for ``ip``. An IPv6 socket leaves IPv4's ports free.

    Raises:
        OSError: this computer does not have the family.
    """
    if ":" not in ip:
        return socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    sock = socket.socket(socket.AF_INET6, socket.SOCK_DGRAM)
    sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
    return sock


class BatchSocket:
    """Non-blocking socket bound to ``ip`` and ``port`` (0: any). Buffer sizes are the kernel's. ``offload``: runs can
    arrive joined.
    """

    def __init__(
        self,
        ip: str = "127.0.0.1",
        port: int = 0,
        *,
        buffer_bytes: int = DEFAULT_BUFFER_BYTES,
        slots: int = DEFAULT_SLOTS,
    ) -> None:
        self.icmp_errors = 0
        self.send_errors = 0
        self._slots = slots
        self._socket = udp_socket(ip)
        try:
            self._socket.setblocking(False)
            self.receive_buffer_bytes = self._ask(socket.SO_RCVBUF, _SO_RCVBUFFORCE, buffer_bytes)
            self.send_buffer_bytes = self._ask(socket.SO_SNDBUF, _SO_SNDBUFFORCE, buffer_bytes)
            self.offload = self._set(SOL_UDP, UDP_GRO, 1)
            self._socket.bind((ip, port))
        except (OSError, OverflowError):
            self._socket.close()
            raise
        self.address: Endpoint = self._socket.getsockname()[:2]
        self.shortfall = "; ".join(
            f"{name} buffer of {format_size(granted // _BOOKKEEPING)} where {format_size(buffer_bytes)} were "
            f"requested: raise net.core.{limit}"
            for name, granted, limit in (
                ("receive", self.receive_buffer_bytes, "rmem_max"),
                ("send", self.send_buffer_bytes, "wmem_max"),
            )
            if granted < _BOOKKEEPING * buffer_bytes
        )

    def _set(self, level: int, option: int, value: int) -> bool:
        try:
            self._socket.setsockopt(level, option, value)
        except OSError:
            return False
        return True

    def _ask(self, option: int, forced: int, wanted_bytes: int) -> int:
        self._set(socket.SOL_SOCKET, option, wanted_bytes)
        if self._socket.getsockopt(socket.SOL_SOCKET, option) < _BOOKKEEPING * wanted_bytes:
            self._set(socket.SOL_SOCKET, forced, wanted_bytes)
        return self._socket.getsockopt(socket.SOL_SOCKET, option)

    def fileno(self) -> int:
        return self._socket.fileno()

    def receive(self) -> list[Run]:
        """Return arrived runs, valid until this thread next calls ``receive`` of any socket."""
        view = _scratch(self._slots)
        try:
            arrivals = native.recv_batch(self._socket.fileno(), view, self._slots)
        except OSError:
            if self._socket.fileno() < 0:
                raise
            self.icmp_errors += 1
            return []
        return [(view[at : at + size], segment, (host, port)) for at, size, segment, host, port in arrivals]

    def has_more(self) -> bool:
        waiting = fcntl.ioctl(self.fileno(), termios.FIONREAD, bytes(4))
        return any(waiting)

    def receive_awaited(
        self, awaited: dict[int, native.Landing], calls: int, patience_us: int
    ) -> tuple[list[native.Tally], list[native.Run]]:
        """Receive; place awaited answers. Return tallies, and other runs, valid until the next call."""
        try:
            return native.recv_runs(self.fileno(), _scratch(self._slots), self._slots, calls, patience_us, awaited)
        except OSError:
            if self._socket.fileno() < 0:
                raise
            self.icmp_errors += 1
            return [], []

    def serve(
        self, neighbours: Mapping[Endpoint, native.Link], requests: native.PlainRequests, transit: native.Transit | None
    ) -> tuple[list[Run], list[native.Served], list[native.Passed]]:
        """Receive, and serve plain requests and packets in transit: see ``native.serve``."""
        view = _scratch(self._slots)
        try:
            arrivals, served, errors, forwarded = native.serve(
                self._socket.fileno(), view, self._slots, neighbours, requests, transit
            )
        except OSError:
            if self._socket.fileno() < 0:
                raise
            self.icmp_errors += 1
            return [], [], []
        self.send_errors += errors
        runs = [(view[at : at + size], segment, (host, port)) for at, size, segment, host, port in arrivals]
        return runs, served, forwarded

    def serve_runs(
        self,
        runs: list[native.Slot],
        source: SatelliteId,
        requests: native.PlainRequests,
        transit: native.Transit | None,
    ) -> tuple[list[native.Slot], list[native.Served], list[native.Passed]]:
        """Serve runs from another socket of this thread."""
        view = _scratch(self._slots)
        unserved, served, errors, forwarded = native.serve_runs(
            self._socket.fileno(), view, runs, source, requests, transit
        )
        self.send_errors += errors
        return unserved, served, forwarded

    @staticmethod
    def received(runs: Iterable[native.Slot]) -> list[native.Run]:
        """Return these runs, valid until this thread next receives."""
        view = _scratch(0)
        return [(view[at : at + size], segment) for at, size, segment in runs]

    def send(self, batch: SegmentBatch, endpoint: Endpoint) -> SegmentBatch | None:
        """Send what the kernel takes. Return the rest, to send when writable. What the network refuses is counted and
        lost.
        """
        host, port = endpoint
        headers, width, payloads = batch.headers, batch.header_bytes, batch.payloads
        try:
            if isinstance(payloads, Slices):
                slices = payloads.value, payloads.chunk_bytes, payloads.indices.start, payloads.indices.step
                sent = native.send_slices(self.fileno(), host, port, headers, width, slices)
            else:
                sent = native.send_batch(self.fileno(), host, port, headers, width, payloads)
        except OSError:
            if self._socket.fileno() < 0:
                raise
            self.send_errors += 1
            return None
        if sent * width >= len(headers):
            return None
        return SegmentBatch(headers[sent * width :], width, payloads[sent:] if payloads is not None else None)

    def send_each(self, packets: list[tuple[Buffer, str, int]]) -> int:
        """Send each packet to its endpoint. Return how many were taken or refused."""
        first = 0
        while first < len(packets):
            try:
                sent = native.send_each(self.fileno(), packets, first)
            except OSError:
                if self._socket.fileno() < 0:
                    raise
                self.send_errors += 1
                sent = 1
            if not sent:
                break
            first += sent
        return first

    def dropped(self) -> int:
        figures = self._socket.getsockopt(socket.SOL_SOCKET, _SO_MEMINFO, _MEMINFO.size)
        return int(_MEMINFO.unpack(figures)[8]) if len(figures) == _MEMINFO.size else 0

    def close(self) -> None:
        self._socket.close()

    def __enter__(self) -> BatchSocket:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


ANY, ANY_IPV6 = "0.0.0.0", "::"


def source_towards(ip: str) -> str | None:
    """Return the local address on the route to ``ip``, if any. Nothing is sent."""
    try:
        with udp_socket(ip) as sock:
            sock.connect((ip, 9))  # for a datagram socket, this only chooses the route
            source = str(sock.getsockname()[0])
    except OSError:
        return None
    address = ipaddress.ip_address(source)
    # A link-local address is incomplete without its link.
    return None if address.version == 6 and address.is_link_local else source


def source_address(ips: Iterable[str]) -> str | None:
    """Return the narrowest address by which all ``ips`` can reach a client; None without a route."""
    sources = {source for ip in ips if (source := source_towards(ip)) is not None}
    outward = sorted(source for source in sources if not ipaddress.ip_address(source).is_loopback)
    if len(outward) > 1:
        return ANY_IPV6 if ":" in outward[0] else ANY
    return outward[0] if outward else next(iter(sorted(sources)), None)


_IP_MTU, _IPV6_MTU = 14, 24
_IP_UDP_BYTES, _IPV6_UDP_BYTES = 28, 48


def largest_whole_bytes(ip: str) -> int | None:
    """Return the largest datagram unfragmented towards ``ip``, if known."""
    try:
        with udp_socket(ip) as sock:
            sock.connect((ip, 9))
            if sock.family == socket.AF_INET6:
                return sock.getsockopt(socket.IPPROTO_IPV6, _IPV6_MTU) - _IPV6_UDP_BYTES
            return sock.getsockopt(socket.IPPROTO_IP, _IP_MTU) - _IP_UDP_BYTES
    except OSError:
        return None
