"""The bars of the cake demo: a prompt's chunks, coloured by where they came from, as they come."""

from __future__ import annotations

import os
import threading
import time
from typing import TextIO

from skymemory.cli._demo_motion_screen import Screen
from skymemory.units import format_size

WIDTH = 56
COMPUTED, LOADED, NOTHING = "█", "▒", "·"
_COLOURS = {COMPUTED: "\x1b[38;5;215m", LOADED: "\x1b[38;5;75m", NOTHING: "\x1b[2m"}
_PLAIN = "\x1b[0m"
_FRAME_S = 0.04
_WAYS = ("compute", "load", "both")


def bar(computed: int, width: int) -> str:
    """``computed`` of ``width`` columns computed, the rest loaded."""
    return COMPUTED * computed + LOADED * (width - computed)


class Bars:
    """Three bars that fill, drawn in place on a terminal and said line by line elsewhere. Told from any thread."""

    def __init__(self, stream: TextIO, began_s: float, *, colour: bool) -> None:
        self._screen = Screen(stream, WIDTH + 24, began_s, line_every_s=float("inf"))
        self._colour = colour and self._screen.live and "NO_COLOR" not in os.environ
        self._lock = threading.Lock()
        self._title = ""
        self._chunks: dict[str, list[str]] = {}
        self._words: dict[str, str] = {}
        self._way = ""
        self._began_s = 0.0
        self._drawn_s = 0.0

    def title(self, tokens: int, size_bytes: int, bytes_per_s: float, share: float) -> None:
        """What is about to be shown."""
        ours = f", {share:.0%} of each step ours" if share < 1 else ""
        self._title = (
            f"{tokens:,} tokens, {format_size(size_bytes)} of keys and values, over a link of "
            f"{bytes_per_s / 1e6:.1f} MB/s: as soon loaded as computed{ours}"
        )
        self._screen.say(self._title)

    def say(self, words: str) -> None:
        with self._lock:
            self._screen.say(words)

    def way(self, word: str) -> None:
        """The next bar, or none of the three."""
        with self._lock:
            self._way = word if word not in self._words else ""

    def begin(self, chunks: int) -> None:
        with self._lock:
            self._chunks[self._way] = [NOTHING] * chunks
            self._began_s = time.monotonic()
            self._draw()

    def settled(self, index: int, origin: str) -> None:
        """A chunk is there."""
        with self._lock:
            self._chunks[self._way][index] = COMPUTED if origin == "computed" else LOADED
            if time.monotonic() - self._drawn_s >= _FRAME_S:
                self._draw()

    def ended(self, seconds: float, met_at_token: int | None) -> None:
        """The bar is full."""
        with self._lock:
            met = f", met at token {met_at_token:,}" if met_at_token is not None else ""
            self._words[self._way] = f"{seconds:.2f} s{met}"
            self._draw()
            if not self._screen.live:
                self._screen.say(f"{self._way:<8}{self._bar(self._way)} {self._words[self._way]}")

    def _draw(self) -> None:
        self._drawn_s = time.monotonic()
        if self._screen.live:
            lines = []
            for way in _WAYS:
                words = self._words.get(way, "")
                if way == self._way and not words:
                    words = f"{self._drawn_s - self._began_s:.2f} s"
                lines.append(f"  {way:<8}{self._bar(way)} {words}")
            legend = f"  {self._paint(COMPUTED)} computed  {self._paint(LOADED)} loaded"
            self._screen.show([*lines, legend], [])

    def _bar(self, way: str) -> str:
        chunks = self._chunks.get(way) or [NOTHING]
        columns = [chunks[at * len(chunks) // WIDTH] for at in range(WIDTH)]
        return "".join(self._paint(one) for one in columns)

    def _paint(self, one: str) -> str:
        return f"{_COLOURS[one]}{one}{_PLAIN}" if self._colour else one

    def close(self) -> None:
        with self._lock:
            self._screen.close()
