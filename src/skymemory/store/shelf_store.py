"""What every store with a shelf does the same way, whatever holds its values."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from skymemory.errors import InvalidInput
from skymemory.forks import OwnLock
from skymemory.store.base import LoadTicket, Presence, TwoPhase, check_keys, check_ttl
from skymemory.store.shelf import Shelf


class ShelfStore(TwoPhase):
    """Looking up, leasing and pinning: asked of the shelf under the store's lock, and of nobody once it is closed."""

    def __init__(self, name: str, shelf: Shelf, lease_s: float, clock: Callable[[], float]) -> None:
        self._name = name
        self._shelf = shelf
        self._lease_s = lease_s
        self._clock = clock
        self._lock = OwnLock(f"the {name} store")
        self._closed = False

    @property
    def name(self) -> str:
        return self._name

    def lookup(self, keys: Sequence[bytes]) -> list[Presence]:
        keys = check_keys(keys)
        with self._open():
            pending, there = self._shelf.pending(self._clock()), self._shelf.entries
            return [
                Presence.HIT if key in there else Presence.PENDING if key in pending else Presence.MISS for key in keys
            ]

    def prefix(self, keys: Sequence[bytes]) -> int:
        keys = check_keys(keys)
        with self._open():
            self._shelf.chains.learn(keys)
            return next((i for i, key in enumerate(keys) if key not in self._shelf.entries), len(keys))

    def prepare_load(self, keys: Sequence[bytes]) -> LoadTicket:
        with self._open():
            return self._shelf.open_load(keys, self._clock(), self._lease_s)

    def pin(self, keys: Sequence[bytes], ttl_s: float) -> list[bool]:
        keys, ttl_s = check_keys(keys), check_ttl(ttl_s)
        with self._open():
            now_s = self._clock()
            return [self._shelf.pin(key, now_s + ttl_s, now_s) for key in keys]

    def _account(self) -> dict[str, int | float]:
        """The shelf's part of ``stats``. With the lock held."""
        return {
            "entries": len(self._shelf),
            "used_bytes": self._shelf.used_bytes,
            "budget_bytes": self._shelf.budget_bytes,
            "open_leases": self._shelf.open_tickets,
        }

    def _open(self) -> OwnLock:
        """The lock, for a ``with`` statement; InvalidInput once closed."""
        if self._closed:
            raise InvalidInput(f"the {self._name} store is closed: open a new one")
        return self._lock
