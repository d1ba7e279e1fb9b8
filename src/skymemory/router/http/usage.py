"""What an answer says of its tokens (OpenAI's ``usage``), read beside its way to the client.

Bytes are looked at after they were passed on: nothing waits for this and nothing is changed by it.
"""

from __future__ import annotations

from typing import NamedTuple

import msgspec

MOST_BYTES = 1 << 20
"""Of an answer in one piece; what is longer is not looked at."""
TAIL_BYTES = 8192
"""Of a stream: its last event or the one before it carries the usage."""


class Usage(NamedTuple):
    prompt_tokens: int
    cached_tokens: int | None
    """Of the prompt; None: it does not say."""
    output_tokens: int | None = None

    def cached_of(self, tokens: int) -> int | None:
        """Of a prompt that we take to have ``tokens``, those that were cached: the engine counts by its own tokenizer,
        and without one we count four bytes as a token.
        """
        if self.cached_tokens is None or not self.prompt_tokens:
            return self.cached_tokens
        return round(self.cached_tokens * tokens / self.prompt_tokens)


class _Details(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    prompt_tokens_details: _Details | None = None


class _Answer(msgspec.Struct):
    usage: _Usage | None = None


_decode = msgspec.json.Decoder(_Answer).decode


class UsageReader:
    """Sees an answer's bytes as they pass."""

    __slots__ = ("_kept", "_streams", "_tail")

    def __init__(self, content_type: bytes, content_encoding: bytes = b"") -> None:
        """Of an answer that is neither JSON nor a stream of events, or that is packed, nothing is kept."""
        self._streams = content_type.startswith(b"text/event-stream")
        looked_at = not content_encoding and (self._streams or content_type.startswith(b"application/json"))
        self._kept: list[bytes] | None = [] if looked_at else None
        self._tail = b""

    @property
    def streams(self) -> bool:
        return self._streams

    @property
    def between_events(self) -> bool:
        """Whether a stream stands where an event of ours can be put."""
        return not self._tail or self._tail.endswith((b"\n\n", b"\r\n\r\n"))

    def add(self, piece: bytes) -> None:
        if self._streams:
            self._tail = piece[-TAIL_BYTES:] if len(piece) >= TAIL_BYTES else (self._tail + piece)[-TAIL_BYTES:]
        elif self._kept is not None:
            self._kept.append(piece)
            if len(self._kept) > 1 and sum(map(len, self._kept)) > MOST_BYTES:
                self._kept = None

    def usage(self) -> Usage | None:
        """What it said, if it did; to be asked when it has ended."""
        if self._kept is None:
            return None
        if not self._streams:
            return _usage_in(b"".join(self._kept))
        for line in reversed(self._tail.split(b"\n")):
            if line.startswith(b"data:") and b'"usage"' in line and (usage := _usage_in(line[5:])) is not None:
                return usage
        return None


def _usage_in(json: bytes) -> Usage | None:
    try:
        said = _decode(json).usage
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    if said is None or said.prompt_tokens is None or said.prompt_tokens < 0:
        return None
    cached = None if said.prompt_tokens_details is None else said.prompt_tokens_details.cached_tokens
    if cached is not None and not 0 <= cached <= said.prompt_tokens:
        cached = None
    output = said.completion_tokens
    return Usage(said.prompt_tokens, cached, None if output is not None and output < 0 else output)
