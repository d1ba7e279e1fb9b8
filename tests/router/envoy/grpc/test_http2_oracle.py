"""The same frames, at random, to our HTTP/2 and to the library `h2`: both take them, or both refuse them alike.

A sequence is compared frame by frame until one of the two ends the connection, or they differ in a way that is meant to
be. What is meant to be is listed in `DELIBERATE`, and each of those is met.
"""

from __future__ import annotations

import contextlib
import random
from collections import Counter

import h2.config
import h2.connection
import h2.errors
import h2.events
import h2.exceptions
import h2.settings
import pytest
from hpack import Encoder
from tests.router.envoy.grpc.frames import REQUEST, Frame, frame, frames, setting, word

from skymemory.router.envoy.grpc import http2 as h
from skymemory.router.envoy.grpc.http2 import Http2

MOST_STREAMS = 4
Outcome = tuple[str, int]
"""fine, stream error or connection error; and the code."""


class Ours:
    def __init__(self) -> None:
        self.http2 = Http2(self, MOST_STREAMS)

    def opened(self, stream: int, headers: list[tuple[bytes, bytes]]) -> None: ...

    def on_data(self, stream: int, data: bytes) -> None:
        self.http2.consumed(stream, len(data))

    def on_stream_end(self, stream: int) -> None: ...

    def aborted(self, stream: int) -> None: ...

    def refused(self, reason: str) -> None: ...

    def hear(self, data: bytes) -> Outcome:
        self.http2.receive(data)
        while self.http2.handle(1, 0.0):
            pass
        return judged(frames(self.http2.data_to_send()))


class Theirs:
    def __init__(self) -> None:
        self.h2 = h2.connection.H2Connection(h2.config.H2Configuration(client_side=False, header_encoding=None))
        self.h2.local_settings = h2.settings.Settings(
            client=False,
            initial_values={
                h2.settings.SettingCodes.MAX_CONCURRENT_STREAMS: MOST_STREAMS,
                h2.settings.SettingCodes.INITIAL_WINDOW_SIZE: h.WINDOW_BYTES,
                h2.settings.SettingCodes.MAX_HEADER_LIST_SIZE: h.MAX_HEADER_BYTES,
            },
        )
        self.h2.initiate_connection()
        self.h2.increment_flow_control_window(h.CONNECTION_WINDOW_BYTES - h.FIRST_WINDOW)
        self.h2.data_to_send()

    def hear(self, data: bytes) -> Outcome:
        try:
            for event in self.h2.receive_data(data):
                if isinstance(event, h2.events.DataReceived) and event.flow_controlled_length:
                    with contextlib.suppress(h2.exceptions.StreamClosedError):
                        self.h2.acknowledge_received_data(event.flow_controlled_length, event.stream_id)
        except h2.exceptions.ProtocolError as error:
            self.h2.data_to_send()
            return "connection error", int(error.error_code)
        return judged(frames(self.h2.data_to_send()))


def judged(said: list[Frame]) -> Outcome:
    for kind, _, _, payload in said:
        if kind == h.GOAWAY:
            return "connection error", int.from_bytes(payload[4:8], "big")
    for kind, _, _, payload in said:
        if kind == h.RST_STREAM:
            return "stream error", int.from_bytes(payload, "big")
    return "fine", 0


class Client:
    """Says what may be said, mostly, and knows what it has said."""

    def __init__(self, dice: random.Random) -> None:
        self._dice = dice
        self._encoder = Encoder()
        self._next = 1
        self._continues = 0

    def _block(self) -> bytes:
        fields = [*REQUEST[:3], (":authority", "x"), *REQUEST[3:]]
        dice = self._dice
        if dice.random() < 0.08:
            change = dice.randrange(7)
            if change == 0:
                del fields[dice.randrange(3)]
            elif change == 1:
                fields.append((":path", "/"))
            elif change == 2:
                fields.append(dice.choice((("Upper", "x"), ("connection", "x"), ("te", "gzip"))))
            elif change == 3:
                fields.insert(0, (":other", "x"))
            elif change == 4:
                fields.append(("content-length", dice.choice(("0", "3", "8"))))
            elif change == 5:
                fields[1] = (":path", "")
            else:
                fields.append(("te", "trailers"))
        return self._encoder.encode(fields)

    def one(self) -> tuple[str, bytes]:
        dice = self._dice
        stream = max(1, self._next - 2 * dice.choice((1, 1, 1, 2, 3)))
        if dice.random() < 0.01:
            stream = dice.choice((0, 2, self._next, self._next + 4))
        ends = h.END_STREAM if dice.random() < 0.4 else 0
        weights = (16, 2, 18, 5, 6, 4, 6, 6, 1, 1, 4) if self._next > 1 else (1, *[0] * 10)
        match dice.choices(range(11), weights)[0]:
            case 0:
                opened, self._next = self._next, self._next + 2
                return "HEADERS", frame(h.HEADERS, h.END_HEADERS | ends, opened, self._block())
            case 1:
                return "trailers", frame(h.HEADERS, h.END_HEADERS | ends, stream, self._encoder.encode([("x-a", "b")]))
            case 2:
                size = dice.choice((0, 1, 3, 3, 8, 2_000))
                return "DATA", frame(h.DATA, ends, stream, bytes(size))
            case 3:
                stream = stream if dice.random() < 0.95 else self._next
                return "RST_STREAM", frame(h.RST_STREAM, 0, stream, bytes(dice.choice((*[4] * 15, 3))))
            case 4:
                more = dice.choice((*[100] * 8, 0, h.LARGEST_WINDOW))
                return "WINDOW_UPDATE", frame(h.WINDOW_UPDATE, 0, dice.choice((0, stream)), word(more))
            case 5:
                name = dice.choice((1, h.SET_PUSH, h.SET_INITIAL_WINDOW, h.SET_INITIAL_WINDOW, h.SET_MAX_FRAME, 99))
                value = dice.choice((0, 1, 1 << 14, 1 << 14, 1 << 16, 1 << 31))
                return "SETTINGS", frame(h.SETTINGS, 0, 0 if dice.random() < 0.95 else 1, setting(name, value))
            case 6:
                return "PING", frame(h.PING, dice.choice((0, 0, h.ACK)), 0, bytes(dice.choice((*[8] * 15, 7))))
            case 7:
                on = dice.choice((0, 0, 0, 0, stream, 1))
                return "PRIORITY", frame(h.PRIORITY, 0, stream, (word(on) + b"\1")[: dice.choice((*[5] * 15, 4))])
            case 8:
                return "GOAWAY", frame(h.GOAWAY, 0, 0, bytes(8))
            case 9:
                return "CONTINUATION", frame(h.CONTINUATION, h.END_HEADERS, stream, b"")
            case _:
                opened, self._next = self._next, self._next + 2
                block = self._block()
                head = frame(h.HEADERS, ends, opened, block[:3])
                between = frame(h.PING, 0, 0, bytes(8)) if dice.random() < 0.1 else b""
                return "HEADERS", head + between + frame(h.CONTINUATION, h.END_HEADERS, opened, block[3:])


