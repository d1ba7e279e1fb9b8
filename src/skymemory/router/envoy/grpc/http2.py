"""Server side of an HTTP/2 connection (RFC 9113), as far as gRPC needs it. No I/O, no clock.

1. ``receive`` buffers input; ``handle`` processes some frames and reports streams to ``Calls``, so that the owner
   shares time among connections.
2. ``headers``, ``data`` and ``finish`` queue answers, within the peer's windows.
3. ``data_to_send`` returns the output.

Push, priorities and the upgrade from HTTP/1.1 are not implemented.

A stream error ends the stream (RST_STREAM); a connection error or flood the connection (GOAWAY). Envoy resets answered
streams, so only unanswered streams and frames without content are floods: each has a token bucket.
"""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from hpack import Decoder, HPACKError, OversizedHeaderListError
from hpack.hpack import decode_integer

from skymemory.pacing import TokenBucket

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
MAX_FRAME_BYTES = 16 << 10
"""Limit of a received frame: the minimum that RFC 9113 allows."""
WINDOW_BYTES = 1 << 20
CONNECTION_WINDOW_BYTES = 16 << 20
MAX_HEADER_BYTES = 16 << 10
"""Limit of a request's headers, compressed or not."""
MAX_CONTINUATIONS = 16
MAX_SIZE_UPDATES = 2
"""Limit of table size updates before a request (RFC 7541, 4.2: the least size, and the current size)."""
MAX_PENDING_BYTES = 1 << 20
"""Unsent data above which a stream gets no further receive window."""
UNANSWERED_PER_S = 1_000
"""Refill rate for unanswered streams (CVE-2023-44487, CVE-2025-8671)."""
IDLE_FRAMES = 5_000
"""Burst of PING, SETTINGS, PRIORITY, WINDOW_UPDATE, empty DATA, CONTINUATION. Each frame sent earns another, for its
WINDOW_UPDATE.
"""
IDLE_FRAMES_PER_S = 1_000
REMEMBERED_STREAMS = 1_024
REASONABLE_BLOCK = 64
"""Free work per request's headers: 32 fields of 64 bytes. More counts as empty frames."""
REMEMBERED_BLOCKS, REMEMBERED_BLOCK_BYTES, REMEMBERED_FIELDS = 16, 512, 32
"""Decoded headers while the header table is unchanged: Envoy repeats them."""

DATA, HEADERS, PRIORITY, RST_STREAM, SETTINGS, PUSH_PROMISE, PING, GOAWAY, WINDOW_UPDATE, CONTINUATION = range(10)
END_STREAM = ACK = 0x1
END_HEADERS, PADDED, HAS_PRIORITY = 0x4, 0x8, 0x20
NO_ERROR, PROTOCOL_ERROR, INTERNAL_ERROR, FLOW_CONTROL_ERROR = range(4)
STREAM_CLOSED, FRAME_SIZE_ERROR, REFUSED_STREAM, CANCEL, COMPRESSION_ERROR = range(5, 10)
ENHANCE_YOUR_CALM = 11
SET_PUSH, SET_MAX_STREAMS, SET_INITIAL_WINDOW, SET_MAX_FRAME, SET_MAX_HEADER_LIST = range(2, 7)
LARGEST_WINDOW = LARGEST_STREAM = (1 << 31) - 1
FIRST_WINDOW, FIRST_FRAME_BYTES, LARGEST_FRAME_BYTES = 65_535, 16_384, (1 << 24) - 1
HEAD = struct.Struct(">HBBBL")
WORD = struct.Struct(">L")
SETTING = struct.Struct(">HL")

_RESET_HERE, _RESET_THERE, _ENDED = range(3)
_PSEUDO = frozenset((b":method", b":scheme", b":path", b":authority"))
_OF_CONNECTIONS = frozenset((b"connection", b"keep-alive", b"proxy-connection", b"transfer-encoding", b"upgrade"))
_NO_NAME = bytes((*range(0x21), ord(":"), *range(0x41, 0x5B), *range(0x7F, 0x100)))
_NO_VALUE = b"\0\r\n"

