"""An engine's memory and a source of chunks for tests of loading sessions: both notice what must not happen."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from skymemory.cache.cake.scheduler import PromptChunk


@dataclass
class Room:
    """Where chunks go: notices two sides in one place, and a write after the end."""

    writer: dict[int, str] = field(default_factory=dict)
    clashes: int = 0
    closed: bool = False
    late: int = 0

    def write(self, index: int, who: str, seconds: float) -> None:
        self.write_all([index], who, seconds)

    def compute(self, indices: Iterable[int], seconds: float) -> None:
        self.write_all(list(indices), "compute", seconds)

    def write_all(self, indices: list[int], who: str, seconds: float) -> None:
        self.late += self.closed
        for index in indices:
            self.clashes += index in self.writer
            self.writer[index] = who
        time.sleep(seconds)
        for index in indices:
            self.clashes += self.writer.pop(index, None) != who


class Source:
    def __init__(self, room: Room, fetch_s: Callable[[], float], place_s: float = 0.0) -> None:
        self.room, self.fetch_s, self.place_s = room, fetch_s, place_s
        self.failing: set[int] = set()
        self.wrong: set[int] = set()
        self.gate = threading.Event()
        self.gate.set()
        self.fetched: list[int] = []
        self.given_up: list[int] = []
        self.closed = False
        self.released = 0
        self.at_once = self.most_at_once = 0
        self.error: BaseException | None = None

    def give_up(self, index: int) -> None:
        self.given_up.append(index)

    def close(self) -> None:
        self.closed = True

    def fetch(self, index: int) -> Chunk | None:
        if self.error is not None:
            raise self.error
        self.at_once += 1
        self.most_at_once = max(self.most_at_once, self.at_once)
        time.sleep(self.fetch_s())
        self.gate.wait(30)
        self.at_once -= 1
        self.fetched.append(index)
        return None if index in self.failing else Chunk(self, index)


@dataclass
class Chunk:
    source: Source
    index: int

    def place(self) -> bool:
        self.source.room.write(self.index, "load", self.source.place_s)
        return self.index not in self.source.wrong

    def release(self) -> None:
        self.source.released += 1


def chunks(count: int, tokens: int = 10) -> list[PromptChunk]:
    return [PromptChunk(at * tokens, tokens, 1000, True) for at in range(count)]
