"""Responses and Messages for engines without these APIs: sent as chat completions, answered in the client's API.

After a 404, 405 or 501 a request is sent again as a chat completion. If that is served, the engine lacks the API for
ten minutes: it may be updated.
"""

from __future__ import annotations

from collections.abc import Callable

from skymemory.router.apis.chat import MAX_ANSWER_BYTES, UnreadableAnswer
from skymemory.router.apis.translation import StreamTranslation, Translation
from skymemory.router.http.connection import Headers
from skymemory.router.http.upstream import Receiver, ResponseHead, UpstreamCall, UpstreamError

MISSING_STATUSES = frozenset((404, 405, 501))
"""Statuses of an engine without the API, or without the model."""
FORGET_S = 600.0
_OF_BODY = frozenset((b"content-length", b"content-type", b"content-encoding", b"transfer-encoding"))


class MissingApis:
    """Record of servers that lack an API, whose requests are translated."""

    def __init__(self) -> None:
        self._missing_until_s: dict[tuple[str, str], float] = {}
        self._served_apis: set[tuple[str, str]] = set()  # APIs that have answered: a 404 concerns a model

    def is_missing(self, server: str, path: str, now_s: float) -> bool:
        until_s = self._missing_until_s.get((server, path))
        if until_s is None or now_s < until_s:
            return until_s is not None
        del self._missing_until_s[server, path]
        return False

    def is_there(self, server: str, path: str) -> bool:
        return (server, path) in self._served_apis

    def on_answer(self, server: str, path: str) -> None:
        self._served_apis.add((server, path))

    def learn(self, server: str, path: str, now_s: float) -> None:
        self._missing_until_s[server, path] = now_s + FORGET_S

    def forget(self, server: str) -> None:
        for server_path in [server_path for server_path in self._missing_until_s if server_path[0] == server]:
            del self._missing_until_s[server_path]
        self._served_apis = {server_path for server_path in self._served_apis if server_path[0] != server}


class TranslatedResponse:
    def __init__(self, receiver: Receiver, translation: Translation, on_fault: Callable[[], None]) -> None:
        """``on_fault`` is called in the handler of an exception, and ends the request."""
        self.call: UpstreamCall | None = None
        self._on_fault = on_fault
        self._receiver = receiver
        self._translation = translation
        self._response_head: ResponseHead | None = None
        self._stream: StreamTranslation | None = None
        self._pieces: list[bytes] = []
        self._size_bytes = 0

    def response_begins(self, head: ResponseHead) -> None:
        first = head.headers.first
        headers = [(name, value) for name, value in head.headers.raw if name.lower() not in _OF_BODY]
        is_stream = first.get(b"content-type", b"").startswith(b"text/event-stream") and head.status < 400
        if is_stream:
            self._stream = self._translation.stream()
        kind = b"text/event-stream; charset=utf-8" if is_stream else b"application/json"
        headers.append((b"Content-Type", kind))
        self._response_head = ResponseHead(head.status, head.reason, Headers(headers))
        self._response_head.chunked = self._response_head.framed = is_stream
        if first.get(b"content-encoding", b"identity") != b"identity":
            self._report_failure("its answer is compressed, though it was asked for one that is not")
            return
        self._receiver.response_begins(self._response_head)

    def response_data(self, piece: bytes, at_end: bool) -> None:
        try:
            self._pass_on_translated(piece, at_end)
        except Exception:
            self._close_call()
            self._on_fault()

    def _pass_on_translated(self, piece: bytes, at_end: bool) -> None:
        stream = self._stream
        if stream is None:
            self._collect(piece, at_end)
            return
        translated = stream.read(piece)
        if at_end:
            translated += stream.end()
        if stream.has_ended and not at_end:
            # Do not wait for data after the last event.
            self._close_call()
            at_end = True
        if translated or at_end:
            self._receiver.response_data(translated, at_end)

    def response_failed(self, error: UpstreamError) -> None:
        self._receiver.response_failed(error)

    def error_event(self, status: int, why: str) -> bytes:
        """Return the last event of a broken stream; empty: it was sent."""
        return b"" if self._stream is None or self._stream.has_ended else self._stream.fail(status, why)

    def _collect(self, piece: bytes, at_end: bool) -> None:
        self._pieces.append(piece)
        self._size_bytes += len(piece)
        head = self._response_head
        assert head is not None
        if self._size_bytes > MAX_ANSWER_BYTES:
            self._report_failure(f"its answer is longer than {MAX_ANSWER_BYTES} bytes")
        elif at_end:
            answer = b"".join(self._pieces)
            try:
                translated = (
                    self._translation.answer(answer)
                    if head.status < 400
                    else self._translation.error(head.status, answer)
                )
            except UnreadableAnswer as error:
                self._report_failure(f"its answer is no chat completion: {error}")
                return
            head.headers = Headers([*head.headers.raw, (b"Content-Length", b"%d" % len(translated))])
            head.framed = True
            self._receiver.response_data(translated, True)

    def _report_failure(self, why: str) -> None:
        self._close_call()
        self._receiver.response_failed(UpstreamError(why))

    def _close_call(self) -> None:
        if self.call is not None:
            self.call.close()
