"""HTTP/2 by frames: what may be sent when, what is given back, and what becomes of those who break the rules."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hpack import Decoder, Encoder
from hypothesis import given
from hypothesis import strategies as st
from tests.router.envoy.grpc.frames import REQUEST, Frame, frame, frames, setting, word

from skymemory.router.envoy.grpc import http2 as h
from skymemory.router.envoy.grpc.http2 import Http2


class Peer:
    """A client by hand, and a server that records what it receives and deals with it at once."""

    def __init__(self, most_streams: int = 10, settings: bytes = b"", deals: bool = True) -> None:
        self.received: list[tuple[str, int, object]] = []
        self.refusals: list[str] = []
        self.deals = deals
        self.now_s = 0.0
        self.encoder = Encoder()
        self.http2 = Http2(self, most_streams)
        self.first = self.heard()
        self.say(h.PREFACE + frame(h.SETTINGS, 0, 0, settings))
        assert self.heard() == [(h.SETTINGS, h.ACK, 0, b"")]

    def opened(self, stream: int, headers: list[tuple[bytes, bytes]]) -> None:
        self.received.append(("opened", stream, dict(headers).get(b":path")))

    def on_data(self, stream: int, data: bytes) -> None:
        self.received.append(("came", stream, data))
        if self.deals:
            self.http2.consumed(stream, len(data))

    def on_stream_end(self, stream: int) -> None:
        self.received.append(("ended", stream, None))

    def aborted(self, stream: int) -> None:
        self.received.append(("broke off", stream, None))

    def refused(self, reason: str) -> None:
        self.refusals.append(reason)

    def say(self, data: bytes) -> None:
        self.http2.receive(data)
        while self.http2.handle(3, self.now_s):
            pass

    def heard(self) -> list[Frame]:
        return frames(self.http2.data_to_send())

    def open(self, stream: int = 1, end: bool = False) -> None:
        self.say(frame(h.HEADERS, h.END_HEADERS | (h.END_STREAM if end else 0), stream, self.encoder.encode(REQUEST)))


def test_a_call_comes_and_its_answer_goes_in_order() -> None:
    peer = Peer()
    received = dict(h.SETTING.iter_unpack(peer.first[0][3]))
    assert received[h.SET_MAX_STREAMS] == 10 and received[h.SET_INITIAL_WINDOW] == h.WINDOW_BYTES
    peer.open()
    peer.say(frame(h.DATA, h.PADDED, 1, b"\x02askpp") + frame(h.DATA, h.END_STREAM, 1))
    assert peer.received == [("opened", 1, b"/service/Call"), ("came", 1, b"ask"), ("ended", 1, None)]
    peer.http2.headers(1, h.literals([(b":status", b"200")]))
    peer.http2.data(1, b"answer")
    peer.http2.finish(1, h.literals([(b"grpc-status", b"0")]))
    peer.http2.data(1, b"after all is said")
    assert [(kind, flags, payload) for kind, flags, _, payload in peer.heard()] == [
        (h.HEADERS, h.END_HEADERS, b"\x00\x07:status\x03200"),
        (h.DATA, 0, b"answer"),
        (h.HEADERS, h.END_HEADERS | h.END_STREAM, b"\x00\x0bgrpc-status\x010"),
    ]
    assert len(peer.http2) == 0


def test_an_answer_before_the_request_has_ended_asks_for_no_more_of_it() -> None:
    peer = Peer()
    peer.open()
    peer.http2.finish(1, b"")
    kinds = [(kind, payload) for kind, _, _, payload in peer.heard()]
    assert kinds == [(h.HEADERS, b""), (h.RST_STREAM, word(h.NO_ERROR))]
    peer.say(frame(h.DATA, h.END_STREAM, 1, b"on its way") + frame(h.RST_STREAM, 0, 1, word(h.CANCEL)))
    assert peer.http2.fault is None and [what for what, *_ in peer.received] == ["opened"]


def test_data_waits_for_the_window_of_its_stream_and_of_the_connection() -> None:
    peer = Peer(settings=setting(h.SET_INITIAL_WINDOW, 10))
    peer.open(1), peer.open(3)
    peer.http2.data(1, b"a" * 25)
    peer.http2.finish(1, b"")
    peer.http2.data(3, b"b" * 5)
    assert [(kind, stream, len(data)) for kind, _, stream, data in peer.heard()] == [(h.DATA, 1, 10), (h.DATA, 3, 5)]
    peer.say(frame(h.SETTINGS, 0, 0, setting(h.SET_INITIAL_WINDOW, 0)))  # of stream 1 the window is below 0 now
    peer.say(frame(h.WINDOW_UPDATE, 0, 1, word(12)))
    assert [(kind, len(data)) for kind, _, _, data in peer.heard()] == [(h.SETTINGS, 0), (h.DATA, 2)]
    peer.say(frame(h.WINDOW_UPDATE, 0, 1, word(1 << 20)))
    assert [(kind, len(data)) for kind, _, _, data in peer.heard()] == [(h.DATA, 13), (h.HEADERS, 0), (h.RST_STREAM, 4)]

    peer = Peer(settings=setting(h.SET_INITIAL_WINDOW, 1 << 20))
    peer.open(1), peer.open(3)
    peer.http2.data(1, b"a" * 60_000)
    peer.http2.data(3, b"b" * 10_000)
    sizes = [(stream, len(data)) for _, _, stream, data in peer.heard()]
    assert sizes == [(1, 16_384), (1, 16_384), (1, 16_384), (1, 10_848), (3, 5_535)]
    peer.say(frame(h.WINDOW_UPDATE, 0, 0, word(1 << 20)))
    assert [(stream, len(data)) for _, _, stream, data in peer.heard()] == [(3, 4_465)]


def test_larger_frames_go_to_peers_that_take_them() -> None:
    peer = Peer(settings=setting(h.SET_MAX_FRAME, 50_000))
    peer.open()
    peer.http2.data(1, b"a" * 60_000)
    assert [len(data) for _, _, _, data in peer.heard()] == [50_000, 10_000]


def test_a_sender_gets_its_window_back_for_what_was_dealt_with_and_no_sooner() -> None:
    peer = Peer(deals=False)
    peer.open()
    peer.heard()
    pieces = h.WINDOW_BYTES // h.MAX_FRAME_BYTES
    peer.say(frame(h.DATA, 0, 1, bytes(h.MAX_FRAME_BYTES)) * pieces)
    assert peer.heard() == []
    peer.http2.consumed(1, h.WINDOW_BYTES)
    assert peer.heard() == [(h.WINDOW_UPDATE, 0, 1, word(h.WINDOW_BYTES))]
    peer.say(frame(h.DATA, 0, 1, bytes(h.MAX_FRAME_BYTES)) * pieces)
    assert peer.http2.fault is None and peer.heard() == []
    peer.say(frame(h.DATA, 0, 1, b"one byte more"))
    assert peer.heard() == [(h.RST_STREAM, 0, 1, word(h.FLOW_CONTROL_ERROR))]
    assert peer.received[-1] == ("broke off", 1, None)


def test_who_does_not_take_its_answer_may_not_send_on() -> None:
    peer = Peer()
    peer.open()
    peer.http2.data(1, bytes(2 * h.MAX_PENDING_BYTES))
    peer.heard()
    peer.say(frame(h.DATA, 0, 1, bytes(h.MAX_FRAME_BYTES)) * 32)
    assert peer.heard() == []
    peer.say(frame(h.WINDOW_UPDATE, 0, 0, word(1 << 24)) + frame(h.WINDOW_UPDATE, 0, 1, word(1 << 24)))
    assert peer.heard()[-1] == (h.WINDOW_UPDATE, 0, 1, word(32 * h.MAX_FRAME_BYTES))


def test_all_streams_together_have_a_window_too() -> None:
    peer = Peer(most_streams=100, deals=False)
    for stream in range(1, 35, 2):
        peer.open(stream)
        peer.say(frame(h.DATA, 0, stream, bytes(h.MAX_FRAME_BYTES)) * 64)
    assert peer.http2.fault is not None and peer.http2.fault.code == h.FLOW_CONTROL_ERROR


def test_streams_beyond_the_most_are_refused_and_their_headers_count() -> None:
    peer = Peer(most_streams=2)
    peer.open(1), peer.open(3), peer.open(5)
    assert peer.heard() == [(h.RST_STREAM, 0, 5, word(h.REFUSED_STREAM))]
    peer.say(frame(h.RST_STREAM, 0, 1, word(h.CANCEL)))
    peer.open(7)  # its headers are references to those of the streams before
    assert peer.received[-2:] == [("broke off", 1, None), ("opened", 7, b"/service/Call")]
    peer.http2.leave()
    peer.open(9)
    assert peer.heard() == [
        (h.GOAWAY, 0, 0, word(7) + word(h.NO_ERROR)),
        (h.RST_STREAM, 0, 9, word(h.REFUSED_STREAM)),
    ]
    peer.say(frame(h.DATA, h.END_STREAM, 9) + frame(h.DATA, h.END_STREAM, 7))
    assert peer.received[-1] == ("ended", 7, None) and peer.http2.fault is None


def test_headers_may_come_in_several_frames_and_trailers_end_a_stream() -> None:
    peer = Peer()
    block = peer.encoder.encode(REQUEST)
    priority = bytes(5)
    peer.say(frame(h.HEADERS, h.HAS_PRIORITY, 1, priority + block[:3]) + frame(h.CONTINUATION, 0, 1, block[3:5]))
    assert not peer.received
    peer.say(frame(h.CONTINUATION, h.END_HEADERS, 1, block[5:]))
    peer.say(frame(h.HEADERS, h.END_HEADERS | h.END_STREAM, 1, peer.encoder.encode([("a", "b")])))
    assert peer.received == [("opened", 1, b"/service/Call"), ("ended", 1, None)]


def test_pings_are_answered_and_what_is_unknown_is_read_over() -> None:
    peer = Peer()
    peer.say(frame(h.PING, 0, 0, b"12345678") + frame(99, 255, 7, b"?") + frame(h.PRIORITY, 0, 3, bytes(5)))
    peer.say(frame(h.PING, h.ACK, 0, b"12345678") + frame(h.GOAWAY, 0, 0, bytes(8)))
    assert peer.heard() == [(h.PING, h.ACK, 0, b"12345678")] and peer.http2.fault is None


FAULTS: dict[str, tuple[int, Callable[[], bytes]]] = {
    "a frame too long": (h.FRAME_SIZE_ERROR, lambda: frame(h.DATA, 0, 1, bytes(h.MAX_FRAME_BYTES + 1))),
    "a stream of the server's": (h.PROTOCOL_ERROR, lambda: frame(h.HEADERS, h.END_HEADERS, 2, b"")),
    "stream 0": (h.PROTOCOL_ERROR, lambda: frame(h.DATA, 0, 0, b"x")),
    "data of nothing": (h.PROTOCOL_ERROR, lambda: frame(h.DATA, 0, 3, b"x")),
    "a reset of nothing": (h.PROTOCOL_ERROR, lambda: frame(h.RST_STREAM, 0, 3, word(8))),
    "a short reset": (h.FRAME_SIZE_ERROR, lambda: frame(h.RST_STREAM, 0, 1, b"")),
    "a window of nothing": (h.PROTOCOL_ERROR, lambda: frame(h.WINDOW_UPDATE, 0, 3, word(1))),
    "no window": (h.PROTOCOL_ERROR, lambda: frame(h.WINDOW_UPDATE, 0, 0, word(0))),
    "too much window": (h.FLOW_CONTROL_ERROR, lambda: frame(h.WINDOW_UPDATE, 0, 0, word(h.LARGEST_WINDOW))),
    "a short window": (h.FRAME_SIZE_ERROR, lambda: frame(h.WINDOW_UPDATE, 0, 0, b"")),
    "too much padding": (h.PROTOCOL_ERROR, lambda: frame(h.DATA, h.PADDED, 1, b"\x09x")),
    "no padding": (h.FRAME_SIZE_ERROR, lambda: frame(h.DATA, h.PADDED, 1, b"")),
    "headers broken off": (h.PROTOCOL_ERROR, lambda: frame(h.HEADERS, 0, 3, b"") + frame(h.PING, 0, 0, bytes(8))),
    "CONTINUATION without HEADERS": (h.PROTOCOL_ERROR, lambda: frame(h.CONTINUATION, h.END_HEADERS, 1, b"")),
    "headers of nothing": (
        h.ENHANCE_YOUR_CALM,
        lambda: frame(h.HEADERS, 0, 3) + frame(h.CONTINUATION, 0, 3) * (h.MAX_CONTINUATIONS + 1),
    ),
    "headers without end": (
        h.ENHANCE_YOUR_CALM,
        lambda: frame(h.HEADERS, 0, 3, bytes(16_000)) + frame(h.CONTINUATION, 0, 3, bytes(16_000)),
    ),
    "headers that are none": (h.COMPRESSION_ERROR, lambda: frame(h.HEADERS, h.END_HEADERS, 3, b"\xff\xff\xff")),
    "headers that swell": (
        h.ENHANCE_YOUR_CALM,
        lambda: frame(h.HEADERS, h.END_HEADERS, 3, b"\x40\x01a\x7f\xbd\x1d" + b"b" * 3900 + b"\xbe" * 20),
    ),
    "a push": (h.PROTOCOL_ERROR, lambda: frame(h.PUSH_PROMISE, 0, 1, bytes(4))),
    "a ping of a stream": (h.PROTOCOL_ERROR, lambda: frame(h.PING, 0, 1, bytes(8))),
    "a short ping": (h.FRAME_SIZE_ERROR, lambda: frame(h.PING, 0, 0, b"")),
    "settings of a stream": (h.PROTOCOL_ERROR, lambda: frame(h.SETTINGS, 0, 1)),
    "half a setting": (h.FRAME_SIZE_ERROR, lambda: frame(h.SETTINGS, 0, 0, b"x")),
    "frames too small": (h.PROTOCOL_ERROR, lambda: frame(h.SETTINGS, 0, 0, setting(h.SET_MAX_FRAME, 1))),
    "a window too large": (
        h.FLOW_CONTROL_ERROR,
        lambda: frame(h.SETTINGS, 0, 0, setting(h.SET_INITIAL_WINDOW, h.LARGEST_WINDOW + 1)),
    ),
    "a stream's window too large": (
        h.FLOW_CONTROL_ERROR,
        lambda: (
            frame(h.WINDOW_UPDATE, 0, 1, word(h.LARGEST_WINDOW - 65_535))
            + frame(h.SETTINGS, 0, 0, setting(h.SET_INITIAL_WINDOW, h.LARGEST_WINDOW))
        ),
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_peer_that_breaks_a_rule_gets_goaway_and_is_not_read_any_more(name: str) -> None:
    code, said = FAULTS[name]
    peer = Peer()
    peer.open()
    peer.say(said())
    kind, _, _, payload = peer.heard()[-1]
    assert kind == h.GOAWAY and payload[4:8] == word(code), payload
    received = len(peer.received)
    peer.open(5)
    assert len(peer.received) == received and peer.heard() == []


def test_who_speaks_something_else_is_not_listened_to() -> None:
    peer = Peer()
    other = Http2(peer, 1)
    other.receive(b"GET / HTTP/1.1\r\n")
    assert not other.handle(10, 0.0)
    assert other.fault is not None and not other.begun


@given(st.integers(0, 5000), st.integers(0, 300))
def test_headers_as_literals_are_read_as_they_were(value: int, name: int) -> None:
    headers = [(b"n" * name + b"a", b"v" * value), (b"b", b"")]
    assert [tuple(map(bytes, each)) for each in Decoder().decode(h.literals(headers), raw=True)] == headers


@given(
    st.lists(
        st.tuples(
            st.integers(0, 11),
            st.integers(0, 255),
            st.sampled_from([0, 1, 3, 5, 2, h.LARGEST_WINDOW]),
            st.binary(max_size=30),
        ),
        max_size=12,
    ),
    st.integers(1, 40),
)
def test_whatever_comes_in_whatever_pieces_ends_in_an_answer_or_a_fault(said: list[Frame], cut: int) -> None:
    whole, parts = Peer(), Peer()
    data = b"".join(frame(*each) for each in said)
    for peer in (whole, parts):
        peer.open()
    whole.say(data)
    for start in range(0, len(data), cut):
        parts.say(data[start : start + cut])
    assert whole.received == parts.received
    assert whole.heard() == parts.heard() and repr(whole.http2.fault) == repr(parts.http2.fault)
