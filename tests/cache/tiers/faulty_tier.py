"""A memory store that fails by a seed: raises, hangs and lands late, drops, spoils, swaps and miscounts."""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from collections.abc import Sequence

from skymemory import native
from skymemory.errors import ConstellationError
from skymemory.store.base import Buffer, LoadTicket, Places, Presence, StoreTicket
from skymemory.store.memory import MemoryStore

TROUBLES = ("raise", "slow", "lie", "spoil")


def sealed(key: bytes, payload: bytes) -> bytes:
    """A value that says which key it is of, so that ``whole`` can check it."""
    return native.crc32(key + payload).to_bytes(4, "big") + payload


def whole(key: bytes, value: memoryview) -> bool:
    return len(value) >= 4 and native.crc32(key + bytes(value[4:])) == int.from_bytes(value[:4], "big")


class FaultyTier(MemoryStore):
    """``trouble`` (one of ``TROUBLES`` or empty) befalls calls with probability ``rate``; all wait for ``hangs``."""

    def __init__(self, name: str, budget_bytes: int = 1 << 20, seed: int = 0, slow_s: float = 0.03) -> None:
        super().__init__(budget_bytes, name=name)
        self.trouble, self.rate, self.slow_s = "", 1.0, slow_s
        self.calls = 0
        self.asked_by: Counter[str] = Counter()
        """Calls by the name of their thread."""
        self.hangs: threading.Event | threading.Barrier | None = None
        self._dice = random.Random(seed)

    def _befallen(self, trouble: str) -> bool:
        return self.trouble == trouble and self._dice.random() < self.rate

    def _enter(self) -> None:
        self.calls += 1
        self.asked_by[threading.current_thread().name] += 1
        if self.hangs is not None:
            self.hangs.wait(20.0)
        if self._befallen("raise"):
            raise self._dice.choice([ConstellationError("dark"), ConnectionError("gone"), RuntimeError("broken")])
        if self._befallen("slow"):
            time.sleep(self.slow_s)

    def lookup(self, keys: Sequence[bytes]) -> list[Presence]:
        self._enter()
        found = super().lookup(keys)
        return [self._dice.choice(list(Presence)) for _ in found] if self._befallen("lie") else found

    def prefix(self, keys: Sequence[bytes]) -> int:
        self._enter()
        return self._dice.randrange(-2, 99) if self._befallen("lie") else super().prefix(keys)

    def prepare_load(self, keys: Sequence[bytes]) -> LoadTicket:
        self._enter()
        return super().prepare_load(keys)

    def complete_load(self, ticket: LoadTicket) -> list[memoryview | None]:
        self._enter()
        values = super().complete_load(ticket)
        if self._befallen("lie"):
            ticket.report = None
            return list(reversed(values))[: self._dice.randrange(len(values) + 1)]
        return [self._spoiled(value) if self._befallen("spoil") else value for value in values]

    def _spoiled(self, value: memoryview | None) -> memoryview | None:
        if not value:
            return value
        raw = bytearray(value)
        raw[self._dice.randrange(len(raw))] ^= 1 << self._dice.randrange(8)
        return memoryview(bytes(raw))[: self._dice.choice([None, len(raw) // 2])]

    def prepare_store(self, items: Sequence[tuple[bytes, Buffer]], places: Places = ()) -> StoreTicket:
        self._enter()
        return super().prepare_store(items, places)

    def complete_store(self, ticket: StoreTicket) -> list[bool]:
        self._enter()
        return super().complete_store(ticket)

    def delete(self, keys: Sequence[bytes]) -> list[bool]:
        self._enter()
        return super().delete(keys)

    def release(self, ticket: LoadTicket) -> None:
        self._enter()
        super().release(ticket)