Headers = list[tuple[bytes, bytes]]


class Http2Fault(Exception):
    """Connection error; ``code`` is RFC 9113's, ``reason`` a metric label."""

    def __init__(self, code: int, message: str, reason: str = "protocol") -> None:
        super().__init__(message)
        self.code = code
        self.reason = reason


class Calls(Protocol):
    """Callbacks for received frames. Each may answer at once."""

    def opened(self, stream: int, headers: Headers) -> None: ...

    def on_data(self, stream: int, data: bytes) -> None:
        """Handle data. Call ``consumed`` when it is processed."""
        ...

    def on_stream_end(self, stream: int) -> None: ...

    def aborted(self, stream: int) -> None: ...

    def refused(self, reason: str) -> None: ...


class _HeaderBlock(NamedTuple):
    headers: Headers
    bad_request: str  # reason why it is not a valid request (RFC 9113, 8.1.1), or empty
    bad_trailers: str
    length: int | None


@dataclass(slots=True, eq=False)
class Http2Stream:
    sends: int  # the peer's receive window; may be negative
    receives: int = WINDOW_BYTES  # our receive window
    owed: int = 0  # processed bytes, not yet returned to the peer's window
    length: int | None = None  # bytes still to come, by `content-length`
    pending: deque[bytes] = field(default_factory=deque)  # data that waits for the peer's window
    pending_bytes: int = 0
    answered: bool = False  # the answer has begun
    finished: bool = False  # the answer is complete, but not yet sent
    trailers: bytes | None = None
    half_closed: bool = False  # the peer has ended its side