DELIBERATE = {
    "ends": "where the RFC ends a stream (5.4.2), h2 ends the connection",
    "late": "what comes for a stream that was reset here is passed over, as 5.1 has it; h2 resets it again",
    "window": "a window of 0 for a stream that is over is passed over likewise; to h2 it is an error of the connection",
    "length": "a content-length with no DATA at all is malformed (8.1.1); h2 compares only where DATA comes",
    "refused": "streams beyond the most are refused (5.1.2); h2 ends the connection",
    "idle": "a reset of an idle stream ends the connection (5.1); h2 passes it over",
    "continuation": "a CONTINUATION without HEADERS ends the connection (6.10); h2 ends its stream, where that is over",
    "farewell": "after a client's GOAWAY its requests go on, and its pings are answered (6.8); h2 takes nothing more",
}


def difference(name: str, ours: Outcome, theirs: Outcome, over: int | None, said_goaway: bool) -> str:
    """Which of the differences that are meant it is; empty: of none."""
    stream, connection = ours[0] == "stream error", theirs[0] == "connection error"
    if said_goaway and connection:
        return "farewell"
    if stream and connection and ours[1] == theirs[1]:
        return "ends"
    if ours == ("stream error", h.REFUSED_STREAM) and connection:
        return "refused"
    if over == h._RESET_HERE and ours[0] == "fine" and theirs == ("stream error", h.STREAM_CLOSED):
        return "late"
    if over is not None and ours[0] == "fine" and connection:
        return "window" if name == "WINDOW_UPDATE" else ""
    if theirs[0] == "fine":
        if ours == ("stream error", h.PROTOCOL_ERROR) and name in ("HEADERS", "trailers"):
            return "length"
        return "idle" if name == "RST_STREAM" and ours == ("connection error", h.PROTOCOL_ERROR) else ""
    return "continuation" if name == "CONTINUATION" and ours == ("connection error", h.PROTOCOL_ERROR) else ""


@pytest.mark.brief()
def test_both_take_and_refuse_alike() -> None:
    met: Counter[str] = Counter()
    alike: Counter[Outcome] = Counter()
    for seed in range(700):
        client, ours, theirs = Client(random.Random(seed)), Ours(), Theirs()
        begin = h.PREFACE + frame(h.SETTINGS, 0, 0)
        assert ours.hear(begin) == theirs.hear(begin) == ("fine", 0)
        said_goaway = False
        for _ in range(16):
            name, said = client.one()
            stream = int.from_bytes(said[5:9], "big")
            over = ours.http2._over.get(stream)
            said_goaway = said_goaway or name == "GOAWAY"
            one, other = ours.hear(said), theirs.hear(said)
            if one == other:
                alike[one] += 1
            else:
                why = difference(name, one, other, over, said_goaway)
                assert why, f"seed {seed}: {name} of stream {stream} is {one} to us and {other} to h2"
                met[why] += 1
            if one != other or one[0] == "connection error":
                break
    assert set(met) == set(DELIBERATE), "each of them is met"
    assert alike["fine", 0] > 2_500 and sum(alike.values()) > 3 * sum(met.values())
    for outcome in (
        ("connection error", h.PROTOCOL_ERROR),
        ("connection error", h.FLOW_CONTROL_ERROR),
        ("connection error", h.FRAME_SIZE_ERROR),
        ("stream error", h.STREAM_CLOSED),
    ):
        assert alike[outcome] > 10, outcome
