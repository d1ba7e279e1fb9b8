"""Floods of HTTP/2 against a picker, and how long another client's health check takes meanwhile.

Each flood is what a client of ill will sends on one connection, again on the next one when it is cut off, for as long
as requested; all on this machine.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import socket
import statistics
import struct
import time
from collections.abc import Callable
from dataclasses import dataclass

import psutil
from envoy.service.ext_proc.v3.external_processor_pb2 import HttpBody, ProcessingRequest
from grpc_health.v1 import health_pb2
from tests.router.envoy.exchanges import request_headers

from skymemory.router.envoy.grpc import http2 as h
from skymemory.router.envoy.messages import SERVICE

BEGIN = h.PREFACE + b"\0\0\0\4\0\0\0\0\0"


def frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    return struct.pack(">HBBBL", len(payload) >> 8, len(payload) & 255, kind, flags, stream) + payload


def block(path: str = f"/{SERVICE}/Process") -> bytes:
    pipe = [(b":method", b"POST"), (b":scheme", b"http"), (b":path", path.encode()), (b"te", b"trailers")]
    return h.literals([*pipe, (b"content-type", b"application/grpc")])


def message(data: bytes) -> bytes:
    return b"\0" + len(data).to_bytes(4, "big") + data


def streams(count: int, one: Callable[[int], bytes]) -> bytes:
    return b"".join(one(2 * number + 1) for number in range(count))


def rapid_reset() -> bytes:
    call = block()
    return streams(60_000, lambda s: frame(h.HEADERS, h.END_HEADERS, s, call) + frame(h.RST_STREAM, 0, s, bytes(4)))


def pings() -> bytes:
    return frame(h.PING, 0, 0, bytes(8)) * 200_000


def settings() -> bytes:
    return streams(200_000, lambda s: frame(h.SETTINGS, 0, 0, h.SETTING.pack(h.SET_INITIAL_WINDOW, 65_000 + s % 3)))


def empty_data() -> bytes:
    return frame(h.HEADERS, h.END_HEADERS, 1, block()) + frame(h.DATA, 0, 1) * 300_000


def windows_and_priorities() -> bytes:
    pair = frame(h.WINDOW_UPDATE, 0, 0, h.WORD.pack(1)) + frame(h.PRIORITY, 0, 3, bytes(5))
    return pair * 100_000


def continuations() -> bytes:
    """Headers of 1 KB in sixteen frames each, which may be, and then such as do not end."""
    call = block()
    padded = call + h.literals([(b"x-much", bytes([97]) * 1024)])
    cut = [padded[at : at + 90] for at in range(0, len(padded), 90)]

    def one(s: int) -> bytes:
        *first, last = (frame(h.CONTINUATION, 0, s, piece) for piece in cut[1:])
        end = frame(h.CONTINUATION, h.END_HEADERS, s, last[9:])
        return frame(h.HEADERS, 0, s, cut[0]) + b"".join(first) + end + frame(h.RST_STREAM, 0, s, bytes(4))

    return streams(5_000, one) + frame(h.HEADERS, 0, 10_001, call) + frame(h.CONTINUATION, 0, 10_001, b"x") * 200_000


def hpack() -> bytes:
    """Blocks of 400 fields that are read each, then one that swells."""
    call = block()

    def one(s: int) -> bytes:
        many = h.literals([(b"a%d" % (s % 1000), b"b%d" % number) for number in range(400)])
        return frame(h.HEADERS, h.END_HEADERS, s, call + many) + frame(h.RST_STREAM, 0, s, bytes(4))

    sizes = frame(h.HEADERS, h.END_HEADERS, 3_001, b"\x20" * 16_000)
    return streams(1_500, one) + sizes


def large_bodies() -> bytes:
    """As many unfinished bodies as the windows take."""
    piece = ProcessingRequest(request_body=HttpBody(body=bytes(62_000), end_of_stream=False)).SerializeToString()
    said = message(request_headers().SerializeToString()) + message(piece) * 16
    sent = [said[at : at + h.MAX_FRAME_BYTES] for at in range(0, len(said), h.MAX_FRAME_BYTES)]
    call = block()

    def one(s: int) -> bytes:
        return frame(h.HEADERS, h.END_HEADERS, s, call) + b"".join(frame(h.DATA, 0, s, each) for each in sent)

    return streams(16, one)


def whole_bodies() -> bytes:
    """Bodies nearly as long as may be, which end: they are read, picked for and said again."""
    body = b'{"model": "m", "prompt": "' + b"abc de " * (15 << 17) + b'"}'
    said = message(request_headers().SerializeToString())
    for at in range(0, len(body), 62_000):
        part = HttpBody(body=body[at : at + 62_000], end_of_stream=at + 62_000 >= len(body))
        said += message(ProcessingRequest(request_body=part).SerializeToString())
    call, sent = block(), [said[at : at + h.MAX_FRAME_BYTES] for at in range(0, len(said), h.MAX_FRAME_BYTES)]

    def one(s: int) -> bytes:
        return frame(h.HEADERS, h.END_HEADERS, s, call) + b"".join(frame(h.DATA, 0, s, each) for each in sent)

    return streams(4, one)


FLOODS: dict[str, Callable[[], bytes]] = {
    "rapid reset": rapid_reset,
    "PING": pings,
    "SETTINGS": settings,
    "empty DATA": empty_data,
    "WINDOW_UPDATE, PRIORITY": windows_and_priorities,
    "CONTINUATION": continuations,
    "hpack": hpack,
    "large bodies": large_bodies,
    "whole bodies": whole_bodies,
}
MOST_CONNECTIONS = 64
"""That a flood keeps open at once."""


def flood(name: str, port: int, for_s: float, pipe: multiprocessing.connection.Connection) -> None:
    """In a process of its own. Reports how many bytes it sent, on how many connections."""
    what = BEGIN + FLOODS[name]()
    pipe.send("ready")
    end_s, sent, connections = time.monotonic() + for_s, 0, 0
    kept: list[socket.socket] = []
    while time.monotonic() < end_s:
        connections += 1
        with contextlib.suppress(OSError):
            peer = socket.create_connection(("127.0.0.1", port), timeout=1)
            kept.append(peer)
            peer.setblocking(False)
            at = 0
            view = memoryview(what)
            while at < len(what) and time.monotonic() < end_s:
                try:
                    at += (went := peer.send(view[at : at + (1 << 18)]))
                    sent += went
                except BlockingIOError:
                    time.sleep(0.001)
                with contextlib.suppress(BlockingIOError):
                    while len(peer.recv(1 << 16)) == 1 << 16:
                        pass
        if len(kept) > MOST_CONNECTIONS:
            kept.pop(0).close()
    pipe.send((sent, connections))
    pipe.recv()


class Prober:
    """Asks after the picker's health on one connection of its own."""

    def __init__(self, port: int) -> None:
        self._socket = socket.create_connection(("127.0.0.1", port), timeout=30)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket.sendall(BEGIN)
        self._block = block("/grpc.health.v1.Health/Check")
        self._ask = message(health_pb2.HealthCheckRequest(service="readiness").SerializeToString())
        self._stream = 1

    def ask(self) -> float:
        """Seconds until it said that it serves."""
        began, got = time.perf_counter(), b""
        self._socket.sendall(
            frame(h.HEADERS, h.END_HEADERS, self._stream, self._block)
            + frame(h.DATA, h.END_STREAM, self._stream, self._ask)
        )
        self._stream += 2
        while b"grpc-status\x010" not in got:
            more = self._socket.recv(65536)
            assert more, f"the health check's connection was closed after {got!r}"
            got += more
        return time.perf_counter() - began


@dataclass(frozen=True)
class Flooded:
    flood: str
    checks: int
    p50_ms: float
    p99_ms: float
    most_ms: float
    more_mib: float
    """Of memory, at its most, than before."""
    sent_mib: float
    connections: int


def flooded(name: str, port: int, process: psutil.Process, for_s: float) -> Flooded:
    """What a health check every 5 ms sees beside the flood ``name``."""
    here, there = multiprocessing.Pipe()
    prober = Prober(port)
    for _ in range(50):
        prober.ask()
    worker = multiprocessing.Process(target=flood, args=(name, port, for_s, there), daemon=True)
    worker.start()
    try:
        assert here.recv() == "ready"
        before, most, took = process.memory_info().rss, 0, []
        while not here.poll():
            took.append(prober.ask())
            most = max(most, process.memory_info().rss)
            time.sleep(0.005)
        sent, connections = here.recv()
        here.send("end")
    finally:
        worker.join(10)
        worker.kill()
    took.sort()
    return Flooded(
        name,
        len(took),
        statistics.median(took) * 1e3,
        took[int(len(took) * 0.99)] * 1e3,
        took[-1] * 1e3,
        (most - before) / (1 << 20),
        sent / (1 << 20),
        connections,
    )