class Http2:
    """HTTP/2 connection. ``fault`` is the error that has ended it."""

    def __init__(self, calls: Calls, most_streams: int) -> None:
        self.fault: Http2Fault | None = None
        self.begun = False
        self._calls = calls
        self._most_streams = most_streams
        self._now_s = 0.0
        self._idle = TokenBucket(IDLE_FRAMES_PER_S, IDLE_FRAMES)
        self._unanswered = TokenBucket(UNANSWERED_PER_S, max(UNANSWERED_PER_S, most_streams))

        self._buffer, self._at = b"", 0
        self._magic = False  # the preface has been read
        self._leaving = False
        self._last = self._highest = 0  # last stream for GOAWAY; highest stream seen
        # Headers that await CONTINUATION: stream, END_STREAM, True if invalid.
        self._unfinished: tuple[int, bool, bool] | None = None
        self._block = bytearray()
        self._continuations = 0
        self._decoder = Decoder(max_header_list_size=MAX_HEADER_BYTES)
        self._blocks: dict[bytes, _HeaderBlock] = {}  # cache of decoded headers
        self._over: dict[int, int] = {}  # closed streams, and how they were closed

        self._out: list[bytes] = []
        # Growing DATA frame at the end of `_out`: stream, index of its head, bytes.
        self._tail: tuple[int, int, int] | None = None
        self._open: dict[int, Http2Stream] = {}
        self.pending_bytes = 0
        self._blocked: dict[int, None] = {}  # streams that wait for the connection's window
        # Windows of the connection, and processed bytes to return to the peer's; the peer's limits:
        self._sends, self._receives, self._owed = FIRST_WINDOW, CONNECTION_WINDOW_BYTES, 0
        self._first_window, self._peer_frame = FIRST_WINDOW, FIRST_FRAME_BYTES
        ours = {SET_MAX_STREAMS: most_streams, SET_INITIAL_WINDOW: WINDOW_BYTES, SET_MAX_HEADER_LIST: MAX_HEADER_BYTES}
        self._frame(SETTINGS, 0, 0, b"".join(SETTING.pack(*item) for item in ours.items()))
        self._frame(WINDOW_UPDATE, 0, 0, WORD.pack(CONNECTION_WINDOW_BYTES - FIRST_WINDOW))

    def __len__(self) -> int:
        return len(self._open)

    @property
    def waiting(self) -> int:
        return len(self._buffer) - self._at

    def data_to_send(self) -> bytes:
        data = b"".join(self._out)
        self._out.clear()
        self._tail = None
        return data

    def leave(self) -> None:
        if not self._leaving and self.fault is None:
            self._leaving = True
            self._frame(GOAWAY, 0, 0, WORD.pack(self._last) + WORD.pack(NO_ERROR))

    # Input

    def receive(self, data: bytes) -> None:
        if self.fault is None:
            self._buffer = self._buffer[self._at :] + data if self._at < len(self._buffer) else data
            self._at = 0

    def drop(self) -> None:
        """Free the buffers before the garbage collector."""
        self._buffer, self._at, self._block = b"", 0, bytearray()
        self._out.clear()

    def handle(self, most: int, now_s: float) -> bool:
        """Process ``most`` units of work (at least 1 per frame). Return True if there may be more."""
        if self.fault is not None:
            return False
        self._now_s = now_s
        try:
            return self._handle(most)
        except Http2Fault as fault:
            self.fault = fault
            self._buffer, self._at = b"", 0
            self._calls.refused(fault.reason)
            self._frame(GOAWAY, 0, 0, WORD.pack(self._last) + WORD.pack(fault.code) + str(fault).encode()[:200])
            return False

    def _handle(self, work: int) -> bool:
        """Process complete frames, up to ``work`` units; return True if input remains."""
        buffer = self._buffer
        if not self._magic:
            if not PREFACE.startswith(buffer[: len(PREFACE)]):
                raise Http2Fault(PROTOCOL_ERROR, "no HTTP/2 preface", "preface")
            if len(buffer) < len(PREFACE):
                return False
            self._magic, self._at = True, len(PREFACE)
        while work > 0:
            at = self._at
            if len(buffer) - at < HEAD.size:
                return False
            high, low, kind, flags, stream = HEAD.unpack_from(buffer, at)
            size = high << 8 | low
            if size > MAX_FRAME_BYTES:
                raise Http2Fault(FRAME_SIZE_ERROR, f"a frame of {size} bytes")
            end = at + HEAD.size + size
            if end > len(buffer):
                return False
            self._at = end
            work -= self._on_frame(kind, flags, stream & LARGEST_STREAM, buffer[end - size : end])
        return len(buffer) > self._at

    def _on_frame(self, kind: int, flags: int, stream: int, payload: bytes) -> int:
        """Return the units of work."""
        if self._unfinished is not None and kind != CONTINUATION:
            raise Http2Fault(PROTOCOL_ERROR, "HEADERS without their CONTINUATION")
        if not self.begun:
            if kind != SETTINGS or flags & ACK:
                raise Http2Fault(PROTOCOL_ERROR, "the first frame must be SETTINGS", "preface")
            self.begun = True
        if kind == DATA:
            self._on_data(flags, stream, payload)
        elif kind == HEADERS:
            return self._on_headers(flags, stream, payload)
        elif kind == CONTINUATION:
            return self._on_continuation(flags, stream, payload)
        elif kind == WINDOW_UPDATE:
            self._on_window(stream, payload)
        elif kind == RST_STREAM:
            self._on_reset(stream, payload)
        elif kind == SETTINGS:
            return self._on_settings(flags, stream, payload)
        elif kind == PING:
            if stream:
                raise Http2Fault(PROTOCOL_ERROR, "PING with a stream")
            if len(payload) != 8:
                raise Http2Fault(FRAME_SIZE_ERROR, "PING of a wrong size")
            self._spend("pings")
            if not flags & ACK:
                self._frame(PING, ACK, 0, payload)
        elif kind == PRIORITY:
            self._on_priority(stream, payload)
        elif kind == PUSH_PROMISE or (kind == GOAWAY and stream):
            raise Http2Fault(PROTOCOL_ERROR, "PUSH_PROMISE, or GOAWAY with a stream, from a client")
        elif kind == GOAWAY and len(payload) < 8:
            raise Http2Fault(FRAME_SIZE_ERROR, "GOAWAY of a wrong size")
        else:
            self._spend("unknown-frames")
        return 1

    def _on_data(self, flags: int, stream: int, payload: bytes) -> None:
        state = self._open.get(stream)
        if state is None:
            self._must_not_be_idle(stream)
        # Padding counts in both windows. The connection's window is charged and paid back for closed streams, too: the
        # peer has spent it, and its other streams would starve (RFC 9113, 6.9).
        size = len(payload)
        self._receives -= size
        if self._receives < 0:
            raise Http2Fault(FLOW_CONTROL_ERROR, "DATA beyond the connection's window")
        data = unpadded(flags, payload)
        ends = bool(flags & END_STREAM)
        if state is None:
            self.consumed(stream, size)
            if self._over.get(stream) == _RESET_HERE:
                self._spend("late-frames")  # it was sent before the peer saw the reset
            else:
                self._refuse(stream, STREAM_CLOSED)
            return
        if state.finished and not state.half_closed:
            # The answer was complete before the request was: the rest of the request is read and dropped.
            state.half_closed = ends
            self.consumed(stream, size)
            return
        state.receives -= size
        if state.length is not None:
            state.length -= len(data)
        wrong = (
            STREAM_CLOSED
            if state.half_closed
            else FLOW_CONTROL_ERROR
            if state.receives < 0
            else PROTOCOL_ERROR
            if state.length is not None and (state.length < 0 or (ends and state.length))
            else None
        )
        if wrong is not None:
            self.consumed(stream, size)
            self._refuse(stream, wrong)
            return
        state.half_closed = ends
        if size != len(data):
            self.consumed(stream, size - len(data))
        if data:
            self._calls.on_data(stream, data)
        elif not ends:
            self._spend("empty-data")
        if ends and self._awaits_input(stream):
            self._calls.on_stream_end(stream)

    # Headers

    def _on_headers(self, flags: int, stream: int, payload: bytes) -> int:
        if not stream % 2:
            raise Http2Fault(PROTOCOL_ERROR, "a client's stream must be odd")
        block, ends, wrong = unpadded(flags, payload), bool(flags & END_STREAM), False
        if flags & HAS_PRIORITY:
            if len(block) < 5:
                raise Http2Fault(FRAME_SIZE_ERROR, "HEADERS too short for their priority")
            wrong = WORD.unpack_from(block)[0] & LARGEST_STREAM == stream  # it depends on itself
            block = block[5:]
        if flags & END_HEADERS:
            return self._on_block(stream, ends, wrong, block)
        self._unfinished, self._block, self._continuations = (stream, ends, wrong), bytearray(block), 0
        return 1

    def _on_continuation(self, flags: int, stream: int, payload: bytes) -> int:
        if self._unfinished is None or self._unfinished[0] != stream:
            raise Http2Fault(PROTOCOL_ERROR, "CONTINUATION without HEADERS")
        self._spend("continuations")
        self._continuations += 1
        self._block += payload
        if self._continuations > MAX_CONTINUATIONS or len(self._block) > MAX_HEADER_BYTES:
            raise Http2Fault(ENHANCE_YOUR_CALM, "too many CONTINUATION frames", "continuations")
        if not flags & END_HEADERS:
            return 1
        _, ends, wrong = self._unfinished
        self._unfinished = None
        return self._on_block(stream, ends, wrong, bytes(self._block))

    def _on_block(self, stream: int, ends: bool, wrong: bool, block: bytes) -> int:
        """Process complete headers; return the units of work."""
        # Blocks of closed streams are decoded, too: the header table depends on all blocks.
        decoded = self._blocks.get(block)
        cost = 1
        if decoded is None:
            decoded = self._read_block(block)
            # Decoding costs about 0.2 µs per byte and 5 µs per field; a frame costs about 5 µs.
            cost += len(block) // 64 + len(decoded.headers)
            if cost > REASONABLE_BLOCK:
                self._spend("headers", cost / 4)
        state = self._open.get(stream)
        if state is not None:
            self._on_trailers(stream, state, ends, wrong or bool(decoded.bad_trailers))
        elif stream > self._highest:
            self._open_stream(stream, ends, wrong, decoded)
        elif (how := self._over.get(stream)) == _RESET_HERE:
            self._spend("late-frames")
        elif how == _RESET_THERE:
            self._refuse(stream, STREAM_CLOSED)
        elif how == _ENDED:
            raise Http2Fault(STREAM_CLOSED, "HEADERS on a closed stream")
        else:
            raise Http2Fault(PROTOCOL_ERROR, "stream numbers must increase")
        return cost

    def _on_trailers(self, stream: int, state: Http2Stream, ends: bool, bad: bool) -> None:
        if state.half_closed:
            self._refuse(stream, STREAM_CLOSED)
        elif state.finished:
            state.half_closed = ends
        elif bad or not ends or state.length:
            self._refuse(stream, PROTOCOL_ERROR)
        else:
            state.half_closed = True
            if self._awaits_input(stream):
                self._calls.on_stream_end(stream)

    def _open_stream(self, stream: int, ends: bool, wrong: bool, read: _HeaderBlock) -> None:
        self._highest = stream
        if self._leaving or len(self._open) >= self._most_streams:
            if not self._leaving:
                self._last = stream
            self._refuse(stream, REFUSED_STREAM, "streams")
            return
        self._last = stream
        if wrong or read.bad_request or (ends and read.length):
            self._refuse(stream, PROTOCOL_ERROR)
            return
        state = self._open[stream] = Http2Stream(self._first_window)
        state.half_closed, state.length = ends, read.length
        self._calls.opened(stream, read.headers)
        if ends and self._awaits_input(stream):
            self._calls.on_stream_end(stream)

    def _read_block(self, block: bytes) -> _HeaderBlock:
        """Decode headers, or raise ``Http2Fault``."""
        if block and block[0] & 0xE0 == 0x20:
            _check_size_updates(block)
        # The meaning of a block depends on the header table, and decoding may change the table. A result is cached only
        # while the table stays the same, judged by its newest entry, its length and its size.
        table = self._decoder.header_table
        entries = table.dynamic_entries
        before = (entries[0] if entries else None, len(entries), table.maxsize)
        try:
            headers = [(bytes(header[0]), bytes(header[1])) for header in self._decoder.decode(block, raw=True)]
        except OversizedHeaderListError as error:
            raise Http2Fault(ENHANCE_YOUR_CALM, "headers too large when decompressed", "headers") from error
        except (HPACKError, IndexError, ValueError) as error:
            raise Http2Fault(COMPRESSION_ERROR, f"invalid headers: {error}") from error
        decoded = _HeaderBlock(headers, *_validate(headers))
        after = (entries[0] if entries else None, len(entries), table.maxsize)
        if before[0] is not after[0] or before[1:] != after[1:]:
            self._blocks.clear()  # the header table has changed
        elif len(block) <= REMEMBERED_BLOCK_BYTES and len(headers) <= REMEMBERED_FIELDS:
            if len(self._blocks) >= REMEMBERED_BLOCKS:
                self._blocks.clear()
            self._blocks[block] = decoded
        return decoded

    # Control frames

    def _on_reset(self, stream: int, payload: bytes) -> None:
        if len(payload) != WORD.size:
            raise Http2Fault(FRAME_SIZE_ERROR, "RST_STREAM of a wrong size")
        state = self._open.get(stream)
        if state is None:
            self._must_not_be_idle(stream)
            self._spend("late-frames")
            return
        self._close(stream, _RESET_THERE)
        if not state.finished:
            self._calls.aborted(stream)
        if not state.answered:
            self._waste("resets")

    def _on_priority(self, stream: int, payload: bytes) -> None:
        if not stream:
            raise Http2Fault(PROTOCOL_ERROR, "PRIORITY without a stream")
        self._spend("priorities")
        if len(payload) != 5:
            self._refuse(stream, FRAME_SIZE_ERROR)
        elif WORD.unpack_from(payload)[0] & LARGEST_STREAM == stream:
            self._refuse(stream, PROTOCOL_ERROR)

    def _on_window(self, stream: int, payload: bytes) -> None:
        if len(payload) != WORD.size:
            raise Http2Fault(FRAME_SIZE_ERROR, "WINDOW_UPDATE of a wrong size")
        self._spend("window-updates")
        more = WORD.unpack(payload)[0] & LARGEST_WINDOW
        if not stream:
            self._grow(more)
            return
        state = self._open.get(stream)
        if state is None:
            self._must_not_be_idle(stream)
            return
        state.sends += more
        if not more or state.sends > LARGEST_WINDOW:
            self._refuse(stream, FLOW_CONTROL_ERROR if more else PROTOCOL_ERROR)
        elif state.pending or state.finished:
            self._send_pending(stream, state)

    def _on_settings(self, flags: int, stream: int, payload: bytes) -> int:
        if stream:
            raise Http2Fault(PROTOCOL_ERROR, "SETTINGS with a stream")
        if len(payload) % SETTING.size or (flags & ACK and payload):
            raise Http2Fault(FRAME_SIZE_ERROR, "SETTINGS of a wrong size")
        self._spend("settings")
        if flags & ACK:
            return 1
        cost = 1
        for name, value in SETTING.iter_unpack(payload):
            if name == SET_PUSH and value > 1:
                raise Http2Fault(PROTOCOL_ERROR, "ENABLE_PUSH must be 0 or 1")
            if name == SET_MAX_FRAME:
                if not FIRST_FRAME_BYTES <= value <= LARGEST_FRAME_BYTES:
                    raise Http2Fault(PROTOCOL_ERROR, "invalid MAX_FRAME_SIZE")
                self._peer_frame = value
            elif name == SET_INITIAL_WINDOW:
                if value > LARGEST_WINDOW:
                    raise Http2Fault(FLOW_CONTROL_ERROR, "invalid window size")
                if value != self._first_window:
                    cost += len(self._open) // 16
                    self._spend("settings", 1 + len(self._open) / 64)
                    self._set_first_window(value)
        self._frame(SETTINGS, ACK, 0, b"")
        return cost

    def _awaits_input(self, stream: int) -> bool:
        state = self._open.get(stream)
        return state is not None and not state.finished

    def _must_not_be_idle(self, stream: int) -> None:
        if not stream % 2 or stream > self._highest:
            raise Http2Fault(PROTOCOL_ERROR, "a frame for an idle stream")

    def _refuse(self, stream: int, code: int, reason: str = "protocol") -> None:
        """Reset a stream after the peer's error (RFC 9113, 5.4.2)."""
        state = self._open.get(stream)
        self._calls.refused(reason)
        self._close(stream, _RESET_HERE)
        self._frame(RST_STREAM, 0, stream, WORD.pack(code))
        if state is not None and not state.finished:
            self._calls.aborted(stream)
        self._waste(reason)

    def _waste(self, reason: str) -> None:
        if self._unanswered.spend(1, self._now_s) < 0:
            raise Http2Fault(ENHANCE_YOUR_CALM, "too many streams were reset or refused", reason)

    def _spend(self, reason: str, amount: float = 1) -> None:
        if self._idle.spend(amount, self._now_s) < 0:
            raise Http2Fault(ENHANCE_YOUR_CALM, f"too many {reason}", reason)

    def _close(self, stream: int, how: int) -> None:
        state = self._open.pop(stream, None)
        if state is not None and state.pending:
            self.pending_bytes -= state.pending_bytes
        self._blocked.pop(stream, None)
        over = self._over
        over[stream] = how  # decides about frames that arrive later
        if len(over) > REMEMBERED_STREAMS:
            del over[next(iter(over))]

    # Output

    def headers(self, stream: int, block: bytes) -> None:
        state = self._open.get(stream)
        if state is not None:
            state.answered = True
            self._frame(HEADERS, END_HEADERS, stream, block)
            self._idle.give_back(1)

    def data(self, stream: int, data: bytes) -> None:
        state = self._open.get(stream)
        if state is None or state.finished:
            return
        if not state.pending and len(data) <= min(state.sends, self._sends, self._peer_frame):  # it fits the windows
            self._data_frame(stream, state, data)
            return
        state.pending.append(data)
        state.pending_bytes += len(data)
        self.pending_bytes += len(data)
        self._send_pending(stream, state)

    def finish(self, stream: int, trailers: bytes | None) -> None:
        """End the answer. No callbacks follow for the stream."""
        state = self._open.get(stream)
        if state is not None and not state.finished:
            state.answered = state.finished = True
            state.trailers = trailers
            self._send_pending(stream, state)

    def reset(self, stream: int, code: int) -> None:
        if stream in self._open:
            self._close(stream, _RESET_HERE)
            self._frame(RST_STREAM, 0, stream, WORD.pack(code))

    def consumed(self, stream: int, count: int) -> None:
        """Return ``count`` processed bytes to the peer's windows."""
        self._owed += count
        if self._owed >= CONNECTION_WINDOW_BYTES // 4:
            self._frame(WINDOW_UPDATE, 0, 0, WORD.pack(self._owed))
            self._receives += self._owed
            self._owed = 0
        state = self._open.get(stream)
        if state is not None:
            state.owed += count
            if state.owed >= WINDOW_BYTES // 4:
                self._give_back(stream, state)

    def pending(self, stream: int) -> int:
        state = self._open.get(stream)
        return 0 if state is None else state.pending_bytes

    def ping(self) -> None:
        self._frame(PING, 0, 0, b"skymemor")

    def _frame(self, kind: int, flags: int, stream: int, payload: bytes) -> None:
        size = len(payload)
        self._out.append(HEAD.pack(size >> 8, size & 0xFF, kind, flags, stream))
        self._out.append(payload)
        self._tail = None

    def _data_frame(self, stream: int, state: Http2Stream, data: bytes) -> None:
        # Answers to a stream in one turn of the loop leave in one frame: Envoy then parses fewer heads and sends fewer
        # updates.
        size = len(data)
        state.sends -= size
        self._sends -= size
        out, tail = self._out, self._tail
        if tail is not None and tail[0] == stream and tail[2] + size <= self._peer_frame:
            index, size = tail[1], tail[2] + size
            out[index] = HEAD.pack(size >> 8, size & 0xFF, DATA, 0, stream)
            out.append(data)
        else:
            index = len(out)
            self._frame(DATA, 0, stream, data)
            self._idle.give_back(1)
        self._tail = (stream, index, size)

    def _give_back(self, stream: int, state: Http2Stream) -> None:
        if state.owed >= WINDOW_BYTES // 4 and state.pending_bytes <= MAX_PENDING_BYTES and not state.half_closed:
            self._frame(WINDOW_UPDATE, 0, stream, WORD.pack(state.owed))
            state.receives += state.owed
            state.owed = 0

    def _send_pending(self, stream: int, state: Http2Stream) -> None:
        """Send what the windows allow, and a finished answer's end."""
        while state.pending:
            most = min(state.sends, self._sends, self._peer_frame)
            if most <= 0:
                if self._sends <= 0:
                    self._blocked[stream] = None  # continued by `_grow`; for the stream's own window, by `_on_window`
                return
            first = state.pending.popleft()
            if len(first) > most:
                state.pending.appendleft(first[most:])
                first = first[:most]
            state.pending_bytes -= len(first)
            self.pending_bytes -= len(first)
            self._data_frame(stream, state, first)
        if not state.finished:
            self._give_back(stream, state)
            return
        if state.trailers is None:
            self._frame(DATA, END_STREAM, stream, b"")
        else:
            self._frame(HEADERS, END_HEADERS | END_STREAM, stream, state.trailers)
        self._idle.give_back(1)
        if state.half_closed:
            self._close(stream, _ENDED)
        else:
            self.reset(stream, NO_ERROR)  # RFC 9113, 8.1: the rest of the request is not needed

    # The peer's windows

    def _grow(self, more: int) -> None:
        self._sends += more
        if not more or self._sends > LARGEST_WINDOW:
            raise Http2Fault(FLOW_CONTROL_ERROR if more else PROTOCOL_ERROR, "invalid window size")
        while self._sends > 0 and self._blocked:  # streams that waited for the connection's window
            stream = next(iter(self._blocked))
            del self._blocked[stream]
            self._send_pending(stream, self._open[stream])

    def _set_first_window(self, value: int) -> None:
        # The change applies to open streams, too, and may make their windows negative (RFC 9113, 6.9.2).
        more = value - self._first_window
        self._first_window = value
        for stream, state in list(self._open.items()):
            state.sends += more
            if state.sends > LARGEST_WINDOW:
                raise Http2Fault(FLOW_CONTROL_ERROR, "invalid window size")
            if state.pending:
                self._send_pending(stream, state)


