"""Tokens as text, piece by piece: no half characters, nothing of a stop text."""

from __future__ import annotations

from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

_REPLACEMENT = "�"


class TextStream:
    """What may be shown so far. A piece is held back while it could be part of a character or of a stop text.

    ``stopped``: the text has come to one of ``stops``; it ends before it, and takes no more tokens.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, stops: Sequence[str] = ()) -> None:
        self._tokenizer = tokenizer
        self._stops = tuple(stops)
        self._ids: list[int] = []
        self._window = 0
        """From here on tokens are decoded: new ones need those before them to get their spaces right."""
        self._read = 0
        """Tokens before this are in the text."""
        self._held = ""
        self.stopped = False

    def add(self, token: int) -> str:
        """The text that is certain now and was not before."""
        self._ids.append(token)
        before, now = self._decode(self._read), self._decode(len(self._ids))
        if len(now) <= len(before) or now.endswith(_REPLACEMENT):
            return ""
        self._window, self._read = self._read, len(self._ids)
        return self._released(self._held + now[len(before) :], ended=False)

    def finish(self) -> str:
        """What was held back, now that no token follows."""
        if self.stopped:
            return ""
        rest = self._decode(len(self._ids))[len(self._decode(self._read)) :]
        self._read = len(self._ids)
        return self._released(self._held + rest, ended=True)

    def _decode(self, end: int) -> str:
        return str(self._tokenizer.decode(self._ids[self._window : end], skip_special_tokens=True))

    def _released(self, text: str, ended: bool) -> str:
        found = [at for at in (text.find(stop) for stop in self._stops) if at >= 0]
        if found:
            self.stopped, self._held = True, ""
            return text[: min(found)]
        keep = 0 if ended else max((_overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]


def _overlap(text: str, stop: str) -> int:
    """Characters at the end of ``text`` that ``stop`` begins with."""
    return next((size for size in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:size])), 0)
