"""The server's side of one HTTP/2 connection, as gRPC needs it (RFC 9113): bytes in, calls and bytes out. No I/O.

Left out is what a server of gRPC never does or is never sent: pushes, priorities (read over, as RFC 9113 has it), the
upgrade from HTTP/1.1. Headers are read by `hpack`. A peer that breaks the rules gets GOAWAY and is not listened to any
more; nothing that it can send makes this keep more than the limits of `http2_frames` allow.
"""

from __future__ import annotations

from typing import Protocol

from hpack import Decoder, HPACKError

from skymemory.router.http2_frames import (
    ACK,
    COMPRESSION_ERROR,
    CONNECTION_WINDOW_BYTES,
    CONTINUATION,
    DATA,
    END_HEADERS,
    END_STREAM,
    ENHANCE_YOUR_CALM,
    FIRST_FRAME_BYTES,
    FIRST_WINDOW,
    FLOW_CONTROL_ERROR,
    FRAME_SIZE_ERROR,
    GOAWAY,
    HAS_PRIORITY,
    HEAD,
    HEADERS,
    LARGEST_FRAME_BYTES,
    LARGEST_WINDOW,
    MAX_FRAME_BYTES,
    MAX_HEADER_BYTES,
    MAX_SETTINGS,
    NO_ERROR,
    PING,
    PREFACE,
    PROTOCOL_ERROR,
    PUSH_PROMISE,
    REFUSED_STREAM,
    RST_STREAM,
    SET_INITIAL_WINDOW,
    SET_MAX_FRAME,
    SET_MAX_HEADER_LIST,
    SET_MAX_STREAMS,
    SETTING,
    SETTINGS,
    WINDOW_BYTES,
    WINDOW_UPDATE,
    WORD,
    Fault,
    unpadded,
)
from skymemory.router.http2_sending import Sending, Stream


class Calls(Protocol):
    """Who is told what comes. Each method may answer on the spot."""

    def opened(self, stream: int, headers: list[tuple[bytes, bytes]]) -> None: ...

    def came(self, stream: int, data: bytes) -> None:
        """Give it back by ``consumed`` when it is dealt with."""
        ...

    def ended(self, stream: int) -> None:
        """The peer has said all."""
        ...

    def broke_off(self, stream: int) -> None:
        """The stream is gone; nothing more may be said on it."""
        ...