def unpadded(flags: int, payload: bytes) -> bytes:
    if not flags & PADDED:
        return payload
    if not payload:
        raise Http2Fault(FRAME_SIZE_ERROR, "a padded frame without a padding length")
    if payload[0] >= len(payload):
        raise Http2Fault(PROTOCOL_ERROR, "padding longer than the frame")
    return payload[1 : len(payload) - payload[0]]


def literals(headers: Iterable[tuple[bytes, bytes]]) -> bytes:
    """Encode headers without the header table."""
    return b"".join(b"\x00" + _length(len(name)) + name + _length(len(value)) + value for name, value in headers)


def _length(count: int) -> bytes:
    """Encode an integer with a prefix of 7 bits (RFC 7541, 5.1)."""
    if count < 127:
        return bytes((count,))
    count -= 127
    coded = bytearray((127,))
    while count >= 128:
        coded.append(count & 127 | 128)
        count >>= 7
    coded.append(count)
    return bytes(coded)


def _check_size_updates(block: bytes) -> None:
    """Limit size updates, of which `hpack` processes a frame full, at 1.5 µs each."""
    at = count = 0
    while at < len(block) and block[at] & 0xE0 == 0x20:
        count += 1
        if count > MAX_SIZE_UPDATES:
            raise Http2Fault(COMPRESSION_ERROR, "too many table size updates", "headers")
        try:
            at += decode_integer(block[at : at + 8], 5)[1]
        except HPACKError as error:
            raise Http2Fault(COMPRESSION_ERROR, f"invalid headers: {error}") from error


