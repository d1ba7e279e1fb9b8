"""Envoy's port, hammered: frames of sound calls, damaged, cut and shuffled, at one connection of the picker's gRPC."""

from __future__ import annotations

import random
from typing import Any

from grpc_health.v1 import health_pb2
from tests.fuzz.mutations import mutate
from tests.router.envoy.exchanges import (
    GET,
    a_completion,
    a_service,
    request_body,
    request_headers,
    response_body,
    response_headers,
)

from skymemory.router.envoy.ext_proc_server import SERVING, HealthBook, _ExtProcStream
from skymemory.router.envoy.grpc import http2 as h
from skymemory.router.envoy.grpc.grpc_server import GrpcServer
from skymemory.router.envoy.messages import SERVICE

_LIFE = 40
_MOST_BYTES = 64 << 10
_MESSAGES = [
    each.SerializeToString()
    for each in (
        request_headers(),
        request_headers(GET, end=True),
        request_body(a_completion()),
        request_body(b"{", end=False),
        response_headers(),
        response_body(b'{"usage": {"prompt_tokens": 3}}'),
        response_headers(503, end=True),
        health_pb2.HealthCheckRequest(service="readiness"),
    )
]


def _headers(path: str) -> bytes:
    headers = [(":method", "POST"), (":path", path), (":scheme", "http"), ("content-type", "application/grpc")]
    return h.literals((name.encode(), value.encode()) for name, value in headers)


_HEADERS = [_headers(f"/{SERVICE}/Process")] * 4 + [
    _headers(path) for path in ("/grpc.health.v1.Health/Check", "/grpc.health.v1.Health/Watch", "/nothing")
]
_OTHERS = [
    (h.SETTINGS, h.SETTING.pack(h.SET_INITIAL_WINDOW, 10)),
    (h.SETTINGS, h.SETTING.pack(h.SET_INITIAL_WINDOW, 1 << 20)),
    (h.WINDOW_UPDATE, h.WORD.pack(5000)),
    (h.RST_STREAM, h.WORD.pack(8)),
    (h.PING, bytes(8)),
    (h.GOAWAY, bytes(8)),
    (h.CONTINUATION, _HEADERS[0][5:]),
    (h.PRIORITY, bytes(5)),
]


class _Transport:
    def __init__(self) -> None:
        self.sent = 0
        self.closed = False

    def write(self, data: bytes) -> None:
        self.sent += len(data)

    def close(self) -> None:
        self.closed = True

    def is_closing(self) -> bool:
        return self.closed

    def pause_reading(self) -> None: ...

    def resume_reading(self) -> None: ...


class GrpcTarget:
    """No fault of ours, no stream that is counted and not there, nothing kept beyond its bounds."""

    def __init__(self) -> None:
        self._faults = 0
        self._service, book = a_service(), HealthBook()
        book.set("readiness", SERVING)
        methods = {**book.methods(), f"/{SERVICE}/Process": lambda answers: _ExtProcStream(self._service, answers)}
        self._door = GrpcServer(methods, _MOST_BYTES, 8, self._fault)
        self._connection = self._door.connect()
        self._transport: Any = _Transport()
        self._connection._transport = self._transport
        self._say(h.PREFACE + _frame(h.SETTINGS, 0, 0, b""))
        self._stream, self._left = -1, _LIFE

    def _fault(self) -> None:
        self._faults += 1

    def __call__(self, dice: random.Random) -> None:
        said = b"".join(self._frame(dice) for _ in range(dice.randint(1, 5)))
        if dice.random() < 0.06:
            said = mutate(dice, said, [said])
        while said:
            size = dice.randint(1, len(said)) if dice.random() < 0.3 else len(said)
            self._say(said[:size])
            said = said[size:]
        http2 = self._connection.http2
        assert not self._faults
        assert self._service.streams <= len(http2) + len(self._connection._calls) <= 2 * 8
        assert http2.waiting <= h.MAX_FRAME_BYTES + h.HEAD.size
        assert self._door.calls == len(self._connection._calls)
        self._left -= 1
        if not self._left or self._transport.closed:
            self._connection.connection_lost(None)
            assert self._service.streams == 0 and not any(server.in_flight for server in self._service.picker.fleet)
            self.__init__()  # type: ignore[misc]

    def _say(self, data: bytes) -> None:
        self._connection.http2.receive(data)
        while self._connection.work():
            pass

    def _frame(self, dice: random.Random) -> bytes:
        kind = dice.random()
        if kind < 0.25 or self._stream < 0:
            self._stream += 2
            block = dice.choice(_HEADERS)
            if dice.random() < 0.04:
                block = mutate(dice, block, _HEADERS)
            return _frame(h.HEADERS, h.END_HEADERS | dice.choice((0, 0, 0, h.END_STREAM)), self._stream, block)
        stream = max(1, self._stream - dice.choice((0, 0, 0, 0, 2, 4)))
        if kind < 0.9:
            message = dice.choice(_MESSAGES)
            if dice.random() < 0.2:
                message = mutate(dice, message, _MESSAGES)
            size = len(message) if dice.random() < 0.98 else dice.choice((0, _MOST_BYTES + 1, 0xFFFFFFFF))
            data = bytes((dice.random() < 0.02,)) + size.to_bytes(4, "big") + message
            return _frame(h.DATA, dice.choice((0, 0, 0, h.END_STREAM)), stream, data)
        other, payload = dice.choice(_OTHERS if dice.random() < 0.1 else _OTHERS[:-2])
        whole = other in (h.SETTINGS, h.PING, h.GOAWAY)
        return _frame(other, 0, 0 if whole else stream, payload)


def _frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    return h.HEAD.pack(len(payload) >> 8, len(payload) & 255, kind, flags, stream) + payload
