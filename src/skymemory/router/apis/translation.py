"""A request to Responses or Messages that its engine serves as a chat completion."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Protocol

import msgspec

from skymemory.router.api_error import ApiError
from skymemory.router.apis import messages, responses
from skymemory.router.apis.chat import EventLines, UnreadableAnswer, as_object, error_in
from skymemory.router.apis.reading import Fields, reason_of

RESPONSES = responses.PATH
MESSAGES, COUNT_TOKENS = messages.PATH, messages.COUNT_PATH
API_PATHS = frozenset((RESPONSES, MESSAGES, COUNT_TOKENS))
PIECE_BYTES = 65_536
_DONE = b"[DONE]"
_fields = msgspec.json.Decoder(dict[str, msgspec.Raw])
_items = msgspec.json.Decoder(list[msgspec.Raw])


class _TranslatedStream(Protocol):
    """Translator of chunks to events of the client's API."""

    @property
    def finish(self) -> str: ...

    def read(self, chunk: Mapping[str, Any]) -> Iterator[bytes]: ...

    def end(self) -> Iterator[bytes]: ...

    def fail(self, status: int, message: str) -> Iterator[bytes]: ...


class Translation:
    def __init__(self, path: str, body: bytes) -> None:
        """Read the request. ``path``: an element of ``API_PATHS``.

        Raises:
            ApiError: 400, no such request, or a chat completion cannot express it.
        """
        self._path = path
        self._fields = read_fields(body)
        self.streams = path != COUNT_TOKENS and self._fields.get("stream") is True
        if path == RESPONSES:
            chat = responses.chat_request(self._fields)
        elif path == MESSAGES:
            chat = messages.chat_request(self._fields, needs_limit=True)
        else:
            chat = messages.counting_request(self._fields)
        self.body = _encoded(chat)

    def answer(self, body: bytes) -> bytes:
        """Translate a complete answer.

        Raises:
            UnreadableAnswer: no chat completion.
        """
        return msgspec.json.encode(self.answer_object(as_object(body)))

    def answer_object(self, answer: Mapping[str, Any]) -> dict[str, Any]:
        if self._path == RESPONSES:
            return responses.translate_answer(self._fields, answer)
        if self._path == MESSAGES:
            return messages.translate_answer(self._fields, answer)
        return messages.count(answer)

    def error(self, status: int, body: bytes) -> bytes:
        return body if self._path == RESPONSES else messages.error_body(status, _message_of(status, body))

    def stream(self) -> StreamTranslation:
        kind = responses.ResponseStream if self._path == RESPONSES else messages.MessageStream
        return StreamTranslation(kind(self._fields))


class StreamTranslation:
    """Translation of a stream's bytes; ``made`` translates its chunks."""

    def __init__(self, made: _TranslatedStream) -> None:
        self._made = made
        self._lines = EventLines()
        self.has_ended = False

    def read(self, piece: bytes) -> bytes:
        return b"".join(self._read(piece))

    def end(self) -> bytes:
        if self.has_ended:
            return b""
        return b"".join(self._end() if self._made.finish else self._fail("the engine ended its stream too early"))

    def chunk(self, chunk: Mapping[str, Any]) -> bytes:
        return b"".join(self._made.read(chunk))

    def fail(self, status: int, message: str) -> bytes:
        self.has_ended = True
        return b"".join(self._made.fail(status, message))

    def _read(self, piece: bytes) -> Iterator[bytes]:
        try:
            for data in self._lines.read(piece):
                if self.has_ended:
                    return
                if data.strip() == _DONE:
                    yield from self._end()
                    return
                chunk = as_object(data)
                if message := error_in(chunk):
                    yield from self._fail(message)
                    return
                yield from self._made.read(chunk)
        except UnreadableAnswer as error:
            yield from self._fail(f"the engine's stream cannot be read: {error}")

    def _end(self) -> Iterable[bytes]:
        self.has_ended = True
        return self._made.end()

    def _fail(self, message: str) -> Iterable[bytes]:
        self.has_ended = True
        return self._made.fail(502, message)


def prompt_body(path: str, body: bytes) -> bytes:
    """Return a chat completion with the engine's prompt, for routing.

    Raises:
        ApiError: 400, no such request, or it refers to stored state.
    """
    fields = read_fields(body)
    convert = responses.chat_request if path == RESPONSES else messages.chat_request
    return _encoded(convert(fields, strict=False))


def read_fields(body: bytes) -> Fields:
    """Decode the body.

    Raises:
        ApiError: 400, no JSON object.
    """
    name = ""
    fields: dict[str, Any] = {}
    try:
        for name, value in _fields.decode(body).items():
            fields[name] = _decoded_in_pieces(value)
    except msgspec.ValidationError as error:
        if name:  # a number that no type holds
            raise ApiError(400, f"`{name}` cannot be read: {error}", name) from error
        raise ApiError(400, "the body is not a JSON object") from error
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise ApiError(400, f"the body is not JSON: {reason_of(error, body)}") from error
    return fields


def _decoded_in_pieces(raw: msgspec.Raw) -> Any:
    """Decode a value, a long list item by item: the decoder blocks all other threads."""
    if len(raw) < PIECE_BYTES or bytes(memoryview(raw)[:1]) != b"[":
        return msgspec.json.decode(raw)
    return [msgspec.json.decode(item) for item in _items.decode(raw)]


def _encoded(chat: dict[str, Any]) -> bytes:
    try:
        return msgspec.json.encode(chat)
    except (OverflowError, ValueError, TypeError, RecursionError) as error:
        raise ApiError(400, f"the body cannot be translated to a chat completion: {error}") from error


# Errors in the format of the path's API


def error_body(path: str, error: ApiError) -> bytes:
    return messages.error_body(error.status, error.message) if is_of_messages(path) else error.body()


def error_event(path: str, status: int, message: str) -> bytes | None:
    """Return an error event; None: the path has chat-completion streams."""
    if is_of_messages(path):
        return messages.error_event(status, message)
    return responses.error_event(status, message) if path.endswith(RESPONSES) else None


def is_of_messages(path: str) -> bool:
    """Return True for Messages. The path's end decides, as a gateway may strip a prefix."""
    return path.endswith((MESSAGES, COUNT_TOKENS))


def _message_of(status: int, body: bytes) -> str:
    try:
        decoded = msgspec.json.decode(body)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return body[:1000].decode("utf-8", "replace") or f"the engine answered {status}"
    for place in ("error", "detail"):
        if isinstance(decoded, dict) and decoded.get(place):
            decoded = decoded[place]
    if isinstance(decoded, dict) and isinstance(decoded.get("message"), str):
        return str(decoded["message"])
    return decoded if isinstance(decoded, str) else body[:1000].decode("utf-8", "replace")
