"""Write admission: what is offered for the first time is not stored; what comes a second time is.

Most prompts of a busy service are seen once. Storing them pushes out what is shared. A sketch of the keys that were
offered (two Bloom filters that take turns, 128 KiB each) knows which ones come again; since a prompt's blocks are
chained, the blocks that several prompts share are exactly those that are offered again.
"""

from __future__ import annotations

import struct
import threading
from collections.abc import Sequence

from skymemory.errors import InvalidInput
from skymemory.metrics import Counters
from skymemory.store.base import Buffer, Presence, Store
from skymemory.store.wrapped import Selecting

_PROBES = struct.Struct(">IIII")
_BITS_PER_KEY = 16


class Sketch:
    """Whether a key was seen among roughly the last ``capacity`` to twice as many.

    Keys are hashes, so four words of one are its four probes. About one unseen key in 400 is taken for seen: it is
    stored a sighting too early, which does no harm.
    """

    def __init__(self, capacity: int = 1 << 16) -> None:
        if capacity < 1:
            raise InvalidInput(f"a sketch of {capacity} keys: expected 1 or more")
        self._capacity = capacity
        self._bits = -(-_BITS_PER_KEY * capacity // 8) * 8
        self._now, self._before = bytearray(self._bits // 8), bytearray(self._bits // 8)
        self._added = 0

    def seen(self, key: bytes) -> bool:
        """Whether it was; from now on it is."""
        places = [word % self._bits for word in _PROBES.unpack_from(key)]
        now, before = (all(bits[at >> 3] >> (at & 7) & 1 for at in places) for bits in (self._now, self._before))
        if not now:
            if self._added == self._capacity:
                self._now, self._before = bytearray(self._bits // 8), self._now
                self._added = 0
            for at in places:
                self._now[at >> 3] |= 1 << (at & 7)
            self._added += 1
        return now or before


class AdmittingStore(Selecting):
    """A store that takes a key only when it is offered again, or is there already."""

    def __init__(self, store: Store, sketch: Sketch | None = None) -> None:
        super().__init__(store)
        self._sketch = sketch or Sketch()
        self._counters = Counters()
        self._lock = threading.Lock()

    def select(self, items: Sequence[tuple[bytes, Buffer]]) -> list[bool]:
        keys = [key for key, _ in items]
        there = self.store.lookup(keys)
        with self._lock:
            seen = [self._sketch.seen(key) for key in keys]
        admitted = [was or present is not Presence.MISS for was, present in zip(seen, there, strict=True)]
        self._counters.add("writes_not_admitted", admitted.count(False))
        return admitted

    def stats(self) -> dict[str, int | float]:
        return {**self.store.stats(), **self._counters.as_dict()}