def _validate(headers: Headers) -> tuple[str, str, int | None]:
    """Return errors as a request and as trailers (RFC 9113, 8.2 and 8.3), and ``content-length``."""
    bad_request = bad_trailers = ""
    pseudo: set[bytes] = set()
    regular = False
    length: int | None = None
    for name, value in headers:
        bad = ""
        if name[:1] == b":":
            bad_trailers = "a pseudo-header in trailers"
            if regular or name not in _PSEUDO or name in pseudo:
                bad = "a misplaced, repeated or unknown pseudo-header"
            pseudo.add(name)
            if name == b":path" and not value:
                bad = "an empty :path"
        else:
            regular = True
            if not name or name.translate(None, _NO_NAME) != name:
                bad = "an invalid header name"
            elif name in _OF_CONNECTIONS or (name == b"te" and value != b"trailers"):
                bad = "a connection-specific header"
            elif name == b"content-length":
                if not value.isdigit() or len(value) > 18 or length not in (None, int(value)):
                    bad = "an invalid content-length"
                else:
                    length = int(value)
        if value.translate(None, _NO_VALUE) != value or value.strip(b" \t") != value:
            bad = "an invalid header value"
        bad_request, bad_trailers = bad_request or bad, bad_trailers or bad
    if not bad_request and not pseudo.issuperset((b":method", b":scheme", b":path")):
        bad_request = ":method, :scheme or :path is missing"
    return bad_request, bad_trailers, length