class Http2(Sending):
    """``receive`` what comes, then send what is in ``out``. ``fault``: why the peer is not listened to any more."""

    def __init__(self, calls: Calls, most_streams: int) -> None:
        super().__init__()
        self.fault: Fault | None = None
        self.begun = False
        """Whether the peer has shown that it speaks HTTP/2."""
        self._calls = calls
        self._most_streams = most_streams
        self._leaving = False
        self._last = 0
        self._kept = b""
        self._unfinished: tuple[int, bool, bytes] | None = None
        """A block of headers that goes on in the next frame: stream, whether it ends it, bytes so far."""
        self._settings_heard = 0
        self._decoder = Decoder(max_header_list_size=MAX_HEADER_BYTES)
        ours = {
            SET_MAX_STREAMS: most_streams,
            SET_INITIAL_WINDOW: WINDOW_BYTES,
            SET_MAX_FRAME: MAX_FRAME_BYTES,
            SET_MAX_HEADER_LIST: MAX_HEADER_BYTES,
        }
        self._frame(SETTINGS, 0, 0, b"".join(SETTING.pack(*item) for item in ours.items()))
        self._frame(WINDOW_UPDATE, 0, 0, WORD.pack(CONNECTION_WINDOW_BYTES - FIRST_WINDOW))

    def leave(self) -> None:
        """No new streams; those under way go on."""
        if not self._leaving and self.fault is None:
            self._leaving = True
            self._frame(GOAWAY, 0, 0, WORD.pack(self._last) + WORD.pack(NO_ERROR))

    def receive(self, data: bytes) -> None:
        if self.fault is not None:
            return
        kept = self._kept + data if self._kept else data
        at = 0
        try:
            if not self.begun:
                if not PREFACE.startswith(kept[: len(PREFACE)]):
                    raise Fault(PROTOCOL_ERROR, "this is not HTTP/2")
                if len(kept) < len(PREFACE):
                    self._kept = kept
                    return
                self.begun, at = True, len(PREFACE)
            while len(kept) - at >= HEAD.size:
                high, low, kind, flags, stream = HEAD.unpack_from(kept, at)
                size = high << 8 | low
                if size > MAX_FRAME_BYTES:
                    raise Fault(FRAME_SIZE_ERROR, f"a frame of {size} bytes")
                end = at + HEAD.size + size
                if end > len(kept):
                    break
                self._hear(kind, flags, stream & LARGEST_WINDOW, kept[at + HEAD.size : end])
                at = end
            self._kept = kept[at:]
        except Fault as fault:
            self.fault, self._kept = fault, b""
            self._frame(GOAWAY, 0, 0, WORD.pack(self._last) + WORD.pack(fault.code) + str(fault).encode()[:200])

    def _hear(self, kind: int, flags: int, stream: int, payload: bytes) -> None:
        if self._unfinished is not None and kind != CONTINUATION:
            raise Fault(PROTOCOL_ERROR, "headers that do not go on")
        if kind == DATA:
            self._hear_data(flags, stream, payload)
        elif kind == HEADERS:
            if not stream % 2:
                raise Fault(PROTOCOL_ERROR, "a stream that no client opens")
            block = unpadded(flags, payload)[5 if flags & HAS_PRIORITY else 0 :]
            self._hear_headers(flags, stream, bool(flags & END_STREAM), block)
        elif kind == CONTINUATION:
            if self._unfinished is None or self._unfinished[0] != stream:
                raise Fault(PROTOCOL_ERROR, "headers that go on out of nowhere")
            if not payload and not flags & END_HEADERS:
                raise Fault(ENHANCE_YOUR_CALM, "headers that go on with nothing")
            _, ends, before = self._unfinished
            self._hear_headers(flags, stream, ends, before + payload)
        elif kind == WINDOW_UPDATE:
            self._hear_window(stream, payload)
        elif kind == RST_STREAM:
            if len(payload) != WORD.size:
                raise Fault(FRAME_SIZE_ERROR, "a reset of another size")
            self._must_not_be_idle(stream)
            state = self._open.pop(stream, None)
            if state is not None and state.trailers is None:
                self._calls.broke_off(stream)
        elif kind == SETTINGS:
            self._hear_settings(flags, stream, payload)
        elif kind == PING:
            if stream:
                raise Fault(PROTOCOL_ERROR, "a ping of a stream")
            if len(payload) != 8:
                raise Fault(FRAME_SIZE_ERROR, "a ping of another size")
            if not flags & ACK:
                self._frame(PING, ACK, 0, payload)
        elif kind == PUSH_PROMISE or (kind == GOAWAY and stream):
            raise Fault(PROTOCOL_ERROR, "a frame that no client sends")

    def _hear_data(self, flags: int, stream: int, payload: bytes) -> None:
        self._must_not_be_idle(stream)
        size = len(payload)
        self._receives -= size
        if self._receives < 0:
            raise Fault(FLOW_CONTROL_ERROR, "more than the connection's window")
        data = unpadded(flags, payload)
        state = self._open.get(stream)
        if state is None or state.trailers is not None or state.all_heard:
            self.consumed(stream, size)  # of a stream that is over here; the peer may not know yet
            return
        state.receives -= size
        if state.receives < 0:
            self.reset(stream, FLOW_CONTROL_ERROR)
            self._calls.broke_off(stream)
            self.consumed(stream, size)
            return
        state.all_heard = bool(flags & END_STREAM)
        if size != len(data):
            self.consumed(stream, size - len(data))
        if data:
            self._calls.came(stream, data)
        if state.all_heard and self._is_heard(stream):
            self._calls.ended(stream)

    def _hear_headers(self, flags: int, stream: int, ends: bool, block: bytes) -> None:
        if len(block) > MAX_HEADER_BYTES:
            raise Fault(ENHANCE_YOUR_CALM, "headers without end")
        if not flags & END_HEADERS:
            self._unfinished = (stream, ends, block)
            return
        self._unfinished = None
        try:
            # Also of a stream that is refused or over: what headers mean depends on all that went before.
            headers = [(bytes(each[0]), bytes(each[1])) for each in self._decoder.decode(block, raw=True)]
        except (HPACKError, IndexError, ValueError) as error:
            raise Fault(COMPRESSION_ERROR, f"headers that cannot be read: {error}") from error
        if stream > self._last:
            self._open_stream(stream, ends, headers)
            return
        state = self._open.get(stream)
        if state is None or state.all_heard:
            return
        if not ends:
            raise Fault(PROTOCOL_ERROR, "headers in the middle of a stream")
        state.all_heard = True  # trailers, of which gRPC's clients have none
        if self._is_heard(stream):
            self._calls.ended(stream)

    def _open_stream(self, stream: int, ends: bool, headers: list[tuple[bytes, bytes]]) -> None:
        if self._leaving or len(self._open) >= self._most_streams:
            if not self._leaving:
                self._last = stream
            self._frame(RST_STREAM, 0, stream, WORD.pack(REFUSED_STREAM))
            return
        self._last = stream
        state = self._open[stream] = Stream(self._first_window)
        state.all_heard = ends
        self._calls.opened(stream, headers)
        if ends and self._is_heard(stream):
            self._calls.ended(stream)

    def _hear_window(self, stream: int, payload: bytes) -> None:
        if len(payload) != WORD.size:
            raise Fault(FRAME_SIZE_ERROR, "a window of another size")
        more = WORD.unpack(payload)[0] & LARGEST_WINDOW
        if not stream:
            self._grow(more)
            return
        self._must_not_be_idle(stream)
        state = self._open.get(stream)
        if state is not None and not self._grow_stream(stream, state, more) and state.trailers is None:
            self._calls.broke_off(stream)

    def _hear_settings(self, flags: int, stream: int, payload: bytes) -> None:
        if stream:
            raise Fault(PROTOCOL_ERROR, "settings of a stream")
        if len(payload) % SETTING.size or (flags & ACK and payload):
            raise Fault(FRAME_SIZE_ERROR, "settings of another size")
        if flags & ACK:
            return
        self._settings_heard += 1
        if self._settings_heard > MAX_SETTINGS:
            raise Fault(ENHANCE_YOUR_CALM, "settings without end")
        told = dict(SETTING.iter_unpack(payload))
        frame, window = told.get(SET_MAX_FRAME), told.get(SET_INITIAL_WINDOW)
        if frame is not None:
            if not FIRST_FRAME_BYTES <= frame <= LARGEST_FRAME_BYTES:
                raise Fault(PROTOCOL_ERROR, "frames of a size that cannot be")
            self._peer_frame = frame
        if window is not None:
            if window > LARGEST_WINDOW:
                raise Fault(FLOW_CONTROL_ERROR, "a window that cannot be")
            self._set_first_window(window)
        self._frame(SETTINGS, ACK, 0, b"")

    def _is_heard(self, stream: int) -> bool:
        """Whether somebody still listens to it: it is neither over nor answered."""
        state = self._open.get(stream)
        return state is not None and state.trailers is None

    def _must_not_be_idle(self, stream: int) -> None:
        if not stream or (stream > self._last and not self._leaving):
            raise Fault(PROTOCOL_ERROR, "a frame of a stream that nobody opened")
