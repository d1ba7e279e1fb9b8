"""What goes out on one HTTP/2 connection: frames, within the windows that the peer gives its streams."""

from __future__ import annotations

from collections import deque

from skymemory.router.http2_frames import (
    CONNECTION_WINDOW_BYTES,
    DATA,
    END_HEADERS,
    END_STREAM,
    FIRST_FRAME_BYTES,
    FIRST_WINDOW,
    FLOW_CONTROL_ERROR,
    HEAD,
    HEADERS,
    LARGEST_WINDOW,
    MAX_PENDING_BYTES,
    NO_ERROR,
    PING,
    PROTOCOL_ERROR,
    RST_STREAM,
    WINDOW_BYTES,
    WINDOW_UPDATE,
    WORD,
    Fault,
)


class Stream:
    """One call: what both sides may still send, and what waits."""

    __slots__ = ("all_heard", "owed", "pending", "pending_bytes", "receives", "sends", "trailers")

    def __init__(self, sends: int) -> None:
        self.sends = sends
        """Bytes that the peer takes; after a change of its settings perhaps below 0."""
        self.receives = WINDOW_BYTES
        self.owed = 0
        """Bytes dealt with whose window the peer has not got back."""
        self.pending: deque[bytes] = deque()
        self.pending_bytes = 0
        self.trailers: bytes | None = None
        """Of an answer that is all said; the stream is over when they are out."""
        self.all_heard = False


class Sending:
    """``out`` is what to send; whoever sends it empties it."""

    def __init__(self) -> None:
        self.out = bytearray()
        self._open: dict[int, Stream] = {}
        self._sends, self._receives, self._owed = FIRST_WINDOW, CONNECTION_WINDOW_BYTES, 0
        self._first_window, self._peer_frame = FIRST_WINDOW, FIRST_FRAME_BYTES

    def __len__(self) -> int:
        """Streams under way."""
        return len(self._open)

    def headers(self, stream: int, block: bytes) -> None:
        if stream in self._open:
            self._frame(HEADERS, END_HEADERS, stream, block)

    def data(self, stream: int, data: bytes) -> None:
        """Now, or when the peer has room."""
        state = self._open.get(stream)
        if state is None or state.trailers is not None:
            return
        if not state.pending and len(data) <= min(state.sends, self._sends, self._peer_frame):
            state.sends -= len(data)
            self._sends -= len(data)
            self._frame(DATA, 0, stream, data)
            return
        state.pending.append(data)
        state.pending_bytes += len(data)
        self._send_pending(stream, state)

    def finish(self, stream: int, trailers: bytes) -> None:
        """The last headers, behind all data. The stream is over for us: nothing of it is told any more."""
        state = self._open.get(stream)
        if state is not None and state.trailers is None:
            state.trailers = trailers
            self._send_pending(stream, state)

    def reset(self, stream: int, code: int) -> None:
        if self._open.pop(stream, None) is not None:
            self._frame(RST_STREAM, 0, stream, WORD.pack(code))

    def consumed(self, stream: int, count: int) -> None:
        """So many bytes that came were dealt with: the peer may send as many again."""
        self._owed += count
        if self._owed >= CONNECTION_WINDOW_BYTES // 4:
            self._frame(WINDOW_UPDATE, 0, 0, WORD.pack(self._owed))
            self._receives += self._owed
            self._owed = 0
        state = self._open.get(stream)
        if state is not None:
            state.owed += count
            self._give_back(stream, state)

    def ping(self) -> None:
        self._frame(PING, 0, 0, b"skymemor")

    def _frame(self, kind: int, flags: int, stream: int, payload: bytes) -> None:
        size = len(payload)
        self.out += HEAD.pack(size >> 8, size & 0xFF, kind, flags, stream)
        self.out += payload

    def _give_back(self, stream: int, state: Stream) -> None:
        if state.owed >= WINDOW_BYTES // 4 and state.pending_bytes <= MAX_PENDING_BYTES and not state.all_heard:
            self._frame(WINDOW_UPDATE, 0, stream, WORD.pack(state.owed))
            state.receives += state.owed
            state.owed = 0

    def _send_pending(self, stream: int, state: Stream) -> None:
        while state.pending:
            most = min(state.sends, self._sends, self._peer_frame)
            if most <= 0:
                return
            first = state.pending.popleft()
            if len(first) > most:
                state.pending.appendleft(first[most:])
                first = first[:most]
            state.sends -= len(first)
            self._sends -= len(first)
            state.pending_bytes -= len(first)
            self._frame(DATA, 0, stream, first)
        if state.trailers is None:
            self._give_back(stream, state)
            return
        self._frame(HEADERS, END_HEADERS | END_STREAM, stream, state.trailers)
        if state.all_heard:
            del self._open[stream]
        else:
            self.reset(stream, NO_ERROR)  # RFC 9113, 8.1: all is said, and the rest of the request is not needed

    # What the peer takes

    def _grow(self, more: int) -> None:
        """
        Raises:
            Fault: the connection's window would be nothing that a window can be.
        """
        had_none = self._sends <= 0
        self._sends += more
        if not more or self._sends > LARGEST_WINDOW:
            raise Fault(FLOW_CONTROL_ERROR if more else PROTOCOL_ERROR, "a window that cannot be")
        if had_none:
            self._send_all_pending()

    def _grow_stream(self, stream: int, state: Stream, more: int) -> bool:
        """False: that cannot be, and the stream is over."""
        state.sends += more
        if not more or state.sends > LARGEST_WINDOW:
            self.reset(stream, FLOW_CONTROL_ERROR if more else PROTOCOL_ERROR)
            return False
        if state.pending:
            self._send_pending(stream, state)
        return True

    def _set_first_window(self, value: int) -> None:
        """
        Raises:
            Fault: a stream's window would be nothing that a window can be.
        """
        for state in self._open.values():
            state.sends += value - self._first_window
            if state.sends > LARGEST_WINDOW:
                raise Fault(FLOW_CONTROL_ERROR, "a window that cannot be")
        self._first_window = value
        self._send_all_pending()

    def _send_all_pending(self) -> None:
        for stream, state in list(self._open.items()):
            if state.pending:
                self._send_pending(stream, state)
