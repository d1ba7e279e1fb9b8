"""What a peer may make us do for nothing ends, kind by kind; what honest ones do does not."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from tests.router.envoy.grpc.frames import REQUEST, frame, setting, word
from tests.router.envoy.grpc.test_http2 import Peer

from skymemory.router.envoy.grpc import http2 as h

CALL = h.literals((name.encode(), value.encode()) for name, value in REQUEST)
MANY = CALL + h.literals([(b"a%d" % number, b"b") for number in range(400)])
UNANSWERED = h.UNANSWERED_PER_S
"""At once too, where fewer streams are allowed."""


def headers(stream: int, block: bytes = CALL, flags: int = h.END_HEADERS) -> bytes:
    return frame(h.HEADERS, flags, stream, block)


def reset(stream: int) -> bytes:
    return frame(h.RST_STREAM, 0, stream, word(h.CANCEL))


def in_pieces(stream: int) -> bytes:
    parts = [frame(h.CONTINUATION, 0, stream, bytes([each])) for each in CALL[:10]]
    last = frame(h.CONTINUATION, h.END_HEADERS, stream, CALL[10:])
    return headers(stream, b"", 0) + b"".join(parts) + last + reset(stream)


FLOODS: dict[str, tuple[str, int, Callable[[int], bytes]]] = {
    # by the reason that it is counted under: how many of them are let pass at once, and what the n-th is
    "resets": ("resets", UNANSWERED, lambda n: headers(2 * n + 1) + reset(2 * n + 1)),
    "malformed": ("protocol", UNANSWERED, lambda n: headers(2 * n + 1, b"")),
    "refused": ("streams", UNANSWERED + 10, lambda n: headers(2 * n + 1)),
    "pings": ("pings", h.IDLE_FRAMES, lambda n: frame(h.PING, 0, 0, bytes(8))),
    "answers to pings": ("pings", h.IDLE_FRAMES, lambda n: frame(h.PING, h.ACK, 0, bytes(8))),
    "settings": ("settings", h.IDLE_FRAMES, lambda n: frame(h.SETTINGS, 0, 0)),
    "windows": ("window-updates", h.IDLE_FRAMES, lambda n: frame(h.WINDOW_UPDATE, 0, 0, word(1))),
    "windows of what is over": (
        "window-updates",
        h.IDLE_FRAMES,
        lambda n: headers(1) + reset(1) if not n else frame(h.WINDOW_UPDATE, 0, 1, word(1)),
    ),
    "priorities": ("priorities", h.IDLE_FRAMES, lambda n: frame(h.PRIORITY, 0, 3, bytes(5))),
    "empty data": ("empty-data", h.IDLE_FRAMES, lambda n: headers(1) if not n else frame(h.DATA, 0, 1)),
    "padding": (
        "empty-data",
        h.IDLE_FRAMES,
        lambda n: headers(1) if not n else frame(h.DATA, h.PADDED, 1, b"\xff" + bytes(255)),
    ),
    "unknown kinds": ("unknown-frames", h.IDLE_FRAMES, lambda n: frame(0xEE, 0, 0)),
    "continuations": ("continuations", h.IDLE_FRAMES // 11, lambda n: in_pieces(2 * n + 1)),
    "many fields": ("headers", h.IDLE_FRAMES // 100, lambda n: headers(2 * n + 1, MANY) + reset(2 * n + 1)),
    "late frames": (
        "late-frames",
        h.IDLE_FRAMES,
        lambda n: headers(1) if not n else frame(h.DATA, 0, 1, b"x"),
    ),
}


@pytest.mark.brief(every=5)
@pytest.mark.parametrize("name", FLOODS)
def test_each_kind_of_flood_ends(name: str) -> None:
    reason, most, one = FLOODS[name]
    peer = Peer(deals=True)
    if name == "late frames":
        peer.say(one(0))
        peer.http2.reset(1, h.CANCEL)
    taken = 0
    for number in range(2 * most + 10):
        peer.say(one(number))
        if peer.http2.fault is not None:
            break
        taken += 1
    assert peer.http2.fault is not None, f"{taken} of them, and more"
    assert (peer.http2.fault.code, peer.http2.fault.reason) == (h.ENHANCE_YOUR_CALM, reason)
    assert peer.refusals[-1] == reason and taken <= most + 10
    assert taken >= most // 2, "so many may come at once"


def test_settings_that_cost_a_look_at_every_stream_end_sooner() -> None:
    peer = Peer(most_streams=6_400)
    for number in range(6_400):
        peer.say(headers(2 * number + 1))
    taken = 0
    while peer.http2.fault is None:
        peer.say(frame(h.SETTINGS, 0, 0, setting(h.SET_INITIAL_WINDOW, 60_000 + taken % 2)))
        taken += 1
    assert peer.http2.fault.reason == "settings" and taken < h.IDLE_FRAMES // 50


def test_headers_that_would_be_read_for_long_are_not_read_at_all() -> None:
    peer = Peer()
    peer.say(headers(1, b"\x20" * 16_000))
    assert peer.http2.fault is not None and peer.http2.fault.reason == "headers"


def test_time_brings_back_what_was_spent() -> None:
    peer = Peer()
    for second in range(20):
        peer.now_s = float(second)
        peer.say(frame(h.PING, 0, 0, bytes(8)) * ((h.IDLE_FRAMES if not second else h.IDLE_FRAMES_PER_S) - 10))
        peer.say(
            b"".join(headers(stream) + reset(stream) for stream in range(1 + 2000 * second, 2000 * (second + 1), 2))
        )
        peer.heard()
    assert peer.http2.fault is None


def test_an_envoy_that_resets_each_stream_when_it_has_its_answers_goes_on() -> None:
    peer = Peer(most_streams=100)
    for number in range(5_000):
        stream = 2 * number + 1
        peer.say(headers(stream) + frame(h.DATA, 0, stream, b"a request"))
        peer.http2.headers(stream, b"")
        peer.http2.data(stream, b"an answer")
        peer.heard()
        # Windows are given back for answers, and what is reset twice was on its way.
        peer.say(frame(h.WINDOW_UPDATE, 0, 0, word(9)) + frame(h.RST_STREAM, 0, stream, word(h.INTERNAL_ERROR)) * 2)
    assert peer.http2.fault is None and not len(peer.http2) and not peer.refusals


def test_all_clients_of_an_envoy_may_hang_up_at_once() -> None:
    peer = Peer(most_streams=11_000)
    streams = range(1, 22_001, 2)
    peer.say(b"".join(map(headers, streams)))
    peer.say(b"".join(map(reset, streams)))
    assert peer.http2.fault is None


def test_headers_that_mean_the_same_are_read_once_and_others_again() -> None:
    peer = Peer()
    received: list[bytes] = []
    peer.opened = lambda stream, headers: received.append(dict(headers)[b":path"])  # type: ignore[method-assign]
    one, other = REQUEST, [(name, "/other" if name == ":path" else value) for name, value in REQUEST]
    wanted = []
    for number, said in enumerate([one, one, other, one, one, other, other, one]):
        stream = 2 * number + 1
        peer.say(frame(h.HEADERS, h.END_HEADERS, stream, peer.encoder.encode(said)) + reset(stream))
        wanted.append(dict(said)[":path"].encode())
    # The same bytes, when the table has changed in between: index 62 is what was added last.
    for value in (b"/a", b"/b"):
        stream += 2
        peer.say(headers(stream, b"\x83\x86\x44" + h._length(len(value)) + value) + reset(stream))
        stream += 2
        peer.say(headers(stream, b"\x83\x86\xbe") + reset(stream))
        wanted += [value, value]
    assert received == wanted and peer.http2.fault is None


def test_one_byte_of_window_at_a_time_costs_one_frame() -> None:
    """And not a look at every stream that waits."""
    peer = Peer(most_streams=1_000)
    peer.say(frame(h.SETTINGS, 0, 0, setting(h.SET_INITIAL_WINDOW, 1 << 20)))
    for stream in range(1, 2_001, 2):
        peer.say(headers(stream))
        peer.http2.data(stream, bytes(1_000))
    peer.heard()
    sent, asked = peer.http2._send_pending, []
    peer.http2._send_pending = lambda *of: (asked.append(of), sent(*of))  # type: ignore[assignment, func-returns-value]
    for _ in range(100):
        peer.say(frame(h.WINDOW_UPDATE, 0, 0, word(1)))
    assert [len(payload) for _, _, _, payload in peer.heard()] == [1] * 100 and len(asked) <= 200
