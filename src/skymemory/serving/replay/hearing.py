"""What the events of one streamed answer say: when its pieces came, how many tokens they were, how it ended."""

from __future__ import annotations

import json
import math
from typing import Any

from skymemory.serving.replay.sse import EventReader, NotEvents


class BadAnswer(ValueError):
    """An answer that is none; the words begin with the kind of fault, for counting."""


class Hearing:
    """``feed`` with the bytes of a stream as they come, then ``close``. Completions and chats alike.

    A piece of the answer is a chunk that carries text, or one whose token has none yet (half of a character). The
    chunk by which a chat begins, which names a role and no more, is none: some servers send it at once.
    """

    def __init__(self) -> None:
        self.first_s = math.nan
        self.gaps_s: list[float] = []
        self.prompt_tokens: int | None = None
        self.cached_tokens: int | None = None
        self.output_tokens: int | None = None
        self.finish: str | None = None
        self.done = False
        self._events = EventReader()
        self._last_s = math.nan

    def feed(self, piece: bytes, now_s: float) -> None:
        """Raises BadAnswer: no events, no JSON, or an error told by the server."""
        try:
            events = self._events.feed(piece)
        except NotEvents as error:
            raise BadAnswer(f"not server-sent events: {error}") from error
        for data in events:
            if data.strip() == "[DONE]":
                self.done = True
            elif not self.done:
                self._take(data, now_s)

    def close(self) -> None:
        """The stream ended. Raises BadAnswer where the answer did not."""
        if not self.done and self.finish is None:
            how = "in mid-event" if self._events.unfinished else "without finish_reason or [DONE]"
            raise BadAnswer(f"stream cut short: it ended {how}")

    def _take(self, data: str, now_s: float) -> None:
        try:
            chunk = json.loads(data)
        except ValueError as error:
            raise BadAnswer(f"not JSON: {data[:80]!r}") from error
        if not isinstance(chunk, dict):
            raise BadAnswer(f"not a chunk: {data[:80]!r}")
        if chunk.get("error") is not None:
            told = chunk["error"]
            raise BadAnswer(f"error in the stream: {told.get('message') if isinstance(told, dict) else told}")
        if isinstance(chunk.get("usage"), dict):
            self._count(chunk["usage"])
        choices = chunk.get("choices")
        if choices is not None and not isinstance(choices, list):
            raise BadAnswer(f"not a chunk: {data[:80]!r}")
        for choice in choices or ():
            if not isinstance(choice, dict):
                raise BadAnswer(f"not a chunk: {data[:80]!r}")
            if _says_something(choice):
                self._came(now_s)
            self.finish = choice.get("finish_reason") or self.finish

    def _came(self, now_s: float) -> None:
        if math.isnan(self.first_s):
            self.first_s = now_s
        else:
            self.gaps_s.append(now_s - self._last_s)
        self._last_s = now_s

    def _count(self, usage: dict[str, Any]) -> None:
        self.prompt_tokens = _whole(usage.get("prompt_tokens"))
        self.output_tokens = _whole(usage.get("completion_tokens"))
        details = usage.get("prompt_tokens_details")
        self.cached_tokens = _whole(details.get("cached_tokens")) if isinstance(details, dict) else None


def _says_something(choice: dict[str, Any]) -> bool:
    """It carries text, or stands for a token that has none yet."""
    delta = choice.get("delta")
    if isinstance(delta, dict):
        said = any(delta.get(name) for name in ("content", "reasoning_content", "reasoning", "tool_calls", "refusal"))
        return said or ("role" not in delta and choice.get("finish_reason") is None)
    return bool(choice.get("text")) or choice.get("finish_reason") is None


def _whole(value: object) -> int | None:
    return value if type(value) is int and value >= 0 else None
