"""A store that lies: drops, truncates, flips, swaps, raises. What is behind it must never be believed."""

from __future__ import annotations

import random
from collections.abc import Sequence

from tests.contract.rows import receive

from skymemory.errors import ConstellationError
from skymemory.store.base import Buffer, LoadTicket, Places, Presence, StoreTicket
from skymemory.store.memory import MemoryStore

FAULTS = ("drop", "truncate", "extend", "flip", "swap", "empty", "garbage")
OUTAGES = ("prefix", "lookup", "prepare_load", "complete_load", "prepare_store", "delete", "release")


class HostileStore(MemoryStore):
    """A memory store whose loads carry ``fault`` with probability ``rate``; ``outage`` names the method that raises.
    ``in_place``: it puts values where they are wanted.
    """

    def __init__(
        self, fault: str = "", rate: float = 1.0, outage: str = "", seed: int = 0, in_place: bool = False
    ) -> None:
        super().__init__(1 << 28, name="hostile")
        self.fault, self.rate, self.outage, self.in_place = fault, rate, outage, in_place
        self.error: Exception = ConstellationError("the sky is dark")
        self._random = random.Random(seed)

    def _fail(self, method: str) -> None:
        if self.outage == method:
            raise self.error

    def prefix(self, keys: Sequence[bytes]) -> int:
        self._fail("prefix")
        return super().prefix(keys)

    def lookup(self, keys: Sequence[bytes]) -> list[Presence]:
        self._fail("lookup")
        return super().lookup(keys)

    def prepare_load(self, keys: Sequence[bytes]) -> LoadTicket:
        self._fail("prepare_load")
        return super().prepare_load(keys)

    def prepare_store(self, items: Sequence[tuple[bytes, Buffer]], places: Places = ()) -> StoreTicket:
        self._fail("prepare_store")
        return super().prepare_store(items, places)

    def delete(self, keys: Sequence[bytes]) -> list[bool]:
        self._fail("delete")
        return super().delete(keys)

    def release(self, ticket: LoadTicket) -> None:
        self._fail("release")
        super().release(ticket)

    def complete_load(self, ticket: LoadTicket) -> list[memoryview | None]:
        self._fail("complete_load")
        values = super().complete_load(ticket)
        others = list(values)
        values = [self._spoil(value, others) if self._random.random() < self.rate else value for value in values]
        return receive(ticket, values) if self.in_place else values

    def _spoil(self, value: memoryview | None, others: list[memoryview | None]) -> memoryview | None:
        if value is None or not self.fault:
            return value
        raw = bytearray(value)
        match self.fault:
            case "drop":
                return None
            case "truncate":
                raw = raw[: self._random.randrange(len(raw))]
            case "extend":
                raw += b"\0"
            case "flip":
                bit = self._random.randrange(8 * len(raw))
                raw[bit // 8] ^= 1 << bit % 8
            case "swap":
                return next((o for o in reversed(others) if o is not None and o != value), None)
            case "empty":
                raw = bytearray()
            case "garbage":
                raw = bytearray(self._random.randbytes(len(raw)))
        return memoryview(bytes(raw))
