"""RFC 9113 and RFC 7541 case by case, by the numbers of their sections: those of h2spec that a server can meet.

Each case is what a client says after its preface and settings; at the end it pings. What comes of it is one of: an
answer to the ping (`FINE`), RST_STREAM with one of some codes, GOAWAY with one of some codes. Where the RFC leaves a
choice, what is chosen here stands there.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hpack import Encoder
from tests.router.envoy.grpc.frames import REQUEST, Frame, frame, frames, setting, word

from skymemory.router.envoy.grpc import http2 as h
from skymemory.router.envoy.grpc.http2 import Http2

FINE = ("fine", ())
PING = frame(h.PING, 0, 0, b"lastping")


def stream_error(*codes: int) -> tuple[str, tuple[int, ...]]:
    return "stream error", codes


def connection_error(*codes: int) -> tuple[str, tuple[int, ...]]:
    return "connection error", codes


class Server:
    """Answers each request when it has ended, with five bytes."""

    def __init__(self) -> None:
        self.http2 = Http2(self, 10)
        self.requests = 0

    def opened(self, stream: int, headers: list[tuple[bytes, bytes]]) -> None: ...

    def on_data(self, stream: int, data: bytes) -> None:
        self.http2.consumed(stream, len(data))

    def on_stream_end(self, stream: int) -> None:
        self.requests += 1
        self.http2.headers(stream, h.literals([(b":status", b"200")]))
        self.http2.data(stream, b"hello")
        self.http2.finish(stream, None)

    def aborted(self, stream: int) -> None: ...

    def refused(self, reason: str) -> None: ...

    def hear(self, data: bytes) -> list[Frame]:
        self.http2.receive(data)
        while self.http2.handle(1, 0.0):
            pass
        return frames(self.http2.data_to_send())


def outcome(said: list[Frame], fault: h.Http2Fault | None) -> tuple[str, int | None]:
    for kind, _, _, payload in said:
        if kind == h.GOAWAY:
            assert fault is not None
            return "connection error", int.from_bytes(payload[4:8], "big")
        if kind == h.RST_STREAM and payload != word(h.NO_ERROR):
            return "stream error", int.from_bytes(payload, "big")
    assert (h.PING, h.ACK, 0, b"lastping") in said, "neither an error nor an answer"
    return "fine", None


END = h.END_HEADERS | h.END_STREAM
PUT = Encoder()
"""The first block of a connection, and literals: they mean the same on each."""


def block(*more: tuple[str, str], without: str = "", first: tuple[tuple[str, str], ...] = ()) -> bytes:
    fields = [each for each in REQUEST if each[0] != without]
    return h.literals((a.encode(), b.encode()) for a, b in (*first, *fields, *more))


def get(stream: int = 1, flags: int = END, said: bytes | None = None) -> bytes:
    return frame(h.HEADERS, flags, stream, block() if said is None else said)


def post(stream: int = 1, said: bytes | None = None) -> bytes:
    return get(stream, h.END_HEADERS, said)


def data(stream: int = 1, payload: bytes = b"test", flags: int = h.END_STREAM) -> bytes:
    return frame(h.DATA, flags, stream, payload)


def reset(stream: int = 1) -> bytes:
    return frame(h.RST_STREAM, 0, stream, word(h.CANCEL))


def window(stream: int, more: int) -> bytes:
    return frame(h.WINDOW_UPDATE, 0, stream, word(more))


def priority(stream: int = 1, on: int = 0, payload: bytes | None = None) -> bytes:
    return frame(h.PRIORITY, 0, stream, word(on) + b"\xff" if payload is None else payload)


def settings(name: int, value: int) -> bytes:
    return frame(h.SETTINGS, 0, 0, setting(name, value))


def some_headers(count: int, stream: int = 1) -> bytes:
    return frame(h.CONTINUATION, 0, stream, h.literals([(b"x-dummy%d" % count, b"dummy")]))


GOES_ON = get(1, h.END_STREAM)
LAST = frame(h.CONTINUATION, h.END_HEADERS, 1)
MORE = frame(h.CONTINUATION, 0, 1)
CLOSED = stream_error(h.STREAM_CLOSED)
PROTOCOL, MALFORMED = connection_error(h.PROTOCOL_ERROR), stream_error(h.PROTOCOL_ERROR)
SIZE, COMPRESSION = connection_error(h.FRAME_SIZE_ERROR), connection_error(h.COMPRESSION_ERROR)
FLOW = connection_error(h.FLOW_CONTROL_ERROR)
LARGEST = h.LARGEST_WINDOW

Case = tuple[tuple[str, tuple[int, ...]], bytes]
CASES: dict[str, Case] = {
    "generic 2: PRIORITY of an idle stream": (FINE, priority()),
    "generic 2: WINDOW_UPDATE when all is heard": (FINE, settings(4, 0) + get() + window(1, 1)),
    "generic 2: PRIORITY when all is heard": (FINE, settings(4, 0) + get() + priority()),
    "generic 2: RST_STREAM when all is heard": (FINE, settings(4, 0) + get() + reset()),
    "generic 2: PRIORITY of a stream that is over": (FINE, get() + priority()),
    "generic 3.1: DATA": (FINE, post() + data()),
    "generic 3.1: DATA in several frames": (FINE, post() + data(flags=0) + data()),
    "generic 3.1: DATA with padding": (FINE, post() + data(1, b"\x06test" + bytes(6), h.PADDED | h.END_STREAM)),
    "generic 3.2: HEADERS": (FINE, get()),
    "generic 3.2: HEADERS with padding": (FINE, get(1, END | h.PADDED, b"\x06" + block() + bytes(6))),
    "generic 3.2: HEADERS with a priority": (FINE, get(1, END | h.HAS_PRIORITY, word(0) + b"\xff" + block())),
    "generic 3.3: PRIORITY, exclusive, of a stream to come": (FINE, priority(1, 1 << 31 | 5) + get()),
    "generic 3.3: PRIORITY of what a client never opens": (FINE, priority(2)),
    "generic 3.4: RST_STREAM": (FINE, post() + reset()),
    "generic 3.5: SETTINGS": (FINE, settings(3, 100)),
    "generic 3.7: PING": (FINE, frame(h.PING, 0, 0, b"h2spec__")),
    "generic 3.8: GOAWAY": (FINE, frame(h.GOAWAY, 0, 0, bytes(8))),
    "generic 3.9: WINDOW_UPDATE of the connection": (FINE, window(0, 1)),
    "generic 3.9: WINDOW_UPDATE of a stream": (FINE, settings(4, 0) + get() + window(1, 1)),
    "generic 3.10: CONTINUATION": (FINE, GOES_ON + some_headers(1) + LAST),
    "generic 3.10: several CONTINUATION": (FINE, GOES_ON + some_headers(1) + some_headers(2) + LAST),
    "generic 4: POST with trailers": (FINE, post() + data(flags=0) + get(1, END, h.literals([(b"x-test", b"ok")]))),
    "3.4: settings come first": (PROTOCOL, b""),
    "4.1: a frame of an unknown kind": (FINE, frame(0xFF, 0, 0, bytes(8))),
    "4.1: flags that are not defined": (FINE, frame(h.PING, 0x16, 0, bytes(8))),
    "4.1: the reserved bit is passed over": (FINE, frame(h.PING, 0, 1 << 31, bytes(8))),
    "4.2: DATA as long as a frame may be": (FINE, post() + data(payload=bytes(1 << 14))),
    "4.2: DATA that is longer": (SIZE, post() + data(payload=bytes((1 << 14) + 1))),
    "4.2: HEADERS that are longer": (SIZE, get(1, END, bytes((1 << 14) + 1))),
    "4.3: a block that cannot be read": (COMPRESSION, get(1, END, b"\x40")),
    "4.3: PRIORITY while headers go on": (PROTOCOL, GOES_ON + priority() + LAST),
    "4.3: HEADERS of another stream while headers go on": (PROTOCOL, GOES_ON + get(3)),
    "4.3: an unknown kind while headers go on": (PROTOCOL, GOES_ON + frame(0xFF, 0, 1, bytes(4))),
    "5.1: idle, DATA": (PROTOCOL, data()),
    "5.1: idle, RST_STREAM": (PROTOCOL, reset()),
    "5.1: idle, WINDOW_UPDATE": (PROTOCOL, window(1, 100)),
    "5.1: idle, CONTINUATION": (PROTOCOL, frame(h.CONTINUATION, h.END_HEADERS, 1, block())),
    "5.1: half-closed, DATA": (CLOSED, settings(4, 0) + get() + data()),
    "5.1: half-closed, HEADERS": (CLOSED, settings(4, 0) + get() + get()),
    "5.1: half-closed, CONTINUATION": (PROTOCOL, settings(4, 0) + get() + LAST),
    "5.1: closed by RST_STREAM, DATA": (CLOSED, post() + reset() + data()),
    "5.1: closed by RST_STREAM, HEADERS": (CLOSED, post() + reset() + get()),
    "5.1: closed by RST_STREAM, CONTINUATION": (PROTOCOL, post() + reset() + LAST),
    "5.1: closed, DATA": (CLOSED, get() + data()),
    "5.1: closed, HEADERS": (connection_error(h.STREAM_CLOSED), get() + get()),
    "5.1: closed, CONTINUATION": (PROTOCOL, get() + LAST),
    "5.1: closed, WINDOW_UPDATE": (FINE, get() + window(1, 1)),
    "5.1: closed, RST_STREAM": (FINE, get() + reset()),
    "5.1.1: an even stream": (PROTOCOL, get(2)),
    "5.1.1: a stream before the one before it": (PROTOCOL, get(5) + get(3)),
    "5.1.2: more streams than are allowed": (
        stream_error(h.REFUSED_STREAM),
        settings(4, 0) + b"".join(get(2 * number + 1) for number in range(11)),
    ),
    "5.3.1: HEADERS that depend on themselves": (MALFORMED, get(1, END | h.HAS_PRIORITY, word(1) + b"\xff" + block())),
    "5.3.1: PRIORITY that depends on itself": (MALFORMED, priority(1, 1)),
    "5.4.1: a PING too long ends the connection": (SIZE, frame(h.PING, 0, 0, bytes(9)) + get()),
    "5.5: an unknown setting": (FINE, settings(0x4A4A, 1)),
    "5.5: an unknown kind within a stream": (FINE, post() + frame(0xFA, 0x7, 1, b"x") + data()),
    "6.1: DATA of stream 0": (PROTOCOL, data(0)),
    "6.1: DATA when all is heard": (CLOSED, settings(4, 0) + get() + data()),
    "6.1: more padding than DATA": (PROTOCOL, post() + data(flags=h.PADDED, payload=b"\x06test")),
    "6.2: HEADERS of stream 0": (PROTOCOL, get(0)),
    "6.2: more padding than HEADERS": (PROTOCOL, get(1, END | h.PADDED, b"\xff" + block())),
    "6.2: HEADERS too short for their priority": (SIZE, get(1, END | h.HAS_PRIORITY, b"\0\0")),
    "6.3: PRIORITY of stream 0": (PROTOCOL, priority(0)),
    "6.3: PRIORITY of another size": (stream_error(h.FRAME_SIZE_ERROR), post() + priority(1, payload=bytes(4))),
    "6.4: RST_STREAM of stream 0": (PROTOCOL, reset(0)),
    "6.4: RST_STREAM of an idle stream": (PROTOCOL, reset()),
    "6.4: RST_STREAM of another size": (SIZE, post() + frame(h.RST_STREAM, 0, 1, bytes(3))),
    "6.5: SETTINGS with ACK and more": (SIZE, frame(h.SETTINGS, h.ACK, 0, setting(3, 1))),
    "6.5: SETTINGS of a stream": (PROTOCOL, frame(h.SETTINGS, 0, 1, setting(3, 1))),
    "6.5: SETTINGS of another size": (SIZE, frame(h.SETTINGS, 0, 0, bytes(3))),
    "6.5.2: neither push nor no push": (PROTOCOL, settings(h.SET_PUSH, 2)),
    "6.5.2: a window above the largest": (FLOW, settings(h.SET_INITIAL_WINDOW, LARGEST + 1)),
    "6.5.2: frames below the least": (PROTOCOL, settings(h.SET_MAX_FRAME, (1 << 14) - 1)),
    "6.5.2: frames above the most": (PROTOCOL, settings(h.SET_MAX_FRAME, 1 << 24)),
    "6.5.3: the last of several values counts": (
        FINE,
        frame(h.SETTINGS, 0, 0, setting(4, 100) + setting(4, 1)) + get(),
    ),
    "6.6: PUSH_PROMISE of a client": (PROTOCOL, post() + frame(h.PUSH_PROMISE, h.END_HEADERS, 1, word(3) + block())),
    "6.7: PING with ACK": (FINE, frame(h.PING, h.ACK, 0, b"invalid_")),
    "6.7: PING of a stream": (PROTOCOL, frame(h.PING, 0, 1, bytes(8))),
    "6.7: PING of another size": (SIZE, frame(h.PING, 0, 0, bytes(6))),
    "6.8: GOAWAY of a stream": (PROTOCOL, frame(h.GOAWAY, 0, 1, bytes(8))),
    "6.9: WINDOW_UPDATE of 0": (PROTOCOL, window(0, 0)),
    "6.9: WINDOW_UPDATE of 0 of a stream": (MALFORMED, post() + window(1, 0)),
    "6.9: WINDOW_UPDATE of another size": (SIZE, frame(h.WINDOW_UPDATE, 0, 0, bytes(3))),
    "6.9.1: a window above the largest": (FLOW, window(0, LARGEST) + window(0, LARGEST)),
    "6.9.1: a stream's window above the largest": (
        stream_error(h.FLOW_CONTROL_ERROR),
        post() + window(1, LARGEST) + window(1, LARGEST),
    ),
    "6.9.2: a first window that makes a stream's too large": (
        FLOW,
        post() + window(1, LARGEST - h.FIRST_WINDOW) + settings(4, h.FIRST_WINDOW + 1),
    ),
    "6.10: CONTINUATION behind the end of headers": (PROTOCOL, post() + LAST),
    "6.10: CONTINUATION of stream 0": (PROTOCOL, GOES_ON + frame(h.CONTINUATION, h.END_HEADERS, 0)),
    "6.10: CONTINUATION behind another CONTINUATION's end": (PROTOCOL, GOES_ON + LAST + LAST),
    "6.10: CONTINUATION behind DATA": (PROTOCOL, post() + data() + LAST),
    "8.1: a second HEADERS that does not end": (MALFORMED, post() + post()),
    "8.2.1: a name in upper case": (MALFORMED, get(1, END, block(("X-TEST", "ok")))),
    "8.2.1: a name with a space": (MALFORMED, get(1, END, block(("x test", "ok")))),
    "8.2.1: a name without a letter": (MALFORMED, get(1, END, block(("", "ok")))),
    "8.2.1: a value with a line's end": (MALFORMED, get(1, END, block(("x-test", "a\nb")))),
    "8.2.1: a value that begins with a space": (MALFORMED, get(1, END, block(("x-test", " a")))),
    "8.2.2: a header of the connection": (MALFORMED, get(1, END, block(("connection", "keep-alive")))),
    "8.2.2: TE but for trailers": (MALFORMED, get(1, END, block(("te", "trailers, deflate;q=0.5")))),
    "8.2.2: TE for trailers": (FINE, get(1, END, block(("te", "trailers")))),
    "8.3: a pseudo-header that is unknown": (MALFORMED, get(1, END, block(first=((":test", "ok"),)))),
    "8.3: a pseudo-header of answers": (MALFORMED, get(1, END, block(first=((":status", "200"),)))),
    "8.3: a pseudo-header in trailers": (MALFORMED, post() + get(1, END, h.literals([(b":method", b"POST")]))),
    "8.3: a pseudo-header behind others": (MALFORMED, get(1, END, block((":authority", "x")))),
    "8.3.1: an empty path": (MALFORMED, get(1, END, block(without=":path", first=((":path", ""),)))),
    "8.3.1: no method": (MALFORMED, get(1, END, block(without=":method"))),
    "8.3.1: no scheme": (MALFORMED, get(1, END, block(without=":scheme"))),
    "8.3.1: no path": (MALFORMED, get(1, END, block(without=":path"))),
    "8.3.1: two methods": (MALFORMED, get(1, END, block(first=((":method", "POST"),)))),
    "8.3.1: two schemes": (MALFORMED, get(1, END, block(first=((":scheme", "http"),)))),
    "8.3.1: two paths": (MALFORMED, get(1, END, block(first=((":path", "/"),)))),
    "8.1.1: less than content-length": (MALFORMED, post(1, block(("content-length", "5"))) + data()),
    "8.1.1: more than content-length": (MALFORMED, post(1, block(("content-length", "3"))) + data(flags=0)),
    "8.1.1: content-length in several frames": (
        MALFORMED,
        post(1, block(("content-length", "9"))) + data(flags=0) + data(),
    ),
    "8.1.1: content-length and no body": (MALFORMED, get(1, END, block(("content-length", "1")))),
    "8.1.1: content-length and trailers": (
        MALFORMED,
        post(1, block(("content-length", "1"))) + get(1, END, h.literals([(b"a", b"b")])),
    ),
    "8.1.1: content-length that is right": (FINE, post(1, block(("content-length", "8"))) + data(flags=0) + data()),
    "8.1.1: two that differ": (MALFORMED, get(1, END, block(("content-length", "0"), ("content-length", "1")))),
    "8.1.1: a content-length that is none": (MALFORMED, get(1, END, block(("content-length", "-1")))),
    "hpack 2.3.3: an index beyond the table": (COMPRESSION, get(1, END, block() + b"\xc6")),
    "hpack 2.3.3: a name beyond the table": (COMPRESSION, get(1, END, block() + b"\x7f\x07\x01a")),
    "hpack 4.2: the table's size said at the end": (COMPRESSION, get(1, END, block() + b"\x20")),
    "hpack 4.2: the table's size said three times": (COMPRESSION, get(1, END, b"\x20\x20\x20" + block())),
    "hpack 4.2: the table's size said twice": (FINE, get(1, END, b"\x20\x3f\xe1\x1f" + block())),
    "hpack 5.2: Huffman padding of more than 7 bits": (COMPRESSION, get(1, END, block() + b"\x00\x01a\x82\xff\xff")),
    "hpack 5.2: Huffman padding of zeros": (COMPRESSION, get(1, END, block() + b"\x00\x01a\x81\x18")),
    "hpack 5.2: Huffman with the end of string": (COMPRESSION, get(1, END, block() + b"\x00\x01a\x84\xff\xff\xff\xfc")),
    "hpack 6.1: index 0": (COMPRESSION, get(1, END, block() + b"\x80")),
    "hpack 6.3: a table above what is allowed": (COMPRESSION, get(1, END, b"\x3f\xe2\x1f" + block())),
}


@pytest.mark.brief(every=5)
@pytest.mark.parametrize("name", CASES)
def test_it_does_what_the_rfc_wants(name: str) -> None:
    (kind, codes), said = CASES[name]
    server = Server()
    first = b"" if name.startswith("3.4") else frame(h.SETTINGS, 0, 0)
    kind_found, code = outcome(server.hear(h.PREFACE + first + said + PING), server.http2.fault)
    assert (kind_found, code in codes or not codes) == (kind, True), (kind_found, code)


def test_3_4_a_preface_that_is_none() -> None:
    server = Server()
    assert server.hear(b"INVALID CONNECTION PREFACE\r\n\r\n")[-1][0] == h.GOAWAY and not server.http2.begun


def test_6_9_1_nothing_beyond_the_window_and_6_9_2_windows_below_zero() -> None:
    server = Server()
    said = server.hear(h.PREFACE + settings(4, 3) + get())
    assert [(kind, payload) for kind, _, _, payload in said][-2:] == [
        (h.HEADERS, b"\0\x07:status\x03200"),
        (h.DATA, b"hel"),
    ]
    assert server.hear(settings(4, 2) + window(1, 1)) == [(h.SETTINGS, h.ACK, 0, b"")]
    assert server.hear(window(1, 9)) == [(h.DATA, 0, 1, b"lo"), (h.DATA, h.END_STREAM, 1, b"")]


def answers_of(said: bytes) -> Callable[[], int]:
    server = Server()
    server.hear(h.PREFACE + frame(h.SETTINGS, 0, 0) + said)
    return lambda: server.requests


def test_what_is_fine_is_answered() -> None:
    wanted = {
        "generic 3.1": 1,
        "generic 3.2": 1,
        "generic 3.10": 1,
        "generic 4": 1,
        "hpack 4.2: the table's size said twice": 1,
    }
    for begin, count in wanted.items():
        for name, (kind, said) in CASES.items():
            if name.startswith(begin) and kind == FINE:
                assert answers_of(said)() == count, name
